"""What can go wrong with a lab, in words for its user."""

from gossamer.core.errors import GossamerError


class LabError(GossamerError, RuntimeError):
    """The lab cannot be made, or broke down."""


class LabInputError(LabError, ValueError):
    """The lab was asked for something that makes no sense: a wrong rate, no command, no hosts."""
