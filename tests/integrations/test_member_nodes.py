"""A member may be a node: two ranks under a torchrun of their own, which come, and are lost, together."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.test_members import hold
from tests.marked import Marked, wait_for
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import SGD

import gossamer
from gossamer.core.errors import AttachError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.node import NodeRanks

SCRIPT = Path(__file__).parent / "scripts" / "node_member.py"
RECIPE = "scatter(qsgd(bits=8)) + quorum_rounds(4, quorum=2)"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a node: a torchrun of two ranks."""
    mark, started = Marked(), list[Any]()

    def start(at: str, recipe: str, *shards: str, ranks: int = 2, restarts: int = 0) -> Any:
        words = [
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(restarts),
            "--monitor-interval",
            "0.2",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *words, str(SCRIPT), at, str(tmp_path), recipe]
        command += shards
        # The ranks of each attempt find one another in a store of their own.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if shards else {}
        with (tmp_path / f"log{len(started)}").open("w") as log:
            started.append(subprocess.Popen(command, env=os.environ | mark.label | own, stdout=log, stderr=log))
        return started[-1]

    yield start
    mark.end()
    for process in started:
        process.wait()


def read(folder: Path, name: str) -> Any:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() and path.read_text() else None


@pytest.mark.gang
@pytest.mark.slow
def test_a_node_is_killed_and_comes_back_and_the_other_goes_on(nodes: Callable[..., Any], tmp_path: Path) -> None:
    store = hold()
    everybody = Members(store, None, 6, least=4, node=NodeRanks(0, 2))
    logs = lambda: "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("log*"))  # noqa: E731
    first, second = (nodes(f"127.0.0.1:{store.port}", RECIPE, restarts=1) for _ in range(2))
    wait_for(lambda: all(read(tmp_path, f"sees{rank}") == [0, 1, 2, 3] for rank in range(4)), 90.0, logs)
    pid, _ = (tmp_path / "pid3").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: all(read(tmp_path, f"sees{rank}") == [0, 1] for rank in (0, 1)), 60.0, logs)
    wait_for(lambda: all(read(tmp_path, f"sees{rank}") == [0, 1, 2, 3] for rank in (0, 1)), 90.0, logs)
    everybody.store.raise_flag("until", "30")
    assert (first.wait(60.0), second.wait(60.0)) == (0, 0), logs()
    ends = [read(tmp_path, f"end{rank}") for rank in range(4)]
    assert [end["flat"] for end in ends] == [ends[0]["flat"]] * 4
    assert [end["began"] > 0 for end in ends] == [False, False, True, True]
    assert ends[0]["seen"] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]
    assert ends[0]["recipe"].startswith("nodes(scatter(qsgd(bits=8")
    assert {end["inside"] for end in ends} == {2}


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "shards"), [("qsgd", False), ("topk", True)], ids=["whole models", "shards"])
def test_a_node_is_killed_under_averages_at_every_step(
    nodes: Callable[..., Any], tmp_path: Path, recipe: str, shards: bool
) -> None:
    if shards and torch.__version__ < "2.13":
        pytest.skip("FSDP2 trains on processors since torch 2.13")
    store = hold()
    everybody = Members(store, None, 6, least=4, node=NodeRanks(0, 2))
    logs = lambda: "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("log*"))  # noqa: E731
    at, words = f"127.0.0.1:{store.port}", ["shards"] if shards else []
    first, second = (nodes(at, recipe, *words, restarts=1) for _ in range(2))

    def see(of: list[int], there: list[int]) -> bool:
        """Ranks see those with the same shard, or all."""
        return all(read(tmp_path, f"sees{r}") == [p for p in there if not shards or p % 2 == r % 2] for r in of)

    wait_for(lambda: see([0, 1, 2, 3], [0, 1, 2, 3]), 90.0, logs)
    pid, _ = (tmp_path / "pid3").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    wait_for(lambda: see([0, 1], [0, 1]), 60.0, logs)
    wait_for(lambda: see([0, 1], [0, 1, 2, 3]), 90.0, logs)
    wait_for(lambda: int((tmp_path / "pid3").read_text().split()[1]) > 0, 60.0, logs)
    came = int((tmp_path / "pid3").read_text().split()[1])
    everybody.store.raise_flag("until", str(came + 600))
    assert (first.wait(90.0), second.wait(90.0)) == (0, 0), logs()
    ends = [read(tmp_path, f"end{rank}") for rank in range(4)]
    assert [end["flat"] for end in ends] == [ends[0]["flat"]] * 4
    assert [end["began"] > 0 for end in ends] == [False, False, True, True]
    assert {end["step"] for end in ends} == {ends[0]["step"]}


def test_nodes_are_named_by_their_members_and_by_nothing_else() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    for given, told in (("members", "members of one rank each: leave nodes out"), (2, "the number of nodes changes")):
        where: Any = given
        with pytest.raises(AttachError, match=told):
            gossamer.attach(model, optimizer, "decoupled_diloco(4)", Members(HashStore(), 0, 2), nodes=where)
    with pytest.raises(AttachError, match=r"nodes='members' is for gossamer\.members\(\)"):
        gossamer.attach(model, optimizer, "qsgd", nodes="members")
