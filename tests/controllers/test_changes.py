"""A controller's change of memory or schedule in mid-run: paid, begun anew or refused, alike on simulator and real processes."""

from itertools import permutations
from typing import Any

import pytest
import torch
from tests.controllers.turns import Turns, turning
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, loss_of, same, small_step
from tests.runtime.gym import bit_equal, by_name, make, parameters, pull, resumed, saved, sgd, spoiled, train
from torch import Tensor, nn

from gossamer.core.contracts import ARREARS
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import registry
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, replicas

SMALL = " + bucket(0.00004)"
DENSE = "allreduce(fp32())"
TOPK = "gather(topk(ratio=0.2)) + error_feedback()"
SIGN = "scatter(sign('l1')) + error_feedback(units='update')"
DIANA = "scatter(qsgd(bits=4, bucket=16)) + diana()"
EF21 = "gather(topk(ratio=0.2)) + ef21(eta=1.0)"
LEARNS, OWES = (DENSE, DIANA, EF21), (TOPK, SIGN)  # by gradients at every step
ROUNDS = tuple(f"{DENSE} + {s}" for s in ("local_sgd(2)", "slowmo(2)", "lookahead(2)", "bmuf(2)", "inner_outer(2)"))
KEEPS = "gather(topk(ratio=0.3)) + error_feedback() + slowmo(2, beta=0.4)"
LAST = "scatter(ternary(), answer=qsgd(bits=3)) + rule('last', scatter(qsgd(bits=4, bucket=16)))"
SOME = f"{TOPK} + rule('ndim < 2', {DENSE})"  # of which vectors owe nothing
EQUAL = (*LEARNS, *OWES, *ROUNDS, KEEPS)
STEPS, AT, BACK = 10, 3, 7


def crossing(a: str, b: str) -> bool:
    """One averages gradients and the other models, and one of them owes."""
    return (a in OWES and b in (*ROUNDS, KEEPS)) or (a == KEEPS and b in (*LEARNS, *OWES))


PAIRS = [  # every sort of memory and of schedule goes out of force in one of them, and comes into force in one
    (DENSE, TOPK),
    (SIGN, DENSE),
    (TOPK, DIANA),
    (EF21, TOPK),
    (DENSE, ROUNDS[0]),
    (ROUNDS[1], DENSE),
    (DIANA, ROUNDS[3]),
    (KEEPS, ROUNDS[2]),
    (ROUNDS[4], EF21),
    (DENSE, LAST),
    (SOME, SIGN),
    (LAST, ROUNDS[0]),
    (SOME, f"{TOPK} + rule('last', {DENSE})"),
]


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints say recipes in texts."""
    monkeypatch.setitem(registry._parts, "turns", Turns)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def simulated(recipe: Recipe, size: int) -> list[Tensor]:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = loss_of(model, rank, step)
        loss.backward()
        return float(loss.detach())

    ranks = replicas(recipe, Awkward, plain, size, seed=3)
    train(ranks, backward, STEPS)
    return [r.flat().clone() for r in ranks]


def trained(rank: int, size: int, pairs: list[tuple[str, str]]) -> list[Tensor | str]:
    """Parameters at the end, of one run for each pair."""
    out = list[Tensor | str]()
    for a, b in pairs:
        try:
            with attached(turning(a, b, AT, BACK, SMALL), optimizer=plain) as (model, optimizer, comm):
                while comm.step < STEPS:
                    small_step(model, optimizer, comm, rank)
                    comm.check_sync()
                out.append(flat(model))
        except AttachError as error:
            out.append(str(error))
    return out


@pytest.mark.gang
def test_a_change_and_back_is_the_simulators_to_the_bit(gang2: Gang) -> None:
    real = gang2.run(trained, PAIRS)
    for i, (a, b) in enumerate(PAIRS):
        virtual = simulated(turning(a, b, AT, BACK, SMALL), 2)
        for rank in range(2):
            found = real[rank][i]
            assert isinstance(found, Tensor), f"{a} to {b}: {found}"
            assert same(found, virtual[rank]), f"{a} to {b}, rank {rank}"
        assert same(virtual[0], virtual[1]), f"{a} to {b}"


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_after_a_change_nothing_is_kept_but_what_goes_on_and_training_gets_there(a: str, b: str) -> None:
    ranks = make(turning(a, b, 8, 16), 2, optimizer=sgd(0.05, 0.0))
    train(ranks, pull, 40)
    assert bit_equal(parameters(ranks))
    assert sum(r.losses[-1] for r in ranks) < 0.7 * sum(r.losses[0] for r in ranks)
    alone = make(a, 2, optimizer=sgd(0.05, 0.0))
    train(alone, pull, 4)
    for role in "memory", "schedule", "mixer":
        assert kept(ranks, role) == kept(alone, role), role


def kept(ranks: list[Replica], role: str) -> set[str]:
    return {key for r in ranks for c in r.worker.buckets for key in c.states[role]}


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_a_run_goes_on_bit_for_bit_from_before_and_after_a_change(a: str, b: str) -> None:
    recipe = turning(a, b, AT, BACK)
    whole, files = make(recipe, 2, optimizer=sgd(0.05, 0.0)), dict[int, list[bytes]]()
    for step in range(1, STEPS + 1):
        train(whole, pull, 1)
        if step in (AT, AT + 1, BACK, BACK + 1):
            files[step] = saved(whole)
    for step, of_all in files.items():
        again = resumed(recipe, of_all, optimizer=sgd(0.05, 0.0))
        train(again, pull, STEPS - step)
        for one, other in zip(parameters(whole), parameters(again), strict=True):
            assert bit_equal([one, other]), f"from step {step}"


# -- optimizers and buffers ----------------------------------------------------------------------------------------


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [sgd(0.05, 0.9), adam], ids=["momentum", "adam"])
@pytest.mark.parametrize("schedule", ["local_sgd(2)", "slowmo(4)", "slowmo(2, buffers='reset')"])
def test_replicas_are_equal_after_each_step_that_averages_gradients(schedule: str, optimizer: Any) -> None:
    """Each rank's momentum is of its own gradients until rounds end: equal gradients would then move equal models apart."""
    ranks = make(turning(f"{DENSE} + {schedule}", DENSE, 4, 10), 2, optimizer=optimizer)
    train(ranks, pull, 4)
    for _ in range(6):  # from 5 to 10
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks))
        one, other = ([*r.worker.optimizer_state.tensors()] for r in ranks)
        assert one
        assert all(bit_equal(pair) for pair in zip(one, other, strict=True))
    train(ranks, pull, 10)  # and in rounds again
    assert bit_equal(parameters(ranks))


def test_ranks_that_skipped_different_steps_begin_their_optimizers_anew_and_say_so() -> None:
    """Under Adam's own counters the same momenta would make other steps."""
    ranks = make(turning(f"{DENSE} + local_sgd(4)", DENSE, 4, 1000), 2, optimizer=adam)
    run = train(ranks, spoiled([(1, 3)], float("inf")), 4)
    said = {d.decision for d in run.ledger.decisions}
    assert "the optimizer's state begins anew: ranks had skipped different steps before every_step()" in said
    for _ in range(4):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def turned_there_and_back(rank: int, size: int, a: str, b: str) -> list[Tensor]:
    """Parameters and running statistics after each step; both recipes average after every second one at least."""
    out = list[Tensor]()
    with attached(turning(a, b, 4, 8), normed(), momentum, buffers="average") as (model, optimizer, _comm):
        for step in range(1, 15):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * rank + step)) + rank
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            out.append(torch.cat([flat(model), *(b.reshape(-1).float() for b in model.buffers())]))
    return out


@pytest.mark.gang
@pytest.mark.parametrize(("a", "b"), [(DENSE, f"{DENSE} + slowmo(2)"), (f"{DENSE} + local_sgd(2)", "scatter(qsgd())")])
def test_models_and_running_statistics_are_equal_through_a_change_on_real_processes(
    gang2: Gang, a: str, b: str
) -> None:
    one, other = gang2.run(turned_there_and_back, a, b)
    alike = [same(x, y) for x, y in zip(one, other, strict=True)]
    rounds = (
        [1 <= step <= 4 or step > 8 for step in range(1, 15)] if "local" in a else [4 < s <= 8 for s in range(1, 15)]
    )
    assert alike == [step % 2 == 0 or not within for step, within in zip(range(1, 15), rounds, strict=True)]
    assert all(x.isfinite().all() for x in one)


# -- nothing is lost -----------------------------------------------------------------------------------------------


class Given:
    """Gradients of `pull` in double precision, and what they add up to, on average over the ranks."""

    def __init__(self, size: int) -> None:
        self.size, self.total = size, torch.zeros((), dtype=torch.float64)

    def __call__(self, model: nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        self.total = self.total + torch.cat([_gradient(p) for p in model.parameters()]).double() / self.size
        return loss


def _gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros(p.numel()) if p.grad is None else p.grad.detach().reshape(-1)


@pytest.mark.parametrize("after", [DENSE, DIANA, TOPK, SOME])
@pytest.mark.parametrize(
    "before",
    [
        TOPK,
        SIGN,
        "scatter(sign('l1')) + error_feedback()",
        "gather(topk(ratio=0.2)) + momentum_correction(0.0)",
        f"scatter(sign('l1')) + error_feedback() + rule('name == \"turned\"', {TOPK.replace(' + ', ', ')})",
    ],
)
def test_what_was_owed_is_paid_in_the_first_average(before: str, after: str) -> None:
    """Sum of all steps == sum of all mean gradients, less what is owed still; dense averages owe nothing."""
    ranks = make(turning(before, after, 5, 1000, " + bucket(0.0003)"), 2, optimizer=sgd(0.05, 0.0))
    start, given = ranks[0].flat().double(), Given(2)
    train(ranks, given, 5)
    due = owed(ranks)
    assert due.norm() > 0.1
    lost = given.total - (start - ranks[0].flat().double()) / 0.05
    torch.testing.assert_close(due, lost, rtol=0, atol=1e-4)
    train(ranks, given, 1)
    if after != DENSE:
        assert after in (TOPK, SOME) or owed(ranks).norm() == 0
        return
    assert ranks[0].worker.residual_norm() == 0
    torch.testing.assert_close((start - ranks[0].flat().double()) / 0.05, given.total, rtol=0, atol=1e-4)


def owed(ranks: list[Replica]) -> Tensor:
    """The mean over ranks, in the model's order."""
    total = torch.zeros(sum(p.numel() for p in ranks[0].model.parameters()), dtype=torch.float64)
    for r in ranks:
        buckets = r.worker.buckets
        found = [by_name(buckets, "memory", key) for key in ("residual", ARREARS)]
        for debts in found:
            for name, p in r.model.named_parameters():
                debts.setdefault(name, torch.zeros_like(p))
            total += torch.cat([debts[n].reshape(-1) for n, _ in r.model.named_parameters()]).double() / len(ranks)
    return total


def test_slow_momentum_that_comes_into_force_again_begins_at_the_model_there_is() -> None:
    """Of an anchor of long ago the round's difference is the whole way since, and more."""
    rounds = f"{DENSE} + slowmo(4, beta=0.8)"
    ranks = make(turning(rounds, DENSE, 8, 40), 2, optimizer=sgd(0.05, 0.0))
    train(ranks, pull, 40)
    before = ranks[0].losses[-1]
    train(ranks, pull, 12)
    assert max(ranks[0].losses[-8:]) < before + 1


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (f"{DENSE} + easgd(2)", "something is on its way"),
        (f"{DENSE} + eager(2)", "something is on its way"),
        (f"{DENSE} + overlap_local_sgd(2)", "something is on its way"),
        (f"{DENSE} + cocod(2)", "something is on its way"),
        (f"{DENSE} + delayed()", "something is on its way"),
        (f"{DENSE} + streaming(4, fragments=1)", "something is on its way"),
        (f"{DENSE} + accelerated()", "a second model is kept"),
        (f"{DENSE} + streaming(4, fragments=2)", "one fragment is averaged at a time"),
        (f"{DENSE} + gossip(push_sum())", "has nothing to change"),
        (f"{DENSE} + pairwise(bipartite())", "has nothing to change"),
        (f"{DENSE} + backup_workers(backups=1)", "late ranks would change the recipe at another step"),
        (f"{DENSE} + post_local(3, local_sgd(2))", "gradients with models"),
        (f"{DENSE} + hierarchical(1, 2, local_sgd(2))", "the controller does not see that"),
        ("gather(topk(ratio=0.2)) + own_gradient() + resync(4)", "each rank has its own"),
        ("fetchsgd(ratio=0.02)", "keeps a momentum or a debt of its own"),
        ("gather(topk(ratio=0.2)) + momentum_correction(0.9)", "counts 10 times"),
        ("scatter(qsgd()) + diana(momentum=0.5)", "counts 2 times"),
        ("gather(topk(ratio=0.2)) + error_feedback(decay=0.9)", "running mean that fades"),
    ],
)
def test_what_nobody_can_go_on_from_is_refused_when_the_recipe_is_made(other: str, reason: str) -> None:
    for pair in (DENSE, other), (other, DENSE):
        with pytest.raises(RecipeError, match=reason):
            turning(*pair)


@pytest.mark.parametrize(("a", "b"), [(a, b) for a, b in permutations(EQUAL, 2) if crossing(a, b) or crossing(b, a)])
def test_a_debt_of_gradients_is_none_of_models(a: str, b: str) -> None:
    with pytest.raises(RecipeError, match="is none of models"):
        turning(a, b)
