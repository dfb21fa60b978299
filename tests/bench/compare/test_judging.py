"""Judging: at the end of a round, by the models that the ranks have. No average is made for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.bench.compare.comparisons import of, run

from gossamer.bench import workloads
from gossamer.bench.compare.control_group import new_group
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import RankRun
from gossamer.bench.record import Step
from gossamer.schedules import LocalSGD

pytestmark = pytest.mark.gang


def judged_after(events: list[dict[str, Any]], name: str = "x") -> list[int]:
    return [e["step"] for e in of(events, "evaluation", name)]


@pytest.mark.parametrize(
    ("recipe", "chunk", "steps", "expected"),
    [
        ("slowmo(3)", 2, 9, [0, 3, 6, 9]),
        ("slowmo(3)", 3, 9, [0, 3, 6, 9]),
        ("slowmo(3)", 4, 9, [0, 6, 9]),
        ("local_sgd(4)", 1, 8, [0, 4, 8]),
        ("allreduce(fp32()) + local_sgd(4, warmup=2)", 1, 8, [0, 1, 2, 4, 8]),
        ("overlap_local_sgd(3)", 2, 8, [0, 2, 5, 8]),  # just before an average lands
        ("sgp", 2, 5, [0, 2, 4, 5]),
        ("sgp(every=3)", 1, 6, [0, 3, 6]),
        ("osgp(every=3)", 1, 8, [0, 2, 5, 8]),
        ("slowmo_sgp(4)", 3, 6, [0, 3, 6]),  # gossip goes on at every step
        ("bf16", 2, 5, [0, 2, 4, 5]),
        ("ddp-postlocal", 3, 13, [0, 3, 13]),
    ],
)
def test_a_turn_goes_on_to_the_end_of_its_round(
    gang2: Any, recipe: str, chunk: int, steps: int, expected: list[int]
) -> None:
    code, events = run(gang2, contenders={"x": recipe}, steps=steps, chunk=chunk)
    assert code == 0
    assert judged_after(events) == expected
    assert of(events, "note") == []


def test_a_limit_within_a_round_is_kept_and_said(gang2: Any) -> None:
    _, events = run(gang2, contenders={"x": "local_sgd(4)", "y": "ddp-postlocal"}, steps=10, chunk=3)
    assert judged_after(events, "x") == [0, 4, 8, 10]
    assert judged_after(events, "y") == [0, 3, 10]
    assert [e["text"] for e in of(events, "note")] == [
        f"{name} had its last step within a round that would have ended with step {end}; "
        "at step 10 each rank's own model was evaluated, and the mean counts"
        for name, end in (("y", 13), ("x", 12))
    ]


def test_who_is_ahead_by_a_round_waits_for_the_others(gang2: Any) -> None:
    _, events = run(gang2, contenders={"a": "bf16", "b": "local_sgd(5)"}, steps=10, chunk=2)
    order = [(e["run"], e["step"]) for e in of(events, "evaluation")]
    expected = [("a", 0), ("b", 0), ("a", 2), ("b", 5), ("a", 4), ("a", 6), ("b", 10), ("a", 8), ("a", 10)]
    assert order == expected


def test_a_local_recipe_does_not_train_past_the_end_of_the_baseline_if_it_is_there(gang2: Any) -> None:
    """It is ahead when the baseline has its last turn, and has the quality: there is nothing left to chase."""
    contenders = {"ddp": "ddp", "x": "local_sgd(4)"}
    _, events = run(gang2, contenders=contenders, steps=5, chunk=5, baseline="ddp", patience=10.0)
    assert judged_after(events, "x") == [0, 8]
    assert of(events, "evaluation", "x")[-1]["quality"] < of(events, "evaluation", "ddp")[-1]["quality"]


def test_a_contender_trains_at_the_rate_that_was_found_for_it(gang2: Any) -> None:
    """A factor of two changes no rounding: the same as twice the mean, for an optimizer that is linear in it."""
    contenders = {"x": "allreduce", "y": "allreduce + every_step(rate=2.0)", "z": "allreduce"}
    _, events = run(gang2, contenders=contenders, steps=6, chunk=6, lr={"x": 2.0})
    ends = {name: of(events, "evaluation", name)[-1]["quality"] for name in contenders}
    assert ends["x"] == pytest.approx(ends["y"], rel=1e-6)
    assert ends["x"] != pytest.approx(ends["z"], rel=1e-2)


def contender(kind: str) -> RankRun:
    plan = ComparePlan({"x": kind}, workload="ridge", deadline=30.0, measure_every=0)
    return RankRun("x", kind, workloads.get("ridge"), plan, new_group(30.0))


def longer_rounds(rank: int, size: int) -> list[int]:
    """What a controller may do: other rounds from step 2 on."""
    one = contender("local_sgd(3)")
    assert one.comm is not None
    worker, seen = one.comm.worker, list[int]()

    def told(step: Step) -> None:
        seen.append(step.step)
        if step.step == 2:
            worker.recipe = replace(worker.recipe, schedule=LocalSGD(5))

    one.train_slice(3, 100, told)
    one.close()
    return seen


def test_the_schedule_in_force_says_where_a_round_ends(gang2: Any) -> None:
    assert gang2.run(longer_rounds) == [[1, 2, 3, 4, 5]] * 2


def look(rank: int, size: int, kind: str, steps: int) -> dict[str, Any]:
    """One judgement after some steps: who evaluated, what crossed for it, and what was there to be judged."""
    one = contender(kind)
    one.train_slice(steps, steps, lambda step: None)
    own = one.workload.evaluate(one.model)
    before = [p.detach().clone() for p in one.model.parameters()]
    calls, crossed = [0], list[int]()
    evaluate, reduce = type(one.workload).evaluate, dist.all_reduce

    def counted(self: Any, model: torch.nn.Module) -> float:
        calls[0] += 1
        return evaluate(self, model)

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        crossed.append(tensor.numel())
        return reduce(tensor, *args, **options)

    ledger = (one.comm.ledger.handed, one.comm.ledger.requests) if one.comm else None
    type(one.workload).evaluate, dist.all_reduce = counted, noted
    try:
        quality = one.quality()
    finally:
        type(one.workload).evaluate, dist.all_reduce = evaluate, reduce
    assert ledger == ((one.comm.ledger.handed, one.comm.ledger.requests) if one.comm else None)
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))
    out = {"own": own, "quality": quality, "evaluated": calls[0], "crossed": crossed, "sent": one.sent()}
    one.close()
    return out


@pytest.mark.parametrize(
    ("kind", "steps", "equal"),
    [
        ("bf16", 5, True),
        ("backup", 5, True),
        ("slowmo(3)", 6, True),
        ("slowmo_sgp(3)", 6, True),
        ("slowmo(3)", 5, False),
        ("slowmo_sgp(3)", 5, False),
        ("overlap_local_sgd(3)", 5, False),
        ("overlap_local_sgd(3)", 6, False),
        ("sgp", 5, False),
        ("osgp", 5, False),
        ("ddp", 5, True),
        ("ddp-postlocal", 13, True),
        ("ddp-postlocal", 12, False),
        ("compute", 5, False),
    ],
)
def test_each_rank_judges_its_own_model_and_equal_ones_are_judged_once(
    gang4: Any, kind: str, steps: int, equal: bool
) -> None:
    looks = gang4.run(look, kind, steps)
    own = [each["own"] for each in looks]
    assert (len(set(own)) == 1) == equal
    assert [each["evaluated"] for each in looks] == ([1, 0, 0, 0] if equal else [1] * 4)
    assert [each["quality"] for each in looks] == pytest.approx([sum(own) / 4] * 4, rel=1e-12)
    assert [each["crossed"] for each in looks] == [[2, 1]] * 4  # two hashes and a number: no model


def test_bytes_are_those_of_the_rounds_and_of_nothing_else(gang4: Any) -> None:
    """An average of models is a ring: each of four ranks sends 2 * 3/4 of it."""
    dense = sum(p.numel() * p.element_size() for p in workloads.get("ridge").model().parameters())
    _, events = run(gang4, contenders={"x": "slowmo(3)", "y": "bf16"}, steps=12, chunk=2)
    assert [(e["step"], e["sent"]) for e in of(events, "evaluation", "x")] == [
        (3 * k, k * dense * 3 // 2) for k in range(5)
    ]
    assert of(events, "end", "x")[0]["wire_bytes"] == 4 * dense * 3 // 2
