"""Errors of the commands; the two classes end with different exit codes."""

from gossamer.core.errors import GossamerError


class InputError(GossamerError, ValueError):
    """Wrong input: exit code 2."""


class FailedError(GossamerError, RuntimeError):
    """A failure of an action: exit code 1."""
