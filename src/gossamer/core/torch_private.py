"""What gossamer uses of torch's inside: each name in one module, and looked for when that is imported."""

from typing import Any

import torch


def private_name(owner: Any, name: str, use: str) -> Any:
    """A private name of torch's, which the next release may not have; then one sentence says so, and no training begins.

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
        raise ImportError(
            f"torch {torch.__version__} has no '{where}.{name}', by which gossamer {use}; use another release of torch, or a "
            "newer gossamer"
        ) from None
