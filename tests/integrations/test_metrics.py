"""Metrics as a time series: who is told what, and when, under every kind of recipe."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, flat, loss_of, same, sgd, small_step
from tests.integrations.test_backup import milestones
from tests.runtime.gym import Flat, make
from torch import Tensor

import gossamer
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Present
from gossamer.fabrics.ledger import Ledger
from gossamer.integrations.metrics import Meter
from gossamer.runtime import Worker

Told = list[tuple[int, dict[str, float]]]

RATES = {"step_seconds", "sent_bytes_per_step", "received_bytes_per_step", "exposed_seconds_per_step"}


def told_of(rank: int, size: int, recipe: str, steps: int, every: int) -> dict[str, Any]:
    """A run that is told, what it was told, and the same run without."""
    told: Told = []
    threads, models, quiet = set[str](), list[Tensor](), list[Tensor]()

    def tell(step: int, metrics: dict[str, float]) -> None:
        told.append((step, metrics))
        threads.add(threading.current_thread().name)
        models.append(flat(model))

    with attached(recipe, on_metrics=tell, metrics_every=every) as (model, optimizer, comm):
        before = comm.metrics()
        started = comm.ledger.sent
        for _ in range(steps):
            small_step(model, optimizer, comm, rank)
        seats = comm.rank, comm.size
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(steps):
            small_step(model, optimizer, comm, rank)
            quiet.append(flat(model))
    return {
        "told": told,
        "threads": threads,
        "models": models,
        "quiet": quiet,
        "before": before,
        "started": started,
        "seats": seats,
    }


RECIPES = [
    "allreduce" + SMALL,
    "topk(ratio=0.2)" + SMALL,
    "local_sgd(3)",
    "topk(ratio=0.2) + slowmo(3)",
    "overlap_local_sgd(3)",
    "sgp",
    "osgp" + SMALL,
]


@pytest.fixture(scope="module", params=RECIPES)
def watched(gang2: Gang, request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """A recipe, and what both ranks were told after every fourth of ten steps; two laws look at it."""
    return request.param, gang2.run(told_of, request.param, 10, 4)


@pytest.mark.gang
def test_every_nth_step_is_told_after_the_optimizer_stepped(watched: tuple[str, list[dict[str, Any]]]) -> None:
    for rank, seen in enumerate(watched[1]):
        assert [step for step, _ in seen["told"]] == [4, 8]
        assert [metrics["step"] for _, metrics in seen["told"]] == [4, 8]
        assert seen["threads"] == {"MainThread"}
        assert same(seen["models"][0], seen["quiet"][3])  # as the step left them, and as in a run that is not watched
        assert same(seen["models"][1], seen["quiet"][7])
        assert seen["seats"] == (rank, 2)


@pytest.mark.gang
def test_rates_are_of_the_window_and_add_up_to_the_totals(watched: tuple[str, list[dict[str, Any]]]) -> None:
    recipe, both = watched
    for seen in both:
        (_, first), (_, second) = seen["told"]
        in_flight = "overlap" in recipe or "osgp" in recipe  # counted when it has arrived, perhaps steps later
        optional = {"ratio_to_dense", "recent_ratio_to_dense"} if in_flight else set[str]()
        everything = seen["before"].keys() | RATES | {"recent_ratio_to_dense"}
        assert everything - optional <= first.keys() <= everything
        for what in ("sent_bytes", "received_bytes"):
            started = seen["before"][what]
            assert started + first[f"{what}_per_step"] * 4 == first[what]
            assert first[what] + second[f"{what}_per_step"] * 4 == second[what] > started
        waited = (first["exposed_seconds_per_step"] + second["exposed_seconds_per_step"]) * 4
        assert waited == pytest.approx(second["exposed_seconds"])
        assert 0 < second["exposed_seconds_per_step"] < second["step_seconds"]
        if not in_flight:
            ratios = [metrics["recent_ratio_to_dense"] for metrics in (first, second)]
            assert first["ratio_to_dense"] == ratios[0]
            assert min(ratios) <= second["ratio_to_dense"] <= max(ratios)


@pytest.mark.gang
def test_the_start_up_is_in_the_bytes_and_not_in_the_ratio(gang2: Gang) -> None:
    for seen in gang2.run(told_of, "allreduce" + SMALL, 4, 4):
        assert seen["before"]["sent_bytes"] == seen["started"] > 0  # the handshake, and rank 0's model
        assert seen["before"]["ratio_to_dense"] == 1.0
        assert seen["told"][0][1]["ratio_to_dense"] == 1.0  # it is the dense ring


@pytest.mark.gang
def test_while_nothing_is_sent_there_is_no_ratio(gang2: Gang) -> None:
    for seen in gang2.run(told_of, "local_sgd(3)", 6, 1):
        for step, metrics in seen["told"]:
            talks = step % 3 == 0
            assert (metrics["sent_bytes_per_step"] > 0) == talks
            assert ("recent_ratio_to_dense" in metrics) == talks
            assert ("ratio_to_dense" in metrics) == (step >= 3)
        assert seen["told"][2][1]["recent_ratio_to_dense"] == pytest.approx(1.0, rel=0.01)  # one average in one step
        assert seen["told"][2][1]["ratio_to_dense"] == pytest.approx(3.0, rel=0.01)  # in three


def straggling(rank: int, size: int, every: int) -> tuple[list[int], Told]:
    """Backup workers, the last of which is late twice; where each turn of the loop ended, and what was told."""
    told: Told = []
    ends = list[int]()
    late = {1: 4, 4: 11}  # after how many turns, and what the others have done by then
    with (
        milestones(rank) as others,
        attached("backup", on_metrics=lambda *s: told.append(s), metrics_every=every) as made,
    ):
        model, optimizer, comm = made
        while comm.step < 12:
            optimizer.zero_grad()
            loss = loss_of(model, rank, comm.step + 1)
            if rank == size - 1 and len(ends) in late:
                others.wait_for(late[len(ends)])
            loss.backward()
            optimizer.step()
            others.reach(comm.step)
            ends.append(comm.step)
        dist.barrier()
    return ends, told


@pytest.mark.gang
@pytest.mark.parametrize("every", [1, 3])
def test_a_late_rank_that_jumps_over_a_multiple_is_told_where_it_lands(gang4: Gang, every: int) -> None:
    outcomes = gang4.run(straggling, every)
    for ends, told in outcomes:
        assert [s for s, _ in told] == [s for before, s in zip([0, *ends], ends) if s // every > before // every]
        steps = [s - before for before, s in zip([0, *(s for s, _ in told)], (s for s, _ in told))]
        for (_, earlier), (_, later), n in zip(told, told[1:], steps[1:]):
            assert earlier["sent_bytes"] + later["sent_bytes_per_step"] * n == pytest.approx(later["sent_bytes"])
    assert len(outcomes[3][0]) < 12
    assert outcomes[3][1][-1][1]["dropped_steps"] > 0


def scaled(rank: int, size: int, recipe: str) -> tuple[list[int], list[float], int]:
    """Rank 1's gradient overflows in the fourth step, which is due to be told."""
    told: Told = []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with attached(recipe, scaler=scaler, on_metrics=lambda *seen: told.append(seen), metrics_every=4) as (
        model,
        optimizer,
        comm,
    ):
        for i in range(1, 13):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, i) * (float("inf") if (rank, i) == (1, 4) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    return [s for s, _ in told], [m["sent_bytes_per_step"] for _, m in told], comm.step


@pytest.mark.gang
def test_a_skipped_step_is_told_with_the_next(gang2: Gang) -> None:
    for steps, rates, last in gang2.run(scaled, "allreduce"):
        assert (steps, last) == ([5, 8, 12], 12)
        assert rates[0] == rates[1] + 1 / 5  # of five steps, one of which says in a byte whose fault it was
        assert rates[1] == rates[2] > 0  # of three and four
    (a, _, _), (b, _, _) = gang2.run(scaled, "local_sgd(2)")
    assert (a, b) == ([4, 8, 12], [5, 8, 12])  # here every rank skips alone


def resumed(rank: int, size: int) -> tuple[dict[str, float], Told]:
    told: Told = []
    with attached("qsgd", on_metrics=lambda *seen: told.append(seen), metrics_every=4) as (model, optimizer, comm):
        for _ in range(5):
            small_step(model, optimizer, comm, rank)
        saved = comm.state_dict()
    with attached("qsgd", on_metrics=lambda *seen: told.append(seen), metrics_every=4) as (model, optimizer, comm):
        comm.load_state_dict(saved)
        loaded = comm.metrics()
        for _ in range(3):
            small_step(model, optimizer, comm, rank)
    return loaded, told


@pytest.mark.gang
def test_after_a_checkpoint_steps_go_on_and_rates_start_anew(gang2: Gang) -> None:
    for loaded, told in gang2.run(resumed):
        assert (loaded["step"], loaded["ratio_to_dense"]) == (5, 1.0)
        assert [step for step, _ in told] == [4, 8]
        assert told[1][1]["sent_bytes"] == loaded["sent_bytes"] + told[1][1]["sent_bytes_per_step"] * 3
        assert told[1][1]["sent_bytes_per_step"] == told[0][1]["sent_bytes_per_step"]
        assert told[1][1]["ratio_to_dense"] == told[0][1]["ratio_to_dense"]


def test_the_dense_ring_of_a_step_is_that_of_the_ranks_that_were_there() -> None:
    """Counted with those that are left, the dense bytes of a long run fell when ranks were lost, and the recent ratio was negative."""
    worker = make("allreduce", 4, Flat)[0].worker
    meter = Meter(worker, Ledger(), None, 1)
    bytes_ = 8 * 5
    worker.step = 101
    before = meter.mark()
    assert before.dense == 100 * 2 * 3 / 4 * bytes_
    with pytest.warns(RuntimeWarning, match="is lost"):
        worker.ranks.renumber(Present(0, (0, 2), (0, 0)))
    worker.step = 111
    assert meter.mark().dense - before.dense == 10 * bytes_
    with pytest.warns(RuntimeWarning, match="is back"):
        worker.ranks.renumber(Present(0, (0, 1, 2, 3), (0, 1, 0, 1)))
    worker.step = 121
    assert meter.mark().dense - before.dense == 10 * bytes_ + 10 * 2 * 3 / 4 * bytes_


def test_a_logged_loss_keeps_no_graph() -> None:
    """Of a step whose backward() is left out it would hold all activations, and auto() keeps the losses of 64 steps."""
    with attached("terngrad") as (model, _, comm):
        comm.log(loss=loss_of(model, 0, 1))
        assert isinstance(comm.worker.loss, Tensor)
        assert not comm.worker.loss.requires_grad


@pytest.mark.parametrize("recipe", ["terngrad", "slowmo(3)", "sgp", "backup"])
def test_a_world_of_one_is_told_too(recipe: str) -> None:
    told: Told = []
    with attached(recipe, on_metrics=lambda *seen: told.append(seen)) as (model, optimizer, comm):
        assert (comm.rank, comm.size) == (0, 1)
        for _ in range(25):
            small_step(model, optimizer, comm, 0)
    assert [step for step, _ in told] == [10, 20]  # and not the five steps left
    for _, metrics in told:
        assert metrics.keys() >= RATES
        assert metrics["sent_bytes_per_step"] == metrics["exposed_seconds_per_step"] == 0
        assert metrics["recent_ratio_to_dense"] == metrics["ratio_to_dense"] == 1.0
        assert metrics["step_seconds"] > 0


def test_what_was_logged_stays_what_it_was() -> None:
    """A loop that logs a tensor of its own goes on to write to it, and so does each replay of a CUDA graph."""
    with attached("allreduce") as (_, _, comm):
        own = torch.ones((), requires_grad=True)
        comm.log(loss=own, held_out=own)
        with torch.no_grad():
            own.fill_(7.0)
        metrics = comm.metrics()
        assert (metrics["loss"], metrics["held_out"], comm.worker.loss) == (1.0, 1.0, 1.0)
        comm.loss(own)
        with torch.no_grad():
            own.zero_()
        assert comm.worker.loss == 7.0


def failing(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor, list[int]]:
    """A logger that fails once: the loop gets its exception at the step, and may go on."""
    told = list[int]()

    def tell(step: int, metrics: dict[str, float]) -> None:
        told.append(step)
        if step == 4:
            raise ConnectionError("the logger is down")

    with attached(recipe, on_metrics=tell, metrics_every=2) as (model, optimizer, comm):
        for _ in range(3):
            small_step(model, optimizer, comm, rank)
        with pytest.raises(ConnectionError, match="the logger is down"):
            small_step(model, optimizer, comm, rank)
        assert comm.step == 4
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        assert optimizer.param_groups[0]["lr"] == 0.05  # which accordion_batch raises during a step
        final = flat(model)
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(6):
            small_step(model, optimizer, comm, rank)
        return final, flat(model), told


@pytest.mark.gang
@pytest.mark.parametrize(
    "recipe", ["qsgd", "slowmo(3)", "accordion_batch(epoch=1, factor=4, interval=1, threshold=1000.0)"]
)
def test_what_a_logger_raises_comes_out_of_the_step_and_harms_nothing(gang2: Gang, recipe: str) -> None:
    for watched, plain, told in gang2.run(failing, recipe):
        assert told == [2, 4, 6]
        assert same(watched, plain)


def test_without_a_logger_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "residual_norm", lambda self: pytest.fail("nobody asked"))
    with attached("topk") as (model, optimizer, comm):
        for _ in range(20):
            small_step(model, optimizer, comm, 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"on_metrics": [], "metrics_every": 5}, r"on_metrics must be a function of \(step, metrics\), got a list"),
        (
            {"on_metrics": print, "metrics_every": 0},
            "metrics_every must be at least 1, got 0; to disable reports leave",
        ),
    ],
)
def test_a_logger_that_cannot_be_called_is_refused_at_once(options: dict[str, Any], reason: str) -> None:
    model = Awkward()
    with pytest.raises(AttachError, match=reason):
        gossamer.attach(model, sgd(model), "qsgd", **options)
    with pytest.raises(AttachError, match=reason):
        gossamer.ddp.register(model, "qsgd", **options)  # pyright: ignore
