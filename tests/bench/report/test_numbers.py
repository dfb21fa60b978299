"""The study of a record, its headline and the table in Markdown."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from tests.bench.report.made import made

from gossamer.bench.record import Evaluation, Record, Run, Status, Step
from gossamer.bench.report import render, write_markdown
from gossamer.bench.report.charts import POINTS, BarChart, LineChart, charts
from gossamer.bench.report.headline import headline
from gossamer.bench.report.layers import layers
from gossamer.bench.report.study import study_of


def record(runs: list[Run], lower: bool = True, metric: str = "held-out loss") -> Record:
    return Record("gossamer compare", "", "lm", "", metric, lower, 1, 2, "200mbit", 0, runs=runs)


def run(name: str, *path: tuple[float, float], status: Status = "ok") -> Run:
    evaluations = [Evaluation(i, s, int(1e6 * s), q) for i, (s, q) in enumerate(path, 1)]
    return Run(name, name, status, steps=[Step(1, 1.0, 5.0, 10)], evaluations=evaluations)


def test_the_headline_leads_with_time_to_quality() -> None:
    title, detail = headline(
        study_of(record([run("ddp", (80, 5.0), (172, 4.1)), run("terngrad", (15, 5.0), (31, 4.1))]))
    )
    assert title == "terngrad was 5.5 times as fast as DDP to held-out loss 4.10: 31.0 s instead of 172 s."
    assert detail == "On the way terngrad sent 31.0 MB per host, DDP 172 MB."


def test_higher_may_be_better() -> None:
    pair = [run("ddp", (50, 0.6), (100, 0.8)), run("qsgd", (10, 0.5), (40, 0.82))]
    title = headline(study_of(record(pair, lower=False, metric="held-out accuracy"))).title
    assert title == "qsgd was 2.6 times as fast as DDP to held-out accuracy 0.800: 38.1 s instead of 100 s."


def test_the_headline_admits_that_nothing_pays() -> None:
    title, detail = headline(
        study_of(record([run("ddp", (100, 4.0)), run("topk", (150, 3.9)), run("sgp", (170, 3.9))]))
    )
    assert title == "Nothing beat DDP to held-out loss 4.00: the next, topk, took 150 s instead of 100 s."
    assert detail == "On this network, saying less did not pay."
    title, detail = headline(study_of(record([run("ddp", (100, 4.0)), run("topk", (50, 4.2))])))
    assert title == (
        "No recipe reached DDP’s final held-out loss, 4.00: closest was topk, 5.0 % short of it after 0.50 of DDP’s time."
    )
    assert detail == ""
    title, _ = headline(study_of(record([run("ddp", (100, 4.0)), run("bf16", (97, 3.9))])))
    assert title.startswith("bf16 was hardly faster than DDP")


def test_a_run_that_was_cut_off_before_it_was_judged_has_no_best_quality() -> None:
    runs = [run("ddp", status="interrupted"), run("qsgd", status="interrupted")]
    for one in runs:
        one.evaluations = [Evaluation(0, 0.0, 0, 7.68)]
    for some in (runs, runs[1:]):
        title, detail = headline(study_of(record(some)))
        assert title == "No run was evaluated after its start."
        assert "Interrupted: " in detail
    diverged = [run("ddp", (100, math.nan)), run("qsgd", (20, math.nan))]
    assert headline(study_of(record(diverged))).title == "No run ended with a usable held-out loss."
    beside_dense = headline(study_of(record([run("ddp", (100, 4.0)), diverged[1]])))
    assert beside_dense.title.endswith("loss, 4.00: none ended with a usable held-out loss.")


def test_steps_of_several_seeds_say_whose_they_are() -> None:
    timed = replace(record([run("ddp", (100, 4.0)), run("qsgd", (20, 3.9))]), timing=True)
    for one in timed.runs:
        one.steps.append(Step(2, 2.0, 5.0, 10))
    assert "Steps are those" not in headline(study_of(timed)).detail
    again = timed.with_again(replace(timed, seed=1))
    assert "Steps are those of seed 0." in headline(study_of(again)).detail


def test_a_run_that_failed_on_another_seed_says_why() -> None:
    first = record([run("ddp", (100, 4.0)), run("qsgd", (20, 3.9))])
    again = record([run("ddp", (110, 4.0)), run("qsgd", (5, 4.8), status="failed")])
    again.seed, again.runs[1].error = 1, "rank 2 was killed by SIGKILL\nits last lines"
    both = first.with_again(again)
    assert [row.outcome for row in study_of(both).rows if row.reached is None] == ["not on every seed"]
    for shown in (render(both), write_markdown(both)):
        assert "with seed 1 qsgd failed: rank 2 was killed by SIGKILL" in shown
        assert "its last lines" not in shown


def test_the_headline_names_who_did_not_get_there_but_not_who_failed() -> None:
    runs = [
        run("ddp", (100, 4.0)),
        run("qsgd", (20, 3.9)),
        run("topk", (50, 4.2)),
        run("sgp", (50, 4.2), status="failed"),
    ]
    _, detail = headline(study_of(record(runs)))
    assert detail.startswith("1 of 3 recipes were faster to that quality than DDP. topk did not get there. On the way")


def test_the_headline_does_not_praise_a_recipe_for_bytes_it_has_yet_to_send() -> None:
    local = run("slowmo", (20, 3.9))
    local.evaluations[0].sent = 0
    detail = headline(study_of(record([run("ddp", (100, 4.0)), local]))).detail
    assert detail == "By then slowmo had sent nothing: its ranks had trained alone."


@pytest.mark.parametrize(("status", "how"), [("failed", "failed on the way"), ("interrupted", "was interrupted")])
def test_the_headline_says_when_the_baseline_stopped_early(status: Status, how: str) -> None:
    _, detail = headline(study_of(record([run("ddp", (100, 4.0), status=status), run("topk", (50, 3.9))])))
    assert f"DDP {how}, so what counts is the last quality that all reached" in detail


def test_the_headline_says_when_only_the_baseline_came_to_an_end() -> None:
    others = [Run("topk", "topk", "failed"), Run("sgp", "sgp", "failed")]
    title, _ = headline(study_of(record([run("ddp", (100, 4.0)), *others])))
    assert title == "DDP alone ended with a result: held-out loss 4.00."


def test_a_run_without_a_network_does_not_compete() -> None:
    alone = run("compute", (5, 3.9))
    alone.yardstick = True
    study = study_of(record([run("ddp", (100, 4.0)), alone, run("bf16", (50, 3.9))]))
    assert headline(study).title.startswith("bf16 was 2.0 times as fast")
    assert [r.run.name for r in study.rows] == ["bf16", "ddp", "compute"]
    assert (study.rows[-1].reached, study.rows[-1].outcome) == (None, "no network")


def test_a_baseline_that_learned_nothing_is_no_target() -> None:
    """Else everybody would be there at the start, after no time at all."""
    base, other = run("ddp", (9, 5.0)), run("bf16", (8, 4.0))
    for each in (base, other):
        each.evaluations.insert(0, Evaluation(0, 0.0, 0, 5.0))
    title, detail = headline(study_of(record([base, other])))
    assert title == "bf16 ended with the best held-out loss: 4.00 after 8.00 s."
    assert detail == "DDP ended with no better held-out loss than it began with, so there is no target to time."
    base.evaluations.pop()
    assert headline(study_of(record([base, other]))).detail.startswith("DDP was not evaluated after its start")
    base.evaluations = [Evaluation(0, 0.0, 0, 6.0), Evaluation(1, 9.0, 5, 5.0)]
    assert record([base]).target() == 5.0


def test_headlines_without_a_target() -> None:
    assert "ended with held-out loss 4.00" in headline(study_of(record([run("bf16", (9, 4.0))]))).title
    assert headline(study_of(record([run("bf16")]))).title == "No run was evaluated on held-out data."
    assert headline(study_of(record([Run("ddp", "ddp", "failed")]))).title == "No run left a result."
    diverged = [run("ddp", (9, math.nan)), run("bf16", (8, 4.0)), run("topk", (8, 5.0))]
    assert headline(study_of(record(diverged))).title.startswith("bf16 ended with the best held-out loss: 4.00")


def test_rows_are_means_and_ratios() -> None:
    study = study_of(made())
    rows = {r.run.name: r for r in study.rows}
    steps = rows["terngrad"].run.steps
    assert rows["terngrad"].step == pytest.approx(fmean(b.seconds - a.seconds for a, b in pairwise(steps)))
    assert rows["terngrad"].wait == fmean(s.wait for s in steps[1:] if s.wait is not None)
    assert rows["ddp"].time_ratio == rows["ddp"].step_ratio == 1.0
    assert [name for name, r in rows.items() if r.nic_off] == ["topk"]
    assert rows["sgp"].cut
    assert rows["sgp"].reached is None
    times = [r.reached for r in study.rows if r.reached is not None]
    assert times == sorted(times)
    assert len(times) == 6  # all but powersgd and sgp


def test_a_step_of_many_local_ones_is_not_as_quick_as_most_of_them() -> None:
    seconds = [0.1 * k + 1.0 * (k // 4) for k in range(1, 9)]  # every fourth step waits for a second
    slowmo = Run("slowmo", "slowmo", steps=[Step(k, s, 1.0, 0) for k, s in enumerate(seconds, 1)])
    assert study_of(record([slowmo])).rows[0].step == pytest.approx((0.7 + 2.0) / 7)


def test_what_is_not_known_is_not_0() -> None:
    unknown = Run(
        "ddp-powersgd", "ddp-powersgd", yardstick=True, steps=[Step(1, 1.0, 5.0, None), Step(2, 2.0, 5.0, None)]
    )
    cut = Run("topk", "topk", "interrupted", steps=[Step(1, 1.0, 5.0, 10), Step(2, 2.0, 5.0, 20)])
    a, b = study_of(record([unknown, cut])).rows
    assert (a.run.sent, a.wire_step, a.compute, a.wait) == (None, None, None, None)
    assert (b.run.sent, b.wire_step, b.nic_ratio) == (20, 10.0, None)
    cells = write_markdown(record([unknown])).splitlines()[-5].split(" | ")
    assert cells[6:13] == ["–"] * 7


def test_a_megabyte_is_needed_to_judge_the_ledger() -> None:
    tiny = Run("ddp", "ddp", wire_bytes=320, nic_bytes=26_600)
    large = Run("topk", "topk", wire_bytes=2_000_000, nic_bytes=1_880_000)
    assert [r.nic_off for r in study_of(record([tiny, large])).rows] == [False, True]


def test_a_run_that_does_not_measure_its_waits_is_not_split() -> None:
    study = study_of(made())
    bars = next(c for c in charts(study) if isinstance(c, BarChart))
    assert [study.record.runs[b.run].name for b in bars.rows if not b.parts] == ["ddp"]
    assert "Hatched" in bars.caption


def test_a_run_that_waits_for_nobody_is_split() -> None:
    alone = Run("compute", "compute", yardstick=True, steps=[Step(1, 0.5, 5.0, 0, 0.5, 0.0, 0.0)])
    bars = next(c for c in charts(study_of(record([alone]))) if isinstance(c, BarChart))
    assert bars.rows[0].parts == [0.5, 0.0, 0.0]


def test_runs_that_end_far_apart_start_on_a_logarithmic_axis() -> None:
    near = charts(study_of(record([run("ddp", (100, 5.0)), run("topk", (10, 5.0))])))[0]
    far = charts(study_of(record([run("ddp", (1000, 5.0)), run("topk", (10, 5.0))])))[0]
    assert isinstance(near, LineChart)
    assert isinstance(far, LineChart)
    assert (near.x.log, far.x.log) == (False, True)


def test_errors_by_parameter_in_a_line_for_each_run() -> None:
    fine, lossy = run("fp32", (9, 4.0)), run("powersgd", (9, 4.0))
    fine.layer_errors = {"a.weight": 0.0, "a.bias": 0.0}
    lossy.layer_errors = {"a.weight": 0.5, "b.weight": 0.7, "a.bias": 0.0, "odd": math.nan}
    found = layers(record([fine, lossy]))
    assert found.exact == ["fp32"]
    assert found.summaries == [(1, 3, 1, 0.6, 0.7, "b.weight")]
    assert [row.name for row in found.rows] == ["a.weight", "b.weight", "a.bias"]


def test_charts_hold_the_record_itself() -> None:
    record = made()
    drawn = {c.id: c for c in charts(study_of(record))}
    assert list(drawn) == ["quality-time", "quality-bytes", "loss-time", "step-time", "residuals"]
    loss = drawn["loss-time"]
    assert isinstance(loss, LineChart)
    for series in loss.series:
        assert [p[:3] for p in series.points] == [(s.seconds, s.loss, s.step) for s in record.runs[series.run].steps]


def test_a_recipe_without_memory_has_no_residual_to_draw() -> None:
    plain = made(["ddp", "topk"])
    plain.runs[0].residuals = [(s.step, 0.0) for s in plain.runs[0].steps]
    drawn = charts(study_of(plain))[-1]
    assert isinstance(drawn, LineChart)
    assert [s.run for s in drawn.series] == [1]


def test_long_runs_are_thinned_and_values_that_are_not_finite_become_gaps() -> None:
    long = Run("ddp", "ddp", steps=[Step(i, float(i), math.inf if i == 3 else 2.0, i) for i in range(50_000)])
    chart = next(c for c in charts(study_of(record([long]))) if isinstance(c, LineChart))
    points = chart.series[0].points
    assert len(points) <= POINTS
    assert (points[0][0], points[-1][0]) == (0.0, 49_999.0)
    short = Run("ddp", "ddp", steps=long.steps[:5])
    chart = next(c for c in charts(study_of(record([short]))) if isinstance(c, LineChart))
    assert [p[1] for p in chart.series[0].points] == [2.0, 2.0, 2.0, None, 2.0]


def test_markdown_table() -> None:
    lines = write_markdown(made()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 8
    assert {line.replace("\\|", "").count("|") for line in table} == {16}  # one more column: not all got there
    assert lines[0].startswith("**terngrad was 6.2 times as fast as DDP to held-out loss")
    assert "**1.083** (off)" in next(line for line in table if line.startswith("| topk"))
    assert next(line for line in table if "**ddp**" in line).split(" | ")[7:10] == ["–", "–", "–"]  # not 0
    assert "sgp: failed after 57 steps." in lines
    assert "  <its host was killed> & gone" in lines  # inside a fence, as it is


def test_how_slow_the_network_was_for_the_model_is_said_where_computing_was_measured() -> None:
    """Four bytes a parameter over 25 MB/s, over the seconds that the run which computes alone takes, or the others' own measure."""
    ran = Run("qsgd", "qsgd", steps=[Step(i, i * 1.0, 5.0, 10 * i, compute=0.2) for i in range(1, 4)])
    several = record([ran])
    several.parameters = 5_000_000
    assert study_of(several).severity == pytest.approx(20e6 / 25e6 / 0.2)
    assert ", seed 0, severity 4.0." in write_markdown(several)
    assert "seed 0, severity 4.0" in render(several)
    several.rate = "1gbit,3:200mbit/100mbit"  # the slowest counts
    assert study_of(several).severity == pytest.approx(8.0)
    alone = Run("compute", "compute", yardstick=True, steps=[Step(i, i * 0.1, 5.0, 0) for i in range(1, 4)])
    several.runs.append(alone)
    assert study_of(several).severity == pytest.approx(16.0)
    for network in ("unshaped", "two tins and a string"):
        several.rate = network
        assert "severity" not in write_markdown(several)


def test_markdown_survives_names() -> None:
    odd = record([run("a|b", (9, 4.0), status="failed")])
    odd.runs[0].error = "``` <script>"
    text = write_markdown(odd)
    assert "| a\\|b |" in text
    assert "````\n``` <script>\n````" in text


def test_steps_are_counted_by_their_numbers_not_by_rows() -> None:
    """Backup workers skip steps they were late for; and a record that was cut off may lack some."""
    gaps = run("a", (1, 2.0))
    gaps.steps = [Step(1, 1.0, 5.0, 10), Step(5, 3.0, 4.0, 50), Step(9, 5.0, 3.0, 90)]
    row = study_of(record([gaps])).rows[0]
    assert (gaps.done, row.step, row.wire_step) == (9, 0.5, 10**6 / 9)  # an evaluation saw more than the last step
    gaps.evaluations.clear()
    assert study_of(record([gaps])).rows[0].wire_step == 10.0


def test_how_old_models_were_is_in_the_table_and_on_the_page() -> None:
    late = run("pairs", (1, 2.0))
    late.staleness = {"1": 3, "2": 1}
    told = record([run("ddp", (1, 2.0)), late])
    said = "pairs: models were 1.2 steps old when they landed, 2 at most."
    assert said in write_markdown(told)
    assert said in render(told)
    assert "steps old" not in render(record([run("ddp", (1, 2.0))]))


def test_what_was_spoilt_is_in_the_table_and_on_the_page() -> None:
    spoilt = run("qsgd", (1, 2.0))
    spoilt.skipped_steps, spoilt.dropped_rounds, spoilt.spoilt = 1, 1, {"0": 1, "1": 2}
    told = record([run("ddp", (1, 2.0)), spoilt])
    said = "qsgd: 1 step skipped and 1 round dropped, all of them spoilt by rank 1, 1 of them spoilt by rank 0."
    assert said in write_markdown(told)
    assert said in render(told)
    assert "spoilt" not in render(record([run("ddp", (1, 2.0))]))


def test_the_target_beside_a_baseline_that_was_cut_off_is_not_called_its_final_quality() -> None:
    cut = run("ddp", (80, 5.0), (172, 3.0), status="interrupted")
    whole = run("ddp", (80, 5.0), (172, 3.0))
    labels = list[str]()
    for base in (cut, whole):
        drawn = charts(study_of(record([base, run("qsgd", (15, 5.0), (31, 3.5))])))
        chart = next(c for c in drawn if isinstance(c, LineChart))
        assert chart.target is not None
        labels.append(chart.target.label)
    assert labels == ["last that all reached, 3.50", "ddp’s final 3.00"]
