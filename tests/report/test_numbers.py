"""The facts of a record, its headline and the table in Markdown."""

import math
from itertools import pairwise

from tests.report.made import made

from gossamer.record import Evaluation, Record, Run, Step
from gossamer.report import write_markdown
from gossamer.report.charts import POINTS, Bars, Lines, charts
from gossamer.report.facts import study
from gossamer.report.headline import headline


def record(runs: list[Run], lower: bool = True, metric: str = "held-out loss") -> Record:
    return Record("gossamer compare", "", "lm", "", metric, lower, 1, 2, "200mbit", 0, runs=runs)


def run(name: str, *path: tuple[float, float], status: str = "ok") -> Run:
    evaluations = [Evaluation(i, s, int(1e6 * s), q) for i, (s, q) in enumerate(path)]
    return Run(name, name, status, steps=[Step(1, 1.0, 5.0, 10)], evaluations=evaluations)


def test_the_headline_leads_with_time_to_quality() -> None:
    title, detail = headline(study(record([run("ddp", (80, 5.0), (172, 4.1)), run("terngrad", (15, 5.0), (31, 4.1))])))
    assert title == "terngrad reached DDP’s final held-out loss 4.10 in 0.18 of DDP’s time: 31 s instead of 172 s."
    assert detail == "On the way terngrad sent 31.0 MB per host, DDP 172 MB."


def test_higher_may_be_better() -> None:
    pair = [run("ddp", (50, 0.6), (100, 0.8)), run("qsgd", (10, 0.5), (40, 0.82))]
    title = headline(study(record(pair, lower=False, metric="held-out accuracy"))).title
    assert title == "qsgd reached DDP’s final held-out accuracy 0.800 in 0.40 of DDP’s time: 40 s instead of 100 s."


def test_the_headline_admits_that_nothing_pays() -> None:
    title, _ = headline(study(record([run("ddp", (100, 4.0)), run("topk", (150, 3.9)), run("sgp", (170, 3.9))])))
    assert title.startswith("Nothing beat DDP here: topk came closest")
    title, detail = headline(study(record([run("ddp", (100, 4.0)), run("topk", (50, 4.2))])))
    assert title == "No recipe reached DDP’s final held-out loss 4.00 in this run."
    assert detail == "Closest was topk, 5.0 % short of it after 0.50 of DDP’s time."


def test_the_headline_says_when_the_baseline_stopped_early() -> None:
    _, detail = headline(study(record([run("ddp", (100, 4.0), status="failed"), run("topk", (50, 3.9))])))
    assert "DDP stopped early" in detail


def test_a_run_without_a_network_does_not_compete() -> None:
    runs = [run("ddp", (100, 4.0)), run("compute", (5, 3.9)), run("bf16", (50, 3.9))]
    assert headline(study(record(runs))).title.startswith("bf16 reached")


def test_headlines_without_a_target() -> None:
    assert "ended with held-out loss 4.00" in headline(study(record([run("bf16", (9, 4.0))]))).title
    assert headline(study(record([run("bf16")]))).title == "No run was evaluated on held-out data."
    assert headline(study(record([Run("ddp", "ddp", "failed")]))).title == "No run left a result."
    diverged = [run("ddp", (9, math.nan)), run("bf16", (8, 4.0)), run("topk", (8, 5.0))]
    assert headline(study(record(diverged))).title.startswith("bf16 ended with the best held-out loss: 4.00")


def test_rows_are_medians_and_ratios() -> None:
    facts = study(made())
    rows = {r.run.name: r for r in facts.rows}
    steps = rows["terngrad"].run.steps
    gaps = sorted(b.seconds - a.seconds for a, b in pairwise(steps))
    assert rows["terngrad"].step == gaps[len(gaps) // 2]
    assert rows["ddp"].time_ratio == rows["ddp"].step_ratio == 1.0
    assert [name for name, r in rows.items() if r.nic_off] == ["topk"]
    assert rows["sgp"].failed
    assert rows["sgp"].reached is None
    times = [r.reached for r in facts.rows if r.reached is not None]
    assert times == sorted(times)
    assert len(times) == 6  # all but powersgd and sgp


def test_a_megabyte_is_needed_to_judge_the_ledger() -> None:
    tiny = Run("ddp", "ddp", wire_bytes=320, nic_bytes=26_600)
    large = Run("topk", "topk", wire_bytes=2_000_000, nic_bytes=1_880_000)
    assert [r.nic_off for r in study(record([tiny, large])).rows] == [False, True]


def test_a_run_that_does_not_measure_its_waits_is_not_split() -> None:
    facts = study(made())
    bars = next(c for c in charts(facts) if isinstance(c, Bars))
    assert [facts.record.runs[b.run].name for b in bars.rows if not b.parts] == ["ddp"]
    assert "Hatched" in bars.caption


def test_charts_hold_the_record_itself() -> None:
    record = made()
    drawn = {c.id: c for c in charts(study(record))}
    assert list(drawn) == ["quality-time", "quality-bytes", "loss-time", "step-time", "residuals"]
    loss = drawn["loss-time"]
    assert isinstance(loss, Lines)
    for series in loss.series:
        assert [p[:3] for p in series.points] == [(s.seconds, s.loss, s.step) for s in record.runs[series.run].steps]


def test_a_recipe_without_memory_has_no_residual_to_draw() -> None:
    plain = made(["ddp", "topk"])
    plain.runs[0].residuals = [(s.step, 0.0) for s in plain.runs[0].steps]
    drawn = charts(study(plain))[-1]
    assert isinstance(drawn, Lines)
    assert [s.run for s in drawn.series] == [1]


def test_long_runs_are_thinned_and_values_that_are_not_finite_become_gaps() -> None:
    long = Run("ddp", "ddp", steps=[Step(i, float(i), math.inf if i == 3 else 2.0, i) for i in range(50_000)])
    chart = next(c for c in charts(study(record([long]))) if isinstance(c, Lines))
    points = chart.series[0].points
    assert len(points) <= POINTS
    assert (points[0][0], points[-1][0]) == (0.0, 49_999.0)
    short = Run("ddp", "ddp", steps=long.steps[:5])
    chart = next(c for c in charts(study(record([short]))) if isinstance(c, Lines))
    assert [p[1] for p in chart.series[0].points] == [2.0, 2.0, 2.0, None, 2.0]


def test_markdown_table() -> None:
    lines = write_markdown(made()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 8
    assert {line.replace("\\|", "").count("|") for line in table} == {14}
    assert lines[0].startswith("**terngrad reached DDP’s final")
    assert "**1.083** (off)" in next(line for line in table if line.startswith("| topk"))
    assert "sgp: failed after 57 steps." in lines
    assert "  <its host was killed> & gone" in lines  # inside a fence, as it is


def test_markdown_survives_names() -> None:
    odd = record([run("a|b", (9, 4.0), status="failed")])
    odd.runs[0].error = "``` <script>"
    text = write_markdown(odd)
    assert "| a\\|b |" in text
    assert "````\n``` <script>\n````" in text
