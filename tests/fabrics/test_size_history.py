"""What is usual in a lane needs no comparison; what is new there is new on every rank."""

import torch
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Verb
from gossamer.fabrics.torch.group import SizeHistory


def wire(length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.uint8)


def asked(sizes: SizeHistory, *verbs: Verb, label: str = "head") -> list[bool]:
    """One program's collectives."""
    return [sizes.breaks_with(label, before, verb, not label) for before, verb in enumerate(verbs)]


def test_a_program_that_repeats_itself_is_compared_where_it_first_begins_anew_and_never_after() -> None:
    sizes = SizeHistory()
    for repeats in (False, True, False, False):
        seen = asked(sizes, AllReduce(torch.ones(3)), AllReduce(torch.ones(5)), AllGather(wire(7)))
        assert seen == [repeats, False, False]


def test_another_turn_from_one_usual_size_to_another_is_compared_once() -> None:
    sizes = SizeHistory()
    usual = [asked(sizes, AllReduce(torch.ones(n))) for n in (3, 5) * 4]
    assert usual == [[False], [True], [True], *[[False]] * 5]
    assert asked(sizes, AllReduce(torch.ones(5))) == [True]
    assert asked(sizes, AllReduce(torch.ones(5))) == [False]


def test_another_size_type_or_reduction_is_compared_once() -> None:
    sizes = SizeHistory()
    asked(sizes, AllReduce(torch.ones(3)))
    asked(sizes, AllReduce(torch.ones(3)))
    for other in (AllReduce(torch.ones(4)), AllReduce(torch.ones(3).double()), AllReduce(torch.ones(3), "max")):
        assert asked(sizes, other) == [True]
        assert asked(sizes, other) == [True]  # it follows upon itself
        assert asked(sizes, other) == [False]


def test_places_are_told_apart_by_label_and_by_turn() -> None:
    sizes = SizeHistory()
    asked(sizes, AllGather(wire(3)), AllGather(wire(4)))
    assert asked(sizes, AllGather(wire(4)), AllGather(wire(3))) == [True, True]
    assert asked(sizes, AllGather(wire(9)), label="tail") == [False]


def test_what_the_training_loop_asks_is_compared_at_its_first_time_too() -> None:
    sizes = SizeHistory()
    assert asked(sizes, AllReduce(torch.ones(3)), label="") == [True]
    assert asked(sizes, AllReduce(torch.ones(3)), label="") == [True]
    assert asked(sizes, AllReduce(torch.ones(3)), label="") == [False]


def test_lengths_that_may_differ_by_rank_or_were_agreed_on_are_not_watched() -> None:
    sizes = SizeHistory()
    for n in range(1, 4):
        assert asked(sizes, AllToAll([wire(n)], [n]), AllGather(wire(n), agreed=True)) == [False, False]


def test_labels_that_never_come_again_do_not_fill_the_memory() -> None:
    sizes = SizeHistory()
    for number in range(20_000):
        asked(sizes, AllReduce(torch.ones(1)), label=f"step {number}")
    assert len(sizes._seen) == 10_000
