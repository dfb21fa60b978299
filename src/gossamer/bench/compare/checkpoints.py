"""Checkpoints of a trial: one file per rank and step; old ones go when all ranks have the new one."""

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
from gossamer.core import files
from gossamer.core.errors import CheckpointError, GossamerError, plainly
from gossamer.integrations.checkpoint import read

History = list[tuple[str, dict[str, Any]]]  # events, as rank 0 told them
RANKS = "number of ranks"
STATE = ("model", "optimizer", "done", "drawn", "seconds", "nic", "sent", "handed")
NAME = re.compile(r"step(\d+)-rank(\d+)\.pt")
CHECKPOINT = files.Kind("checkpoint of a run", (b"X\x05\0\0\0facts",))  # the first key of the table that is pickled


def saved_steps(folder: Path, rank: int) -> list[int]:
    """The steps of which a rank has a checkpoint."""
    found = [NAME.fullmatch(p.name) for p in folder.glob("step*.pt")]
    return sorted(int(m[1]) for m in found if m and int(m[2]) == rank)


def save(plan: ComparePlan, control: ControlGroup, run: RankRun, history: History) -> str:
    """Write, then rename, then remove what is older. If any rank cannot, all keep the last one; returns why.

    With it goes what the run has told so far: the record on disk may be some seconds behind when its command is killed.
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
    """Remove what a rank, or all of them, had half written when it was killed; called when it writes no more."""
    remove(files.half_written(folder, f"step*-rank{'*' if rank is None else rank}"))


def remove(paths: Iterable[Path]) -> None:
    """What a folder does not let go of stays: it takes room, and nothing else. A rank that failed here, after the others
    have agreed on what counts, would leave them waiting.
    """
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    """The disk's reason, such as being full: torch's writer stumbles over it, and tells of that instead."""
    reason = error if isinstance(error, OSError) else error.__context__
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else plainly(error)


def restore(plan: ComparePlan, control: ControlGroup, run: RankRun) -> History:
    """Go on from the last step of which every rank has a checkpoint; returns what the run told up to there."""
    folder, rank = Path(plan.checkpoint), dist.get_rank()
    path = folder / f"step{_common_step(folder, control)}-rank{rank}.pt"
    saved, why = dict[str, Any](), ""
    try:
        saved = _checked(path, plan, run)
    except CheckpointError as error:
        why = str(error)
    for other, reason in enumerate(control.texts(why[:1500])):  # nobody changes anything where one cannot go on
        if reason:
            raise CheckpointError(why or f"{control.named(other)}: {reason}")
    try:
        run.load_state_dict(saved["state"])
    except Exception as error:
        said = str(error) if isinstance(error, GossamerError) else plainly(error)
        raise CheckpointError(f"{path} does not fit this run: {said}") from None
    return saved["history"]


def _common_step(folder: Path, control: ControlGroup) -> int:
    """The last step that all ranks have; an error says who has none, or that there were more ranks, or fewer."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = saved_steps(folder, rank)
    ranks = _ranks_of(folder / f"step{mine[-1]}-rank{rank}.pt") if mine else None
    everyone = [json.loads(text) for text in control.texts(json.dumps({"steps": mine, "ranks": ranks}))]
    before = next((each["ranks"] for each in everyone if each["ranks"] not in (None, size)), None)
    if before is not None:
        raise CheckpointError(
            f"the run in {folder} was one of {before} ranks, and there are {size} now: go on with as many, or begin anew"
        )
    common = set.intersection(*(set(each["steps"]) for each in everyone))
    if not common:
        lacking = [r for r, each in enumerate(everyone) if not each["steps"]]
        who = f"rank(s) {', '.join(map(str, lacking))} have none" if lacking else "no step is there for all ranks"
        raise CheckpointError(f"nothing to resume from in {folder}: {who}")
    return max(common)


def _ranks_of(path: Path) -> int | None:
    """How many ranks wrote such checkpoints; None where it does not say, which is found out when all of it is read."""
    with suppress(Exception):
        return int(torch.load(path, weights_only=True, mmap=True)["facts"][RANKS])
    return None


def _checked(path: Path, plan: ComparePlan, run: RankRun) -> dict[str, Any]:
    """What a file holds, if it is of this run."""
    try:
        saved = read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; without it the run can only begin anew") from None
    kinds = {"facts": dict, "state": dict, "history": list}
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), kind) for key, kind in kinds.items()):
        raise CheckpointError(f"{path} is no checkpoint of a run")
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
    """What must not change when a run goes on."""
    facts = {"recipe": run.origin, "workload": plan.workload, "options": plan.options, "seed": plan.seed}
    several = f", {plan.per_host} ranks a host" if plan.per_host > 1 else ""
    return facts | {"network": plan.network + several, RANKS: dist.get_world_size()}
