"""The launcher's side: start the ranks, listen to rank 0, and come back with the record."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gossamer.bench.compare import rank
from gossamer.bench.compare.baselines import BASELINES
from gossamer.bench.compare.checkpoints import tidy
from gossamer.bench.compare.events import OnEvent
from gossamer.bench.compare.load import describe
from gossamer.bench.compare.local import OnLine, RankExits, run_here
from gossamer.bench.compare.parent_death import program
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import about
from gossamer.bench.compare.record_builder import RecordBuilder
from gossamer.bench.lab import available, in_lab, run_lab
from gossamer.bench.record import Record, Run, machine, versions
from gossamer.bench.workloads import find, get

UNFINISHED = "its command was killed, or is still running"  # error of a run in the record until its end is known


def launch(
    plan: ComparePlan,
    hosts: int,
    rate: str | None,
    command: str,
    on_event: OnEvent,
    path: Path | None = None,
    earlier: Record | None = None,
) -> tuple[Record, int]:
    """Run a comparison on `hosts` hosts of `plan.per_host` ranks, in a lab if a rate is given and a lab can be made.

    The code is 0, or 1 if anything failed. Ctrl-C ends all ranks and returns the
    record so far (code 130). During the run, the file at `path` holds the record of some seconds ago, together with the
    `earlier` seeds; the caller writes the final one.
    """
    builder = RecordBuilder(_record(plan, hosts, rate, command), on_event, path, earlier)
    reason = available() if rate else None
    if reason:
        builder.unshaped(reason)
        rate = None
    plan = replace(plan, network=builder.record.rate)

    def work() -> int:
        words = program("gossamer.bench.compare.rank", plan.to_json())
        exits = run_ranks(hosts, plan.per_host, rate, words, builder.line)
        if exits.first is not None:
            builder.ended(*exits.first)
        for number in exits.frozen:
            builder.ended(number, -signal.SIGSTOP)
        return int(exits.first is not None)

    try:
        return _with_load(builder, builder.follow(work), hosts * plan.per_host)
    finally:
        if plan.checkpoint:
            tidy(Path(plan.checkpoint))


def join(plan: ComparePlan, command: str, on_event: OnEvent, path: Path | None = None) -> tuple[Record, int]:
    """Join the ranks that a launcher has started; rank 0 has the whole record."""
    if in_lab():  # the lab sets how many ranks share a link
        plan.per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hosts = int(os.environ["WORLD_SIZE"]) // plan.per_host
    builder = RecordBuilder(_record(plan, hosts, None, command), on_event, path)
    if in_lab():
        builder.record.note = "inside of a lab, whose rates are not known here"
    ended = builder.follow(lambda: rank.take_part(plan, builder.take))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return _with_load(builder, ended, int(os.environ["WORLD_SIZE"]) if in_lab() else here)


def _with_load(builder: RecordBuilder, ended: tuple[Record, int], ranks: int) -> tuple[Record, int]:
    """Say of an emulated run how busy its ranks, so many on this machine, kept the processor."""
    record, code = ended
    if record.compute and record.has_begun:
        told = describe(record.runs, ranks, record.compute)
        record.note = "; ".join(filter(None, [record.note, told]))
        builder.say(told)
    return record, code


def run_ranks(hosts: int, per_host: int, rate: str | None, command: Sequence[str], on_line: OnLine) -> RankExits:
    """Run a command once per rank and wait for all: in a lab if a rate is given, else on this machine."""
    if rate is None:
        return run_here(hosts * per_host, command, on_line)
    result = run_lab(hosts, rate, command, per_host=per_host, on_line=on_line)
    codes = {} if result.first_failure is None else {result.first_failure: result.exit_code}
    return RankExits(codes, [each.rank for each in result.ranks if each.frozen])


def _record(plan: ComparePlan, hosts: int, rate: str | None, command: str) -> Record:
    workload = find(plan.workload)
    return Record(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=plan.workload,
        summary=workload.summary,
        metric=workload.metric,
        lower_is_better=workload.lower_is_better,
        parameters=_parameters(plan),
        hosts=hosts,
        per_host=plan.per_host,
        rate=rate or "unshaped",
        seed=plan.seed,
        versions=versions(),
        machine=machine(),
        baseline=plan.baseline or next(iter(plan.contenders)),
        imports=plan.imports,
        compute=plan.compute,
        timing=plan.timing or bool(plan.compute),
        runs=[
            Run(name, recipe, "interrupted", UNFINISHED, about(recipe), recipe in BASELINES, lr=plan.lr.get(name, 1.0))
            for name, recipe in plan.contenders.items()
        ],
    )


def _parameters(plan: ComparePlan) -> int:
    """Number of parameters, counted before any rank starts, since a rank may fail at once."""
    model = get(plan.workload, seed=plan.seed, **plan.options).model()
    return sum(p.numel() for p in model.parameters())
