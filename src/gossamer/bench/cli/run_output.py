"""What a command that starts ranks leaves behind and shows: its folder, the lines on the way, record and report at the end."""

import os
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import typer

from gossamer.bench.cli import progress
from gossamer.bench.cli.console import console, is_lively
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.output import PAGE, RECORD, hold, new_folder, run_folder
from gossamer.bench.cli.summary import summary
from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.events import FilesWritten, OnEvent, RankEvent
from gossamer.bench.compare.script_observer import ScriptPlan
from gossamer.bench.record import Record
from gossamer.bench.report import write_html
from gossamer.fabrics.liveness.launch import is_number


def is_a_rank() -> bool:
    """True if a launcher has started this process; what it has set is refused if it is no number."""
    told = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"
    wrong = next((name for name in told if not is_number(os.environ.get(name, "0"))), None)
    if wrong and "RANK" in os.environ:
        raise InputError(
            f"the environment variable {wrong} is {os.environ[wrong]!r}, not a number: set it as torchrun does, or unset RANK where no "
            "launcher has started this process"
        )
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def command() -> str:
    return shlex.join(["gossamer", *sys.argv[1:]])


class RunOutput:
    """The folder of a run, and how much of it is shown."""

    def __init__(self, kind: str, out: Path | None, force: bool, quiet: bool, as_json: bool) -> None:
        self.is_named = out is not None  # else ranks on several machines have no name in common for their files
        self.folder = out or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
        self.force, self.quiet, self.as_json = force, quiet, as_json

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def checkpoint(self) -> str:
        return str((self.folder / "checkpoint").resolve())

    def prepare(self) -> None:
        if not self.is_named:
            self.folder = new_folder(self.folder)
        run_folder(self.folder, self.force)
        if not is_a_rank() or not int(os.environ["RANK"]):  # of ranks that share a folder, the first writes the record
            hold(self.folder)

    def earlier(self) -> Record | None:
        """The record of a run that is resumed; the checkpoint has its history, too."""
        try:
            return Record.read(self.record)
        except (OSError, ValueError):
            return None

    @contextmanager
    def shown(self, plan: ComparePlan | ScriptPlan) -> Generator[OnEvent]:
        if self.as_json or self.quiet or not is_lively(stderr=True):
            yield self.lines(plan)
        else:
            with progress.LiveTable(plan) as table:
                yield table.show

    def lines(self, plan: ComparePlan | ScriptPlan) -> OnEvent:
        if self.as_json:
            return progress.events_as_json
        return progress.quiet if self.quiet else progress.PlainLines(plan).show

    def conclude(self, record: Record, code: int, earlier: Record | None = None) -> NoReturn:
        """Write the files, show the result, and exit."""
        trouble = self._keep(record, earlier)
        if not self.quiet and not self.as_json:
            summary(record)  # printed even if the files could not be written
        if trouble:
            print(f"gossamer: {trouble}", file=sys.stderr)
        elif self.as_json:
            progress.events_as_json(RankEvent(FilesWritten(code, str(self.record), str(self.folder / PAGE))))
        elif not self.quiet:
            console().print(f"\nreport: {self.folder / PAGE}", markup=False, soft_wrap=True)
        raise typer.Exit(code or int(bool(trouble)))

    def _keep(self, record: Record, earlier: Record | None) -> str:
        """Write record and report of a run; return why that failed, or an empty string."""
        if earlier is not None and not record.has_begun:
            return (
                f"the run could not be resumed; record and report in {self.folder} are still those of the earlier run"
            )
        try:
            record.write(self.record)
            write_html(record, self.folder / PAGE)
        except OSError as error:
            why = error.strerror or error
            return f"the report could not be written to {self.folder}: {why}; the earlier files are unchanged"
        return ""
