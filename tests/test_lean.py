"""What stands in for torch's compiler in commands that tests start is enough to train with."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

LEAN = Path(__file__).parent / "lean" / "sitecustomize.py"


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_steps_and_a_group_ends_without_torchs_compiler(
    make: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)  # in the end both are as before
    monkeypatch.delitem(vars(torch), "_dynamo", raising=False)
    runpy.run_path(str(LEAN))
    stand_in = sys.modules["torch._dynamo"]
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = make(model.parameters())  # pyright: ignore[reportCallIssue]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not torch.equal(model.weight, before)
    assert sys.modules["torch._dynamo"] is stand_in
