"""Where a worker's state lies. No GPU is needed to see it: torch's "meta" device stands for one."""

from collections.abc import Iterator

import pytest
import torch
from tests.worker import fleet
from tests.worker.gym import Odd, Worker, make, on_all, pull, train
from torch import Tensor

from gossamer.worker import checkpoint


def far() -> torch.nn.Module:
    return Odd().to("meta")


def remembered(worker: Worker) -> Iterator[tuple[str, Tensor]]:
    """All that a worker keeps, what is on its way included."""
    for channel in worker.channels:
        for role, state in channel.states.items():
            yield from ((f"{role}/{key}", tensor) for key, tensor in state.items())
    yield from worker.control.items()
    landed, arrived = worker.pending()
    yield from (("landed", mean) for mean in landed or [])
    yield from (("arrived", wire) for wires in arrived or [] for wire in wires)


@pytest.mark.parametrize("recipe", fleet.ALL)
def test_a_checkpoint_that_was_loaded_to_the_host_goes_to_the_parameters_device(recipe: str) -> None:
    """`torch.load(map_location="cpu")`, or a folder. Numbers stay on the host, which asks for them at each step."""
    near = make(recipe, 3)
    train(near, pull, 5)
    on_all(near, Worker.quiesce)
    for old, new in zip(near, make(recipe, 3, far), strict=True):
        checkpoint.load(new.worker, checkpoint.save(old.worker))
        for key, tensor in remembered(new.worker):
            assert tensor.device.type == ("meta" if tensor.dim() else "cpu"), key
