"""For people who already have DistributedDataParallel: a recipe as its communication hook."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program
from gossamer.fabrics.torch import TorchFabric
from gossamer.hosts.handshake import compare, fingerprint
from gossamer.hosts.intake import Intake
from gossamer.recipe import Recipe
from gossamer.worker import Worker, checkpoint


class Hook:
    """A recipe driven by DDP's buckets. DDP regroups its buckets after the first step; our channels stay as they are."""

    def __init__(self, worker: Worker, fabric: TorchFabric, names: dict[int, str], scaler: Any) -> None:
        self.worker, self.fabric, self.names, self.scaler = worker, fabric, names, scaler
        self.intake = Intake(worker, self._launch)
        self.waiting: list[tuple[list[Tensor], list[str], Future[Tensor], Tensor]] = []

    @property
    def recipe(self) -> Recipe:
        return self.worker.recipe

    @property
    def step(self) -> int:
        return self.worker.step - 1

    def state_dict(self) -> dict[str, Any]:
        return checkpoint.save(self.worker)

    def load_state_dict(self, saved: Any) -> None:
        checkpoint.load(self.worker, saved)
        self.intake = Intake(self.worker, self._launch)

    def close(self) -> None:
        self.fabric.close()

    def take(self, bucket: Any) -> Future[Tensor]:
        """One DDP bucket is ready: keep its gradients, and promise the averaged bucket."""
        if self.fabric.size == 1:
            self.worker.step += int(bucket.is_last())
            alone: Future[Tensor] = Future()
            alone.set_result(bucket.buffer())
            return alone
        if not self.intake.arrived:
            self.worker.means = []
            self.worker.scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        names = [self.names[id(p)] for p in bucket.parameters()]
        gradients = list(bucket.gradients())
        device = bucket.buffer().device
        promise: Future[Tensor] = Future(devices=[device]) if device.type == "cuda" else Future()
        self.waiting.append((gradients, names, promise, bucket.buffer()))
        for name, gradient in zip(names, gradients, strict=True):
            self.intake.take(name, gradient)
        if len(self.intake.arrived) == len(self.intake.slots):
            waiting, self.waiting = self.waiting, []
            self.intake.reset()
            self.fabric.start(self._deliver(waiting), "deliver", self.worker.step)
        return promise

    def _launch(self, index: int, flat: Tensor) -> None:
        request = self.worker.program(index, flat, reuse=True)
        self.worker.expect(index, self.fabric.start(request.program, request.label, request.step))

    def _deliver(self, waiting: "list[tuple[list[Tensor], list[str], Future[Tensor], Tensor]]") -> Program[None]:
        """On the comm lane, after all channels: put the means where DDP looks for them, and keep the promises."""
        try:
            yield from self.worker.average_gradients()
            means, channels = self.worker.mean_by_name(), self.worker.channels
            for gradients, names, _, _ in waiting:
                for gradient, name in zip(gradients, names, strict=True):
                    gradient.copy_(means[name])
            self.worker.end_step()
            if self.worker.channels is not channels:
                self.intake = Intake(self.worker, self._launch)
            for *_, promise, buffer in waiting:  # only now may the next backward begin
                promise.set_result(buffer)
        except Exception as error:
            for *_, promise, _ in waiting:
                if not promise.done():
                    promise.set_exception(error)  # pyright: ignore[reportArgumentType]
            raise


def register(
    ddp_model: DistributedDataParallel,
    recipe: str | Recipe,
    process_group: "dist.ProcessGroup | None" = None,
    *,
    seed: int = 0,
    deadline: float = 300.0,
    scaler: Any = None,
) -> Hook:
    """Replace DDP's all-reduce by a recipe. For recipes that average gradients at every step.

    Call it once, before the first backward. Give a GradScaler as `scaler`, so that memories are free of its scale. The
    object returned holds the state: save its `state_dict()` per rank.
    """
    if not isinstance(ddp_model, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError("register takes a DistributedDataParallel model; for a plain one use gossamer.attach")
    parsed = Recipe.of(recipe)
    if not parsed.schedule.averages_gradients or not hasattr(parsed.exchange, "average"):
        raise AttachError(
            f"{parsed} is more than a gradient average; take the model out of DDP and use gossamer.attach"
        )
    if parsed.schedule.accumulate != 1 or getattr(parsed.schedule, "l1", 0.0):
        raise AttachError(
            f"{parsed.schedule} acts on the optimizer, which a DDP hook does not see; use gossamer.attach"
        )
    if any(getattr(m, "units", "gradient") == "update" for m in (parsed.memory, *(r.memory for r in parsed.rules))):
        raise AttachError(f"{parsed} follows the learning rate, which a DDP hook does not see; use gossamer.attach")
    named: dict[str, Tensor] = {n: p for n, p in ddp_model.module.named_parameters() if p.requires_grad}
    fabric = TorchFabric(process_group or ddp_model.process_group, deadline=deadline)
    idle = torch.optim.SGD(list(named.values()), lr=1.0)  # channels ask for rates; a hook has none to offer
    hook = Hook(
        Worker(parsed, named, idle, fabric.rank, fabric.size, seed),
        fabric,
        {id(p): n for n, p in named.items()},
        scaler,
    )
    if fabric.size > 1:
        fabric.run(compare(hook.worker, fingerprint(hook.worker, {"deadline": deadline}, ddp_model.module)))
    ddp_model.register_comm_hook(hook, _hook())
    return hook


def _hook() -> Callable[[Any, Any], Any]:
    """DDP insists on a plain function whose second argument is called `bucket` and has no annotation."""

    def gossamer_hook(state, bucket):  # type: ignore[no-untyped-def]  # pyright: ignore
        return state.take(bucket)

    return gossamer_hook


__all__ = ["Hook", "register"]
