"""Tables of runs to the end, made from the records alone, and where they stand: a page, the README, `gossamer recipes`."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.end.contenders import LEFT_OUT, best_rate, text_of
from benchmarks.end.records import DENSE, JUDGED, ROOT, TUNING, Job, Run, Study

from gossamer.recipes import presets

MAIN = Study("fashion", 2500)
ON = f"{MAIN.workload}, {MAIN.steps:,} steps on {MAIN.ranks} virtual ranks"
PAGE, README = ROOT / "docs" / "quality" / "end.md", ROOT / "README.md"
SHIPPED = ROOT / "src" / "gossamer" / "bench" / "cli" / "end_verdicts.json"
LEAST_LOSS, LEAST_BLEU = 0.01, 0.5  # a difference below it is none, however alike dense's seeds are
EMPTY = "–"

Known = Mapping[Job, Run]


class Verdict(NamedTuple):
    """What a recipe lost against dense on the same seeds, both at one rate or both at the best of theirs."""

    lost: float  # of the metric, the mean over seeds; inf if it diverged
    allowed: float
    seeds: int

    @property
    def as_good(self) -> bool:
        return self.lost <= self.allowed

    @property
    def text(self) -> str:
        said = "as good as dense to the end" if self.as_good else self.short
        return said + (" (one seed so far)" if self.seeds == 1 else "")

    @property
    def short(self) -> str:
        if self.as_good:
            return "as good"
        return f"lost {number(self.lost)}" if math.isfinite(self.lost) else "diverged"


def known_of(runs: Iterable[Run], study: Study, metric: str = "") -> dict[Job, Run]:
    """The runs of a study, all of one metric; of the one that is given, if any: an accuracy is not to be taken from BLEU."""
    found = {run.job: run for run in runs if run.study == study}
    metrics = sorted({*(run.metric for run in found.values()), *filter(None, [metric])})
    if len(metrics) > 1:
        raise SystemExit(
            f"runs of {study.name} would be judged by {' and by '.join(metrics)}: keep those of one of them"
        )
    return found


def number(value: float, signed: bool = False) -> str:
    """Four decimals without the zero before them.

    >>> number(0.9095), number(-0.0015, signed=True), number(2.5)
    ('.9095', '-.0015', '2.5000')
    """
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{'+' if signed else ''}.4f}")


def judged(known: Known, contender: str, rate: float) -> dict[int, Run]:
    """The runs of the seeds that judge."""
    found = {seed: known.get(Job(contender, rate, seed)) for seed in JUDGED}
    return {seed: run for seed, run in found.items() if run is not None and run.outcome != "refused"}


def allowed(dense: Mapping[int, Run]) -> float:
    """What a recipe may lose and be as good: as much as dense's own seeds differ, but no less than the metric can tell.

    An accuracy is a mean over so many right and wrong answers, whose standard error is known.
    """
    qualities = [run.quality for run in dense.values() if run.quality is not None]
    return max(max(qualities) - min(qualities), _least(next(iter(dense.values())), fmean(qualities)))


def _least(run: Run, mean: float) -> float:
    if run.lower_is_better:
        return LEAST_LOSS
    return math.sqrt(mean * (1 - mean) / run.held) if "accuracy" in run.metric else LEAST_BLEU


def verdict(mine: Mapping[int, Run], dense: Mapping[int, Run]) -> Verdict | None:
    """The rule, which is older than the runs; None where there is no seed on which both were trained."""
    seeds = [seed for seed in mine if seed in dense and dense[seed].quality is not None]
    if not seeds:
        return None
    return Verdict(fmean(_lost(mine[seed], dense[seed]) for seed in seeds), allowed(dense), len(seeds))


def _lost(run: Run, dense: Run) -> float:
    if run.quality is None or dense.quality is None:
        return math.inf
    return (run.quality - dense.quality) * (1 if run.lower_is_better else -1)


# -- the tables of a study --------------------------------------------------------------------------------------------------


def main_table(known: Known) -> str:
    """One row for each recipe that was trained on a seed that judges, dense first and then the best."""
    dense = judged(known, DENSE, 1.0)
    if not any(run.quality is not None for run in dense.values()):
        return "Dense has not been trained yet.\n"
    names = dict.fromkeys(job.contender for job in known if judged(known, job.contender, 1.0))
    order = sorted(names, key=lambda name: (name != DENSE, _rank(known, name, dense), name))
    word = "loss" if _any(known).lower_is_better else "accuracy"
    head = ["recipe", "bytes", word, "lost", "held-out loss", "above dense's", "best of three rates", "lost there"]
    rows = [[*head, "seeds", "verdict"], *(_row(known, name, dense) for name in order)]
    return _markdown(rows, right=range(1, 9))


def _any(known: Known) -> Run:
    return next(iter(known.values()))


def _rank(known: Known, name: str, dense: Mapping[int, Run]) -> float:
    found = verdict(judged(known, name, 1.0), dense)
    return math.inf if found is None else found.lost


def _row(known: Known, name: str, dense: Mapping[int, Run]) -> list[str]:
    mine = judged(known, name, 1.0)
    found = verdict(mine, dense)
    qualities, losses = _numbers(mine, "quality"), _numbers(mine, "loss")
    above = [
        run.loss - other.loss
        for seed, run in mine.items()
        if (other := dense.get(seed)) is not None and run.loss is not None and other.loss is not None
    ]
    told = [
        f"`{name}`",
        _fewer(mine, dense),
        _mean(qualities),
        _spread(qualities) if name == DENSE else (EMPTY if found is None else _signed(found.lost)),
        _mean(losses),
        _spread(losses) if name == DENSE else (number(fmean(above), signed=True) if above else EMPTY),
        *_at_best(known, name),
        str(len(mine)),
    ]
    return [*told, "what others are compared with" if name == DENSE else final(known, name)]


def _numbers(runs: Mapping[int, Run], what: str) -> list[float]:
    return [value for run in runs.values() if (value := getattr(run, what)) is not None]


def _mean(values: Sequence[float]) -> str:
    return number(fmean(values)) if values else EMPTY


def _spread(values: Sequence[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def _signed(lost: float) -> str:
    return number(lost, signed=True) if math.isfinite(lost) else "diverged"


def _fewer(mine: Mapping[int, Run], dense: Mapping[int, Run]) -> str:
    sent, full = ([run.sent for run in runs.values() if run.sent] for runs in (mine, dense))
    if not sent or not full:
        return EMPTY
    ratio = fmean(full) / fmean(sent)
    return "1" if 0.995 < ratio < 1.005 else f"1/{ratio:.3g}"


def _best_pair(known: Known, name: str) -> tuple[float, Verdict | None] | None:
    """The rate that the tuning seeds chose, and what it loses to dense at the best of dense's."""
    rate, denses = best_rate(name, known), best_rate(DENSE, known)
    if rate is None:
        return None
    dense = judged(known, DENSE, denses or 1.0) or judged(known, DENSE, 1.0)
    return rate, verdict(judged(known, name, rate), dense)


def _at_best(known: Known, name: str) -> list[str]:
    found = _best_pair(known, name)
    if found is None:
        return [EMPTY, EMPTY]
    rate, at_best = found
    return [f"{rate:g}", EMPTY if at_best is None or name == DENSE else _signed(at_best.lost)]


def final(known: Known, name: str) -> str:
    """The verdict in words: at the workload's rate, and at another that is better and has another verdict."""
    found, best = verdict(judged(known, name, 1.0), judged(known, DENSE, 1.0)), _best_pair(known, name)
    if found is None:
        return EMPTY
    if best is None or best[0] == 1.0 or best[1] is None or best[1].lost >= found.lost or best[1].text == found.text:
        return found.text
    return f"{found.text}; at {best[0]:g} times the rate {best[1].text}"


def tuning_table(known: Known) -> str:
    """What was tried on the seeds that may choose: the quality at the end, by rate and seed."""
    tried = dict.fromkeys((job.contender, job.rate) for job in sorted(known) if job.seed in TUNING)
    if not tried:
        return "Nothing yet.\n"
    rows = [["recipe", "rate", *(f"seed {seed}" for seed in TUNING), "mean"]]
    for name, rate in tried:
        runs = [known.get(Job(name, rate, seed)) for seed in TUNING]
        ends = [EMPTY if r is None else "diverged" if r.quality is None else number(r.quality) for r in runs]
        qualities = [r.quality for r in runs if r is not None and r.quality is not None]
        rows.append([f"`{name}`", f"{rate:g}", *ends, _mean(qualities)])
    return _markdown(rows, right=range(1, len(rows[0])))


def refused_list(known: Known) -> str:
    """Recipes that this workload or so few ranks cannot train, each with its own sentence; and who is left out."""
    refused = {job.contender: run.error for job, run in sorted(known.items()) if run.outcome == "refused"}
    rows = [f"- `{name}`: {' '.join(why.split())}" for name, why in {**refused, **LEFT_OUT}.items()]
    return "\n".join(rows) + "\n"


def _markdown(rows: Sequence[Sequence[str]], right: Iterable[int]) -> str:
    sides = [" ---: |" if i in right else " --- |" for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "".join(sides), *lines[1:]]) + "\n"


# -- where they stand -------------------------------------------------------------------------------------------------------


def filled(page: str, runs: Sequence[Run]) -> str:
    """A page with its tables made again: each stands between `<!-- made: NAME of STUDY -->` and `<!-- made -->`."""
    makers = {"table": main_table, "tuning": tuning_table, "refused": refused_list}
    studies = {run.study.name: run.study for run in runs}

    def make(found: re.Match[str]) -> str:
        study = studies.get(found["study"])
        made = makers[found["kind"]](known_of(runs, study)) if study else "Waiting: not run yet.\n"
        return f"{found['open']}\n\n{made}\n<!-- made -->"

    pattern = r"(?P<open><!-- made: (?P<kind>\w+) of (?P<study>[\w-]+) -->)\n.*?<!-- made -->"
    return re.sub(pattern, make, page, flags=re.S)


def verdicts(runs: Sequence[Run]) -> dict[str, dict[str, str | int]]:
    """By preset, as `gossamer recipes` tells them; presets that have not been trained are not in it."""
    known, out = known_of(runs, MAIN), dict[str, dict[str, str | int]]()
    for name in presets():
        contender = text_of(name, MAIN)
        found = verdict(judged(known, contender, 1.0), judged(known, DENSE, 1.0))
        if name != DENSE and found is not None:
            out[name] = {"text": final(known, contender), "short": _told(found), "seeds": found.seeds, "on": ON}
    return out


def readme(text: str, runs: Sequence[Run]) -> str:
    """The README with the last column of its first table made again."""
    cells = {name: row["short"] for name, row in verdicts(runs).items()}
    lines, column = list[str](), False
    for line in text.split("\n"):
        if line.startswith("| recipe |"):
            column, line = True, f"{_four(line)} [to the end](docs/quality/end.md) |"
        elif not line.startswith("|"):
            column = False
        elif column:
            name = re.match(r"\| \[?`(\w+)`", line)
            line = f"{_four(line)} {cells.get(name[1], EMPTY) if name else '---'} |"
        lines.append(line)
    return "\n".join(lines)


def _four(row: str) -> str:
    """A row without its fifth cell."""
    return "|".join(row.split("|")[:5]) + "|"


def _told(found: Verdict) -> str:
    return found.short + (", 1 seed" if found.seeds == 1 else "")


def write(runs: Sequence[Run]) -> list[Path]:
    """Make all of them again."""
    rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in verdicts(runs).items())
    texts = {
        PAGE: filled(PAGE.read_text(), runs),
        README: readme(README.read_text(), runs),
        SHIPPED: "{\n" + ",\n".join(rows) + "\n}\n",
    }
    for path, text in texts.items():
        path.write_text(text)
    return [*texts]
