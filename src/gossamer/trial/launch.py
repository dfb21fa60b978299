"""The launcher's side: start the ranks, listen to rank 0, and keep a record that is valid at any moment."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer.lab import available, run_lab
from gossamer.record import Evaluation, Record, Run, Step
from gossamer.trial.plan import MARK, Plan
from gossamer.workloads import find

OnEvent = Callable[[dict[str, Any]], None]


def launch(plan: Plan, hosts: int, rate: str | None, command: str, on_event: OnEvent) -> tuple[Record, int]:
    """Run a trial on `hosts` ranks, in a lab if a rate is given and a lab can be made.

    Ctrl-C ends all ranks; what was seen until then is in the record that comes back (exit code 130).
    """
    record = _record(plan, hosts, rate, command)
    listener = _Listener(record, on_event)
    reason = available() if rate else None
    if rate and reason:
        record.note = f"unshaped: {reason}"
        record.rate = "unshaped"
        listener.say(f"no lab here, so the network is as fast as this machine: {reason}")
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        path = Path(folder) / "plan.json"
        plan.write(path)
        program = [sys.executable, "-m", "gossamer.trial.rank", str(path)]
        try:
            code = _in_lab(hosts, rate, program, listener) if rate and not reason else _here(hosts, path, listener)
        except KeyboardInterrupt:
            record.note = "; ".join(filter(None, [record.note, "interrupted"]))
            code = 130
    _account_for_the_missing(record, code, listener)
    return record, code


class _Listener:
    """Turns rank 0's events into the record; everything else the ranks print is passed on."""

    def __init__(self, record: Record, on_event: OnEvent) -> None:
        self.record, self.on_event = record, on_event
        self.complaints = list[str]()
        self.finished = set[str]()

    def line(self, rank: int | None, text: str) -> None:
        if not text.startswith(MARK):
            if text.strip():
                self.complaints.append(text if rank is None else f"[{rank}] {text}")
            return
        with suppress(json.JSONDecodeError):  # a line cut short by a kill
            self.take(json.loads(text.removeprefix(MARK)))

    def say(self, text: str) -> None:
        self.on_event({"event": "note", "text": text})

    def take(self, event: dict[str, Any]) -> None:
        kind, run = event["event"], self.record.run(event.get("run", ""))
        facts = {k: v for k, v in event.items() if k not in ("event", "run")}
        if kind == "begin":
            self.record.parameters = facts["parameters"]
        elif run is not None:
            _note(run, kind, facts)
            if kind in ("end", "failed"):
                self.finished.add(run.name)
        self.on_event(event)


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
    elif kind == "end":
        for key, value in facts.items():
            setattr(run, key, value)


def _in_lab(hosts: int, rate: str, program: Sequence[str], listener: _Listener) -> int:
    return run_lab(hosts, rate, program, on_line=listener.line, env={"PYTHONWARNINGS": "ignore"}).exit_code


def _here(hosts: int, plan: Path, listener: _Listener) -> int:
    """Ranks on this machine, through torch's own launcher."""
    elastic = ["torch.distributed.run", "--nproc-per-node", str(hosts), "--master-addr", "127.0.0.1"]
    elastic += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", *elastic, "-m", "gossamer.trial.rank", str(plan)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            listener.line(None, line.rstrip("\n"))
        return process.wait()
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    """The launcher first gets to end its ranks; after that nothing of the session is left."""
    for how, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _record(plan: Plan, hosts: int, rate: str | None, command: str) -> Record:
    workload = find(plan.workload)
    return Record(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=plan.workload,
        summary=workload.summary,
        metric=workload.metric,
        lower_is_better=workload.lower_is_better,
        parameters=0,
        hosts=hosts,
        rate=rate or "unshaped",
        seed=plan.seed,
        versions=_versions(),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        baseline=plan.baseline or next(iter(plan.contenders)),
        runs=[Run(name, recipe) for name, recipe in plan.contenders.items()],
    )


def _versions() -> dict[str, str]:
    found = {"gossamer": gossamer.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "triton"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _account_for_the_missing(record: Record, code: int, listener: _Listener) -> None:
    """A run that neither ended nor failed was cut off; say so, and say what the ranks said last."""
    for run in record.runs:
        if run.name not in listener.finished and run.status == "ok":
            run.status = "failed"
            run.error = (
                "interrupted" if code == 130 else "; ".join(listener.complaints[-5:]) or f"the ranks ended with {code}"
            )
    if code not in (0, 130) and listener.complaints:
        listener.say("\n".join(listener.complaints[-20:]))
