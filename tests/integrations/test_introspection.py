"""What is looked up in the Python stack, in threads of which torch's own frame is the outermost, and among all modules."""

import _thread
import sys
import threading
import weakref
from typing import Any

import pytest
from torch import nn
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


class Wrapper(nn.Module):
    """Has a name that is looked for."""


class Derived(Wrapper):
    pass


def test_modules_are_found_by_the_names_of_their_classes_and_bases() -> None:
    own, derived, other = Wrapper(), Derived(), nn.Linear(1, 1)
    found = introspection.living({"Wrapper"})
    assert any(o is own for o in found)
    assert any(o is derived for o in found)
    assert not any(o is other for o in found)
    assert introspection.living({"NobodyHasThisName"}) == []


def test_modules_are_searched_for_again_only_where_there_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = list[int]()
    search: Any = introspection.gc.get_referrers

    def counted(*kinds: Any) -> Any:
        searches.append(len(kinds))  # not the classes, of which a reference more would count
        return search(*kinds)

    monkeypatch.setattr(introspection.gc, "get_referrers", counted)
    first = Wrapper()
    found = introspection.living({"Wrapper", "Other"})
    again = introspection.living({"Wrapper", "Other"})
    assert any(o is first for o in found)
    assert (again, len(searches)) == (found, 1)
    second = Derived()
    assert any(o is second for o in introspection.living({"Wrapper", "Other"}))
    assert len(searches) == 2
    del second
    third = Derived()  # in the place of the second, so that its class is referred to as often
    assert any(o is third for o in introspection.living({"Wrapper", "Other"}))
    assert any(o is first for o in introspection.living({"Wrapper", "Other"}))


def test_a_search_keeps_no_module_alive() -> None:
    module = Wrapper()
    introspection.living({"Wrapper", "Kept"})
    known = weakref.ref(module)
    del module
    assert known() is None


def test_the_search_for_modules_ends_no_other_thread() -> None:
    """Who holds a tuple that another thread has begun ends that thread in a SystemError; a comm thread under auto() did so."""
    ended, enough = list[SystemError](), threading.Event()

    def build() -> None:
        try:
            while not enough.is_set():
                frozenset[int]().union(*(frozenset((i,)) for i in range(50)))
        except SystemError as error:
            ended.append(error)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=build)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(30):  # a search of all objects ended it in the first few
            introspection.living({"Wrapper"})
    finally:
        enough.set()
        sys.setswitchinterval(before)
        thread.join()
    assert ended == []
