"""Measures what a step of the user's own script costs on one rank: `gossamer.bench.compare.script_cost SPEC`, in JSON.

The script runs unchanged, alone, for a few steps. When a gradient comes, when backward begins and ends, and when the
optimizer steps is seen by hooks; what is left of a step is its forward pass, data included.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer.bench.compare.parent_death import program
from gossamer.bench.compare.script_launch import ScriptError
from gossamer.bench.compare.script_observer import Enough
from gossamer.bench.compare.script_rank import run_as_main
from gossamer.core.process_exit import exit_in_order
from gossamer.integrations.metrics import Meter
from gossamer.integrations.run_observer import VARIABLE, ObserverSlot, RunObserver
from gossamer.planning.measured_model import dtype_of, frozen_bytes
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.step_moments import StepMoments, measured_on, medians, now
from gossamer.recipe import Recipe
from gossamer.runtime.optimizer_state import kept_so_far

WARM, STEPS = 3, 8
PATIENCE = 600.0  # seconds that the script has for all of it


class CostObserver(RunObserver):
    """Notes the moments of each step of one rank that trains alone."""

    deadline = 120.0

    def __init__(self) -> None:
        self.attached = 0
        self.params = dict[str, Tensor]()
        self.frozen = 0
        self.optimizer: Any = None
        self.device = torch.device("cpu")
        self.steps = list[StepMoments]()
        self._now: StepMoments | None = None  # the step under way

    def take(self, given: "Recipe | str | None", ordered: str) -> None:
        self.attached += 1

    def begin(self, meter: Meter, kind: str) -> None:
        self._seen = register_module_forward_pre_hook(self._runs)
        self.params = {name: param.parameter for name, param in meter.worker.params.items()}
        for name, parameter in self.params.items():
            parameter.register_post_accumulate_grad_hook(self._arrived(name))
        if self.params:
            self.device = next(iter(self.params.values())).device
            self._now = StepMoments(self.device, now(self.device))

    def _runs(self, module: nn.Module, inputs: Any) -> None:
        """In the first step, note what the model holds frozen: it is the module that has all others."""
        self.frozen = max(self.frozen, frozen_bytes(module))

    def stepped(self) -> None:
        pass

    def told(self, name: str, value: float) -> None:
        pass

    def _arrived(self, name: str) -> Any:
        def note(parameter: Tensor) -> None:
            if self._now is not None:
                self._now.note(name)

        return note

    def before_step(self, optimizer: Any, *of: Any) -> None:
        self.optimizer = optimizer

    def after_step(self, *of: Any) -> None:
        if self._now is None or not self._now.has_backward:
            return
        self._now.finish()
        self.steps.append(self._now)
        self._seen.remove()
        self._now = StepMoments(self.device, self._now.end)
        if len(self.steps) == WARM + STEPS:
            raise Enough

    @contextmanager
    def watching_backward(self) -> Generator[None]:
        """The last backward pass of a step is the one whose gradients are averaged; those before it count as forward.

        Reentrant activation checkpointing runs a pass within a pass for each of its segments: they are parts of the outer one.
        """
        backward, is_within = torch.autograd.backward, False

        def timed(*of: Any, **more: Any) -> Any:
            nonlocal is_within
            if self._now is None or is_within:
                return backward(*of, **more)
            self._now.begin_backward()
            is_within = True
            try:
                out = backward(*of, **more)
            finally:
                is_within = False
            self._now.end_backward()
            return out

        torch.autograd.backward = timed
        try:
            yield
        finally:
            torch.autograd.backward = backward

    def result(self) -> dict[str, Any]:
        """Medians over the steps after the first ones."""
        return {
            "attached": self.attached,
            "steps": len(self.steps),
            "shapes": {n: list(p.shape) for n, p in self.params.items()},
            "dtype": dtype_of(self.params.values()),
            "momenta": 0 if self.optimizer is None else kept_so_far(self.optimizer),
            "frozen": self.frozen,
            **(medians(self.steps[WARM:], self.params) if len(self.steps) > WARM else {}),
            "device": self.device.type,
        }


def measure_script(script: Path, arguments: list[str]) -> ModelCost:
    """Run a script alone for a few steps, in a process of its own, and return what its step costs."""
    if not script.is_file():
        raise ScriptError(f"there is no script {script}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cost.json"
        spec = json.dumps({"script": str(script.absolute()), "arguments": arguments, "out": str(out)})
        command = program("gossamer.bench.compare.script_cost", spec)
        try:
            done = subprocess.run(
                command, env=_alone(), capture_output=True, text=True, timeout=PATIENCE, check=False, errors="replace"
            )
        except subprocess.TimeoutExpired:
            raise ScriptError(f"{script.name} did not take {WARM + STEPS} steps within {PATIENCE:.0f} s") from None
        found = json.loads(out.read_text()) if out.exists() else {}
    _refuse(script.name, found, done)
    return ModelCost(
        shapes={n: tuple(s) for n, s in found["shapes"].items()},
        shares=found["shares"],
        forward=found["forward"],
        backward=found["backward"],
        optimizer=found["optimizer"],
        momenta=found["momenta"],
        dtype=found["dtype"],
        frozen=found["frozen"],
        name=script.name,
        source=f"measured in {script.name}, one rank alone {measured_on(torch.device(found['device']))}",
    )


def _alone() -> dict[str, str]:
    """The environment of one rank, as a launcher sets it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}


def _refuse(name: str, found: dict[str, Any], done: "subprocess.CompletedProcess[str]") -> None:
    steps = found.get("steps", 0)
    if steps == WARM + STEPS and found["attached"] == 1:
        return
    last = " ".join((done.stderr.strip().splitlines() or ["it printed no error"])[-1].split())[:300]
    if found.get("attached", 0) > 1:
        raise ScriptError(f"{name} attaches twice, and a plan is of one model: put all models in one module")
    if not found.get("attached"):
        why = "ended" if done.returncode == 0 else f"failed ({last})"
        raise ScriptError(
            f"{name} {why} and never attached: put comm = gossamer.attach(model, optimizer) before its training loop"
        )
    why = "" if done.returncode == 0 else f": {last}"
    raise ScriptError(
        f"{name} took {steps} of {WARM + STEPS} steps{why}; a plan needs them all, so let it train longer"
    )


def main(text: str) -> None:
    spec = json.loads(text)
    torch.set_num_threads(1)
    os.environ.setdefault(VARIABLE, "allreduce")
    observer = CostObserver()
    ObserverSlot.observer = observer
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    try:
        with observer.watching_backward():
            run_as_main(spec["script"], spec["arguments"])
    finally:
        Path(spec["out"]).write_text(json.dumps(observer.result()))
    exit_in_order(0)


if __name__ == "__main__":
    main(sys.argv[1])
