"""Which way tensors go: by where they lie and what the group has, whatever it is called."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fabrics import streams
from tests.gang import Gang

from gossamer.core.errors import AttachError
from gossamer.fabrics.torch import nccl
from gossamer.fabrics.torch.endpoint import path
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("has", "on_cpu", "on_cuda"),
    [
        ("cpu:gloo,cuda:gloo", "gloo", "staged"),
        ("cpu:gloo", "gloo", "staged"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", None, "nccl"),
        ("cpu:mpi,cuda:mpi", None, None),
    ],
)
def test_it_follows_from_the_device_and_what_the_group_has_for_it(
    monkeypatch: pytest.MonkeyPatch, has: str, on_cpu: str | None, on_cuda: str | None
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: has)
    group: Any = object()
    for device, wanted in ((CPU, on_cpu), (CUDA, on_cuda)):
        assert path(group, 1, device) == "alone"
        if wanted is not None:
            assert path(group, 2, device) == wanted
            continue
        with pytest.raises(
            AttachError, match=rf"the model is on {device}, and .*init_process_group\('.*backend='gloo'"
        ):
            path(group, 2, device)


@contextmanager
def having(patch: Callable[[int], str], rank: int) -> Iterator[None]:
    """The group says that it has other backends."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        streams.install(monkeypatch)
        monkeypatch.setattr(dist, "get_backend_config", lambda group: patch(rank))
        yield


def _mpi(rank: int) -> str:
    return "cuda:mpi"


def _one_has_mpi(rank: int) -> str:
    return "cuda:mpi" if rank == 1 else "cuda:nccl"


def _nccl(rank: int) -> str:
    return "cuda:nccl"


def opens(rank: int, size: int, has: Callable[[int], str], cards: list[str]) -> tuple[str, str]:
    with having(has, rank), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(nccl, "card_of", lambda device: cards[rank])
        monkeypatch.setattr(nccl, "new_group", lambda *_: pytest.fail("there was to be none"))
        try:
            TorchFabric(deadline=20, device=CUDA)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", "no error"


def test_a_group_without_a_backend_is_refused_on_every_rank(gang2: Gang) -> None:
    for kind, text in gang2.run(opens, _mpi, ["", ""]):
        assert kind == "AttachError"
        assert "it has mpi for cuda" in text


def test_what_is_refused_on_one_rank_is_told_to_the_others(gang2: Gang) -> None:
    zero, one = gang2.run(opens, _one_has_mpi, ["", ""])
    assert zero[0] == "PeerError"
    assert "rank 1 cannot start: the model is on cuda:1, and the process group has no backend" in zero[1]
    assert one[0] == "AttachError"


def test_ranks_that_share_a_gpu_are_told_before_nccl_fails(gang2: Gang) -> None:
    answers = gang2.run(opens, _nccl, ["GPU-7 of here", "GPU-7 of here"])
    assert answers[0] == answers[1]
    kind, text = answers[0]
    assert kind == "AttachError"
    assert text.startswith("ranks 0, 1 share one GPU, GPU-7 of here, and NCCL refuses that: ")
    assert "process_group=torch.distributed.new_group(backend='gloo')" in text


def test_clones_of_a_machine_are_not_taken_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Virtual machines of one image have one name, and `nodes="hosts"` would average densely between them."""
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(nccl.socket, "gethostname", lambda: "vm")
    monkeypatch.setattr(nccl, "BOOT", tmp_path / "boot")
    assert nccl.machine() == "vm"
    names = set[str]()
    for boot in ("3f2c1b9e-8a1d\n", "77aa0000-8a1d\n"):
        nccl.BOOT.write_text(boot)
        names.add(nccl.machine())
    assert names == {"vm 3f2c1b9e", "vm 77aa0000"}
