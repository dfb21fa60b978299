"""0/1 Adam: few exact means to learn of, signs of all others; then steps apart, and signs of what they came to."""

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, loss_of, same, small_step
from tests.runtime.gym import Odd, Replica, bit_equal, make, parameters, pull, resumed, saved, spoiled, train
from tests.updates.test_onebit_adam_update import adamw, undecayed
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe
from gossamer.schedules import ZeroOne

SHORT = "zero_one_adam(4, kappa=1, scaler=2, clipper=4)"  # exact at 1, 2 and 4; ranks meet after 5, 6, 8, 12, 16
EXACT = "allreduce(fp32()) + zero_one_adam_update() + zero_one(4, kappa=1, scaler=2, clipper=4)"


def test_how_many_means_are_exact_and_how_often_ranks_meet() -> None:
    """The examples of its tutorial, and of the paper's BERT."""
    few = ZeroOne(12_500)
    assert sum(not few.is_compressed(t) for t in range(1, 1001)) == 96
    assert sum(not few.is_compressed(t) for t in range(1, 10_001)) == 148
    short = ZeroOne(1000, scaler=1000)
    assert sum(map(short.ends_round, range(1001, 20_001))) == pytest.approx(2813, abs=1)
    assert sum(map(few.ends_round, range(12_501, 118_001))) == pytest.approx(58_120, abs=2)


class Twin:
    """The method as it is written down, with exact means, in double precision, on so many ranks."""

    def __init__(self, ranks: int) -> None:
        self.models = [Odd().double() for _ in range(ranks)]
        shapes = [p.detach() for p in self.models[0].parameters()]
        self.v, self.learned = [torch.zeros_like(p) for p in shapes], 0
        self.m = [[torch.zeros_like(p) for p in shapes] for _ in range(ranks)]
        self.u = [[torch.zeros_like(p) for p in shapes] for _ in range(ranks)]
        self.anchor = list[Tensor]()
        self.count_anew()

    def count_anew(self) -> None:
        """What each rank has counted since the last meeting: its learning rates, and what its weight decay has left."""
        self.rates, self.shrunk = [0.0 for _ in self.models], [1.0 for _ in self.models]

    def gradients(self, step: int) -> list[list[Tensor]]:
        for rank, model in enumerate(self.models):
            pull(model, rank, step)
        return [[torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()] for m in self.models]

    @torch.no_grad()
    def step(self, t: int, lr: float, decay: float, skipped: Collection[int] = ()) -> None:
        g = self.gradients(t)
        together, learns = t <= 4, t in (1, 2, 4)
        if together:
            mean = [torch.stack(each).mean(0) for each in zip(*g, strict=True)]
            g = [mean for _ in g]
            if learns:
                self.v = [0.999 * v + 0.001 * x**2 for v, x in zip(self.v, mean, strict=True)]
                self.learned += 1
            self.anchor = []
        if not self.anchor:
            self.anchor = [p.detach().clone() for p in self.models[0].parameters()]
        roots = [(v / (1 - 0.999**self.learned)).sqrt() + 1e-8 for v in self.v]
        for rank, model in enumerate(self.models):
            if rank in skipped:
                continue
            self.rates[rank] += lr
            self.shrunk[rank] *= 1 - lr * decay
            for i, p in enumerate(model.parameters()):
                self.m[rank][i] = 0.9 * self.m[rank][i] + 0.1 * g[rank][i]
                bias = 1 - 0.9**t if together else 1.0
                p.mul_(1 - lr * decay).sub_(lr * self.m[rank][i] / bias / roots[i])
                self.u[rank][i] += lr * self.m[rank][i]
        if together:
            self.anchor, self.u = [], [[torch.zeros_like(x) for x in u] for u in self.u]
            self.count_anew()
            return
        if t in (5, 6, 8, 12, 16):
            self.meet(roots)

    def meet(self, roots: list[Tensor]) -> None:
        rate, shrunk = fmean(self.rates), fmean(self.shrunk)
        for i in range(len(roots)):
            agreed = torch.stack([u[i] for u in self.u]).mean(0)
            for rank, model in enumerate(self.models):
                list(model.parameters())[i].copy_(self.anchor[i] * shrunk - agreed / roots[i])
                self.m[rank][i] = agreed / rate if rate else self.m[rank][i]
                self.u[rank][i] = torch.zeros_like(agreed)
        self.anchor = []
        self.count_anew()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_with_an_exact_exchange_it_is_what_is_written_down(decay: float) -> None:
    ranks, twin = make(EXACT, 3, optimizer=lambda m: adamw(m, weight_decay=decay)), Twin(3)
    for step in range(1, 17):
        train(ranks, pull, 1)
        twin.step(step, 0.02, decay)
        assert_close(ranks, twin)


def assert_close(ranks: Sequence[Replica], twin: Twin) -> None:
    for r, model in zip(ranks, twin.models, strict=True):
        expected = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).float()
        torch.testing.assert_close(r.flat(), expected, rtol=1e-4, atol=1e-5)


def test_steps_that_a_rank_skips_count_neither_for_the_momentum_nor_for_the_decay() -> None:
    """One rank skips a whole round, all skip one, and some a part of one, in whose midst the run is saved and resumed."""
    spoilt = {5: [0], 6: [0, 1, 2], 7: [1], 10: [2], 11: [2]}
    at = [(rank, step) for step, bad in spoilt.items() for rank in bad]

    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, weight_decay=0.5)

    ranks, twin = make(EXACT, 3, optimizer=decayed), Twin(3)
    for step in range(1, 17):
        train(ranks, spoiled(at, float("inf")), 1)
        twin.step(step, 0.02, 0.5, spoilt.get(step, ()))
        assert_close(ranks, twin)
        if step == 10:
            ranks = resumed(EXACT, saved(ranks), optimizer=decayed)


def test_a_round_without_a_learning_rate_changes_no_model_and_leaves_each_rank_its_momentum() -> None:
    """It is saved and resumed in the round, whose learning rates come to zero."""
    ranks, twin = make(EXACT, 3, optimizer=adamw), Twin(3)
    for step in range(1, 17):
        lr = 0.0 if 9 <= step <= 12 else 0.02
        for r in ranks:
            r.optimizer.param_groups[0]["lr"] = lr
        train(ranks, pull, 1)
        twin.step(step, lr, 0.1)
        assert_close(ranks, twin)
        if step == 10:
            ranks = resumed(EXACT, saved(ranks), optimizer=adamw)


def test_what_steps_came_to_tells_the_common_point_at_every_step() -> None:
    ranks = make(SHORT, 3, optimizer=undecayed)
    train(ranks, pull, 8)
    for _ in range(4):
        train(ranks, pull, 1)
        points = list[Tensor]()
        for r in ranks:
            (c,) = r.worker.buckets
            gone = c.states["update"].get("gone", torch.zeros(()))
            points.append(c.read() + gone / c.states["update"]["divisor"])
        assert all(torch.allclose(p, points[0], rtol=1e-5, atol=1e-6) for p in points)


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_are_equal_when_they_meet_and_what_never_had_a_gradient_stays(size: int) -> None:
    ranks = make(SHORT, size, optimizer=undecayed)
    still = ranks[0].model.get_parameter("still").detach().clone()
    for step in range(1, 17):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == (step in (1, 2, 3, 4, 5, 6, 8, 12, 16))
        if step in (5, 6, 8, 12, 16):
            assert bit_equal([r.worker.buckets[0].states["update"]["m"] for r in ranks])
    assert torch.equal(ranks[0].model.get_parameter("still"), still)
    assert not ranks[0].optimizer.state  # all of it is the recipe's


def test_bytes_of_exact_steps_of_signs_and_of_steps_apart() -> None:
    run = train(make(SHORT, 2, optimizer=adamw), pull, 12)
    sent = [sum(e.sent for e in run.ledger if e.step == s) for s in range(1, 13)]
    assert sent[0] == sent[1] == sent[3] > 8 * sent[2]  # small tensors pay for their scales
    assert sent[2] + 2 * 16 == sent[4] == sent[5] == sent[7] == sent[11]  # and two numbers that each rank has counted
    assert [sent[i] for i in (6, 8, 9, 10)] == [0] * 4


def test_gradients_that_are_not_finite_leave_no_trace() -> None:
    ranks = make(SHORT, 2, optimizer=adamw)
    train(ranks, spoiled([(0, 3), (1, 4), (0, 6), (1, 10)], float("inf")), 12)
    assert all(p.isfinite().all() for p in parameters(ranks))
    assert bit_equal(parameters(ranks))
    assert all(t.isfinite().all() for r in ranks for k, t in r.worker.buckets[0].states["update"].items() if k == "m")


def test_a_rank_that_skips_its_first_step_apart_goes_on_from_the_model_of_all() -> None:
    ranks = make(SHORT, 2, optimizer=adamw)
    train(ranks, spoiled([(0, 5)], float("inf")), 5)
    assert [r.worker.record.skipped for r in ranks] == [1, 0]
    for _ in range(3):  # ranks meet after steps 5, 6 and 8
        assert bit_equal(parameters(ranks)) == (ranks[0].worker.step != 8)
        assert ranks[0].worker.buckets[0].states["update"].keys() == ranks[1].worker.buckets[0].states["update"].keys()
        train(ranks, pull, 1)
    assert bit_equal(parameters(ranks))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zero_one_adam(0)", "the second moment needs averaged gradients"),
        ("zero_one_adam(3, kappa=0)", "kappa must be at least 1"),
        ("zero_one_adam(3, scaler=0)", "scaler must be at least 1"),
        ("zero_one_adam(3, clipper=0)", "the longest round"),
        ("zero_one_adam(3, beta2=1.0)", "beta2 must lie between 0 and 1"),
        ("allreduce(fp32()) + zero_one_adam_update() + local_sgd(4)", "local_sgd(4) has neither"),
        ("zero_one_adam(3) + error_feedback(units='update')", "leave units out"),
        ("zero_one_adam(3) + switch_exchange(3, scatter(qsgd()))", "compare gradients with models"),
        ("zero_one_adam(3) + signs()", "needs an agreed gradient"),
        ("dgc(momentum=0.9) + zero_one_adam_update()", "adds a second one"),
        ("scatter(sign()) + zero_one(3) + zero_one_adam_update()", "error_feedback()"),
    ],
)
def test_what_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [{"betas": (0.8, 0.99)}, {"amsgrad": True}])
def test_an_optimizer_with_numbers_of_its_own_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(AttachError, match=r"recipe|amsgrad"):
        make(SHORT, 2, optimizer=lambda m: adamw(m, **wrong))


# -- real processes --------------------------------------------------------------------------------------------------


def stopped_and_resumed(rank: int, size: int, stops: list[int], dtype: torch.dtype) -> list[bool]:
    """A run of ten steps; and for each of these steps one that is saved after it, and goes on anew."""

    def run(comm_state: Any = None, start: Tensor | None = None, until: int = 10) -> tuple[Tensor, Any]:
        with attached(SHORT, Awkward(dtype), adamw) as (model, optimizer, comm):
            if start is not None:
                for p, new in zip(
                    model.parameters(), start.split([p.numel() for p in model.parameters()]), strict=True
                ):
                    p.data.copy_(new.view(p.shape))
                comm.load_state_dict(comm_state)
            while comm.step < until:
                small_step(model, optimizer, comm, rank)
            return flat(model), comm.state_dict()

    whole, _ = run()
    return [bit_equal([whole, run(state, there)[0]]) for there, state in (run(until=s) for s in stops)]


@pytest.mark.gang
def test_it_resumes_bit_equal_around_the_freeze_and_within_a_round(gang2: Gang) -> None:
    for dtype, stops in (torch.float32, [3, 4, 7, 9]), (torch.bfloat16, [7]):
        for found in gang2.run(stopped_and_resumed, stops, dtype):
            assert found == [True] * len(stops)


def scaled(rank: int, size: int, factor: float, bad: int) -> Tensor:
    """With a loss scale, whose steps are those without; at one step rank 0 has a loss that is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=factor, growth_interval=3)
    with attached(SHORT, None, adamw, scaler=scaler) as (model, optimizer, comm):
        for step in range(1, 13):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * float("inf") if (rank, step) == (0, bad) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        comm.check_sync()
        return flat(model)


@pytest.mark.gang
def test_a_loss_scale_that_moves_changes_no_bit_and_one_that_bursts_no_number(gang2: Gang) -> None:
    one, many = gang2.run(scaled, 1.0, 0), gang2.run(scaled, 1024.0, 0)
    assert same(one[0], many[0])
    for bad in (3, 10):
        found = gang2.run(scaled, 1024.0, bad)
        assert same(found[0], found[1])
        assert bool(found[0].isfinite().all())


def unscaled(rank: int, size: int) -> Tensor:
    """Nobody skips a step whose gradient is not finite; ranks return to where they met last."""
    with attached(SHORT, None, adamw) as (model, optimizer, comm):
        for step in range(1, 17):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            (loss * float("inf") if (rank, step) == (1, 10) else loss).backward()
            optimizer.step()
        comm.check_sync()
        return flat(model)


@pytest.mark.gang
@pytest.mark.filterwarnings("ignore")
def test_a_round_that_is_not_finite_is_lost_and_the_next_is_not(gang2: Gang) -> None:
    first, second = gang2.run(unscaled)
    assert same(first, second)
    assert bool(first.isfinite().all())
