"""Check streams: work on two streams must keep its order, and a copy must overlap with computing."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement, Sizes
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.compare.gpu.kernels import keeps_busy
from gossamer.bench.kernels import event_seconds
from gossamer.core.verbs import Compute, Handle, Program
from gossamer.fabrics.torch.fabric import TorchFabric

NUMBERS = 1_000_003  # elements; large enough to be read before they are written, if streams are not ordered


def check(spec: CheckSpec, placement: Placement, subject: str) -> Finding:
    says, numbers = SUBJECTS[subject](spec.sizes, placement.device)
    outcome = "measured" if numbers else "failed" if says else "passed"
    return Finding(spec.title, subject, outcome, says, numbers)


def overlap(sizes: Sizes, device: torch.device) -> tuple[str, dict[str, float]]:
    """Overlap of a copy from the host with computing on another stream, as a share of the shorter one."""
    host = torch.ones(sizes.copied, dtype=torch.uint8, device="cpu").pin_memory()
    there = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    busy = keeps_busy(sizes, device)

    def copy() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            there.copy_(host, non_blocking=True)

    def both() -> None:
        copy()
        busy()
        main.wait_stream(side)

    def alone() -> None:
        copy()
        main.wait_stream(side)

    for do in (busy, alone):
        do()
    computing, copying, together = (min(event_seconds(do, device) for _ in range(3)) for do in (busy, alone, both))
    hidden = (computing + copying - together) / min(computing, copying)
    says = f"{max(0.0, min(1.0, hidden)):.0%} of the shorter of a host copy and a computation was hidden"
    return says, {
        "computing_ms": round(computing * 1e3, 3),
        "copying_ms": round(copying * 1e3, 3),
        "together_ms": round(together * 1e3, 3),
    }


def reads_what_was_written(sizes: Sizes, device: torch.device) -> tuple[str, dict[str, float]]:
    """Check that a comm thread reads a tensor only after the loop's stream has written it."""
    busy, fabric = keeps_busy(sizes, device), TorchFabric(device=device)
    x = torch.zeros(NUMBERS, device=device, dtype=torch.float32)
    busy()
    x.add_(1.0)
    return _told(
        fabric, fabric.start(_copied(x)), "a comm thread read a tensor before the loop's stream had written it"
    )


def waits_for_comm_thread(sizes: Sizes, device: torch.device) -> tuple[str, dict[str, float]]:
    """Check that the loop's stream reads a tensor only after a comm thread has written it."""
    busy, fabric = keeps_busy(sizes, device), TorchFabric(device=device)
    x = torch.zeros(NUMBERS, device=device, dtype=torch.float32)

    def late() -> Tensor:
        busy()
        return x.add_(1.0)

    return _told(
        fabric, fabric.start(_does(late)), "the loop's stream read a tensor before a comm thread had written it"
    )


def keeps_memory(sizes: Sizes, device: torch.device) -> tuple[str, dict[str, float]]:
    """Check that memory freed by the loop is not reused before a comm thread has read it."""
    busy, fabric = keeps_busy(sizes, device), TorchFabric(device=device)
    x = torch.ones(NUMBERS, device=device, dtype=torch.float32)
    handle = fabric.start(_late_copy(x, busy))
    del x
    others = [torch.full((NUMBERS,), 7.0, device=device, dtype=torch.float32) for _ in range(4)]
    told = _told(fabric, handle, "a comm thread read memory that had been reused")
    del others
    return told


def _told(fabric: TorchFabric, handle: Handle[Tensor], otherwise: str) -> tuple[str, dict[str, float]]:
    """What is wrong if a tensor of ones does not come back, or nothing; the fabric is closed."""
    total = float(fabric.join(handle).double().sum())
    fabric.close()
    return "" if total == NUMBERS else f"{otherwise}: {total:g} where {NUMBERS} was right", {}


def _does(do: Callable[[], Tensor]) -> Program[Tensor]:
    return (yield Compute(do, "write"))


def _copied(x: Tensor) -> Program[Tensor]:
    return (yield Compute(x.clone, "read"))


def _late_copy(x: Tensor, busy: Callable[[], object]) -> Program[Tensor]:
    yield Compute(busy, "be late")
    return (yield Compute(x.clone, "read"))


SUBJECTS: dict[str, Callable[[Sizes, torch.device], tuple[str, dict[str, float]]]] = {
    "a comm thread reads after the loop has written": reads_what_was_written,
    "the loop reads after a comm thread has written": waits_for_comm_thread,
    "memory is kept until both streams are done with it": keeps_memory,
    "a copy overlaps with computing": overlap,
}
