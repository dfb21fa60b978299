"""Policies of state entries: how an entry is loaded into a world of another size, and its unit."""

from typing import Literal

Policy = Literal["equal", "mean", "owner", "shard", "drop"]
"""How a state entry is loaded into a world of another size. It is equal on all ranks; every new rank gets the mean
of the old ranks' entries; each element is kept by the owner of its chunk, in an entry as long as the bucket ("owner") or as
the chunk ("shard"); or it starts anew."""


Unit = Literal["gradient", "none"]
"""The unit of a state entry: that of gradients, which a loss scaler multiplies, or another. The worker
rescales the former when the loss scale changes, so that parts need not handle it."""
