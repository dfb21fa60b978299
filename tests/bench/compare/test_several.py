"""Several ranks a host: what a host's link carries and what stays inside are told apart, and a run that goes on has as many."""

from pathlib import Path
from typing import Any

import pytest
from tests.bench.compare.comparisons import of, run, steps

from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.events import Ended, RankEvent
from gossamer.bench.compare.launch import _record
from gossamer.bench.compare.record_builder import RecordBuilder
from gossamer.bench.report import write_markdown
from gossamer.bench.workloads import get
from gossamer.planning import bytes_between, bytes_per_step

FLAT, TWO_LEVELS = "scatter(qsgd(bits=4))", "nodes(scatter(qsgd(bits=4)), 2)"
STEPS = 4


def ended(gang: Any, **plan: Any) -> dict[str, Any]:
    code, events = run(gang, contenders={"x": plan.pop("kind")}, steps=STEPS, chunk=2, per_host=2, **plan)
    assert code == 0, of(events, "failed")
    assert of(events, "evaluation")[-1]["sent"] == of(events, "end")[0]["wire_bytes"]
    assert {sent for *_, sent in steps(events, "x")} == {None}  # rank 0 does not know what its neighbour sends
    return of(events, "end")[0]


@pytest.mark.gang
@pytest.mark.parametrize("kind", [FLAT, TWO_LEVELS, "allreduce"])
def test_bytes_of_a_host_are_those_that_are_counted(gang4: Any, kind: str) -> None:
    shapes: dict[str, Any] = dict(get("ridge").model().named_parameters())
    end = ended(gang4, kind=kind)
    assert end["wire_bytes"] == STEPS * bytes_between(kind, shapes, 4, per_node=2)
    assert end["wire_bytes"] + end["inside_bytes"] == STEPS * 2 * bytes_per_step(kind, shapes, 4)


@pytest.mark.gang
def test_a_ring_of_ddp_crosses_a_link_once_and_computing_never(gang4: Any) -> None:
    ring = STEPS * 2 * 3 * 32 * 8 // 4  # what each rank sends of 32 numbers in double precision
    ddp, alone = ended(gang4, kind="ddp"), ended(gang4, kind="compute")
    assert (ddp["wire_bytes"], ddp["inside_bytes"]) == (ring, ring)
    assert (alone["wire_bytes"], alone["inside_bytes"]) == (0, 0)


@pytest.mark.gang
def test_a_run_goes_on_with_as_many_ranks_a_host_and_counts_on(gang4: Any, tmp_path: Path) -> None:
    plan: dict[str, Any] = {"contenders": {"x": TWO_LEVELS}, "chunk": 2, "checkpoint": str(tmp_path), "per_host": 2}
    run(gang4, **plan, steps=2)
    _, events = run(gang4, **{**plan, "per_host": 1}, steps=4, resume=True)
    assert "its network was 'unshaped, 2 ranks a host', and is 'unshaped' now" in of(events, "failed")[0]["error"]
    code, events = run(gang4, **plan, steps=4, resume=True)
    assert code == 0
    whole = ended(gang4, kind=TWO_LEVELS)
    end = of(events, "end")[0]
    assert (end["wire_bytes"], end["inside_bytes"]) == (whole["wire_bytes"], whole["inside_bytes"])


@pytest.mark.gang
def test_errors_name_rank_and_host(gang4: Any) -> None:
    code, _ = run(gang4, contenders={"x": TWO_LEVELS}, per_host=2, mine={3: {"seed": 9}})
    assert (
        code == "the ranks were started with different commands: seed is 0 on rank 0 on host0 and 9 on rank 3 on host1"
    )


def test_the_record_and_the_report_say_how_many_and_what_stayed_inside() -> None:
    said: list[RankEvent] = []
    plan = ComparePlan({"x": TWO_LEVELS}, workload="ridge", per_host=4)
    builder = RecordBuilder(_record(plan, 2, "100mbit", "a command"), said.append)
    end = Ended(wire_bytes=3_000_000, inside_bytes=9_000_000, logical_bytes=5, nic_bytes=3_060_000)
    builder.take(RankEvent(end, "x"))
    builder.line(6, "a complaint")
    builder.ended(6, -9)
    assert "[rank 6 on host1] a complaint" in builder.complaints
    assert builder.lost.startswith("rank 6 on host1 was killed by SIGKILL")
    assert (builder.record.hosts, builder.record.per_host) == (2, 4)
    text = write_markdown(builder.record)
    assert "2 hosts of 4 ranks on 100 Mbit/s" in text
    assert "| wire | inside | NIC | NIC / wire |" in text
    assert "| 3.00 MB | 9.00 MB | 3.06 MB | 1.020 |" in text
