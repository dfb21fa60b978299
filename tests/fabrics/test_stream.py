"""A program's way to a lane's stream and back, without a GPU: what is asked of streams and events, and by whom."""

import threading
from typing import Any

import pytest
import torch
from tests.fabrics import streams
from tests.fabrics.streams import GPU, Cuda

from gossamer.core import verbs
from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.torch import TorchFabric


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return streams.install(monkeypatch)


def where() -> Program[Any]:
    return (yield Compute(lambda: (threading.current_thread().name, torch.cuda.current_stream(GPU).device), "look"))


def test_a_cpu_model_trains_in_a_process_that_has_touched_cuda(cuda: Cuda) -> None:
    """On Python 3.11 and 3.12 nothing started there: a generator's type was subscripted at run time."""
    fabric = TorchFabric()
    assert fabric.run(verbs.all_reduce(torch.ones(2))).tolist() == [1.0, 1.0]
    fabric.close()
    assert cuda.devices == []


def test_every_lane_stands_on_the_device_of_the_tensors(cuda: Cuda) -> None:
    """Without `torch.cuda.set_device` in the loop, lanes worked on GPU 0, ordered by nothing."""
    fabric = TorchFabric(device=GPU)
    fabric.open_lane("other")
    for _ in range(2):
        for lane in ("comm", "other"):
            assert fabric.join(fabric.start(where(), lane=lane)) == (f"gossamer-{lane}", GPU)
    fabric.close()
    assert cuda.devices == [("gossamer-comm", GPU), ("gossamer-other", GPU)]


def test_a_tensor_of_another_device_is_refused_with_its_device(cuda: Cuda) -> None:
    fabric = TorchFabric(device=GPU)
    with pytest.raises(ValueError, match="AllReduce of a tensor on cpu, in a lane for tensors on cuda:3"):
        fabric.run(verbs.all_reduce(torch.ones(1)))
    fabric.close()
