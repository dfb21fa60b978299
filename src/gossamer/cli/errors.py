"""What the commands themselves complain about; the two kinds end with different exit codes."""

from collections.abc import Callable
from typing import TypeVar

from gossamer.core.errors import GossamerError
from gossamer.lab import LabError

T = TypeVar("T")


class InputError(GossamerError, ValueError):
    """Wrong input: exit code 2."""


class FailedError(GossamerError, RuntimeError):
    """Something that did not work out: exit code 1."""


def as_input(read: Callable[[], T]) -> T:
    """Read what a person wrote about a network; what is wrong with it is wrong input, not a lab that broke."""
    try:
        return read()
    except LabError as error:
        raise InputError(str(error)) from None
