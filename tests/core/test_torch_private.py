"""Torch's private names: each is in one module, and one that is missing is told when gossamer is imported."""

import re
from pathlib import Path

import pytest
import torch

import gossamer
from gossamer.core.torch_private import private_name

FILES = {p: p.read_text() for p in Path(gossamer.__file__).parent.rglob("*.py")}
NAMES = {
    name for text in FILES.values() for name in re.findall(r'private_name\([^()]+, "(_[a-z]\w+)"', text, re.IGNORECASE)
}


def test_each_private_name_is_in_one_module() -> None:
    assert "_current_graph_task_id" in NAMES
    for name in NAMES - {"__code__", "_no_such_thing"}:
        assert len([p for p, text in FILES.items() if re.search(rf"\b{name}\b", text)]) == 1, name


def test_no_other_module_reaches_into_torch_s_extension() -> None:
    reaching = [p.name for p, text in FILES.items() if re.search(r"torch\._C\.(?!_distributed_c10d)\w+", text)]
    assert reaching in ([], ["torch_private.py"])  # its example


@pytest.mark.parametrize("owner", [torch._C, torch.amp.GradScaler])
def test_a_name_that_is_gone_is_told_in_one_sentence(owner: object) -> None:
    with pytest.raises(
        ImportError, match=r"^torch \S+ has no '\S+\._gone', by which gossamer sees; use another release"
    ):
        private_name(owner, "_gone", "sees")
