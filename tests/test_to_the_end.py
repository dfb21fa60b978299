"""The tables of `benchmarks/to_the_end.py` are made from its records, and what stands in the pages is what the records say."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.end import contenders, fine_tuning, records, tables
from benchmarks.end.contenders import best_rate, jobs, rates_of, text_of
from benchmarks.end.records import DENSE, JUDGED, TUNING, Job, Run, Study
from benchmarks.end.training import run

from gossamer.bench.workloads import get
from gossamer.recipe import Recipe
from gossamer.recipes import presets

STUDY = Study("digits", 40)


def ended(contender: str, rate: float, seed: int, quality: float, study: Study = tables.MAIN) -> Run:
    job = Job(contender, rate, seed)
    return Run(study, job, contender, "ended", "held-out accuracy", False, 2000, quality, 1 - quality, sent=1000)


def known(*runs: Run) -> dict[Job, Run]:
    return {r.job: r for r in runs}


DENSES = [ended(DENSE, 1.0, seed, quality) for seed, quality in zip(JUDGED, (0.905, 0.91, 0.915))]


# -- records ------------------------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written_and_a_spoilt_one_is_named(tmp_path: Path) -> None:
    made = replace(DENSES[0], curve=((50, 2.5), (100, 1.25)), error="none")
    path = made.write(tmp_path)
    assert records.read_all(tmp_path) == [made]
    assert [p.name for p in path.parent.iterdir()] == ["allreduce-x1-seed40.json"]  # nothing half-written beside it
    told = json.loads(path.read_text())
    del told["sent"]
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"allreduce-x1-seed40.json is no record .*: sent missing"):
        records.read_all(tmp_path)


def test_all_records_of_the_repository_are_read_and_lie_where_their_job_says() -> None:
    for path in sorted(records.FOLDER.glob("*/*.json")):
        found = records.read(path)
        assert path == records.path_of(found.study, found.job)
        assert (found.outcome == "ended") == (found.quality is not None)
        assert len(found.curve) <= 51


def test_runs_that_were_judged_by_another_metric_are_not_compared() -> None:
    """As where sacrebleu was installed between two of them."""
    other = replace(DENSES[1], metric="BLEU")
    assert tables.known_of(DENSES, tables.MAIN, "held-out accuracy").keys() == known(*DENSES).keys()
    for runs, metric in (([DENSES[0], other], ""), (DENSES, "BLEU")):
        with pytest.raises(SystemExit, match="would be judged by BLEU and by held-out accuracy"):
            tables.known_of(runs, tables.MAIN, metric)


# -- who is trained, and when -----------------------------------------------------------------------------------------------------


def test_every_preset_is_trained_or_left_out_with_a_reason() -> None:
    texts = contenders.all_presets(tables.MAIN)
    names = {text.partition("(")[0] for text in texts if "+" not in text}
    assert names | contenders.LEFT_OUT.keys() | {DENSE} == presets().keys()
    assert len(texts) == len(set(texts))
    for text in (*texts, *contenders.TWELVE):
        Recipe.of(text)


def test_what_matters_most_is_trained_first() -> None:
    done: dict[Job, Run] = {}
    order = list[Job]()
    for job in jobs(["topk", "qsgd"], done):
        order.append(job)
        # topk is best at half the rate, the others as they are
        quality = 0.9 + 0.01 * (job.rate == (0.5 if job.contender == "topk" else 1.0))
        done[job] = ended(job.contender, job.rate, job.seed, quality)
    assert [(j.contender, j.seed) for j in order[:5]] == [(DENSE, s) for s in JUDGED] + [("topk", 40), ("qsgd", 40)]
    assert all(j.rate == 1.0 for j in order[:5])
    tuned = order[5:]
    assert tuned[:3] == [Job(DENSE, rate, TUNING[0]) for rate in contenders.RATES]
    assert tuned[6] == Job("topk", 0.5, 40)  # the best of its three, at once
    assert {j.seed for j in order[-3:]} == {42}
    assert sum(j.seed in JUDGED and j.contender == "qsgd" for j in order) == 3  # its best rate is the workload's
    assert len(order) == len(set(order)) == 9 + 9 + 3


def test_who_is_refused_is_not_asked_again_and_who_is_done_is_not_trained_again() -> None:
    refused = replace(ended("adam", 1.0, 40, 0.0), outcome="refused", quality=None)
    left = list(jobs(["adam", "topk"], known(*DENSES, refused)))
    assert {j.contender for j in left} == {DENSE, "topk"}
    assert not {*left} & {r.job for r in DENSES}


def test_the_best_rate_is_that_of_the_tuning_seeds_and_none_where_one_is_missing() -> None:
    ends = {0.5: (0.8, 0.9), 1.0: (0.9, 0.7), 2.0: (0.1, 0.1)}
    runs = [ended("topk", rate, seed, q) for rate, each in ends.items() for seed, q in enumerate(each)]
    judging = ended("topk", 2.0, 40, 1.0)
    assert best_rate("topk", known(*runs, judging)) == 0.5
    assert best_rate("topk", known(*runs[::2], judging)) == 1.0  # of the first seed alone
    assert best_rate("topk", known(*runs[:-2], judging)) is None
    lower = [replace(r, lower_is_better=True) for r in runs]
    assert best_rate("topk", known(*lower)) == 2.0
    spoilt = [replace(r, outcome="diverged", quality=None) if r.job.rate == 0.5 else r for r in runs]
    assert best_rate("topk", known(*spoilt)) == 1.0
    assert max(rates_of("signsgd(momentum=0.9)")) == 0.1


# -- verdicts ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "text", "short"),
    [
        (
            (0.90, 0.905, 0.906),
            "as good as dense to the end",
            "as good",
        ),  # .0063 of the .01 by which dense's seeds differ
        ((0.95, 0.95, 0.95), "as good as dense to the end", "as good"),
        ((0.89, 0.9, 0.9), "lost .0133", "lost .0133"),
        ((0.90,), "as good as dense to the end (one seed so far)", "as good"),
        ((0.88,), "lost .0250 (one seed so far)", "lost .0250"),
        ((0.90, math.nan, 0.9), "diverged", "diverged"),
    ],
)
def test_a_verdict_compares_with_what_dense_s_own_seeds_differ(ends: tuple[float, ...], text: str, short: str) -> None:
    mine = {seed: ended("a", 1.0, seed, quality) for seed, quality in zip(JUDGED, ends)}
    mine = {s: replace(r, quality=None) if math.isnan(r.quality or 0) else r for s, r in mine.items()}
    found = tables.verdict(mine, {r.job.seed: r for r in DENSES})
    assert found is not None
    assert (found.text, found.short) == (text, short)


def test_alike_seeds_of_dense_allow_what_the_metric_cannot_tell() -> None:
    alike = {seed: ended(DENSE, 1.0, seed, 0.91) for seed in JUDGED}
    assert tables.allowed(alike) == pytest.approx(0.0064, abs=1e-4)
    nats = {s: replace(r, lower_is_better=True, metric="held-out loss (nats/token)") for s, r in alike.items()}
    assert tables.allowed(nats) == 0.01
    bleu = {s: replace(r, metric="BLEU (200 held-out sentences)", quality=20.0) for s, r in alike.items()}
    assert tables.allowed(bleu) == 0.5
    worse = {s: replace(r, quality=0.93) for s, r in nats.items()}
    found = tables.verdict(worse, nats)
    assert found is not None
    assert found.lost == pytest.approx(0.02)  # a higher loss is worse


def test_a_better_rate_is_told_beside_the_workload_s() -> None:
    tried = [ended("a", rate, 0, q) for rate, q in ((0.5, 0.9), (1.0, 0.8), (2.0, 0.7))]
    runs = known(*DENSES, *tried, ended("a", 1.0, 40, 0.88), ended("a", 0.5, 40, 0.9))
    good = "at 0.5 times the rate as good as dense to the end (one seed so far)"
    assert tables.final(runs, "a") == f"lost .0250 (one seed so far); {good}"
    row = next(line for line in tables.main_table(runs).splitlines() if line.startswith("| `a`"))
    assert [cell.strip() for cell in row.split("|")[2:10]] == [
        *("1", ".8800", "+.0250", ".1200", "+.0250", "0.5", "+.0050", "1"),
    ]


def test_a_better_rate_with_the_same_verdict_is_not_told_twice() -> None:
    tried = [ended("a", rate, 0, q) for rate, q in ((0.5, 0.9), (1.0, 0.8), (2.0, 0.7))]
    runs = known(*DENSES, *tried, ended("a", 1.0, 40, 0.903), ended("a", 0.5, 40, 0.905))
    assert tables.final(runs, "a") == "as good as dense to the end (one seed so far)"


def test_a_loss_is_compared_with_dense_s_of_the_same_seed_where_another_seed_diverged() -> None:
    lost = replace(ended("a", 1.0, 40, 0.0), outcome="diverged", quality=None, loss=None)
    runs = known(*DENSES, lost, ended("a", 1.0, 41, 0.91), ended("a", 1.0, 42, 0.915))  # as dense's of these seeds
    row = next(line for line in tables.main_table(runs).splitlines() if line.startswith("| `a`"))
    assert row.split("|")[6].strip() == "+.0000"


# -- pages ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few() -> list[Run]:
    diverged = replace(ended("topk", 1.0, 40, 0.0), outcome="diverged", quality=None, loss=None)
    refused = replace(ended("des_loc", 1.0, 40, 0.0), outcome="refused", quality=None, error="it needs\nAdam")
    qsgd = replace(ended("qsgd", 1.0, 40, 0.904), sent=125)
    return [*DENSES, qsgd, diverged, refused, ended("qsgd", 1.0, 0, 0.5)]


def test_a_page_is_filled_from_records_and_its_words_stay(few: list[Run]) -> None:
    page = "# Words\n\n" + "\n".join(
        f"<!-- made: {kind} of {study} -->\nold\n<!-- made -->\nwords {kind}\n"
        for kind, study in (
            ("table", "fashion-2500-linear"),
            ("refused", "fashion-2500-linear"),
            ("tuning", "fashion-2500-linear"),
            ("table", "lm-1500-linear"),
        )
    )
    made = tables.filled(page, few)
    assert "old" not in made
    assert made.count("words") == 4
    names = [line.split("`")[1] for line in made.splitlines() if line.startswith("| `")]
    assert names == [DENSE, "qsgd", "topk", "qsgd"]  # dense first, who diverged last; then the tuning seeds
    assert "| `qsgd` | 1/8 | .9040 | +.0010 |" in made
    assert "| as good as dense to the end (one seed so far) |" in made
    assert "- `des_loc`: it needs Adam" in made
    assert "- `auto`: it chooses" in made
    assert "Waiting: not run yet." in made
    assert tables.filled(made, few) == made  # twice is once
    fewer = tables.filled(made, few[:3])
    assert "qsgd" not in fewer


def test_a_readme_gets_one_column_however_often_it_is_made(few: list[Run]) -> None:
    text = (
        "Words | here\n\n| recipe | what | paper | fewer |\n| --- | --- | --- | ---: |\n| `qsgd` | a | b | 7 x |\n"
        "| [`bf16`](x.md) | a | b | 2 x |\n\n| You | Page |\n| --- | --- |\n| `qsgd` | c |\n"
    )
    made = tables.readme(text, few)
    assert made.splitlines()[2:6] == [
        "| recipe | what | paper | fewer | [to the end](docs/quality/end.md) |",
        "| --- | --- | --- | ---: | --- |",
        "| `qsgd` | a | b | 7 x | as good, 1 seed |",
        "| [`bf16`](x.md) | a | b | 2 x | – |",
    ]
    assert made.splitlines()[7:] == text.splitlines()[7:]
    assert tables.readme(made, few) == made


def test_what_stands_in_the_repository_is_what_its_records_say() -> None:
    """After new records: `python -m benchmarks.to_the_end table`."""
    runs = records.read_all()
    page, readme = tables.PAGE.read_text(), tables.README.read_text()
    assert page == tables.filled(page, runs)
    assert readme == tables.readme(readme, runs)
    assert json.loads(tables.SHIPPED.read_text()) == tables.verdicts(runs)


# -- runs ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contender", ["allreduce", "sgp", "streaming_diloco(10)", "minibatch", "powersgd"])
def test_a_run_is_a_whole_training_and_the_same_every_time(contender: str) -> None:
    job = Job(contender, 1.0, 40)
    one, two = run(STUDY, job), run(STUDY, job)
    assert replace(one, processor_seconds=0.0) == replace(two, processor_seconds=0.0)
    assert (one.outcome, one.held, one.steps) == ("ended", 360, 5 if contender == "minibatch" else 40)
    assert one.quality is not None
    assert one.quality > (0.15 if contender == "minibatch" else 0.6)
    assert one.curve[-1][0] == one.steps
    assert one.sent > 0


def test_the_rate_ends_at_zero_and_a_higher_one_may_diverge() -> None:
    assert STUDY.factor(STUDY.steps) == 1 / 20
    lost = run(STUDY, Job("allreduce", 1e20, 40))
    assert (lost.outcome, lost.quality) == ("diverged", None)
    assert "not finite" in lost.error


def test_a_recipe_that_the_optimizer_does_not_bear_is_refused_in_its_own_words() -> None:
    found = run(STUDY, Job(text_of("zero_one_adam", STUDY), 1.0, 40))
    assert (found.outcome, found.quality) == ("refused", None)
    assert "use torch.optim.SGD with momentum=0" in found.error


def test_training_goes_on_densely_from_the_model_of_each_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fine_tuning, "PythonInPieces", lambda seed: get("digits", seed=seed + 1))
    study, job = replace(STUDY, then="lm"), Job("local_sgd(4)", 1.0, 40)
    found = fine_tuning.run(study, job, folder=tmp_path)
    (before,) = records.read_all(tmp_path)
    assert before == replace(run(STUDY, job), processor_seconds=before.processor_seconds)
    assert (found.study, found.job, found.recipe, found.sent) == (study, job, before.recipe, before.sent)
    assert found.curve[0][1] < before.curve[0][1] / 2  # it does not begin anew
    assert (found.outcome, found.steps) == ("ended", 10)
    assert records.path_of(study, job).parent.name == "digits-40-linear-then-lm"
    lost = fine_tuning.run(study, Job("allreduce", 1e20, 40), folder=tmp_path)
    assert (lost.outcome, lost.study) == ("diverged", study)
