"""Check a lost peer: a rank ends within a step. The others must get an error in time that names it."""

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import gossamer
from gossamer.bench.compare.gpu.check_spec import CheckSpec, Placement
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.compare.gpu.recipes import batches_of, net, short, step
from gossamer.core.errors import PeerError

FATAL = 3  # the step in which the last rank ends
PATIENT, SLACK = 2.0, 5.0  # an error is too late after PATIENT deadlines and SLACK seconds
Tell = Callable[[Finding], None]


def check(spec: CheckSpec, placement: Placement, subject: str, tell: Tell) -> Finding:
    """End the last rank within a step, and check the error of the others."""
    sizes, doomed = spec.sizes, placement.size - 1
    torch.manual_seed(0)
    model = net(sizes.width).to(placement.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = batches_of(placement.rank).to(placement.device)
    error, began = "", 0.0
    with gossamer.attach(model, optimizer, short(subject), deadline=sizes.deadline) as comm:
        try:
            while comm.step < 2 * FATAL:
                if comm.step == FATAL and placement.rank == doomed:
                    tell(Finding(spec.title, subject, "left out", "it ended within a step, as planned"))
                    model[1].register_forward_hook(_ends_in_backward)
                began = time.monotonic()
                step(model, optimizer, comm, batches)
        except PeerError as told:
            error = str(told)
    return _judged(spec, subject, doomed, error, time.monotonic() - began)


def _ends_in_backward(module: object, inputs: object, output: Tensor) -> None:
    output.register_hook(_end)


def _end(gradient: Tensor) -> None:
    sys.stdout.flush()
    os._exit(0)


def _judged(spec: CheckSpec, subject: str, doomed: int, error: str, seconds: float) -> Finding:
    title, deadline = spec.title, spec.sizes.deadline
    numbers = {"seconds": round(seconds, 1), "deadline": deadline}
    if not error:
        return Finding(
            title, subject, "failed", f"rank {doomed} ended in step {FATAL}, and this rank got no error", numbers
        )
    if f"rank {doomed}" not in error and f"ranks [{doomed}]" not in error and f"rank(s) [{doomed}]" not in error:
        return Finding(title, subject, "failed", f"the error does not name rank {doomed}: {error}", numbers)
    if seconds > PATIENT * deadline + SLACK:
        says = f"the error came after {seconds:.0f} s, with a deadline of {deadline:g} s: {error}"
        return Finding(title, subject, "failed", says, numbers)
    return Finding(title, subject, "passed", f"after {seconds:.1f} s: {error}", numbers)
