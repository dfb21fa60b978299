"""The launcher's side: start the ranks, listen to rank 0, and keep a record that is valid at any moment."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.lab import available, in_lab, run_lab
from gossamer.record import Evaluation, Record, Run, Step
from gossamer.trial import rank
from gossamer.trial.contender import about
from gossamer.trial.diary import Diary
from gossamer.trial.orphans import end
from gossamer.trial.plan import MARK, Plan
from gossamer.trial.saving import tidy
from gossamer.trial.yardsticks import YARDSTICKS
from gossamer.workloads import find, get

OnEvent = Callable[[dict[str, Any]], None]
UNFINISHED = "its command was killed, or is still running"  # what a record says until the end is known
WORDS = 200  # lines of the ranks that are kept, in case they say why it went wrong


def launch(
    plan: Plan,
    hosts: int,
    rate: str | None,
    command: str,
    on_event: OnEvent,
    earlier: Record | None = None,
    path: Path | None = None,
) -> tuple[Record, int]:
    """Run a trial on `hosts` ranks, in a lab if a rate is given and a lab can be made.

    The code is 0, or 1 if anything failed. Ctrl-C ends all ranks; what was seen until then is in the record that comes
    back (code 130). `earlier` is the record of a run that this one goes on with. Until the end, the file at `path` holds
    what was seen some seconds ago; whoever calls this writes the rest.
    """
    listener = _Listener(_record(plan, hosts, rate, command), on_event, earlier, path)
    reason = available() if rate else None
    if rate and reason:
        listener.unshaped(reason)

    def work() -> int:
        if rate and not reason:
            return _in_lab(hosts, rate, [sys.executable, "-m", "gossamer.trial.rank", plan.to_json()], listener)
        return _here(hosts, plan, listener)

    try:
        return listener.follow(work)
    finally:
        if plan.checkpoint:
            tidy(Path(plan.checkpoint))


def join(
    plan: Plan, command: str, on_event: OnEvent, earlier: Record | None = None, path: Path | None = None
) -> tuple[Record, int]:
    """Take part as one of the ranks that a launcher has started; rank 0's record is the whole one."""
    listener = _Listener(_record(plan, int(os.environ["WORLD_SIZE"]), None, command), on_event, earlier, path)
    if in_lab():
        listener.record.note = "inside of a lab, whose rates are not known here"
    return listener.follow(lambda: rank.take_part(plan, listener.take))


class _Listener:
    """Turns rank 0's events into the record; what else the ranks print is kept in case it says why they ended."""

    def __init__(
        self, record: Record, on_event: OnEvent, earlier: Record | None = None, path: Path | None = None
    ) -> None:
        self.record, self.on_event, self.earlier = record, on_event, earlier
        self.diary = Diary(record, path)
        self.complaints = deque[str](maxlen=WORDS)
        self.finished = set[str]()
        self.lost = self.broken = ""  # who was killed; what rank 0 could not go on without

    def follow(self, work: Callable[[], int]) -> tuple[Record, int]:
        """Do the work, and account for its end, whichever it is."""
        try:
            code = int(work() != 0)
        except KeyboardInterrupt as stop:
            number = int(stop.args[0] if stop.args else signal.SIGINT)
            code, self.lost, self.broken = 128 + number, f"interrupted by {signal.Signals(number).name}", ""
        except GossamerError as error:
            code, self.broken = 1, str(error)
        self._account_for_the_missing(code)
        return self.record, code

    def line(self, number: int | None, text: str) -> None:
        said, mark, rest = text.partition(MARK)  # another rank's line may not have been finished
        if mark:
            try:
                event = json.loads(rest)
                self._understand(event)
            except (ValueError, KeyError, TypeError, AttributeError):  # cut short by a kill, or not ours
                said = text
            else:
                self._tell(event)
        if said.strip():
            self.complaints.append(said if number is None else f"[{number}] {said}")

    def say(self, text: str) -> None:
        self.on_event({"event": "note", "text": text})

    def unshaped(self, reason: str) -> None:
        self.record.note, self.record.rate = f"unshaped: {reason}", "unshaped"
        self.say(
            f"no lab here, so the network is as fast as this machine, and times say little about a slow one: {reason}"
        )

    def ended(self, number: int, code: int) -> None:
        """A rank was the first to fail; who was killed can no longer tell."""
        if code < 0 or code > 128:
            name = signal.Signals(-code if code < 0 else code - 128).name
            how = "frozen" if name == "SIGSTOP" else "killed"
            hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
            self.lost = f"rank {number} was {how} by {name}{hint}"

    def take(self, event: dict[str, Any]) -> None:
        """One event of a rank in this very process."""
        self._understand(event)
        self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        self.on_event(event)
        if why := self.diary.keep_up():
            self.say(f"the record cannot be written: {why}; it is tried again until the end")

    def _understand(self, event: dict[str, Any]) -> None:
        """An error says that the event is none of ours."""
        kind, run = event["event"], self.record.run(event.get("run", ""))
        facts = {k: v for k, v in event.items() if k not in ("event", "run")}
        if kind == "lost":
            self.ended(facts["rank"], facts["code"])
        elif kind == "broken":
            self.broken = str(facts["error"])
        elif run is not None:
            _note(run, kind, facts)
            if kind == "contender":
                self._go_on(run, facts["done"])
            elif kind in ("end", "failed"):
                self.finished.add(run.name)
        elif "run" in event:
            raise ValueError(f"no contender is called {event['run']!r}")

    def _go_on(self, run: Run, done: int) -> None:
        """A resumed run's history is that of the earlier one, up to the checkpoint."""
        before = self.earlier.run(run.name) if self.earlier else None
        if before is not None and done:
            run.steps = [s for s in before.steps if s.step <= done]
            run.evaluations = [e for e in before.evaluations if e.step < done]
            run.residuals = [r for r in before.residuals if r[0] <= done]
            run.decisions = [d for d in before.decisions if d[0] <= done]

    def _account_for_the_missing(self, code: int) -> None:
        """A run that neither ended nor failed was cut off; say so, and say why."""
        missing = [run for run in self.record.runs if run.name not in self.finished]
        if not missing:
            return
        why = "; ".join(filter(None, [self.lost, self.broken])) or "; ".join(list(self.complaints)[-5:])
        why = why or f"the ranks ended early, with code {code}"
        for run in missing:
            run.status, run.error = "interrupted" if code > 128 else "failed", why
        if code == 1:
            self.say(why)
            if self.complaints:
                self.say("the ranks' last words:\n" + "\n".join(list(self.complaints)[-20:]))


def _note(run: Run, kind: str, facts: dict[str, Any]) -> None:
    if kind == "contender":
        run.recipe = facts["recipe"]
    elif kind == "step":
        run.steps.append(Step(**facts))
    elif kind == "evaluation":
        run.evaluations.append(Evaluation(**facts))
    elif kind == "residual":
        run.residuals.append((facts["step"], facts["norm"]))
    elif kind == "decision":
        run.decisions.append((facts["step"], facts["text"]))
    elif kind == "failed":
        run.status, run.error = "failed", facts["error"]
    elif kind == "layers":
        run.layer_errors |= facts["errors"]
    elif kind == "end":
        run.status, run.error = "ok", ""
        run.wire_bytes, run.logical_bytes, run.nic_bytes = (
            facts["wire_bytes"],
            facts["logical_bytes"],
            facts["nic_bytes"],
        )


def _in_lab(hosts: int, rate: str, program: Sequence[str], listener: _Listener) -> int:
    result = run_lab(hosts, rate, program, on_line=listener.line, env={"PYTHONWARNINGS": "ignore"})
    if result.first_failure is not None:
        listener.ended(result.first_failure, result.exit_code)
    for host in result.hosts:
        if host.frozen:
            listener.ended(host.rank, 128 + signal.SIGSTOP)
    return result.exit_code


def _here(hosts: int, plan: Plan, listener: _Listener) -> int:
    """Ranks on this machine, through torch's own launcher."""
    elastic = ["--nproc-per-node", str(hosts), "--master-addr", "127.0.0.1", "--master-port", "0"]
    elastic += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    local = [sys.executable, "-m", "gossamer.trial.local", str(os.getpid()), *elastic]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "LOGLEVEL": "CRITICAL"}
    process = subprocess.Popen(
        [*local, "-m", "gossamer.trial.rank", plan.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, **quiet},
        start_new_session=True,  # ctrl-C on the terminal is for us, who then end the ranks in order
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            listener.line(None, line.rstrip("\n"))
        return process.wait()
    finally:
        end(process)
        process.stdout.close()


def _record(plan: Plan, hosts: int, rate: str | None, command: str) -> Record:
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
        rate=rate or "unshaped",
        seed=plan.seed,
        versions=_versions(),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}{_tcp()}",
        baseline=plan.baseline or next(iter(plan.contenders)),
        runs=[
            Run(name, recipe, "interrupted", UNFINISHED, about(recipe), recipe in YARDSTICKS)
            for name, recipe in plan.contenders.items()
        ],
    )


def _parameters(plan: Plan) -> int:
    """Counted before anything starts: ranks that fail at once can no longer tell."""
    model = get(plan.workload, seed=plan.seed, **plan.options).model()
    return sum(p.numel() for p in model.parameters())


def _versions() -> dict[str, str]:
    found = {"gossamer": gossamer.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "triton", "decent-dp"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _tcp() -> str:
    """How the kernel shares links between flows: on slow ones it moves step times by several percent."""
    with suppress(OSError):
        return f", TCP {Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().strip()}"
    return ""
