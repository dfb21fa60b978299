"""Compare recipes on a script: run it once per recipe, in a lab, on this machine, or on the ranks of a launcher."""

import json
import os
import shlex
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.bench.compare import events as told
from gossamer.bench.compare.control_group import ControlGroup, meet
from gossamer.bench.compare.events import OnEvent, RankEvent
from gossamer.bench.compare.journal import Journal
from gossamer.bench.compare.launch import UNFINISHED, run_ranks
from gossamer.bench.compare.local import HERE, beside_this_rank
from gossamer.bench.compare.rank_run import about
from gossamer.bench.compare.script_events import HELD_OUT, LAST, ScriptEvents, judge
from gossamer.bench.compare.script_observer import ScriptPlan
from gossamer.bench.lab import available, in_lab
from gossamer.bench.lab.output import LineSplitter
from gossamer.bench.record import Record, Run, machine, versions
from gossamer.core.errors import GossamerError
from gossamer.integrations.run_observer import PLAIN

AFTER_DDP = (
    "'ddp' is allreduce() here: this script attaches a plain model, and there is no DistributedDataParallel in it"
)

COMPILED = (
    "the script uses torch.compile, whose time counts, and the first run pays most of it: compare once more, now that its cache "
    "is filled"
)
UNTOLD = "the script logs no loss: compared by the values it calls backward() on, summed over a step"
RISES = "what the script logs as held_out rises in every run, and less counts as better: log a loss, or 1 - accuracy"


class ScriptError(GossamerError, ValueError):
    """A script that cannot be compared as it is."""


RunScript = Callable[[ScriptEvents], None]


class ScriptCompare:
    """Runs the script under one recipe after the other, and keeps a record that is valid at any moment."""

    def __init__(
        self, plan: ScriptPlan, hosts: int, rate: str | None, command: str, show: OnEvent, path: Path | None
    ) -> None:
        self.plan, self.hosts, self.show = plan, hosts, show
        self.record = _record(plan, hosts, rate, command)
        self.journal = Journal(self.record, path)
        self.events = dict[str, ScriptEvents]()
        self.code = 0

    def follow(self, run: RunScript) -> tuple[Record, int]:
        """Do all runs, until the script is refused or ctrl-C; return the record and the exit code."""
        try:
            for name, kind in self.plan.contenders.items():
                self._one(name, kind, run)
        except KeyboardInterrupt as stop:
            number = int(stop.args[0] if stop.args else signal.SIGINT)
            self._interrupted(f"interrupted by {signal.Signals(number).name}")
            self.code = 128 + number
        self._judge()
        judged = [run.evaluations for run in self.record.runs if len(run.evaluations) > 1]
        if self.record.metric == HELD_OUT and judged and all(e[-1].quality > e[0].quality for e in judged):
            self._note(RISES)  # an accuracy, most likely
        return self.record, self.code

    def _judge(self) -> None:
        self.record.metric = judge(self.record.runs, self.events, self.plan.chunk)

    def _one(self, name: str, kind: str, run: RunScript) -> None:
        mine = self.record.run(name)
        assert mine is not None
        events = self.events[name] = ScriptEvents(mine, self.plan.per_host, self.plan.chunk, self._passed_on)
        names = list(self.plan.contenders)
        if len(names) > 1:  # the first events take seconds
            self._shown(told.Note(f"{name}, {names.index(name) + 1} of {len(names)}"))
        self._shown(told.Entered(kind, 0), name)
        try:
            run(events)
            events.conclude(self.hosts * self.plan.per_host)
        except GossamerError as error:  # such as a lab that broke down: the events of other runs are kept
            events.conclude(self.hosts * self.plan.per_host)
            mine.status, mine.error = "failed", str(error)
        self._refuse(events)
        self.record.parameters = self.record.parameters or (events.attached.parameters if events.attached else 0)
        if events.goes_by_backward and not events.held_out:
            self._note(UNTOLD)
        if events.compiled and len(names) > 1:
            self._note(COMPILED)
        if name == "ddp" and mine.recipe != "ddp" and mine.status == "ok":
            mine.yardstick, mine.about = False, about("allreduce")
            self._note(AFTER_DDP)
        if mine.status == "ok":
            self._shown(told.Ended(mine.wire_bytes, mine.inside_bytes, mine.logical_bytes, mine.nic_bytes), name)
        else:
            self.code = 1
            self._shown(told.Failed(mine.error), name)

    def _refuse(self, events: ScriptEvents) -> None:
        if events.refused:
            raise ScriptError(events.refused)
        if events.run.status == "ok" and not events.losses and not events.held_out:
            name = Path(self.plan.script).name
            raise ScriptError(
                f"{name} logged no loss and called backward() on none, so there is nothing to compare: put "
                "comm.log(loss=loss) into its loop, or comm.log(held_out=...) where it evaluates its model"
            )

    def _note(self, text: str) -> None:
        """Add a note to the record, once."""
        if text not in self.record.note:
            self.record.note = "; ".join(filter(None, [self.record.note, text]))

    def _interrupted(self, why: str) -> None:
        for run in self.record.runs:
            if run.error == UNFINISHED:
                events = self.events.get(run.name)
                if events is not None:
                    events.conclude(self.hosts * self.plan.per_host)
                run.status, run.error = "interrupted", why

    def _shown(self, what: object, run: str = "") -> None:
        self._passed_on(RankEvent(what, run))

    def _passed_on(self, event: RankEvent) -> None:
        self.show(event)
        if why := self.journal.keep_up(self._judge):
            self.show(RankEvent(told.Note(f"the record cannot be written: {why}; it is tried again until the end")))


def launch_script(
    plan: ScriptPlan, hosts: int, rate: str | None, command: str, show: OnEvent, path: Path | None
) -> tuple[Record, int]:
    """Run the script on the hosts of a lab if a rate is given and a lab can be made, else on this machine."""
    comparison = ScriptCompare(plan, hosts, rate, command, show, path)
    reason = available() if rate else None
    if reason:
        comparison.record.note, comparison.record.rate = f"unshaped: {reason}", "unshaped"
        show(RankEvent(told.Note(f"no lab here, so times say little about a slow network: {reason}")))
        rate = None

    def run(events: ScriptEvents) -> None:
        exits = run_ranks(hosts, plan.per_host, rate, plan.command(events.run.name), events.line)
        if exits.first is not None:
            events.killed(*exits.first)

    return comparison.follow(run)


def join_script(plan: ScriptPlan, command: str, show: OnEvent, path: Path | None) -> tuple[Record, int]:
    """Join the ranks that a launcher has started; each runs the script in a second process with the same rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if in_lab():
        plan.per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    meet(1800.0)  # torch's own default: they may be started by hand
    control = ControlGroup(2 * plan.deadline + 60.0, plan.per_host)
    control.same("the ranks were started with different commands", plan.same_on_all())
    comparison = ScriptCompare(plan, size // plan.per_host, None, command, show, path)

    def run(events: ScriptEvents) -> None:
        with _store_of_a_run(rank) as port:
            port = int(control.texts(str(port))[0])
            ended = _beside(plan.command(events.run.name), port, lambda line: rank or events.line(0, line))
            everyone = control.texts(json.dumps(ended))
        for other, text in enumerate(everyone):
            code, said = json.loads(text)
            for line in said if other or rank else []:
                events.line(other, line)
            if code:
                events.killed(other, code)

    try:
        return comparison.follow(run)
    finally:
        dist.destroy_process_group()


@contextmanager
def _store_of_a_run(rank: int) -> Generator[int]:
    """Open a new store on rank 0 for one run and yield its port; other ranks yield 0."""
    if rank:
        yield 0
        return
    try:
        listener = socket.create_server((os.environ["MASTER_ADDR"], 0))
    except OSError:  # the name is not an address of this machine
        listener = socket.create_server(("", 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield port
    del store  # until here it serves


def _beside(command: list[str], port: int, on_line: Callable[[str], object]) -> tuple[int, list[str]]:
    """Run one rank's script in a second process; return its exit code, its events, and the last of its other lines.

    All ranks are sent them: of a script that prints much, all lines would be more than ranks send each other.
    """
    environment = beside_this_rank() | {"MASTER_PORT": str(port)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    said, other, cut = list[str](), deque[str](maxlen=LAST), LineSplitter()
    assert process.stdout is not None
    try:
        while data := os.read(process.stdout.fileno(), 1 << 16):
            for line in cut.feed(data):
                (said if told.MARK in line else other).append(line)
                on_line(line)
        other += cut.feed(b"")
        return process.wait(), [*said, *other]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def check_script(path: Path) -> None:
    """Raise ScriptError if the script cannot be read or compiled, before any rank is started."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ScriptError(f"{path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        raise ScriptError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise ScriptError(f"{path} is not valid Python: {error}") from None


def _record(plan: ScriptPlan, hosts: int, rate: str | None, command: str) -> Record:
    name = Path(plan.script).name
    return Record(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=name,
        summary=shlex.join([name, *plan.arguments]),
        metric="training loss",
        lower_is_better=True,
        parameters=0,
        hosts=hosts,
        per_host=plan.per_host,
        rate=rate or "unshaped",
        seed=0,
        versions=versions(),
        machine=machine(),
        note="inside of a lab, whose rates are not known here" if in_lab() else "",
        baseline=next(iter(plan.contenders)),
        imports=plan.imports,
        script=plan.script,
        runs=[
            Run(name, recipe, "interrupted", UNFINISHED, about(recipe), recipe in PLAIN)
            for name, recipe in plan.contenders.items()
        ],
    )
