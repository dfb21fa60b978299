"""The exceptions of gossamer. Each message says what is wrong, where, and what to do."""

import re

from gossamer.core.text import cut


class GossamerError(Exception):
    """Base of every error that gossamer raises on purpose."""


class RecipeError(GossamerError, ValueError):
    """A recipe cannot be read, or its parts must not be combined. Long messages are cut."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, 2000))


class UnknownPartError(RecipeError):
    """No part is registered under this name; a plugin that is not loaded yet may have it."""


class WireError(GossamerError, ValueError):
    """Bytes from the network are not what their codec writes."""


class AttachError(GossamerError, RuntimeError):
    """A recipe cannot be bound to this model, optimizer or training loop."""


class PeerError(GossamerError, RuntimeError):
    """Another rank is missing, later than the deadline, or makes other requests than this one."""


class DeadlockError(GossamerError, RuntimeError):
    """All programs wait for each other, so that none can go on."""


class CheckpointError(GossamerError, ValueError):
    """A checkpoint does not fit this recipe, model or number of ranks."""


class CostError(GossamerError, ValueError):
    """A cluster, a model to plan, or a quantity in them cannot be read or planned."""


class OutputError(GossamerError, FileExistsError):
    """A file exists that gossamer must not overwrite."""


def plainly(error: BaseException) -> str:
    """The first line of another library's error, without its source location and its advice to developers.

    >>> plainly(RuntimeError("[/src/gloo/pair.cc:537] Connection closed by peer. This is typically caused by bugs. GLHF!"))
    'Connection closed by peer'
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]+:\d+\] ", "", line).split(". This is typically")[0][:200]
