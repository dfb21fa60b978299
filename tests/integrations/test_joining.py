"""What a rank that comes to others compares with them."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError
from gossamer.fabrics.liveness.store import LONGEST, SharedStore
from gossamer.integrations import joining


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
