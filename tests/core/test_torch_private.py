"""Torch's private names: each is in one module, and one that is missing is told when gossamer is imported."""

import re
import subprocess
import sys
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


GONE = """
import sys
sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"] = None
from torch import nn
from gossamer.integrations.held_model import WholeModel, held
assert isinstance(held(nn.Linear(2, 2)), WholeModel)
import gossamer.integrations.fsdp
"""


def test_a_module_of_fsdp2_that_is_gone_is_told_to_those_who_shard_alone() -> None:
    program = f"import sys, torch.distributed.fsdp; sys.path[:0] = {sys.path!r}\n{GONE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: torch {torch.__version__} has no 'torch.distributed.fsdp._fully_shard._fsdp_common'"
    )
    assert last.endswith("use another release of torch, or a newer gossamer")
