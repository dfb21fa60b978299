"""gossamer tune: search learning rate and knobs, with the same budget for every recipe."""

import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from gossamer.bench.cli import progress
from gossamer.bench.cli.compare import Quiet, Shards, Workload
from gossamer.bench.cli.console import columns, console, print_table
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports
from gossamer.bench.cli.output import PAGE, RECORD, Force, hold, new_folder, run_folder, writing
from gossamer.bench.cli.run_output import command
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.compare.rank_run import check
from gossamer.bench.lab.network import MOST_HOSTS
from gossamer.bench.report.formatting import fixed, size
from gossamer.bench.report.tuned import CandidateRow, SearchStudy, headline, studied, told, write_html
from gossamer.bench.tune import Search, SearchOverride, SearchPlan, Trial, Tuning, is_tuning

DDP, DENSE = "ddp", "allreduce"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def tune(
    recipes: Annotated[list[str], typer.Argument(help="Presets, expressions or TOML files; 'ddp' is always included.")],
    workload: Workload = "lm",
    trials: Annotated[int, typer.Option(min=1, help="Trials of each recipe; the first is the recipe as it is.")] = 8,
    knob: Annotated[
        list[str] | None,
        typer.Option(
            help="Search this, too: 'topk.ratio', 'clip=1.5..4', 'norm=max,l2', 'lr=0.5..8'. May be repeated."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a trial; most rounds divide 48.")] = 48,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes that a rank may send in a trial, such as 200MB; recipes that send less then train longer."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="How many other seeds the best of each recipe is evaluated on.")
    ] = 3,
    hosts: Annotated[int, typer.Option(min=1, max=MOST_HOSTS, help="How many virtual ranks.")] = 4,
    seed: int = 0,
    shards: Shards = "iid",
    out: Annotated[Path | None, typer.Option(help="Folder for the record and the report.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the search in --out; it may have more trials now.")] = False,
    imports: Imports = None,
    force: Force = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Trials as JSON lines on standard output.")] = False,
) -> None:
    """Search the learning rate and the knobs of every recipe, with the same budget for all, dense included.

    Virtual ranks train in one process, since only quality counts here; the best of each is evaluated again on seeds that
    the search did not use. Prints the best as expressions, and writes a report of all trials.
    """
    named, most_bytes, wishes = _named(recipes), _bytes(budget), [SearchOverride.of(k) for k in knob or []]
    question = SearchPlan(named, workload, shards, trials, hosts, steps, most_bytes, repeats, seed, wishes)
    search = Search(question, command())
    if resume:
        search.resume(_earlier(out))
    folder = out or new_folder(Path("runs") / f"tune-{datetime.now():%Y%m%d-%H%M%S}")
    run_folder(folder, force)
    hold(folder)
    if not resume and is_tuning(folder / RECORD) and not force:
        raise InputError(f"{folder} holds a search already: continue it with --resume, give another --out, or --force")
    interrupted = _run(search, folder, _teller(question, quiet, as_json))
    if not quiet and not as_json:
        _conclude(search.tuning)
        console().print(f"\nreport: {folder / PAGE}", markup=False, soft_wrap=True)
    if interrupted:
        raise KeyboardInterrupt


def _run(search: Search, folder: Path, tell: Callable[[Tuning, Trial], None]) -> bool:
    """Run the search; return True if it was interrupted. Trials so far are kept and get a report."""

    def keep(tuning: Tuning, trial: Trial) -> None:
        with writing(folder / RECORD, "give another folder with --out"):
            tuning.write(folder / RECORD)
        tell(tuning, trial)

    interrupted = False
    try:
        search.run(keep)
    except KeyboardInterrupt:
        interrupted = True
    with writing(folder, "give another folder with --out"):
        search.tuning.write(folder / RECORD)
        write_html(search.tuning, folder / PAGE)
    return interrupted


def _named(texts: list[str]) -> dict[str, str]:
    """Recipes by name. The first is the baseline; without dense, it is put first."""
    names = dict[str, str]()
    for text in texts:
        is_file = text.strip().endswith(".toml")
        name = Path(text.strip()).stem if is_file else text.strip()
        if name in BASELINES and name != DDP:
            raise InputError(
                f"{name!r} is a baseline that runs without gossamer, so there is nothing to tune; give 'ddp' for dense"
            )
        check(text)
        if name in names:
            raise InputError(f"{name!r} is named twice: every recipe has the same number of trials")
        names[name] = DENSE if name == DDP else text.strip()
    return names if {DDP, DENSE} & names.keys() else {DDP: DENSE, **names}


def _bytes(text: str | None) -> int | None:
    """
    >>> _bytes("200MB"), _bytes("1.5gb"), _bytes("5000")
    (200000000, 1500000000, 5000)
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    if found is None or not 0 < float(found[1]) < 1e18:
        raise InputError(f"--budget {text!r} is not a number of bytes: write 200MB, 1.5GB or 5000")
    return int(float(found[1]) * UNITS[found[2]])


def _earlier(out: Path | None) -> Tuning:
    if out is None:
        raise InputError("--resume needs --out: the folder of the search to resume")
    try:
        return Tuning.read(out / RECORD)
    except OSError as error:
        raise InputError(
            f"nothing to resume from: {out / RECORD} cannot be read: {error.strerror}; run without --resume first"
        ) from None
    except ValueError as error:
        raise InputError(f"{out / RECORD} is not a record of a search: {error}") from None


def _teller(question: SearchPlan, quiet: bool, as_json: bool) -> Callable[[Tuning, Trial], None]:
    if as_json:
        return lambda tuning, trial: progress.json_line({"event": "trial", **vars(trial)})
    if quiet:
        return lambda tuning, trial: None
    width = min(24, max(map(len, question.recipes)))

    def line(tuning: Tuning, trial: Trial) -> None:
        number = f"{trial.number + 1}/{question.trials}" if trial.number >= 0 else f"seed {trial.seed}"
        best = tuning.best(trial.contender) if trial.number >= 0 else None
        quality = f"held out {fixed(trial.quality, 4)}" if trial.outcome == "ok" else trial.outcome
        mark = "  best so far" if best is trial and trial.number else ""
        progress.said(f"{trial.contender:>{width}}  {number:>7}  {quality:<16}  {told(trial)}{mark}")

    return line


def _conclude(tuning: Tuning) -> None:
    out, study = console(), studied(tuning)
    out.print(f"\n{headline(study).title}", soft_wrap=True, markup=False, style="bold")
    for sentence in study.notes:
        out.print(sentence, markup=False, soft_wrap=True, style="dim")
    print_table(out, _table(study))
    for row in study.rows:
        if row.best is not None:
            out.print(f"{row.name}: {row.expression}", markup=False, soft_wrap=True)


def _table(study: SearchStudy) -> Table:
    heads = ("recipe", study.judged_on, f"vs {study.baseline}", "lr", "steps", "sent/step", "as given", "best")
    table = columns(*map(escape, heads))
    for row in study.rows:
        table.add_row(*map(escape, _cells(row)))
    return table


def _cells(row: CandidateRow) -> list[str]:
    best = row.best
    sent = size(best.sent / best.steps) if best and best.steps else ""
    given = "diverged" if row.given is not None and not math.isfinite(row.given) else row.number(row.given)
    found = ["", "", "", given, ""]
    if best:
        found = [f"{best.lr:g}", str(best.steps), sent, given, row.number(best.quality)]
    return [row.name, row.number(row.mean), row.verdict, *found]
