"""Contenders in turns: who trains on, who is out, and what is told."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.bench.compare.comparisons import of, run, steps, trial

from gossamer.bench import workloads
from gossamer.bench.compare.control_group import new_group
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import RankRun
from gossamer.bench.workloads.quality import judging
from gossamer.integrations import Communicator
from gossamer.schedules import EveryStep

pytestmark = pytest.mark.gang


def test_the_baseline_sets_the_quality_and_the_others_train_on_until_they_have_it(gang2: Any) -> None:
    contenders = {"ddp": "ddp", "same": "allreduce", "compute": "compute"}
    contenders["slow"] = "allreduce(fp32()) + slowmo(12, beta=0.0, alpha=0.2)"
    code, events = run(gang2, contenders=contenders, steps=20, chunk=5, baseline="ddp", patience=3.0)
    assert code == 0
    count = {name: len(steps(events, name)) for name in contenders}
    assert count["ddp"] == count["compute"] == 20
    assert 20 <= count["same"] <= 60
    ends = {e["run"]: e for e in of(events, "end")}
    assert ends.keys() == contenders.keys()
    for name in ("slow", "same"):
        last, base = of(events, "evaluation", name)[-1], of(events, "evaluation", "ddp")[-1]
        assert last["quality"] <= base["quality"] or last["seconds"] > base["seconds"] or count[name] == 60


def test_all_take_turns_of_the_same_length_the_baseline_first_and_the_others_in_an_order_that_turns_round(
    gang2: Any,
) -> None:
    contenders = {"a": "bf16", "b": "fp16", "c": "allreduce"}
    _, events = run(gang2, contenders=contenders, steps=7, chunk=3, baseline="a", patience=1.0)
    order = [e["run"] for e in of(events, "evaluation")]
    assert "".join(order) == "abc" + "abc" + "acb" + "abc"
    assert [e["step"] for e in of(events, "evaluation", "a")] == [0, 3, 6, 7]


def test_a_dense_recipe_trains_as_ddp_does(gang2: Any) -> None:
    _, events = run(gang2, contenders={"ddp": "ddp", "ours": "allreduce"}, steps=10)
    ddp, ours = ([loss for _, loss, _ in steps(events, name)] for name in ("ddp", "ours"))
    assert ours == pytest.approx(ddp, rel=1e-6)
    assert ours[-1] < ours[0]


def test_who_says_where_its_time_goes(gang2: Any) -> None:
    """A yardstick that does not is not said to wait for 0 seconds; nor to send 0 bytes where nobody counts them."""
    contenders = {name: name for name in ("compute", "ddp", "ddp-powersgd", "terngrad")}
    _, events = run(gang2, contenders=contenders, steps=2, chunk=2)
    parts = {n: [(e["compute"], e["codec"], e["wait"]) for e in of(events, "step", n)] for n in contenders}
    assert parts["ddp"] == parts["ddp-powersgd"] == [(None, None, None)] * 2
    assert all(compute > 0 and (codec, wait) == (0.0, 0.0) for compute, codec, wait in parts["compute"])
    assert all(min(each) > 0 for each in parts["terngrad"])
    ends = {e["run"]: (e["wire_bytes"], e["logical_bytes"], e["nic_bytes"]) for e in of(events, "end")}
    assert (ends["compute"], ends["ddp-powersgd"]) == ((0, 0, None), (None, None, None))
    assert min(ends["ddp"][:2]) > 0
    assert [e["sent"] for e in of(events, "evaluation", "ddp-powersgd")] == [None] * 2


def test_a_second_contender_that_computes_alone_has_its_steps_and_no_more(gang2: Any) -> None:
    contenders = {"ddp": "ddp", "compute": "compute", "compute #2": "compute"}
    _, events = run(gang2, contenders=contenders, steps=4, chunk=2, baseline="ddp", patience=3.0)
    assert len(steps(events, "compute")) == len(steps(events, "compute #2")) == 4


def lossy(rank: int, size: int, facts: dict[str, Any]) -> tuple[int | str, list[dict[str, Any]]]:
    """A communicator that says that rank 1 spoilt a step in every three, and both ranks together the fourth."""
    from tests.bench.compare.comparisons import trial

    def metrics(self: Communicator) -> dict[str, float]:
        return {**sound(self), "skipped_steps": float(self.step // 3), "dropped_rounds": float(self.step >= 4)}

    sound = Communicator.metrics
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "metrics", metrics)
        spoilt = property(lambda self: {0: self.step // 4, 1: self.step // 3 + self.step // 4})
        patch.setattr(Communicator, "spoilt", spoilt, raising=False)
        return trial(rank, size, facts, {})


def test_what_was_spoilt_and_by_whom_is_told_and_outlives_an_interruption(gang2: Any, tmp_path: Path) -> None:
    facts = {"contenders": {"x": "bf16"}, "workload": "ridge", "deadline": 30.0, "chunk": 2}
    _, events = gang2.run(lossy, {**facts, "steps": 6, "checkpoint": str(tmp_path)})[0]
    told = [(e["skipped_steps"], e["dropped_rounds"], e["by"]) for e in of(events, "spoilt")]
    assert told == [(1, 1, {"0": 1, "1": 2}), (2, 1, {"0": 1, "1": 3})]
    _, rest = run(gang2, **{**facts, "steps": 8, "checkpoint": str(tmp_path), "resume": True})
    assert [(e["skipped_steps"], e["by"]) for e in of(rest, "spoilt")] == [(2, {"0": 1, "1": 3})]


def aged(rank: int, size: int, facts: dict[str, Any]) -> tuple[int | str, list[dict[str, Any]]]:
    """A communicator to which a model comes at each step, that is one step old."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "staleness", property(lambda self: {1: self.step}), raising=False)
        return trial(rank, size, facts, {})


def test_how_old_models_were_outlives_an_interruption(gang2: Any, tmp_path: Path) -> None:
    facts = {"contenders": {"x": "bf16"}, "workload": "ridge", "deadline": 30.0, "chunk": 2}
    facts |= {"checkpoint": str(tmp_path)}
    _, events = gang2.run(aged, {**facts, "steps": 6})[0]
    assert [e["ages"] for e in of(events, "staleness")] == [{"1": 2}, {"1": 4}, {"1": 6}]
    _, rest = run(gang2, **{**facts, "steps": 8, "resume": True})
    assert [e["ages"] for e in of(rest, "staleness")] == [{"1": 6}]


def test_a_contender_that_cannot_be_attached_is_out_and_the_others_go_on(gang2: Any) -> None:
    contenders = {"broken": "no_such_part()", "fine": "bf16", "off": "scatter(qsgd()) + gossip()"}
    code, events = run(gang2, contenders=contenders, steps=4, chunk=2)
    assert code == 1
    assert {e["run"] for e in of(events, "failed")} == {"broken", "off"}
    assert "no_such_part" in of(events, "failed", "broken")[0]["error"]
    assert len(steps(events, "fine")) == 4
    assert [e["run"] for e in of(events, "end")] == ["fine"]


def one_fails(rank: int, size: int, kind: str, where: str) -> tuple[int | str, list[dict[str, Any]]]:
    """Rank 1 of a contender called "bad" raises in the middle of its third step, when others wait for it already."""
    from tests.bench.compare.comparisons import trial

    sound, target = getattr(RankRun, where), 3

    def unsound(self: RankRun, *args: Any) -> Any:
        if self.name == "bad" and rank == 1 and self.steps_done == target - 1:
            raise MemoryError("no room")
        return sound(self, *args)

    setattr(RankRun, where, unsound)
    try:
        contenders = {"bad": kind, "good": "bf16", "base": "ddp"}
        return trial(
            rank, size, {"contenders": contenders, "workload": "ridge", "steps": 6, "chunk": 2, "deadline": 5.0}, {}
        )
    finally:
        setattr(RankRun, where, sound)


@pytest.mark.parametrize("kind", ["terngrad", "ddp", "sgp"])
def test_a_contender_that_fails_on_one_rank_is_out_on_all_and_the_others_go_on(gang2: Any, kind: str) -> None:
    code, events = gang2.run(one_fails, kind, "_batch")[0]
    assert code == 1
    assert [e["run"] for e in of(events, "failed")] == ["bad"]
    error = of(events, "failed", "bad")[0]["error"]
    assert error == "rank 1: MemoryError: no room" or kind == "ddp"  # where torch's own words may come first
    assert len(steps(events, "good")) == len(steps(events, "base")) == 6


def one_fails_the_other_is_slow(rank: int, size: int) -> tuple[int | str, list[dict[str, Any]]]:
    """Rank 1 fails at once; rank 0 has 200 slow steps before it would hear of it: 50 s, and nobody waits for more than 40."""
    from tests.bench.compare.comparisons import trial

    sound = RankRun._batch

    def unsound(self: RankRun) -> Any:
        if self.name == "bad" and rank == 1:
            raise MemoryError("no room")
        if self.name == "bad":
            time.sleep(0.25)
        return sound(self)

    contenders = {"bad": "local_sgd(1000)", "good": "bf16"}
    facts = {"contenders": contenders, "workload": "ridge", "steps": 200, "chunk": 200, "deadline": 30.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankRun, "_batch", unsound)
        return trial(rank, size, facts, {})


def test_who_trains_alone_for_long_hears_that_another_rank_has_failed(gang2: Any) -> None:
    code, events = gang2.run(one_fails_the_other_is_slow)[0]
    assert code == 1
    assert [(e["run"], e["error"]) for e in of(events, "failed")] == [("bad", "rank 1: MemoryError: no room")]
    assert len(steps(events, "bad")) < 100
    assert len(steps(events, "good")) == 200


def test_ranks_with_different_commands_or_data_are_told_so(gang2: Any) -> None:
    code, _ = run(gang2, {1: {"steps": 30}}, contenders={"a": "bf16"}, steps=20)
    assert code == "the ranks were started with different commands: steps is 20 on rank 0 and 30 on rank 1"


def judged_otherwise(rank: int, size: int) -> str:
    """Each rank by a metric of its own, as where only one host has sacrebleu."""
    facts = {"contenders": {"a": "bf16"}, "workload": "ridge", "deadline": 30.0, "steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads.Ridge, "metric", f"metric {rank}")
        return str(trial(rank, size, facts, {})[0])


def test_ranks_that_judge_by_different_metrics_are_told_so(gang2: Any) -> None:
    why = "the ranks judge by different metrics: the metric is 'metric 0' on rank 0 and 'metric 1' on rank 1"
    assert gang2.run(judged_otherwise) == [why] * 2


EVERY_RECIPE = [
    *("allreduce", "bf16", "terngrad", "qsgd", "topk", "powersgd", "diana", "local_sgd", "slowmo", "overlap_local_sgd"),
    *("sgp", "osgp", "backup(backups=0)", "accordion(epoch=2)", "accordion_batch(epoch=2)"),
]
BASELINES = ["compute", "ddp", "ddp-fp16", "ddp-powersgd", "ddp-postlocal"]


def test_every_recipe_and_yardstick_can_take_part(gang2: Any) -> None:
    names = [*EVERY_RECIPE, *BASELINES]
    code, events = run(gang2, contenders={n: n for n in names}, workload="digits", steps=4, chunk=2)
    assert (code, of(events, "failed")) == (0, [])
    for name in names:
        last = of(events, "evaluation", name)[-1]
        assert last["step"] == 4
        assert math.isfinite(last["quality"])


def with_batch_norm(rank: int, size: int, kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    class Normed(workloads.Ridge):
        def network(self) -> torch.nn.Module:
            layers = torch.nn.BatchNorm1d(32, dtype=torch.float64), torch.nn.Linear(32, 1, dtype=torch.float64)
            return torch.nn.Sequential(*layers)

        def evaluate(self, model: torch.nn.Module) -> float:
            with judging(model):
                return float(self.loss(model, self.data.held))

    plan = ComparePlan({"x": kind}, workload="ridge", deadline=30.0)
    contender = RankRun("x", kind, Normed(), plan, new_group(30.0))
    before = contender.quality()
    contender.train_slice(10, 10, lambda step: None)
    after = contender.quality()
    contender.close()
    return after - before, {n: b.clone() for n, b in contender.model.named_buffers()}


@pytest.mark.parametrize(
    "kind",
    [
        *("terngrad", "sgp", "osgp", "slowmo", "overlap_local_sgd", "backup(backups=0)", "ddp", "ddp-postlocal"),
        *("decoupled_diloco(2)", "allreduce + by_speed(local_sgd(2))", "auto(allow=('allreduce + local_sgd(2)',))"),
    ],
)
def test_a_model_with_batch_norm_trains_under_every_kind_of_schedule(gang2: Any, kind: str) -> None:
    results = gang2.run(with_batch_norm, kind)
    assert all(change < 0 for change, _ in results)
    means = [buffers["0.running_mean"] for _, buffers in results]
    if kind in ("sgp", "osgp"):  # nobody waits for everybody: the statistics stay each rank's own
        assert not torch.equal(*means)


def held_by_postlocal(rank: int, size: int) -> tuple[list[bool], int | None, int]:
    """After which steps all models are equal, and what the formula says was sent."""
    workload = workloads.get("ridge")
    contender = RankRun(
        "x", "ddp-postlocal", workload, ComparePlan({"x": "ddp-postlocal"}, deadline=30.0), new_group(30.0)
    )
    equal = []
    for step in range(1, 15):
        contender.train_slice(step, step, lambda step: None)
        mine = next(contender.model.parameters()).detach().clone()
        rows = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(rows, mine)
        equal.append(torch.equal(rows[0], rows[1]))
        assert contender.ends_round(step) == equal[-1]
    return equal, contender.sent(), sum(p.numel() * 8 for p in contender.model.parameters())


def test_torchs_post_local_sgd_averages_when_the_formula_says_so(gang2: Any) -> None:
    equal, sent, dense = gang2.run(held_by_postlocal)[0]
    assert [i + 1 for i, same in enumerate(equal) if same] == [1, 2, 3, 4, 5, 13]
    assert sent == 6 * dense  # each is a ring all-reduce between two ranks


def test_what_a_controller_decides_is_told_at_the_step_where_it_does(gang2: Any) -> None:
    """Accordion compares epochs 0 and 1 after step 4: a threshold that high lets nothing count as critical."""
    contenders = {"a": "accordion(epoch=2, interval=1, threshold=1000.0)", "c": "powersgd"}
    contenders["b"] = "accordion_batch(epoch=2, factor=3, interval=1, threshold=1000.0)"
    _, events = run(gang2, contenders=contenders, workload="digits", steps=12, chunk=10)
    told = of(events, "decision", "a")
    assert [e["step"] for e in told] == [4]
    assert told[0]["text"] == "allreduce(powersgd(rank=1)) for 4 parameters"
    told = [(e["step"], e["text"]) for e in of(events, "decision", "b")]
    assert told == [(4, repr(EveryStep(micro_batches=3, rate=3.0)))]
    assert of(events, "decision", "c") == []


def test_a_controller_that_goes_by_the_loss_is_told_it(gang2: Any) -> None:
    contenders = {"a": "allreduce + local_sgd(4) + adacomm(4)"}
    code, events = run(gang2, contenders=contenders, steps=12, chunk=4)
    assert (code, of(events, "failed")) == (0, [])
    assert len(steps(events, "a")) == 12


def test_what_a_controller_says_is_told_where_it_changes_nothing(gang2: Any) -> None:
    _, events = run(gang2, contenders={"a": "auto(steps=4)"}, steps=4, chunk=2)
    told = [e["text"] for e in of(events, "decision", "a")]
    assert [text.partition(":")[0] for text in told] == ["auto begins", "auto"]
    assert told[-1].startswith("auto: dense is kept: 4 steps are no more than ")


def test_layer_errors_come_in_lines_that_a_pipe_does_not_cut(gang2: Any) -> None:
    import json

    contenders = {"a": "powersgd"}
    code, events = run(gang2, contenders=contenders, steps=2, chunk=2, measure_every=1, workload="lm-bytes")
    assert code == 0
    errors = {k: v for e in of(events, "layers", "a") for k, v in e["errors"].items()}
    assert len(errors) > 16
    assert all(math.isfinite(v) for v in errors.values())
    assert max(len(json.dumps(e)) for e in events) < 4000
    model = workloads.get("lm-bytes").model()
    assert list(errors) == [n for n, _ in model.named_parameters() if n in errors]  # as the model has them
