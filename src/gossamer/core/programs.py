"""Running programs: one to its end, by a call that answers, or with its requests made by somebody else.

Whatever answers, a request that fails raises in the program, where it was asked: a part may know what to do.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from gossamer.core.verbs import Program, Verb

T = TypeVar("T")


def drive(program: Program[T], answer: Callable[[Verb], Any]) -> T:
    """Run a program to its end.

    >>> import torch
    >>> from gossamer.core.verbs import all_reduce
    >>> drive(all_reduce(torch.tensor(1.0)), lambda verb: 2 * verb.tensor)
    tensor(2.)
    """
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            verb = program.send(reply) if error is None else program.throw(error)
        except StopIteration as stop:
            return stop.value
        reply, error = None, None
        try:
            reply = answer(verb)
        except Exception as raised:
            error = raised


def through(program: Program[T], ask: Callable[[Verb], Program[Any]]) -> Program[T]:
    """The program, with its requests made by somebody else; what is thrown into that is thrown into the program."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            verb = program.send(answer) if error is None else program.throw(error)
        except StopIteration as stop:
            return stop.value
        answer, error = None, None
        try:
            answer = yield from ask(verb)
        except GeneratorExit:
            program.close()
            raise
        except BaseException as thrown:
            error = thrown
