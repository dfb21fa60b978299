"""What averages or shards a model by itself, as people hand it to a trainer."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's, which compiles before it begins: gossamer knows it by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        return self.module(*args, **options)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "DeepSpeed": DeepSpeedEngine,
}
