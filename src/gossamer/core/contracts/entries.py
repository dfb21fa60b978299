"""What is said of an entry of a state: what becomes of it in a world of another size, and what it is measured in."""

from typing import Literal

Policy = Literal["equal", "mean", "owner", "shard", "drop"]
"""What becomes of a state entry when the world changes its size. It is equal on all ranks; every new rank gets the mean
of the old ranks' entries; each element lives with the owner of its chunk, in an entry as long as the block ("owner") or as
the chunk ("shard"); or it starts anew."""


Unit = Literal["gradient", "none"]
"""What a state entry is measured in: as gradients are, which a loss scaler multiplies; or otherwise. Whoever drives a part
multiplies the former when the loss scale changes, so that no part knows of it."""
