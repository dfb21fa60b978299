"""What the commands themselves complain about; the two kinds end with different exit codes."""

from gossamer.core.errors import GossamerError


class InputError(GossamerError, ValueError):
    """Wrong input: exit code 2."""


class FailedError(GossamerError, RuntimeError):
    """Something that did not work out: exit code 1."""
