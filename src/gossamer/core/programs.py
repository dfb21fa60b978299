"""Runs programs: to the end with a function that answers, or with each request passed on to another program.

A request that fails raises inside the program that made it, which may handle the error.
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
    """The program with each request passed to `ask`; exceptions from `ask` are thrown into the program."""
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


def single(verb: Verb) -> Program[Any]:
    """A program that makes one request, and returns the answer."""
    return (yield verb)
