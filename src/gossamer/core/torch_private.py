"""Access to private names of torch, each used in one module and looked up when that module is imported."""

from importlib import import_module
from typing import Any

import torch


def private_name(owner: Any, name: str, use: str) -> Any:
    """Look up a private name of torch; raises ImportError with a clear message in releases of torch without it.

    >>> private_name(torch._C, "_no_such_thing", "tells backward passes apart")
    Traceback (most recent call last):
        ...
    ImportError: torch ... has no 'torch._C._no_such_thing', by which gossamer tells backward passes apart; use another \
release of torch, or a newer gossamer
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        raise _gone(f"{where}.{name}", use) from None


def private_module(name: str, use: str) -> Any:
    """Import a private module of torch; raises the same error in releases of torch without it."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise _gone(name, use) from None


def _gone(name: str, use: str) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} has no '{name}', by which gossamer {use}; use another release of torch, or a newer gossamer"
    )
