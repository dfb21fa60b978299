"""Checkpoints of a trial: one file per rank and step; old ones go when all ranks have the new one."""

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer.core.errors import CheckpointError, GossamerError, plainly
from gossamer.trial.agree import Circle
from gossamer.trial.contender import Contender
from gossamer.trial.plan import Plan

NAME = re.compile(r"step(\d+)-rank(\d+)\.pt")


def saved_steps(folder: Path, rank: int) -> list[int]:
    """The steps of which a rank has a checkpoint."""
    found = [NAME.fullmatch(p.name) for p in folder.glob("step*.pt")]
    return sorted(int(m[1]) for m in found if m and int(m[2]) == rank)


def save(plan: Plan, circle: Circle, contender: Contender) -> str:
    """Write, then rename, then remove what is older. If any rank cannot, all keep the last one; returns why."""
    folder, rank, step = Path(plan.checkpoint), dist.get_rank(), contender.steps_done
    final = folder / f"step{step}-rank{rank}.pt"
    half = final.with_suffix(".part")
    state = {"facts": _facts(plan, contender), "state": contender.state_dict()}
    mine = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the older ones go next: a power cut must not take this one, too
        os.replace(half, final)
    except (OSError, RuntimeError) as error:
        mine = f"rank {rank}: {_why(error)}"
    finally:
        tidy(folder, rank)
    others = [folder / f"step{s}-rank{rank}.pt" for s in saved_steps(folder, rank) if s != step]
    if circle.all_fine(not mine):
        for old in others:
            old.unlink(missing_ok=True)
        return ""
    if others:
        final.unlink(missing_ok=True)
    return next(t for t in circle.texts(mine[:1500]) if t)


def tidy(folder: Path, rank: int | None = None) -> None:
    """Remove what a rank, or all of them, had half written when it was killed; called when it writes no more."""
    for half in folder.glob(f"step*-rank{'*' if rank is None else rank}.part"):
        half.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    """The disk's reason, such as being full: torch's writer stumbles over it, and tells of that instead."""
    reason = error if isinstance(error, OSError) else error.__context__
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else plainly(error)


def restore(plan: Plan, circle: Circle, contender: Contender) -> None:
    """Go on from the last step of which every rank has a checkpoint."""
    folder, rank = Path(plan.checkpoint), dist.get_rank()
    mine = saved_steps(folder, rank)
    everyone = [{int(s) for s in text.split()} for text in circle.texts(" ".join(map(str, mine)))]
    common = set.intersection(*everyone)
    if not common:
        lacking = [r for r, steps in enumerate(everyone) if not steps]
        who = f"rank(s) {', '.join(map(str, lacking))} have none" if lacking else "no step is there for all ranks"
        raise CheckpointError(f"nothing to resume from in {folder}: {who}")
    path = folder / f"step{max(common)}-rank{rank}.pt"
    saved = _read(path)
    for name, value in _facts(plan, contender).items():
        if saved["facts"].get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: its {name} was {saved['facts'].get(name)!r}, and is {value!r} now"
            )
    try:
        contender.load_state_dict(saved["state"])
    except Exception as error:
        why = str(error) if isinstance(error, GossamerError) else plainly(error)
        raise CheckpointError(f"{path} does not fit this run: {why}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:
        why = plainly(error).split(". ")[0]
        raise CheckpointError(f"{path} cannot be read: {why}; without it the run can only begin anew") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("facts"), dict) or "state" not in saved:
        raise CheckpointError(f"{path} is no checkpoint of a run")
    return saved


def _facts(plan: Plan, contender: Contender) -> dict[str, Any]:
    """What must not change when a run goes on."""
    facts = {"recipe": contender.origin, "workload": plan.workload, "options": plan.options, "seed": plan.seed}
    return facts | {"number of ranks": dist.get_world_size()}
