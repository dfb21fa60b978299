"""What is looked up in the Python stack, in threads of which torch's own frame is the outermost, as on a GPU."""

import _thread
import threading
from typing import Any

import pytest
from torch.autograd.function import BackwardCFunction, Function

from gossamer.integrations.checks import introspection


class Handed:
    """Stands for the node of a function's backward, which torch calls from a thread without any Python frame."""

    def __init__(self, seen: list[bool], done: threading.Event) -> None:
        self.seen, self.done = seen, done
        self._forward_cls = type(self)

    def backward(self) -> None:
        try:
            self.seen.append(introspection.is_nested())
        finally:
            self.done.set()

    vjp = Function.vjp  # which versions look for before they take the backward

    def _get_user_fn(self) -> Any:
        return type(self).backward


@pytest.mark.parametrize(("known", "nested"), [(True, False), (False, True)])
def test_a_backward_pass_may_be_the_outermost_frame(monkeypatch: pytest.MonkeyPatch, known: bool, nested: bool) -> None:
    """FSDP2 hands gradients out in the backward of a function; that is no nested pass, and the search must end."""
    if known:
        monkeypatch.setattr(introspection, "not_nested", {Handed})
    seen, done = list[bool](), threading.Event()
    apply: Any = BackwardCFunction.apply
    _thread.start_new_thread(apply, (Handed(seen, done),))
    assert done.wait(300.0), "the search for an outer pass did not end"
    assert seen == [nested]
