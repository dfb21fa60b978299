"""Checkpoints of a run: one file per rank and step; old files are removed when all ranks have the new one."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer.bench.compare.control_group import ControlGroup
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import RankRun
from gossamer.bench.workloads import find
from gossamer.core import files
from gossamer.core.errors import CheckpointError, GossamerError, plainly
from gossamer.integrations.checkpoint import read

History = list[tuple[str, dict[str, Any]]]  # events, as rank 0 sent them
RANKS = "number of ranks"
STATE = ("model", "optimizer", "done", "drawn", "seconds", "nic", "sent", "handed")
NAME = re.compile(r"step(\d+)-rank(\d+)\.pt")
CHECKPOINT = files.FileKind("checkpoint of a run", (b"X\x05\0\0\0facts",))  # the first key of the pickled dict


def saved_steps(folder: Path, rank: int) -> list[int]:
    """Steps of which a rank has a checkpoint, in order."""
    found = [NAME.fullmatch(p.name) for p in folder.glob("step*.pt")]
    return sorted(int(m[1]) for m in found if m and int(m[2]) == rank)


def save(plan: ComparePlan, control: ControlGroup, run: RankRun, history: History) -> str:
    """Write a checkpoint and remove older ones; if any rank fails, all keep the last one. Returns why, or nothing.

    It holds the events so far too: the record on disk may be some seconds behind when its command is killed.
    """
    folder, rank, step = Path(plan.checkpoint), dist.get_rank(), run.steps_done
    final = folder / f"step{step}-rank{rank}.pt"
    mine = ""
    try:
        state = {"facts": _facts(plan, run), "state": run.state_dict(), "history": history}
        folder.mkdir(parents=True, exist_ok=True)
        with files.replacing(final, CHECKPOINT) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        mine = f"{control.named(rank)}: {_why(error)}"
    finally:
        tidy(folder, rank)
    others = [folder / f"step{s}-rank{rank}.pt" for s in saved_steps(folder, rank) if s != step]
    others = [path for path in others if files.is_ours(path, CHECKPOINT)]
    if control.all_fine(not mine):
        remove(others)
        return ""
    remove([final] if others and not mine else [])
    return next(t for t in control.texts(mine[:1500]) if t)


def tidy(folder: Path, rank: int | None = None) -> None:
    """Remove half-written files of one rank, or of all; call it when nothing is being written."""
    remove(files.half_written(folder, f"step*-rank{'*' if rank is None else rank}"))


def remove(paths: Iterable[Path]) -> None:
    """Remove files; one that cannot be removed stays.

    An error here, after the ranks have agreed on a checkpoint, would leave the other ranks waiting.
    """
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    """The reason of the operating system, such as a full disk, which torch's own error hides."""
    reason = error if isinstance(error, OSError) else error.__context__
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else plainly(error)


def restore(plan: ComparePlan, control: ControlGroup, run: RankRun) -> History:
    """Load the last step of which every rank has a checkpoint; return the events up to there."""
    folder, rank = Path(plan.checkpoint), dist.get_rank()
    path = folder / f"step{_common_step(folder, control)}-rank{rank}.pt"
    saved, why = dict[str, Any](), ""
    try:
        saved = _checked(path, plan, run)
    except CheckpointError as error:
        why = str(error)
    for other, reason in enumerate(control.texts(why[:1500])):  # no rank changes its state if any rank cannot resume
        if reason:
            raise CheckpointError(why or f"{control.named(other)}: {reason}")
    try:
        run.load_state_dict(saved["state"])
    except Exception as error:
        said = str(error) if isinstance(error, GossamerError) else plainly(error)
        raise CheckpointError(f"{path} does not fit this run: {said}") from None
    return saved["history"]


def _common_step(folder: Path, control: ControlGroup) -> int:
    """The last step of which all ranks have a checkpoint; an error names ranks without one, or another number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = saved_steps(folder, rank)
    ranks = _ranks_of(folder / f"step{mine[-1]}-rank{rank}.pt") if mine else None
    everyone = [json.loads(text) for text in control.texts(json.dumps({"steps": mine, "ranks": ranks}))]
    before = next((each["ranks"] for each in everyone if each["ranks"] not in (None, size)), None)
    if before is not None:
        raise CheckpointError(
            f"the run in {folder} had {before} ranks, and there are {size} now: resume with as many, or start again"
        )
    common = set.intersection(*(set(each["steps"]) for each in everyone))
    if not common:
        lacking = [r for r, each in enumerate(everyone) if not each["steps"]]
        who = (
            f"rank(s) {', '.join(map(str, lacking))} have none" if lacking else "no step has a checkpoint of every rank"
        )
        raise CheckpointError(f"nothing to resume from in {folder}: {who}")
    return max(common)


def _ranks_of(path: Path) -> int | None:
    """Number of ranks that wrote a checkpoint; None if the file does not say, which a full read reports later."""
    with suppress(Exception):
        return int(torch.load(path, weights_only=True, mmap=True)["facts"][RANKS])
    return None


def _checked(path: Path, plan: ComparePlan, run: RankRun) -> dict[str, Any]:
    """Read a checkpoint; raise CheckpointError if it does not belong to this run."""
    try:
        saved = read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; without it the run must start again") from None
    kinds = {"facts": dict, "state": dict, "history": list}
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path} is not a checkpoint of a run")
    for name, value in _facts(plan, run).items():
        if saved["facts"].get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: its {name} was {saved['facts'].get(name)!r}, and is {value!r} now"
            )
    state, model = saved["state"], run.model.state_dict()
    wanted = {"state": state, "model": state.get("model")}
    for what, names in ("state", STATE), ("model", model):
        held = wanted[what] if isinstance(wanted[what], dict) else {}
        lacking = [name for name in names if name not in held]
        if lacking:
            raise CheckpointError(f"{path} does not fit this run: its {what} lacks {lacking[0]!r}")
    return saved


def _facts(plan: ComparePlan, run: RankRun) -> dict[str, Any]:
    """Facts that must not change when a run is resumed."""
    return {
        "recipe": run.origin,
        "workload": plan.workload,
        "options": plan.options,
        "seed": plan.seed,
        "metric": find(plan.workload).metric,  # sacrebleu may be installed since
        "--lr": plan.lr.get(run.name, 1.0),
        "--compute": plan.compute or None,
        "--slow": plan.slow,
        "network": plan.network + (f", {plan.per_host} ranks a host" if plan.per_host > 1 else ""),
        RANKS: dist.get_world_size(),
    }
