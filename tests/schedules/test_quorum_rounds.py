"""A quorum over rounds on the simulator: who closes a round, what becomes of the late, and that no step is lost."""

from collections.abc import Callable

import pytest
import torch
from tests.runtime.gym import (
    Flat,
    anchors,
    bit_equal,
    make,
    on_all,
    parameters,
    pull,
    remembered,
    resumed,
    same_memory,
    saved,
    sgd,
    train,
)
from torch import Tensor, nn

from gossamer.core.bucket import Layout
from gossamer.core.errors import AttachError, RecipeError
from gossamer.fabrics.sim import Network
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.schedules.async_worker import AsyncWorker
from gossamer.schedules.merging import Merge
from gossamer.simulate import Replica

ALL = "overlap=0, grace=0.0"


def even(rank: int, step: int) -> float:
    return 1.0


def one_slow(rank: int, step: int) -> float:
    return 5.0 if rank == 0 else 1.0


def spikes(rank: int, step: int) -> float:
    """A rank in its turn takes ten times as long, now and then."""
    return 10.0 if (7 * step + 13 * rank) % 29 == 0 else 1.0


def learner(rank: Replica) -> AsyncWorker:
    return rank.worker.live["learner"]


# -- equivalences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "carrier",
    [
        "allreduce",
        "topk(ratio=0.1)",
        "scatter(qsgd(bits=4, bucket=16)) + error_feedback() + bucket(0.00002)",
        "powersgd",
        "nodes(scatter(qsgd(bits=4, bucket=16)), 2)",
    ],
)
def test_of_all_ranks_without_overlap_it_is_diloco_bit_for_bit(carrier: str) -> None:
    ranks = make(f"{carrier} + quorum_rounds(3, quorum=4, weigh='equal', {ALL})", 4)
    twins = make(f"{carrier} + slowmo(3, 0.9, 0.7, by_lr=False, nesterov=True)", 4)
    for crew in ranks, twins:
        train(crew, pull, 10)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(twins)))
    assert all(bit_equal([anchors(a), anchors(b)]) for a, b in zip(ranks, twins))


@pytest.mark.parametrize(
    ("extra", "twin"), [("overlap=0", "local_sgd(3)"), ("overlap=2", "allreduce + cocod(3, delay=2)")]
)
def test_without_an_outer_step_it_is_local_sgd_or_cocod_bit_for_bit(extra: str, twin: str) -> None:
    ranks = make(f"allreduce + quorum_rounds(3, quorum=3, grace=0.0, rate=1.0, momentum=0.0, {extra})", 3)
    twins = make(twin, 3)
    for crew in ranks, twins:
        train(crew, pull, 11)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(twins)))


def test_fewer_with_all_in_time_is_as_if_all_were_waited_for() -> None:
    ranks, twins = (make(f"decoupled_diloco(4) + quorum_rounds(4, quorum={k})", 3) for k in (1, 3))
    for crew in ranks, twins:
        train(crew, pull, 14)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(twins)))
    assert ranks[0].worker.record.accepted == dict.fromkeys(range(3), 3)


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("carrier", "seconds"),
    [("allreduce", one_slow), ("scatter(qsgd(bits=4, bucket=16)) + error_feedback()", spikes)],
)
def test_a_slow_machine_holds_up_nobody_else(carrier: str, seconds: Callable[[int, int], float]) -> None:
    """The undisturbed step takes a second, and a little for what cannot be hidden; DDP takes as long as the slowest."""
    steps, network = 36, Network(latency=0.01)
    own = [sum(seconds(r, s) for s in range(1, steps + 1)) for r in range(4)]
    undisturbed = make(f"{carrier} + quorum_rounds(6, quorum=2)", 4)
    train(undisturbed, pull, steps, network, even)
    ranks = make(f"{carrier} + quorum_rounds(6, quorum=2)", 4)
    train(ranks, pull, steps, network, seconds)
    extra = max(r.clock for r in undisturbed) / steps
    assert extra < 1.05
    for r, mine in zip(ranks, own):
        assert r.clock <= 1.15 * mine * extra
    ddp = make("allreduce", 4)
    train(ddp, pull, steps, network, seconds)
    slowest = [max(seconds(r, s) for r in range(4)) for s in range(1, steps + 1)]
    assert ddp[1].clock >= sum(slowest) > 1.5 * min(own)


def test_a_slow_link_is_hidden_behind_steps_with_a_codec() -> None:
    """One link at 20 Mbit/s, a second of computing a step, a million numbers: dense is exposed, four bits are not."""
    network = Network(latency=0.001, rate=(2.5e6, 1.25e8, 1.25e8, 1.25e8))
    clocks = dict[str, float]()
    for carrier in ("allreduce", "scatter(qsgd(bits=4))"):
        ranks = make(
            f"{carrier} + quorum_rounds(4, quorum=3)", 4, lambda: Flat(1_000_000, torch.float32), sgd(0.1, 0.0)
        )

        def still(model: nn.Module, rank: int, step: int) -> float:
            for p in model.parameters():
                p.grad = torch.full_like(p, float(rank))
            return 0.0

        train(ranks, still, 9, network, even)
        clocks[carrier] = max(r.clock for r in ranks)
    assert clocks["allreduce"] > 1.15 * 9 > clocks["scatter(qsgd(bits=4))"]


def test_grace_takes_in_who_comes_within_the_slack_and_no_more() -> None:
    def a_bit(rank: int, step: int) -> float:
        return 1.0 + 0.15 * rank

    def taken(grace: float) -> set[int]:
        ranks = make(f"allreduce + quorum_rounds(4, grace={grace})", 4)
        train(ranks, pull, 5, seconds=a_bit)
        return set(ranks[0].worker.record.last_accepted)

    # Rank 0 opens the round at 4.0, and lands a second later; the others' steps end at 4.6, 5.2 and 4.35.
    assert [taken(grace) for grace in (0.0, 0.5, 1.0)] == [{0}, {0, 3}, {0, 1, 3}]


# -- what becomes of steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe",
    [
        *("quorum_rounds(3)", "quorum_rounds(4, quorum=2, fragments=2)", "quorum_rounds(3, overlap=0)"),
        "quorum_rounds(3, least=3, weigh='equal', delayed=0.25)",
    ],
)
@pytest.mark.parametrize("seconds", [one_slow, spikes])
def test_every_step_is_merged_once(recipe: str, seconds: Callable[[int, int], float]) -> None:
    ranks = make(f"allreduce + {recipe} + bucket(0.00002)", 4)
    for steps in (5, 1, 17):
        train(ranks, pull, steps, Network(latency=0.01), seconds)
        on_all(ranks, Worker.quiesce)
        assert bit_equal([anchors(r) for r in ranks])
        for r in ranks:
            assert all(f.merged + f.steps == r.worker.step - 1 for f in learner(r)._fragments)


def test_nobody_moves_where_there_is_nothing_to_learn() -> None:
    def nothing(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return 0.0

    ranks = make("decoupled_diloco(3)", 4)
    start = parameters(ranks)
    train(ranks, nothing, 20, Network(latency=0.1), one_slow)
    assert all(torch.equal(a, b) for a, b in zip(start, parameters(ranks)))


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_a_late_learner_lands_on_the_new_anchor_with_what_it_learned(late: str) -> None:
    """Rank 1 is in its first step when the others' first round closes."""

    def known(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)
        return 0.0

    recipe = f"allreduce + quorum_rounds(2, quorum=1, rate=1.0, momentum=0.0, late={late!r}, {ALL})"
    ranks = make(recipe, 2, Flat, sgd(0.1, 0.0))
    start = parameters(ranks)[0]
    train(ranks, known, 2, seconds=lambda rank, step: 1.0 if rank == 0 else 3.0)
    assert torch.allclose(parameters(ranks)[0], start - 0.2)
    after = {"keep": -0.2 - 0.4, "drop": -0.2 - 0.2}[late]  # two steps of 0.2, the first of them dropped, or kept
    torch.testing.assert_close(parameters(ranks)[1], start + after, rtol=0, atol=1e-12)


def test_a_mean_goes_by_what_learners_did() -> None:
    """Rank 1 is in its second step when rank 0 opens the round with three."""

    def known(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)
        return 0.0

    found = dict[str, float]()
    for weigh in ("tokens2/steps", "equal"):
        recipe = f"allreduce + quorum_rounds(3, quorum=2, rate=1.0, momentum=0.0, weigh={weigh!r}, {ALL})"
        ranks = make(recipe, 2, Flat, sgd(0.1, 0.0))
        start = parameters(ranks)[0]
        train(ranks, known, 3, seconds=lambda rank, step: 1.0 if rank == 0 else 2.9)
        found[weigh] = float((anchors(ranks[0]) - start)[0])
    assert found["tokens2/steps"] == pytest.approx(-(3 * 0.3 + 2 * 0.4) / 5)
    assert found["equal"] == pytest.approx(-(0.3 + 0.4) / 2)


def test_what_error_feedback_keeps_of_a_late_rank_stays() -> None:
    ranks = make("topk(ratio=0.1) + quorum_rounds(3, quorum=3, grace=0.0)", 4)
    train(ranks, pull, 4, seconds=lambda rank, step: 1.0 if rank or step < 4 else 100.0)
    before = remembered(ranks[0].worker, "memory")
    assert before
    train(ranks, pull, 3, seconds=lambda rank, step: 100.0 if rank == 0 else 1.0)
    assert ranks[1].worker.record.accepted[0] == 1
    assert all(bit_equal([before[k], v]) for k, v in remembered(ranks[0].worker, "memory").items())


def test_a_rank_whose_model_is_not_finite_returns_to_the_anchor_and_spoils_nothing() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        if (rank, step) == (2, 2):
            with torch.no_grad():
                model.get_parameter("matrix")[0, 0] = float("inf")
        return pull(model, rank, step)

    ranks = make("decoupled_diloco(3)", 4)
    train(ranks, backward, 14)
    assert all(p.isfinite().all() for p in [*parameters(ranks), *map(anchors, ranks)])
    assert [r.worker.record.dropped_rounds for r in ranks] == [0, 0, 1, 0]


def test_it_learns_though_one_rank_is_slow() -> None:
    ranks = make("decoupled_diloco(4, momentum=0.5)", 4)
    train(ranks, pull, 40, Network(latency=0.01), one_slow)
    assert all(r.losses[-1] < 0.5 * r.losses[0] for r in ranks[1:])


# -- radial merges -----------------------------------------------------------------------------------------------------


def merged(merge: Merge, layout: Layout, *moved: Tensor) -> Tensor:
    weights = [1.0, 3.0, 2.0][: len(moved)]
    lengths = [merge.lengths(m, layout) * w for m, w in zip(moved, weights)]
    given = [merge.given(m.clone(), layout) * w for m, w in zip(moved, weights)]
    total = sum(weights)
    return merge.made(torch.stack(given).sum(0) / total, layout, torch.stack(lengths).sum(0) / total)


def test_a_radial_mean_is_the_mean_of_directions_as_long_as_lengths_are() -> None:
    layout = Layout.of({"embed": (2,), "w": (3,)}, torch.float64)
    a, b = (torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    out = merged(Merge(True, ("emb*",)), layout, a, b)
    torch.testing.assert_close(out[:2], (a[:2] + 3 * b[:2]) / 4)  # as it is
    turned = (a[2:] / a[2:].norm() + 3 * b[2:] / b[2:].norm()) / 4
    length = (a[2:].norm() + 3 * b[2:].norm()) / 4
    torch.testing.assert_close(out[2:], length * turned / turned.norm())


def test_a_radial_mean_of_one_or_of_alike_is_the_mean_and_opposites_stand_still() -> None:
    layout, merge = Layout.of({"w": (4,)}, torch.float64), Merge(True, ())
    a = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(merged(merge, layout, a), a)
    torch.testing.assert_close(merged(merge, layout, a, 2 * a), (a + 3 * 2 * a) / 4)
    opposite = merge.made(torch.zeros(4, dtype=torch.float64), layout, torch.ones(1, dtype=torch.float64))
    assert not opposite.any()
    assert not merged(merge, layout, torch.zeros(4, dtype=torch.float64)).any()


def test_radial_rounds_keep_their_length_whatever_the_quorum() -> None:
    """Four learners that go four ways: the mean goes half as far."""

    def apart(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            p.grad[rank] = 1.0
        return 0.0

    far = list[float]()
    for merge in ("radial", "mean"):
        recipe = f"allreduce + quorum_rounds(2, quorum=4, rate=1.0, momentum=0.0, merge={merge!r}, {ALL})"
        ranks = make(recipe, 4, Flat, sgd(0.1, 0.0))
        start = parameters(ranks)[0]
        train(ranks, apart, 2)
        far.append(float((parameters(ranks)[0] - start).norm()))
        assert bit_equal(parameters(ranks))
    assert far == pytest.approx([0.2, 0.1])


# -- resume ------------------------------------------------------------------------------------------------------------


RESUMED = (
    "decoupled_diloco(3)",
    "topk(ratio=0.1) + quorum_rounds(4, quorum=3, overlap=2, fragments=2, merge='radial') + bucket(0.00002)",
    "scatter(qsgd(bits=4, bucket=16)) + error_feedback() + quorum_rounds(3, overlap=0, late='drop')",
    "async_diloco(3, share=0.25)",
)


@pytest.mark.parametrize(
    ("recipe", "seconds"),
    [*((r, even) for r in RESUMED), (RESUMED[1], one_slow), (RESUMED[2], spikes), (RESUMED[3], one_slow)],
)
def test_a_run_that_is_killed_and_resumed_after_any_step_changes_no_bit(
    recipe: str, seconds: Callable[[int, int], float]
) -> None:
    """After every step of two rounds; and where ranks are in step, it is the run that was never looked at."""
    network = Network(latency=0.01)
    ranks, untouched = make(recipe, 4), make(recipe, 4)
    for step in range(1, 9):
        again = resumed(recipe, saved(ranks))
        for crew in (ranks, again):
            train(crew, pull, 1, network, seconds)
            on_all(crew, Worker.quiesce)
        assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(again))), step
        for a, b in zip(ranks, again):
            assert same_memory(
                remembered(a.worker, "schedule", "memory"), remembered(b.worker, "schedule", "memory")
            ), step
    if seconds is even:
        train(untouched, pull, 8, network, seconds)
        assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(untouched)))


# -- bytes, and what is refused ----------------------------------------------------------------------------------------


def test_bytes_are_what_is_counted() -> None:
    recipe, steps = "scatter(qsgd(bits=4)) + quorum_rounds(4, quorum=2)", 17
    ranks = make(recipe, 4)
    shapes = {n: tuple(p.shape) for n, p in ranks[0].model.named_parameters()}
    run = train(ranks, pull, steps)
    assert run.ledger.sent / 4 == pytest.approx(bytes_per_step(recipe, shapes, 4) * (steps - 1))


REFUSED: dict[str, tuple[str, str]] = {
    "decoupled_diloco(8, quorum=0)": ("quorum must be at least 1 rank", "1 is usual"),
    "decoupled_diloco(0)": ("at least 1 step", "100 is usual"),
    "allreduce + quorum_rounds(4, overlap=5)": ("only one may be in flight", "use 0 to 4"),
    "allreduce + quorum_rounds(4, overlap=3, fragments=2)": ("more than the 2 steps", "use 0 to 2"),
    "allreduce + quorum_rounds(4, fragments=3)": ("must be a multiple of the number of fragments", "use every=6"),
    "allreduce + quorum_rounds(4, grace=1.5)": ("[0, 1]", "1 waits for all of the slack"),
    "allreduce + quorum_rounds(4, least=5)": ("between 1 and 4", "got 5"),
    "decoupled_diloco(4, momentum=1.0)": ("[0, 1)", "0.9 is usual"),
    "decoupled_diloco(4, rate=0.0)": ("must be positive", "freeze"),
    "diana + quorum_rounds(4)": ("late ranks are left out", "use error_feedback()"),
    "ef21 + quorum_rounds(4)": ("late ranks are left out", "use error_feedback()"),
    "allreduce + quorum_rounds(4) + adacomm(6)": ("ranks are at different steps", "use diloco"),
    "signsgd + quorum_rounds(4)": ("averages none", "every_step()"),
    "gather(topk()) + momentum_correction(0.9) + quorum_rounds(4)": ("differences of models hold", "error_feedback()"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Recipe.of(text)
    assert all(part in str(refused.value) for part in REFUSED[text]), refused.value


def test_more_learners_than_there_are_ranks_are_refused() -> None:
    with pytest.raises((AttachError, RecipeError), match=r"quorum=5\) on 4 ranks.*use at most 4"):
        make("decoupled_diloco(4, quorum=5)", 4)
    with pytest.raises(AttachError, match=r"would be without parameters"):
        make("allreduce + quorum_rounds(8, fragments=8)", 2)
