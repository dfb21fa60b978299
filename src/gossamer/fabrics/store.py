"""The store that torch's process groups meet in."""

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from gossamer.core.insides import inside

default_store: Callable[[], Any] = inside(distributed_c10d, "_get_default_store", "lets the ranks of a group meet")
"""The store that `init_process_group` was given, or made."""
