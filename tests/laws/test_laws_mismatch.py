"""Law 7: ranks that do different things get an error that says so; nothing hangs."""

import pytest
import torch
from tests.runtime.gym import Flat, make, pull, train

from gossamer.core.errors import DeadlockError, PeerError, RecipeError, WireError
from gossamer.core.verbs import all_gather, all_reduce
from gossamer.fabrics.sim import simulate

PAIRS = [
    ("allreduce", "scatter(bf16())"),
    ("gather(qsgd(bits=4))", "gather(qsgd(bits=3))"),
    ("scatter(qsgd(bits=4))", "scatter(qsgd(bits=8))"),
    ("topk(ratio=0.1)", "topk(ratio=0.2)"),
    ("powersgd(rank=1)", "powersgd(rank=2)"),
    ("terngrad", "terngrad(levels=3)"),
    ("allreduce", "allreduce + bucket(0.00002)"),
    ("local_sgd(2)", "allreduce"),
    ("slowmo(2, beta=0.5)", "scatter(qsgd()) + slowmo(2)"),
]


def crew(*recipes: str):
    return [make(recipe, len(recipes))[rank] for rank, recipe in enumerate(recipes)]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_different_recipes_are_an_error_that_names_both_ranks(one: str, other: str) -> None:
    with pytest.raises(PeerError, match=r"rank 0.*rank 1|rank 1.*rank 0"):
        train(crew(one, other), pull, 4)


def test_the_odd_rank_among_many_is_named() -> None:
    with pytest.raises(PeerError, match=r"rank 0 .* while rank 2 "):
        train(crew(*["topk(ratio=0.1)"] * 2, "topk(ratio=0.2)", "topk(ratio=0.1)"), pull, 2)


def test_a_rank_that_never_speaks_is_a_deadlock_explained() -> None:
    with pytest.raises(DeadlockError, match=r"(?s)rank 0 waits for .*rank 1 has ended"):
        train(crew("local_sgd(2)", "local_sgd(7)"), pull, 6)


def test_averages_of_different_steps_do_not_meet() -> None:
    with pytest.raises(PeerError, match=r"rank 0 is at .*, step 2 while rank 1 is at .*, step 4"):
        train(crew("local_sgd(2)", "local_sgd(4)"), pull, 6)
    with pytest.raises(PeerError, match=r"rank 0 is at .*, step 2 while rank 1 is at .*, step 1"):
        train(crew("local_sgd(2)", "allreduce"), pull, 4)


def test_gossip_of_different_shapes_is_an_error() -> None:
    ranks = [make("sgp", 2)[0], make("sgp", 2, model=lambda: Flat(7))[1]]
    with pytest.raises((PeerError, WireError), match=r"rank 1 sends .* to rank 0|rank 0 sends .* to rank 1"):
        train(ranks, pull, 2)


def test_models_of_different_sizes_are_an_error() -> None:
    ranks = [make("allreduce", 2)[0], make("allreduce", 2, model=lambda: Flat(7, torch.float32))[1]]
    with pytest.raises(PeerError, match=r"rank 0 asks AllReduce"):
        train(ranks, pull, 1)


def test_different_verbs_are_an_error() -> None:
    x = torch.ones(4)
    with pytest.raises(PeerError, match=r"rank 0 asks AllReduce.*rank 1 asks AllGather"):
        simulate([all_reduce(x), all_gather(x.view(torch.uint8))])


def test_more_backups_than_ranks_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"no gradient to wait for"):
        train(make("backup(backups=2)", 2), pull, 1)
