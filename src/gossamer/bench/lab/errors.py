"""Errors of a lab."""

from gossamer.core.errors import GossamerError


class LabError(GossamerError, RuntimeError):
    """The lab cannot be made, or broke down."""


class LabInputError(LabError, ValueError):
    """Wrong arguments of a lab, such as a wrong rate, no command or no hosts."""
