"""What every rank of a trial runs: `python -m gossamer.trial.rank PLAN.json`. Rank 0 tells the launcher what happens."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer import kernels, workloads
from gossamer.core.errors import CheckpointError, GossamerError
from gossamer.lab import in_lab
from gossamer.record import Step
from gossamer.trial.contender import Contender, mean_over_ranks
from gossamer.trial.plan import MARK, Plan


def tell(event: str, **facts: Any) -> None:
    """One event, one line; written at once, so that a launcher that is interrupted knows how far we came."""
    if dist.get_rank() == 0:
        sys.stdout.write(MARK + json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()


def main(path: str) -> int:
    """Take part in a trial; the exit code is 1 if a contender failed."""
    plan = Plan.read(Path(path))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=plan.deadline))
    try:
        return _run(plan)
    except GossamerError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        return 1


def _run(plan: Plan) -> int:
    workload = workloads.get(plan.workload, seed=plan.seed, **plan.options)
    kernels.warmup()
    parameters = sum(p.numel() for p in workload.model().parameters())
    tell("begin", parameters=parameters, size=dist.get_world_size(), in_lab=in_lab())
    contenders = dict[str, Contender]()
    failed = 0
    for name, kind in plan.contenders.items():
        made = _together(name, lambda: _make(plan, workload, name, kind, contenders))  # noqa: B023
        failed += not made
    failed += _rounds(plan, contenders)
    for c in contenders.values():
        c.close()
    dist.barrier()
    tell("done")
    return 1 if failed else 0


def _make(plan: Plan, workload: workloads.Workload, name: str, kind: str, into: dict[str, Contender]) -> None:
    contender = Contender(name, kind, workload, plan.seed, plan.deadline, plan.measure_every)
    into[name] = contender
    if plan.resume:
        _restore(plan, contender)
    tell("contender", run=name, recipe=contender.recipe, done=contender.steps_done)
    quality = contender.quality()
    tell(
        "evaluation",
        run=name,
        step=contender.steps_done,
        seconds=contender.clock.seconds,
        sent=contender.sent(),
        quality=quality,
    )


def _rounds(plan: Plan, contenders: dict[str, Contender]) -> int:
    """Turns, until all have had their steps; then on, for those that chase the baseline's quality."""
    lower, target, failed = workloads.find(plan.workload).lower_is_better, None, 0
    reached, waiting = dict[str, float](), list(contenders)
    while waiting:
        for name in list(waiting):
            contender = contenders[name]
            steps = min(plan.chunk, _limit(plan, name) - contender.steps_done)
            if steps > 0 and not _together(name, lambda: _turn(contender, steps, reached)):  # noqa: B023
                failed += 1
                waiting.remove(name)
                continue
            _save(plan, contender)
            if name == plan.baseline and contender.steps_done >= plan.steps:
                target = reached[name]
            if _finished(plan, contender, contenders, target, reached.get(name), lower):
                waiting.remove(name)
                _finish(contender)
    return failed


def _limit(plan: Plan, name: str) -> int:
    chases = plan.baseline and name not in (plan.baseline, "compute")
    return int(plan.steps * plan.patience) if chases else plan.steps


def _finished(
    plan: Plan,
    contender: Contender,
    everybody: dict[str, Contender],
    target: float | None,
    quality: float | None,
    lower: bool,
) -> bool:
    if contender.steps_done >= _limit(plan, contender.name):
        return True
    if plan.baseline not in everybody or contender.steps_done < plan.steps:
        return False
    if target is None or quality is None:
        return False
    reached = quality <= target if lower else quality >= target
    mine = torch.tensor([float(contender.clock.seconds)], dtype=torch.float64)
    dist.broadcast(mine, 0)  # clocks differ by a hair between ranks, decisions must not
    base = torch.tensor([everybody[plan.baseline].clock.seconds], dtype=torch.float64)
    dist.broadcast(base, 0)
    return reached or bool(mine > base)


def _turn(contender: Contender, steps: int, reached: dict[str, float]) -> None:
    recipe = contender.recipe

    def told(step: Step) -> None:
        tell("step", run=contender.name, **asdict(step))

    contender.turn(steps, told)
    reached[contender.name] = contender.quality()
    tell(
        "evaluation",
        run=contender.name,
        step=contender.steps_done,
        seconds=contender.clock.seconds,
        sent=contender.sent(),
        quality=reached[contender.name],
    )
    if contender.comm is not None:
        tell("residual", run=contender.name, step=contender.steps_done, norm=contender.comm.metrics()["residual_norm"])
        if contender.recipe != recipe:
            tell("decision", run=contender.name, step=contender.steps_done, text=contender.recipe)


def _finish(contender: Contender) -> None:
    own = contender.comm.worker.errors if contender.comm else {}
    # A rank's own chunks are exact under scatter, so one rank's errors tell little; all ranks measured the same names.
    errors = dict(zip(own, mean_over_ranks(*own.values()), strict=True))
    wire, handed, nic = mean_over_ranks(contender.sent(), contender.handed(), contender.clock.nic)
    tell(
        "end",
        run=contender.name,
        wire_bytes=int(wire),
        logical_bytes=int(handed),
        nic_bytes=int(nic) if in_lab() else None,
        layer_errors=errors,
    )


def _together(name: str, do: Callable[[], None]) -> bool:
    """Do something all ranks do; if it fails on any, it counts as failed on all, and the others go on."""
    error: BaseException | None = None
    try:
        do()
    except Exception as caught:
        error = caught
    flag = torch.tensor([int(error is not None)])
    dist.all_reduce(flag)
    if not int(flag):
        return True
    texts: list[Any] = [None] * dist.get_world_size()
    mine = f"{type(error).__name__}: {error}" if error else ""
    gather_texts(texts, mine)
    tell("failed", run=name, error=next(f"rank {r}: {t}" for r, t in enumerate(texts) if t))
    return False


def gather_texts(into: list[Any], mine: str) -> None:
    """Every rank's text, as bytes: nothing is pickled."""
    data = torch.zeros(4096, dtype=torch.uint8)
    raw = mine.encode()[:4096]
    data[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else data[:0]
    rows = [torch.zeros_like(data) for _ in into]
    dist.all_gather(rows, data)
    for r, row in enumerate(rows):
        into[r] = bytes(row.numpy()).rstrip(b"\0").decode(errors="replace")


def _file(plan: Plan) -> Path:
    return Path(plan.checkpoint) / f"rank{dist.get_rank()}.pt"


def _save(plan: Plan, contender: Contender) -> None:
    """Write, then rename: whatever happens, a whole checkpoint is there."""
    if not plan.checkpoint:
        return
    last = contender.steps_done >= plan.steps
    if contender.steps_done % plan.checkpoint_every and not last:
        return
    final = _file(plan)
    final.parent.mkdir(parents=True, exist_ok=True)
    half = final.with_suffix(".part")
    try:
        torch.save(contender.state_dict(), half)
        os.replace(half, final)
    except (OSError, RuntimeError) as error:
        half.unlink(missing_ok=True)
        print(
            f"rank {dist.get_rank()}: no checkpoint at step {contender.steps_done}: {error}; the last one stands",
            file=sys.stderr,
        )


def _restore(plan: Plan, contender: Contender) -> None:
    if not _file(plan).exists():
        raise CheckpointError(f"nothing to resume from: {_file(plan)} is not there; run without --resume first")
    contender.load_state_dict(torch.load(_file(plan), weights_only=True))


if __name__ == "__main__":
    began = time.time()
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
