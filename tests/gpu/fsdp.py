"""FSDP2 on the pretended device: `fully_shard` itself, so that the streams and events are torch's own.

Its collectives inside a replica are computed by gloo, and noted as reads and writes of the stream on which FSDP2 calls them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.clocks import current_stream
from tests.gpu.diary import lock, place
from tests.gpu.memory import Use
from tests.gpu.rules import Rules
from tests.gpu.tensors import Cuda
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

REPLICAS = 2


def install() -> None:
    """Put FSDP2 on the device, in this process."""
    # A DTensor is where its shard is; torch asks the C++ side, which has not heard of the pretended device.
    made: Any = DTensor
    made.device = property(lambda x: x._local_tensor.device)
    made.is_cuda = property(lambda x: x._local_tensor.is_cuda)
    made.is_cpu = property(lambda x: x._local_tensor.is_cpu)
    # Gathered parameters keep their memory: a storage of the device cannot be cut to nothing and made anew.
    private: Any = _fsdp_param
    private.alloc_storage = private.free_storage = _nothing
    autograd: Any = torch.autograd
    autograd._engine_run_backward = _ruled(autograd._engine_run_backward)
    calls: Any = dist
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        setattr(calls, name, _on_device(getattr(calls, name)))


def _nothing(tensor: Tensor) -> None:
    return


def _ruled(real: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2 makes tensors in the backward pass, where torch has taken the rules off."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with Rules():
            return real(*args, **kwargs)

    return call


def _on_device(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        if not (isinstance(output_tensor, Cuda) and isinstance(input_tensor, Cuda)):
            return real(output_tensor, input_tensor, **options)
        stream, given = current_stream(output_tensor.index), input_tensor.inner.clone()
        with lock:
            use = Use(stream, stream.tick(), place())
            input_tensor.memory.read(use)
            output_tensor.memory.write(use)
        return real(output_tensor.inner, given, **options)

    return call


def mesh_of(rank: int, size: int) -> DeviceMesh:
    """Two replicas. FSDP2 and gossamer are told that these groups of gloo are for CUDA."""
    ranks = torch.arange(size, dtype=torch.int).view(REPLICAS, -1)
    groups: Any = [[dist.new_group(row.tolist(), backend="gloo") for row in rows] for rows in (ranks.t(), ranks)]
    mine = [groups[0][rank % ranks.size(1)], groups[1][rank // ranks.size(1)]]
    return DeviceMesh.from_group(mine, "cuda", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for part in model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
