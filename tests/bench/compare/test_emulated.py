"""Training on an emulated accelerator: DDP and attach see gradients as usual, and what is told says what it was."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.bench.compare.comparisons import of, run, steps

from gossamer.bench import workloads
from gossamer.bench.compare.control_group import new_group
from gossamer.bench.compare.launch import _record
from gossamer.bench.compare.load import LoadMeter, cores, describe
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import RankRun
from gossamer.bench.record import Record, Run, Step
from gossamer.bench.report.charts import charts
from gossamer.bench.report.headline import headline
from gossamer.bench.report.study import study_of
from gossamer.bench.workloads.emulated import emulated

pytestmark = pytest.mark.gang
NAMES = {name: name for name in ("ddp", "allreduce", "qsgd", "topk", "local_sgd(2)", "compute")}


def after_a_step(rank: int, size: int, kind: str) -> tuple[float, bool]:
    """How far a model is from where the mean of all ranks' gradients leads, and whether it is the same on all ranks."""
    workload = emulated(workloads.get("lm"), "2ms")
    plan = ComparePlan({kind: kind}, "lm", compute="2ms")
    training = RankRun(kind, kind, workload, plan, new_group(30.0))
    training.train_slice(1, 1, lambda _: None)
    wanted = workload.model()
    stepping = workload.optimizer(wanted)
    for other in range(size):
        (workload.loss(wanted, workload.batch(0, other, size)) / size).backward()
    stepping.step()
    mine, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (training.model, wanted))
    off = float((mine - theirs).abs().max())
    extremes = torch.stack([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    training.close()
    return off, torch.equal(extremes[0], -extremes[1])


@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_a_step_goes_where_the_mean_of_all_gradients_leads(gang2: Any, kind: str) -> None:
    for off, same in gang2.run(after_a_step, kind):
        assert off < 1e-6
        assert same


def test_all_train_as_many_steps_and_say_what_the_processor_did(gang2: Any) -> None:
    code, events = run(gang2, contenders=NAMES, steps=6, chunk=2, workload="lm-bytes", compute="2ms", timing=True)
    assert code == 0
    for name in NAMES:
        assert [step for step, _, _ in steps(events, name)] == list(range(1, 7))
        (end,) = of(events, "end", name)
        assert end["processor"] > end["beside"] > 0
        assert end["late"] > 0
        assert end.get("busy_cores", 1.0) > 0
        assert all(e["quality"] != e["quality"] for e in of(events, "evaluation", name))
    assert of(events, "spoilt") == []
    ring, qsgd = steps(events, "allreduce")[-1][2], steps(events, "qsgd")[-1][2]
    assert 0 < qsgd < ring / 4  # Rice codes and bits are of real values: none of them is empty


def test_ranks_that_emulate_different_times_are_told_so(gang2: Any) -> None:
    code, _ = run(gang2, {1: {"compute": "3ms"}}, contenders={"ddp": "ddp"}, compute="2ms", timing=True)
    assert "compute is '2ms' on rank 0 and '3ms' on rank 1" in str(code)


def test_a_record_of_steps_names_the_shortest_and_draws_no_loss() -> None:
    plan = ComparePlan({"ddp": "ddp", "qsgd": "qsgd"}, "ridge", compute="150ms")
    record = _record(plan, 4, "200mbit", "")
    assert (record.compute, record.timing) == ("150ms", True)
    for each, pace in zip(record.runs, (1.6, 0.4), strict=True):
        each.status = "ok"
        each.steps = [Step(i, i * pace, float("nan"), 0) for i in range(1, 5)]
    study = study_of(record)
    assert study.target is None
    assert [row.run.name for row in study.rows] == ["qsgd", "ddp"]
    head = headline(study)
    assert head.title == "qsgd had the shortest mean step, 400 ms: 0.25 of DDP’s."
    assert head.detail == "Computing was emulated (150ms), so losses mean nothing."
    assert [chart.id for chart in charts(study)] == ["step-time"]


def test_a_record_of_real_steps_has_its_losses() -> None:
    made = Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0, timing=True)
    made.runs = [Run("ddp", "ddp", steps=[Step(i, float(i), 1.0, 0) for i in range(1, 5)])]
    assert headline(study_of(made)).title == "DDP took 1.00 s a step."
    assert "loss-time" in [chart.id for chart in charts(study_of(made))]


def test_too_much_work_for_the_cores_is_warned_of() -> None:
    runs = [Run("ddp", "ddp", processor=0.06, beside=0.042, late=0.0002, busy_cores=0.9)]
    runs.append(Run("qsgd", "qsgd", processor=0.05, beside=0.041, late=0.001))
    few = describe(runs, cores(), "150ms")
    assert "a rank used 50 to 60 ms of a processor a step, 41 to 42 ms of it while computing lasted" in few
    assert "which ended 0.2 to 1.0 ms late; 0.9 of" in few
    assert "more than 50%" not in few
    many = describe(runs, 2 * cores(), "150ms")
    assert f"Under ddp, {2 * cores()} ranks wanted 56% of" in many
    assert many.endswith("give --compute 170ms or more, or fewer hosts")
    runs[1].late = 0.01
    assert describe(runs, cores(), "150ms").endswith("so run it again on a quieter machine")


def test_the_first_slice_counts_only_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, times = LoadMeter(workloads.get("ridge")), iter([0.0, 5.0, 5.0, 5.2, 5.2, 5.6])
    monkeypatch.setattr("gossamer.bench.compare.load.time.process_time", lambda: next(times))
    for wanted in (0.5, 0.02, 0.03):
        meter.begin()
        meter.end(10)
        assert meter.means()["processor"] == pytest.approx(wanted)
    assert "beside" not in meter.means()  # where computing is real, nothing is beside it
