"""Runs a claim: two processes of one thread, and every run that is finished is kept.

A claim that was ended at any moment goes on where it was, and its record ends as that of one that was not.
"""

import math
import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import torch

import gossamer
from gossamer.bench.claims.claim import ClaimError, ClaimInterrupted, PaperClaim
from gossamer.bench.claims.evidence import ClaimRun, Evidence, Key
from gossamer.bench.claims.plan import ClaimStudy, Contest, PlannedRun, plain, plan_hash
from gossamer.bench.claims.record import ClaimRecord, EarlierVerdicts, JudgedStatement, grown
from gossamer.bench.claims.sources import commit, is_judged_code, sources
from gossamer.bench.claims.training import DivergedAt
from gossamer.bench.claims.verdict import ORDER, beside_reference
from gossamer.bench.compare.parent_death import end_with_parent
from gossamer.core.errors import GossamerError

PROCESSES = 2
Tell = Callable[[ClaimRun, int], None]  # a run that is over, and how many are known to be left now


def hash_of(claim: PaperClaim) -> str:
    """Of the settings and of the rules that judge."""
    return plan_hash(claim.plan, {s.key: f"{s.rule} / {s.expected}" for s in claim.statements})


def empty(claim: PaperClaim) -> ClaimRecord:
    """The record of a claim before its first run."""
    seeds = sorted({seed for study in claim.plan.values() for seed in study.seeds})
    return ClaimRecord(
        claim=claim.name,
        paper=claim.paper,
        setup=[*claim.setup],
        limits=claim.limits,
        plan=hash_of(claim),
        settings=plain(claim.plan),
        commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"gossamer": gossamer.__version__, "python": platform.python_version(), "torch": torch.__version__},
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        sources=sources(claim),
        statements=[
            JudgedStatement(s.key, s.says, s.rule, s.expected, found=f"it waits for {s.waits}" if s.waits else "")
            for s in claim.statements
        ],
        seeds=seeds,
    )


def begun(claim: PaperClaim, path: Path, anew: bool = False) -> ClaimRecord:
    """The record to go on with. That of a plan which has only grown since keeps its verdicts, and its new statements wait.

    With `anew`, that of another plan or of changed code makes room, and its verdicts stay in the new one as earlier ones.
    """
    try:
        if not path.exists():
            return empty(claim)
        known = ClaimRecord.read(path)
    except (OSError, ValueError) as error:
        raise ClaimError(f"{path} cannot be gone on with: {error}; give another folder with --records") from None
    if known.claim != claim.name:
        raise ClaimError(f"{path} is the record of the claim {known.claim!r}, not of {claim.name!r}; rename it")
    if known.plan == hash_of(claim):
        return _room_for(known, claim) if anew and not is_judged_code(claim, known.sources) else known
    if (more := grown(known, empty(claim))) is not None:
        return more
    if not anew:
        raise ClaimError(
            f"{path} is of another plan ({known.plan}; that of this version is {hash_of(claim)}); "
            "with --anew its verdicts are kept as earlier ones and the new plan is run"
        )
    return _room_for(known, claim)


def _room_for(known: ClaimRecord, claim: PaperClaim) -> ClaimRecord:
    """An empty record in which the verdicts of this one stand as earlier ones."""
    fresh = empty(claim)
    if any(s.verdict != "waiting" for s in known.statements):
        verdicts = {s.key: str(s.verdict) for s in known.statements}
        earlier = EarlierVerdicts(
            known.plan, known.commit, known.created, verdicts, {s.key: s.found for s in known.statements}
        )
        fresh.earlier = [*known.earlier, earlier]
    return fresh


def run_claim(claim: PaperClaim, known: ClaimRecord, keep: Callable[[ClaimRecord], None], tell: Tell) -> None:
    """Make all runs that the record lacks, and judge; `keep` is called after each, and `tell` hears of it.

    A record that is done is left as it is: no verdict is given twice.
    """
    if known.done:
        return
    done = {run.key: run for run in known.runs}
    clock = _Clock(known)
    if any(study.tasks(name, done) for name, study in claim.plan.items()):
        _all_runs(claim, known, done, lambda: (clock.tick(), keep(known)), tell)
    known.runs = [done[key] for key in sorted(done)]
    judge(claim, known)
    known.done = True
    clock.tick()
    keep(known)


def quick(claim: PaperClaim, tell: Tell) -> list[ClaimRun]:
    """One seed, a fifth of the steps, no search, no verdict: does everything still run?"""
    short: dict[str, ClaimStudy | Contest] = {name: study.quickened() for name, study in claim.plan.items()}
    done, out = dict[Key, ClaimRun](), list[ClaimRun]()
    for name, study in short.items():
        for task in study.tasks(name, done):
            run = perform(task, claim.module)
            out.append(run)
            tell(run, 0)
    claim.figures(Evidence(out))
    return out


def confirm(claim: PaperClaim, known: ClaimRecord, tell: Tell) -> list[str]:
    """Make the judged runs of the first seed again. If all are as they were, the verdicts stand for the code as it is now.

    Returns the runs that are not; then the record stays stale.
    """
    torch.set_num_threads(1)
    seed = min(known.seeds)
    kept = {run.key: run for run in known.runs}
    rest = {key: run for key, run in kept.items() if (run.stage, run.seed) != ("judged", seed)}
    others = list[str]()
    for name, study in claim.plan.items():
        for task in study.tasks(name, rest):
            run = perform(task, claim.module)
            tell(run, 0)
            if not _alike(run, kept[task.key]):
                others.append(f"{run.study} {run.case}")
    if not others:
        known.sources, known.confirmed = sources(claim), commit()
    return others


def _alike(one: ClaimRun, other: ClaimRun) -> bool:
    """To a millionth: processors of one kind give equal bits, and a method that has changed is further away."""
    return one.rows.keys() == other.rows.keys() and all(
        len(row) == len(other.rows[name]) and all(map(_close, row, other.rows[name])) for name, row in one.rows.items()
    )


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))


def judge(claim: PaperClaim, known: ClaimRecord) -> None:
    """Give the verdicts that are not given yet and draw the figures, from the record's runs."""
    evidence, now = Evidence(known.runs), commit()
    diverged = _without_reference(claim, evidence)
    for statement, row in zip(claim.statements, known.statements, strict=True):
        if statement.judge is None or row.verdict in ORDER:
            continue
        found = beside_reference(statement.judge(evidence), diverged)
        row.verdict, row.found, row.unit = found.verdict, found.found, found.unit
        row.effect = [found.effect.mean, found.effect.low, found.effect.high] if found.effect else []
        row.commit = "" if now == known.commit else now
    known.figures = claim.figures(evidence)


def _without_reference(claim: PaperClaim, evidence: Evidence) -> set[int]:
    """The seeds on which the first contender of a contest, with which the others are compared, diverged."""
    contests = [(name, next(iter(study.recipes))) for name, study in claim.plan.items() if isinstance(study, Contest)]
    ends = [evidence.last(name, reference, "quality") for name, reference in contests]
    return {seed for end in ends for seed, quality in end.items() if math.isnan(quality)}


class _Clock:
    """Adds the seconds since it was last asked to a record."""

    def __init__(self, known: ClaimRecord) -> None:
        self._known, self._last = known, time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        self._known.wall, self._last = self._known.wall + now - self._last, now


def _all_runs(
    claim: PaperClaim, known: ClaimRecord, done: dict[Key, ClaimRun], keep: Callable[[], object], tell: Tell
) -> None:
    """Stage by stage, for a later one depends on the earlier: the best of a search goes on."""
    with _pool() as pool:
        while tasks := [t for name, study in claim.plan.items() for t in study.tasks(name, done)]:
            running: dict[Future[ClaimRun], PlannedRun] = {pool.submit(perform, t, claim.module): t for t in tasks}
            while running:
                over, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in over:
                    del running[future]
                    run = _result(future)
                    done[run.key] = run
                    known.runs = [done[key] for key in sorted(done)]
                    keep()
                    tell(run, len(running))


def _result(future: Future[ClaimRun]) -> ClaimRun:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ClaimInterrupted(
            "a process of the claim was ended from outside, perhaps for want of memory; every run that was finished is "
            "kept, and the same command goes on from there"
        ) from None


@contextmanager
def _pool() -> Generator[ProcessPoolExecutor]:
    """Processes that end with this one, whatever ends it."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(PROCESSES, spawn, _one_thread)
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _one_thread() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself hears ctrl-C, and ends us
    torch.set_num_threads(1)


def perform(task: PlannedRun, module: str) -> ClaimRun:
    """Make one run, in this process."""
    import_module(module)
    study, case, stage, number, seed = task.key
    began, busy = time.perf_counter(), time.process_time()
    rows, why = dict[str, list[float]](), ""
    try:
        rows = task.call(**task.arguments)
    except DivergedAt as error:
        rows, why = error.rows, str(error)
    except GossamerError as error:
        if not task.may_fail:
            raise
        why = str(error)
    spent = time.perf_counter() - began, time.process_time() - busy
    return ClaimRun(study, case, stage, number, seed, task.shown, _floats(rows), *spent, why)


def _floats(rows: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: [float(v) for v in row] for name, row in rows.items()}
