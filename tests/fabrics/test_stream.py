"""A program's way to a lane's stream and back, without a GPU: what is asked of streams and events, and in which order."""

from typing import Any

import pytest
import torch

from gossamer.core import verbs
from gossamer.fabrics.torch import TorchFabric


class Stream:
    """Takes what is asked of a stream, and writes it down."""

    def __init__(self, device: Any = None) -> None:
        self.said = list[str]()

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        self.said.append(event)


def test_a_cpu_model_trains_in_a_process_that_has_touched_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.11 and 3.12 nothing started there: a generator's type was subscripted at run time."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    fabric = TorchFabric()
    assert fabric.run(verbs.all_reduce(torch.ones(2))).tolist() == [1.0, 1.0]
    fabric.close()
