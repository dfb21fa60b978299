"""What a rank that comes to others compares with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError
from gossamer.fabrics.liveness.store import LONGEST, SharedStore
from gossamer.integrations import joining
from gossamer.integrations.broadcast import hyperparameters


def test_the_set_up_of_a_model_of_many_tensors_can_be_read_by_who_comes() -> None:
    store = SharedStore(HashStore(), 0, 1)
    fabric: Any = SimpleNamespace(members=SimpleNamespace(beginning=store))
    worker: Any = SimpleNamespace(rank=0, ranks=SimpleNamespace(number=3))
    names = [f"layers.{layer}.experts.{expert}.down_proj.weight" for layer in range(64) for expert in range(400)]
    facts = {f"parameter {name}": "bfloat16 (2048, 768)" for name in names}
    assert sum(map(len, facts)) > LONGEST
    joining._post(worker, facts, fabric)
    joining._compare_with_the_first(worker, facts, fabric)
    with pytest.raises(PeerError, match=r"rank 3 has come .* its set-up differs.*\n  recipe: .*'topk' on rank\(s\) 1"):
        joining._compare_with_the_first(worker, {**facts, "recipe": "topk"}, fabric)
    store.raise_flag("setup", "anything")
    with pytest.raises(PeerError, match="holds a value that gossamer does not write"):
        joining._compare_with_the_first(worker, facts, fabric)


def test_who_comes_may_have_loaded_its_optimizer_at_a_later_step_of_a_schedule() -> None:
    store = SharedStore(HashStore(), 0, 1)
    fabric: Any = SimpleNamespace(members=SimpleNamespace(beginning=store))
    worker: Any = SimpleNamespace(rank=0, ranks=SimpleNamespace(number=3))
    model = nn.Linear(2, 1)

    def adamw(**more: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, **more)

    joining._post(worker, hyperparameters([adamw()]), fabric)
    later = adamw()
    schedule = torch.optim.lr_scheduler.OneCycleLR(later, max_lr=0.2, total_steps=10)
    later.step()
    schedule.step()
    joining._compare_with_the_first(worker, hyperparameters([later]), fabric)
    with pytest.raises(PeerError, match=r"its set-up differs.*\n  the optimizer's group 0: .*weight_decay"):
        joining._compare_with_the_first(worker, hyperparameters([adamw(weight_decay=0.5)]), fabric)
