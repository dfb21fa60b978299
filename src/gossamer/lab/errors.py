"""What can go wrong with a lab, in words for its user."""

from gossamer.core.errors import GossamerError


class LabError(GossamerError, RuntimeError):
    """The lab cannot be made, or was asked for something that makes no sense."""
