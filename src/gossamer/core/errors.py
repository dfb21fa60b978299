"""Errors that speak to the user: what is wrong, where, and what to do."""


class GossamerError(Exception):
    """Base of every error that gossamer raises on purpose."""


class RecipeError(GossamerError, ValueError):
    """A recipe that cannot be read, or a combination that cannot be right."""


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
