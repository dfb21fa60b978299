"""The default store of torch.distributed."""

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from gossamer.core.torch_private import private_name

default_store: Callable[[], Any] = private_name(
    distributed_c10d, "_get_default_store", "lets the ranks of a group meet"
)
"""Returns the store that `init_process_group` received or created."""
