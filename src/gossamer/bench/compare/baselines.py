"""Baselines: training without gossamer, under the same conditions as the recipes."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

WARM, PERIOD = 4, 8  # post-local SGD: dense steps at the start, then local steps between two averages
DECENT = "decent-dp"


class Baseline:
    """Each rank trains alone and sends nothing: a lower bound for the step time."""

    says_where_time_goes: ClassVar[bool] = True  # a rank that trains alone never waits

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
        self.model, self.optimizer, self.group = model, optimizer, group
        self.forward = self.wrapped()

    def wrapped(self) -> nn.Module:
        """The module whose forward pass trains."""
        return self.model

    def begin_step(self) -> None:
        self.optimizer.zero_grad()

    def end_step(self) -> None:
        self.optimizer.step()

    def ends_round(self, step: int) -> bool:
        """True if this is the last step of a round."""
        return True

    def quiesce(self) -> None:
        """Wait for what is in flight."""

    def sent(self, steps: int) -> int | None:
        """Bytes over one rank's link by formula, since baselines keep no ledger; None where there is no formula."""
        return 0

    def _ring(self) -> int:
        """Bytes that one dense ring all-reduce sends over one link."""
        dense = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        size = dist.get_world_size()
        return 2 * (size - 1) * dense // size


class Ddp(Baseline):
    """PyTorch's DistributedDataParallel without a comm hook."""

    says_where_time_goes = False
    bucket_mb: ClassVar[float | None] = None

    def wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.model, process_group=self.group, bucket_cap_mb=self.bucket_mb)

    def sent(self, steps: int) -> int | None:
        return self._ring() * steps


class DdpHalf(Ddp):
    """DDP with PyTorch's own fp16 hook."""

    def wrapped(self) -> DistributedDataParallel:
        made = super().wrapped()
        made.register_comm_hook(self.group, default_hooks.fp16_compress_hook)
        return made

    def sent(self, steps: int) -> int | None:
        return self._ring() * steps // 2


class DdpPowerSgd(Ddp):
    """DDP with PyTorch's own PowerSGD hook, rank 4.

    All gradients go in one bucket, since the hook fails with several.
    """

    bucket_mb = 4096

    def wrapped(self) -> DistributedDataParallel:
        made = super().wrapped()
        state = powerSGD_hook.PowerSGDState(self.group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return made

    def sent(self, steps: int) -> int | None:
        return None  # the hook counts only the matrices


class DdpPostLocal(Ddp):
    """PyTorch's own post-local SGD: some dense steps, then local steps, with an average of the models every eight.

    The hook leaves gradients local after the first steps, and the averager averages the models.
    """

    def wrapped(self) -> DistributedDataParallel:
        made = super().wrapped()
        state = post_localSGD_hook.PostLocalSGDState(self.group, None, WARM, post_local_gradient_allreduce=False)
        made.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        self.averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARM, process_group=self.group)
        return made

    def end_step(self) -> None:
        super().end_step()
        self.averager.average_parameters(self.model.parameters())

    def ends_round(self, step: int) -> bool:
        first = WARM + 1  # the first local step is averaged, and every PERIOD after it
        return step < first or (step - first) % PERIOD == 0

    def sent(self, steps: int) -> int | None:
        averages = -(-max(steps - WARM, 0) // PERIOD)
        return self._ring() * (min(steps, WARM) + averages)


class Decent(Baseline):
    """decent-dp: steps its own optimizers inside the backward pass, and mixes models with neighbours."""

    says_where_time_goes = False

    def wrapped(self) -> Any:
        wrapper = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
        importlib.import_module("loguru").logger.disable("decent_dp")
        # `_local_world_size`: each rank counts as one machine, as in a lab.
        return wrapper(self.model, self._optimizer_of, topology="ring", _local_world_size=1)

    def _optimizer_of(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        return type(self.optimizer)([p for _, p in named], **self.optimizer.defaults)  # type: ignore[call-arg]

    def begin_step(self) -> None:
        self.forward.train()

    def end_step(self) -> None:
        pass

    def sent(self, steps: int) -> int | None:
        return None

    def quiesce(self) -> None:
        for message in cast(Any, self.forward)._comm_ops:  # sent at the end of a step, mixed in at the next one
            if message is not None:
                message.wait()


KINDS: dict[str, type[Baseline]] = {
    "compute": Baseline,
    "ddp": Ddp,
    "ddp-fp16": DdpHalf,
    "ddp-powersgd": DdpPowerSgd,
    "ddp-postlocal": DdpPostLocal,
    DECENT: Decent,
}
BASELINES = tuple(KINDS)


def has_decent() -> bool:
    return importlib.util.find_spec("decent_dp") is not None


def usable() -> Iterator[str]:
    """Baselines whose packages are installed."""
    return (name for name in BASELINES if name != DECENT or has_decent())
