"""Local SGD and SlowMo: the self-tests T3.1 to T3.9 of the method notes."""

from functools import partial

import pytest
import torch
from tests.runtime.gym import (
    Flat,
    anchors,
    bit_equal,
    make,
    parameters,
    pull,
    remembered,
    resumed,
    saved,
    sgd,
    spoiled,
    train,
)
from tests.schedules.rates import (
    NUMEL,
    Rate,
    constant,
    cosine,
    gradient,
    known_sgd,
    model,
    scheduled,
    steps_down,
    trained,
)
from torch import Tensor

from gossamer.core.errors import RecipeError
from gossamer.schedules import LocalSGD, SlowMo

RATES = [constant, cosine, steps_down]


def start() -> Tensor:
    return Flat(NUMEL).x.detach().clone()


def by_hand(
    size: int, rounds: int, every: int, rate: Rate, beta: float, alpha: float, outer: str, momentum: float = 0.0
) -> Tensor:
    """The formulas of the papers, rank after rank; `outer` is the form of the slow step."""
    anchor, slow, last = start(), torch.zeros(NUMEL, dtype=torch.float64), None
    buffers = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(size)]
    for round in range(rounds):
        models = [anchor.clone() for _ in range(size)]
        for step in range(round * every + 1, (round + 1) * every + 1):
            for i in range(size):
                buffers[i] = momentum * buffers[i] + gradient(models[i], i, step)
                models[i] = models[i] - rate(step) * buffers[i]
        gamma, moved = rate((round + 1) * every), anchor - torch.stack(models).mean(0)
        if outer == "division":  # u = beta u + (a - mean) / gamma;  a -= alpha gamma u
            slow = beta * slow + moved / gamma
            anchor = anchor - alpha * gamma * slow
        elif outer == "velocity":  # v = beta gamma_t / gamma_(t-1) v + (a - mean);  a -= alpha v
            slow = beta * (gamma / last if last else 0.0) * slow + moved
            anchor, last = anchor - alpha * slow, gamma
        else:  # block momentum
            slow = beta * slow + moved
            anchor = anchor - alpha * slow
    return anchor


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("size", "every", "beta", "alpha"), [(2, 3, 0.5, 1.0), (4, 3, 0.7, 1.0), (3, 2, 0.4, 1.3)])
def test_slowmo_is_its_formula_in_both_forms(size: int, every: int, beta: float, alpha: float, rate: Rate) -> None:
    ranks = trained(f"slowmo({every}, beta={beta}, alpha={alpha})", size, 6 * every, rate, momentum=0.5)
    for form in ("division", "velocity"):
        expected = by_hand(size, 6, every, rate, beta, alpha, form, momentum=0.5)
        torch.testing.assert_close(model(ranks[0]), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rate", RATES)
def test_without_slow_momentum_it_is_local_sgd(rate: Rate) -> None:
    for size in (2, 3, 4):
        slow, local = trained("slowmo(3, beta=0.0)", size, 12, rate, 0.9), trained("local_sgd(3)", size, 12, rate, 0.9)
        assert bit_equal([*parameters(slow), *parameters(local)])
        expected = by_hand(size, 4, 3, rate, 0.0, 1.0, "block", momentum=0.9)
        torch.testing.assert_close(model(local[0]), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", [2, 4])
def test_rounds_of_one_step_are_large_batch_momentum_sgd_under_any_rate(size: int, rate: Rate) -> None:
    slow = trained("slowmo(1, beta=0.8, alpha=1.0)", size, 25, rate)
    fast = trained("allreduce", size, 25, rate, momentum=0.8)
    torch.testing.assert_close(model(slow[0]), model(fast[0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_without_the_rate_in_it_it_is_block_momentum(rate: Rate, alpha: float) -> None:
    ranks = trained(f"allreduce + slowmo(3, beta=0.6, alpha={alpha}, by_lr=False)", 4, 18, rate)
    expected = by_hand(4, 6, 3, rate, 0.6, alpha, "block")
    torch.testing.assert_close(model(ranks[0]), expected, rtol=0, atol=1e-14)
    if rate is constant:
        same = trained(f"slowmo(3, beta=0.6, alpha={alpha})", 4, 18, rate)
        torch.testing.assert_close(model(same[0]), expected, rtol=0, atol=1e-14)
    else:
        other = trained(f"slowmo(3, beta=0.6, alpha={alpha})", 4, 18, rate)
        assert (model(other[0]) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.9])
def test_on_equal_ranks_and_without_momentum_it_is_lookahead(alpha: float) -> None:
    ranks = make(f"slowmo(5, beta=0.0, alpha={alpha})", 2, lambda: Flat(NUMEL), known_sgd(0.9))
    train(ranks, scheduled(constant, lambda x, rank, step: gradient(x, 0, step)), 20)
    slow, fast, buffer = start(), start(), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(1, 21):
        buffer = 0.9 * buffer + gradient(fast, 0, step)
        fast = fast - 0.1 * buffer
        if step % 5 == 0:
            slow = slow + alpha * (fast - slow)
            fast = slow.clone()
    torch.testing.assert_close(model(ranks[0]), slow, rtol=0, atol=1e-14)


def test_steady_progress_is_alpha_over_one_minus_beta() -> None:
    def downhill(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.ones(NUMEL, dtype=torch.float64)

    ranks = make("slowmo(2, beta=0.75, alpha=0.5)", 2, lambda: Flat(NUMEL), known_sgd())
    train(ranks, scheduled(constant, downhill), 200)
    before = model(ranks[0])
    train(ranks, scheduled(constant, downhill), 2)
    moved = before - model(ranks[0])
    torch.testing.assert_close(moved, torch.full_like(moved, 2 * 0.1 * 0.5 / 0.25), rtol=1e-10, atol=0)


def test_a_rate_of_zero_drops_the_slow_momentum_instead_of_dividing_by_it() -> None:
    def paused(step: int) -> float:
        return 0.0 if 4 <= step <= 6 else 0.1

    ranks = trained("slowmo(3, beta=0.7)", 2, 12, paused)
    assert model(ranks[0]).isfinite().all()
    stopped = trained("slowmo(3, beta=0.7)", 2, 6, paused)
    resumed_once = trained("slowmo(3, beta=0.7)", 2, 9, paused)
    torch.testing.assert_close(
        stopped[0].worker.buckets[0].states["schedule"]["velocity"],
        0 * trained("slowmo(3, beta=0.7)", 2, 3, paused)[0].flat(),
        rtol=0,
        atol=1e-16,
    )
    moved = model(stopped[0]) - model(resumed_once[0])
    torch.testing.assert_close(
        moved, resumed_once[0].worker.buckets[0].states["schedule"]["velocity"], rtol=0, atol=1e-15
    )


@pytest.mark.parametrize("recipe", ["slowmo(3)", "qsgd + slowmo(3)", "topk(ratio=0.2) + slowmo(3)", "slowmo_sgp(3)"])
def test_anchors_and_velocities_are_bit_equal_after_each_round(recipe: str) -> None:
    ranks = make(recipe, 4)
    for _ in range(5):
        train(ranks, pull, 3)
        assert bit_equal([anchors(r) for r in ranks])
        assert bit_equal([torch.cat([c.states["schedule"]["velocity"] for c in r.worker.buckets]) for r in ranks])
        assert bit_equal([anchors(ranks[0]), torch.cat([c.read() for c in ranks[0].worker.buckets])])


@pytest.mark.parametrize("recipe", ["slowmo(4)", "topk(ratio=0.2) + slowmo(4)", "slowmo_sgp(4)"])
@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6, 7])
def test_resuming_within_a_round_changes_no_bit(recipe: str, stop: int) -> None:
    whole = make(recipe, 3)
    train(whole, pull, 12)
    ranks = make(recipe, 3)
    train(ranks, pull, stop)
    again = resumed(recipe, saved(ranks))
    train(again, pull, 12 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again)))


def test_over_push_sum_weights_are_one_again_after_the_round() -> None:
    ranks = make("slowmo_sgp(3, topology=exponential(count=2))", 7)
    for step in range(1, 10):
        train(ranks, pull, 1)
        kept = [c.states["mixer"] for r in ranks for c in r.worker.buckets]
        assert sum(float(k.get("w", 1.0)) for k in kept) == pytest.approx(7, rel=1e-6)  # where none is kept it is one
        assert step % 3 or not any(kept)
    assert bit_equal(parameters(ranks))


def test_over_push_sum_the_round_averages_exactly_what_local_steps_summed() -> None:
    """The average of numerators is that of plain local steps with gradients that do not look at the model."""

    def blind(x: Tensor, rank: int, step: int) -> Tensor:
        return gradient(torch.zeros_like(x), rank, step)

    results = list[Tensor]()
    for recipe in ("slowmo_sgp(4, beta=0.5)", "slowmo(4, beta=0.5)"):
        ranks = make(recipe, 8, lambda: Flat(NUMEL), known_sgd(0.9))
        train(ranks, scheduled(cosine, blind), 12)
        results.append(model(ranks[0]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def momenta(ranks) -> list[Tensor]:
    return [
        torch.cat([r.optimizer.state[p]["momentum_buffer"].flatten() for p in r.model.parameters() if p.numel()])
        for r in ranks
    ]


def test_buffers_are_kept_or_averaged_at_the_round() -> None:
    held = {}
    for what in ("maintain", "average"):
        ranks = make(f"allreduce + slowmo(3, buffers='{what}')", 3)
        train(ranks, pull, 2)
        before = momenta(ranks)
        train(ranks, pull, 1)
        held[what] = momenta(ranks)
        assert not bit_equal(before)
    assert bit_equal(held["average"])
    torch.testing.assert_close(held["average"][0], torch.stack(held["maintain"]).mean(0))
    assert not bit_equal(held["maintain"])


def test_double_precision_buffers_are_averaged_in_double_precision() -> None:
    ranks = make("allreduce + slowmo(2, buffers='average')", 3, lambda: Flat(NUMEL), known_sgd(0.9))
    twins = make("allreduce + slowmo(2, buffers='maintain')", 3, lambda: Flat(NUMEL), known_sgd(0.9))
    for r in (ranks, twins):
        train(r, scheduled(constant), 2)
    mean = torch.stack(momenta(twins)).mean(0)
    torch.testing.assert_close(momenta(ranks)[1], mean, rtol=0, atol=1e-15)


def test_a_rank_without_buffers_yet_does_not_stop_the_others() -> None:
    """Its first step was skipped, so its optimizer has no momentum to average; the round goes on without."""
    ranks = make("allreduce + slowmo(1, buffers='average')", 3)
    train(ranks, spoiled([(0, 1)], float("nan")), 1)
    assert [bool(r.optimizer.state) for r in ranks] == [False, True, True]
    assert bit_equal(parameters(ranks))
    train(ranks, pull, 2)
    assert bit_equal(momenta(ranks))


def test_a_square_that_overflowed_on_one_rank_reaches_no_other() -> None:
    """Its gradient was finite, and Adam moves that element no more."""
    ranks = make(
        "allreduce + slowmo(2, beta=0.0, buffers='average')",
        2,
        Flat,
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    )
    train(ranks, pull, 1)
    squares = [r.optimizer.state[r.model.get_parameter("x")]["exp_avg_sq"] for r in ranks]
    squares[1][0] = float("inf")
    train(ranks, pull, 1)
    assert squares[0].isfinite().all()
    assert not ranks[1].optimizer.state[ranks[1].model.get_parameter("x")]
    train(ranks, pull, 2)
    assert bit_equal(parameters(ranks))


def test_codes_of_an_optimizers_state_are_not_averaged() -> None:
    """Some optimizers keep their state in eight bits, and the mean of two codes is the code of something else."""
    ranks = make("allreduce + slowmo(2, buffers='average')", 2)
    for rank in ranks:
        for p in rank.model.parameters():
            rank.optimizer.state[p]["codes"] = torch.full_like(p, 100 * rank.worker.rank, dtype=torch.uint8)
    train(ranks, pull, 2)
    for rank in ranks:
        assert all(bool((s["codes"] == 100 * rank.worker.rank).all()) for s in rank.optimizer.state.values())


def test_adams_counters_are_not_averaged() -> None:
    ranks = make(
        "allreduce + slowmo(2, buffers='average')", 2, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01)
    )
    train(ranks, pull, 2)
    states = [r.optimizer.state[p] for r in ranks for p in r.model.parameters() if p.grad is not None]
    assert {float(s["step"]) for s in states} == {2.0}
    train(ranks, pull, 4)
    assert bit_equal(parameters(ranks))


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
    "adam": torch.optim.Adam,
    "adamw": partial(torch.optim.AdamW, amsgrad=True, weight_decay=0.0),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.3),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": partial(torch.optim.ASGD, lambd=0.0),
    "adafactor": torch.optim.Adafactor,
}


def strides(kind: str, recipe: str, steps: int, spoil: int = 0) -> list[Tensor]:
    """What each step takes off a matrix on which a gradient of ones always pulls; `spoil` leaves NaN in the state."""

    class Matrix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))

    def pulled(model: torch.nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.ones_like(x)
        if step == spoil:
            x.data.fill_(torch.nan)
            model.optimizer.state[x]["exp_avg_sq"].fill_(torch.nan)  # pyright: ignore
        return 0.0

    def known(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
        object.__setattr__(model, "optimizer", optimizer)
        return optimizer

    ranks, moves = make(recipe, 2, Matrix, known), list[Tensor]()
    for _ in range(steps):
        before = ranks[0].flat().clone()
        train(ranks, pulled, 1)
        moves.append(before - ranks[0].flat())
    return moves


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_after_a_reset_an_optimizer_steps_as_a_new_one_does(kind: str) -> None:
    moves = strides(kind, "allreduce + slowmo(4, beta=0.0, buffers='reset')", 12)
    for round in (1, 2):
        for first, later in zip(moves[:4], moves[4 * round : 4 * round + 4], strict=True):
            if kind == "adafactor":  # its steps follow the size of the parameter
                assert 0 < later.abs().max() < 0.011
            else:
                torch.testing.assert_close(first, later, rtol=1e-9, atol=0)


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
def test_adams_step_is_its_learning_rate_whatever_becomes_of_its_state(buffers: str) -> None:
    for move in strides("adam", f"allreduce + slowmo(3, beta=0.0, buffers='{buffers}')", 12):
        torch.testing.assert_close(move / 0.01, torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=0)


def test_adams_step_is_its_learning_rate_after_a_lost_round() -> None:
    moves = strides("adam", "allreduce + slowmo(3, beta=0.0)", 12, spoil=6)
    for step, move in enumerate(moves, start=1):
        if step not in (4, 5, 6):  # the round that is dropped
            torch.testing.assert_close(move / 0.01, torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=0)


def test_bytes_are_one_average_a_round() -> None:
    ranks = make("local_sgd(4)", 3)
    run = train(ranks, pull, 12)
    d = ranks[0].flat().numel()
    assert run.ledger.by_verb() == {"AllReduce": (3 * 3, 3 * 3 * (2 * 2 * 4 * d // 3))}


def test_warm_up_averages_at_every_step() -> None:
    ranks = make("allreduce + local_sgd(4, warmup=6)", 3)
    for step in range(1, 13):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == (step <= 6 or step % 4 == 0)


def test_quantised_slow_momentum_needs_fewer_bytes_and_still_learns() -> None:
    dense, small = make("slowmo(4, beta=0.5)", 4), make("qsgd + slowmo(4, beta=0.5)", 4)
    runs = [train(r, pull, 40) for r in (dense, small)]
    assert runs[1].ledger.sent < runs[0].ledger.sent / 4
    for ranks in (dense, small):
        assert sum(r.losses[-1] for r in ranks) < 0.8 * sum(r.losses[0] for r in ranks)


def test_the_average_waits_for_the_slowest_once_a_round() -> None:
    ranks = make("local_sgd(4)", 2, optimizer=sgd())
    train(ranks, pull, 8, seconds=lambda rank, step: 3.0 if (rank, step) in ((0, 1), (1, 2)) else 1.0)
    assert [r.clock for r in ranks] == [10.0, 10.0]  # two slow steps in one round pass side by side


@pytest.mark.parametrize(
    ("make_it", "reason"),
    [
        (lambda: SlowMo(0), "at least 1"),
        (lambda: SlowMo(4, beta=1.0), r"\[0, 1\)"),
        (lambda: SlowMo(4, alpha=0.0), "freeze"),
        (lambda: LocalSGD(0), "at least 1"),
        (lambda: LocalSGD(2, warmup=-1), "0 steps or more"),
    ],
)
def test_impossible_values_are_refused(make_it, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        make_it()


def test_memories_do_not_grow_between_rounds() -> None:
    ranks = make("topk(ratio=0.1) + slowmo(3)", 2)
    train(ranks, pull, 3)
    before = remembered(ranks[0].worker)
    train(ranks, pull, 2)
    after = remembered(ranks[0].worker)
    assert all(torch.equal(before[k], after[k]) for k in before)
    train(ranks, pull, 1)
    assert not all(torch.equal(before[k], v) for k, v in remembered(ranks[0].worker).items())
