"""A step whose averages fail because members change leaves every memory, exchange and update as it was."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.core.canned_answers import answer_with_wires
from gossamer.core.programs import drive
from gossamer.core.verbs import Compute, Join, MembersChanged, Now, OptimizerStep, Start, Verb
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, params_of

RECIPES = [
    "gather(topk(0.2)) + error_feedback()",
    "terngrad",
    "gather(topk(0.2)) + momentum_correction()",
    "gather(qsgd(bits=4)) + diana()",
    "gather(topk(0.2)) + ef21(eta=1.0)",
    "powersgd",
    "allreduce",
]


class Breaking:
    """Answers as if both ranks sent the same, until the k-th collective fails."""

    def __init__(self, breaks_at: int) -> None:
        self.left = breaks_at

    def answer(self, verb: Verb) -> Any:
        match verb:
            case Start(program):
                try:
                    return drive(program, self.answer), None
                except MembersChanged as error:
                    return None, error
            case Join(handle):
                pair: Any = handle
                if pair[1] is not None:
                    raise pair[1]
                return pair[0]
            case Compute(work):
                return work()
            case Now():
                return 0.0
            case OptimizerStep():
                return True
            case _:
                self.left -= 1
                if self.left == 0:
                    raise MembersChanged("a rank is lost")
                return answer_with_wires(verb, 2)


def step_of(worker: Worker, breaks_at: int) -> bool:
    """One step; False if it was dropped."""
    generator = torch.Generator().manual_seed(worker.step)
    flats = [torch.randn(b.layout.numel, generator=generator) for b in worker.buckets]
    optimizer: Any = worker.optimizer

    def descend() -> bool:
        worker.update_step.put()
        optimizer.step()
        return True

    try:
        drive(worker.train_step(flats, descend, lambda: None), Breaking(breaks_at).answer)
    except MembersChanged:
        worker.drop()
        return False
    return True


def kept(worker: Worker) -> list[dict[str, dict[str, Tensor]]]:
    return [deepcopy({role: dict(state) for role, state in b.states.items()}) for b in worker.buckets]


def same(one: list[dict[str, dict[str, Tensor]]], other: list[dict[str, dict[str, Tensor]]]) -> bool:
    pairs = [(a[role], b[role]) for a, b in zip(one, other, strict=True) for role in a]
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def make(recipe: str) -> tuple[Worker, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Worker(Recipe.of(recipe), params_of(dict(model.named_parameters())), optimizer, 0, 2), model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dropped_step_leaves_no_trace_and_the_next_is_as_if_it_had_never_been(recipe: str) -> None:
    spared, alike = make(recipe)
    worker, model = make(recipe)
    for _ in range(2):
        assert step_of(worker, 0)
        assert step_of(spared, 0)
    before, weights = kept(worker), [p.detach().clone() for p in model.parameters()]
    k = 1
    while not step_of(worker, k):
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert same(before, kept(worker))
        k += 1
    assert k > 1
    assert worker.record.dropped_steps == [3] * (k - 1)
    assert step_of(spared, 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alike.parameters(), strict=True))
    assert same(kept(worker), kept(spared))


def _doubled(verb: Any) -> Tensor:
    """The sum over two ranks that hold the same."""
    return verb.tensor * 2


def test_learned_estimates_agree_again_after_a_change_of_members() -> None:
    """The common part of DIANA is the mean of the own parts of those who are there; who joins begins at it."""
    worker, _ = make("gather(qsgd(bits=4)) + diana()")
    step_of(worker, 0)
    bucket = worker.buckets[0]
    state = dict(bucket.states["memory"]) | {"common": torch.full_like(bucket.states["memory"]["own"], 9.0)}
    drive(bucket.memory.renew(state, 2), _doubled)
    assert torch.equal(state["common"], state["own"])
    assert torch.equal(bucket.memory.join({"common": state["own"]})["own"], state["own"])


ROUNDS = ["local_sgd(2)", "slowmo(2)", "bmuf(2)", "diloco(2)", "gather(topk(0.2)) + error_feedback() + slowmo(2)"]


def rounds_of(recipe: str, keeps: bool, breaks_at: int) -> tuple[Worker, nn.Module, int]:
    """Four local steps with an average after the second and the fourth; the last is how many requests were left to a failure."""
    worker, model = make(recipe)
    worker.averaging.keeps = keeps
    optimizer: Any = worker.optimizer
    network = Breaking(breaks_at)

    def descend() -> bool:
        generator = torch.Generator().manual_seed(worker.step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        return True

    for _ in range(4):
        drive(worker.train_step([], descend, lambda: None), network.answer)
    return worker, model, network.left


@pytest.mark.parametrize("recipe", ROUNDS)
def test_a_round_whose_average_fails_runs_again_with_what_each_has_given(recipe: str) -> None:
    plain, alike, _ = rounds_of(recipe, False, 0)
    _, _, left = rounds_of(recipe, True, 0)  # where nobody is lost, nothing changes to the bit
    collectives = -left
    assert collectives >= 2
    for breaks_at in (0, *range(1, collectives + 1)):
        worker, model, left = rounds_of(recipe, True, breaks_at)
        assert left < 0
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alike.parameters(), strict=True))
        assert same(kept(worker), kept(plain))
