"""Errors that speak to the user: what is wrong, where, and what to do."""

import re

from gossamer.core.text import cut


class GossamerError(Exception):
    """Base of every error that gossamer raises on purpose."""


class RecipeError(GossamerError, ValueError):
    """A recipe that cannot be read, or a combination that cannot be right. However long that is, the words are few."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message, 2000))


class UnknownPartError(RecipeError):
    """A word that nothing is registered by: a package that nobody has asked yet may have it."""


class WireError(GossamerError, ValueError):
    """Bytes from the network that are not what their codec writes."""


class AttachError(GossamerError, RuntimeError):
    """A model, an optimizer or a training loop that a recipe cannot be bound to."""


class PeerError(GossamerError, RuntimeError):
    """Another rank is missing, late beyond the deadline, or does something else than this one."""


class DeadlockError(GossamerError, RuntimeError):
    """Every program waits for another: nothing can ever happen again."""


class CheckpointError(GossamerError, ValueError):
    """A checkpoint that does not belong to this recipe, model or world."""


class OutputError(GossamerError, FileExistsError):
    """A file that is not ours to write over."""


def plainly(error: BaseException) -> str:
    """What somebody else's error says, in one line: without the place in their source, and their advice to themselves.

    >>> plainly(RuntimeError("[/src/gloo/pair.cc:537] Connection closed by peer. This is typically caused by bugs. GLHF!"))
    'Connection closed by peer'
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]+:\d+\] ", "", line).split(". This is typically")[0][:200]
