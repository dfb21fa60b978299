"""Train PyTorch models over slow, uneven or unreliable networks.

One line gives a training loop a recipe: `comm = gossamer.attach(model, optimizer, "qsgd")`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gossamer.core.version import __version__

if TYPE_CHECKING:  # `__getattr__` brings the same when it is asked for
    from gossamer import data, recipes
    from gossamer.core.errors import (
        AttachError,
        CheckpointError,
        CostError,
        DeadlockError,
        GossamerError,
        OutputError,
        PeerError,
        RecipeError,
        UnknownPartError,
        WireError,
    )
    from gossamer.fabrics.liveness.store_server import members
    from gossamer.integrations import Communicator, attach, checkpoint, ddp
    from gossamer.kernels import warmup
    from gossamer.recipe import Recipe

__all__ = [
    "AttachError",
    "CheckpointError",
    "Communicator",
    "CostError",
    "DeadlockError",
    "GossamerError",
    "OutputError",
    "PeerError",
    "Recipe",
    "RecipeError",
    "UnknownPartError",
    "WireError",
    "__version__",
    "attach",
    "checkpoint",
    "data",
    "ddp",
    "members",
    "recipes",
    "warmup",
]

_HOMES = {
    "Communicator": "gossamer.integrations",
    "Recipe": "gossamer.recipe",
    "attach": "gossamer.integrations",
    "checkpoint": "gossamer.integrations",
    "ddp": "gossamer.integrations",
    "members": "gossamer.fabrics.liveness.store_server",
    "warmup": "gossamer.kernels",
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "gossamer.core.errors"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: importing torch takes a second, and ctrl-C must work before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name)  # "data" and "recipes" are modules of the package itself
    value = import_module(f"{__name__}.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
