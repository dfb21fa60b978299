"""Two records on one page."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from tests.bench.report.made import made

from gossamer.bench.record import RepeatedRuns
from gossamer.bench.report import render
from gossamer.bench.report.beside import beside
from gossamer.bench.report.charts import BarChart, charts
from gossamer.bench.report.study import study_of

Say = Callable[..., tuple[int, str, str]]


def test_two_records_share_a_page_a_baseline_and_their_charts(tmp_path: Path, say: Say) -> None:
    slow, fast = made(["ddp", "qsgd"]), replace(made(["ddp", "qsgd"]), rate="1gbit", command="gossamer compare fast")
    for name, record in (("slow", slow), ("fast", fast)):
        (tmp_path / name).mkdir()
        record.write(tmp_path / name / "record.json")
    code, out, _ = say("report", str(tmp_path / "slow"), str(tmp_path / "fast"))
    assert code == 0
    assert out.strip() == str(tmp_path / "slow" / "together.html")
    page = (tmp_path / "slow" / "together.html").read_text()
    for name in ("ddp (200mbit)", "ddp (1gbit)", "qsgd (1gbit)", "gossamer compare fast"):
        assert name in page
    assert "Time vs ddp (200mbit)" in page
    assert "severity" in render(slow)
    assert "severity" not in page  # each network has its own
    assert "Those of one record started from the same model" in page
    code, _, err = say("report", str(tmp_path / "slow"), str(tmp_path / "slow"), "--markdown")
    assert code == 0, err


def test_records_of_other_training_do_not_share_a_page(tmp_path: Path, say: Say) -> None:
    made(["ddp"]).write(tmp_path / "a.json")
    replace(made(["ddp"]), workload="ridge").write(tmp_path / "b.json")
    code, _, err = say("report", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert code == 2
    assert "the workload is stdlib-lm in the first and ridge in another" in err
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".html") == []


def test_steps_do_not_share_a_page_with_quality(tmp_path: Path, say: Say) -> None:
    """Losses under an emulated accelerator mean nothing, and would be drawn and ranked beside real ones."""
    quality, steps = made(["ddp"]), replace(made(["ddp"]), timing=True)
    emulated = replace(steps, compute="150ms")
    for name, record in (("quality", quality), ("steps", steps), ("emulated", emulated)):
        record.write(tmp_path / f"{name}.json")
    for first, other, why in (
        ("quality", "emulated", "of quality in the first and of emulated steps in another"),
        ("steps", "emulated", "of steps in the first and of emulated steps in another"),
        ("steps", "quality", "of steps in the first and of quality in another"),
    ):
        code, _, err = say("report", str(tmp_path / f"{first}.json"), str(tmp_path / f"{other}.json"))
        assert (code, f"the comparison is {why}" in err) == (2, True), err
    both = beside([emulated, replace(emulated, compute="300ms")])
    assert "Computing was emulated (150ms, 300ms)" in render(both)


def test_bars_of_time_have_whiskers_where_there_are_seeds() -> None:
    record = made(["ddp", "qsgd"])
    assert 'class="whisker"' not in render(record)
    again = deepcopy(record.runs)
    for point in [p for run in again for p in (*run.steps, *run.evaluations)]:
        point.seconds *= 1.1
    record.again = [RepeatedRuns(8, again)]
    page = render(record)
    assert page.count('class="whisker"') == 2
    reached = next(row.reached for row in study_of(record).rows if row.baseline)
    bounds = next(row.reached_bounds for row in study_of(record).rows if row.baseline)
    assert reached is not None
    assert bounds is not None
    assert bounds[0] < reached < bounds[1]


def test_how_long_ddp_waits_is_known_beside_a_run_that_computes_alone() -> None:
    record = made(["ddp", "qsgd"])
    (unknown,) = [c for c in charts(study_of(record)) if isinstance(c, BarChart)]
    assert [row.parts for row in unknown.rows if row.run == 0] == [[]]
    alone = replace(made(["qsgd"]).runs[0], name="compute", recipe="compute", yardstick=True)
    record.runs.append(alone)
    study = study_of(record)
    steps = {row.run.name: row.step or 0.0 for row in study.rows}
    (known,) = [c for c in charts(study) if isinstance(c, BarChart)]
    (ddp,) = [row for row in known.rows if row.run == 0]
    assert ddp.by_difference
    assert ddp.parts == [steps["compute"], 0.0, steps["ddp"] - steps["compute"]]
    assert "ddp cannot say" in known.caption


def test_runs_of_several_records_are_split_by_the_computing_of_their_own() -> None:
    short = replace(made(["ddp"]), timing=True, compute="150ms")
    alone = replace(made(["qsgd"]).runs[0], name="compute", recipe="compute", yardstick=True)
    short.runs.append(alone)
    long = replace(deepcopy(short), compute="300ms", rate="1gbit", hosts=8)
    for step in long.runs[1].steps:
        step.seconds *= 2
    both = beside([short, long])
    (chart,) = [c for c in charts(study_of(both)) if isinstance(c, BarChart)]
    computing = {both.runs[bar.run].name: bar.parts[0] for bar in chart.rows if bar.by_difference}
    assert computing["ddp (1gbit)"] > 1.5 * computing["ddp (200mbit)"] > 0
    assert "hosts: 200mbit 4 hosts, 1gbit 8 hosts" in both.note
