"""What a step of `gossamer bench steps` takes, from the rows of a run."""

from dataclasses import replace

import pytest

from gossamer.bench.cli.bench import as_markdown
from gossamer.bench.compare import ComparePlan, steps
from gossamer.bench.compare.steps import StepRow, paces
from gossamer.bench.record import Evaluation, Record, Run, Step


def run(recipe: str, yardstick: bool, *seconds: float) -> Run:
    """Turns of three steps; at the beginning of each all ranks have met."""
    return Run(recipe, recipe, yardstick=yardstick, steps=[Step(i, s, 1.0, 0) for i, s in enumerate(seconds, start=1)])


def test_a_turns_first_step_is_left_out() -> None:
    seconds = 9.0, 9.1, 9.2, 10.0, 10.1, 10.2, 13.0, 13.1, 13.3, 16.0, 16.1, 16.2
    assert [round(p) for p in paces(run("scatter(qsgd())", False, *seconds), 3)] == [100, 200, 100, 100]


def test_ranks_that_compute_alone_are_waited_for_at_the_end_of_a_turn() -> None:
    # Rank 0 needs a tenth of a second for each of its steps; the others have the processor then, and it waits for them.
    seconds = 0.1, 0.2, 0.3, 0.7, 0.8, 0.9, 1.3, 1.4, 1.5, 1.9, 2.0, 2.1
    assert [round(p) for p in paces(run("compute", True, *seconds), 3)] == [200, 200]


def test_a_run_that_failed_after_some_steps_is_not_told_as_whole() -> None:
    whole = StepRow("ddp", "unshaped", 4, 10.0, 9.0, 11.0, 1.0, 2.0, 0.1, 0.1, 3.0)
    cut = replace(whole, recipe="topk", error="rank 2: no memory", sent_mb=None)
    _, _, first, second = as_markdown([whole, cut]).splitlines()
    assert "| 10 (9-11) |" in first
    assert "| 10 (9-11), failed: rank 2: no memory |" in second
    assert "| failed: rank 2: no memory |" in as_markdown([replace(cut, step_ms=0.0)])


def test_bytes_and_waits_of_a_step_are_those_of_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of local SGD: two rounds of eight, and four steps that have sent nothing yet."""
    local = Run("local", "allreduce(fp32()) + local_sgd(8)", wire_bytes=200_000_000, nic_bytes=210_000_000)
    local.steps = [Step(i, 0.1 * i, 1.0, 0, wait=0.8 * (i % 8 == 0)) for i in range(1, 21)]
    ends = ((0, 0), (8, 100), (16, 200), (20, 200))
    local.evaluations = [Evaluation(step, 0.1 * step, sent, 1.0) for step, sent in ends]
    record = Record("", "", "lm", "", "loss", True, 1, 4, "unshaped", 0, runs=[local])
    monkeypatch.setattr(steps, "launch", lambda *of: (record, 0))
    row = steps.measure_steps(ComparePlan({"local": local.recipe}, chunk=4), 3, None, 4, lambda event: None)[0]
    assert (row.sent_mb, row.nic_mb, row.waited_ms) == (12.5, 13.125, 100.0)
