"""`gossamer doctor --gpu --save`, piece by piece, without a GPU: a clock that is given, and processors in its place."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gang import Gang

from gossamer.bench.compare.calibrate import Figure
from gossamer.bench.compare.gpu.calibrate import GpuCalibration, copy_rates, measured_on, refuse_shared_gpus
from gossamer.core.errors import PeerError
from gossamer.core.verbs import AllReduce
from gossamer.costs import crossing_of
from gossamer.costs.cluster import WorkTable
from gossamer.costs.cluster_file import read_cluster, write_cluster

FOUND = GpuCalibration(
    nodes=2,
    ranks_per_node=4,
    down=Figure(12e9, 0.01),
    up=Figure(12e9, 0.01),
    memory=Figure(1.5e12, 0.02),
    all_reduces={4: Figure(14 * 20e-6, 0.1), 2**24: Figure(14 * 20e-6 + 14 / 8 * 2**24 / 3e9, 0.02)},
    work={"qsgd": WorkTable(6_000_000, (2, 4), ((1e-4, 0.0), (2e-4, 0.0)), "gpu")},
)


def test_copies_are_bytes_over_the_clocks_seconds() -> None:
    ticks = count()
    down, up, memory = copy_rates("cpu", lambda: float(next(ticks)), 1000)
    assert [figure.value for figure in (down, up, memory)] == [1000, 1000, 2000]


def test_ranks_that_share_a_gpu_are_told_so_before_nccl_refuses_them() -> None:
    refuse_shared_gpus(["a of x", "b of x", "a of y"])
    refuse_shared_gpus(["", ""])  # a driver that gives no ids
    with pytest.raises(
        PeerError, match=r"ranks 1, 2 share one GPU, b of x, and NCCL refuses that: start one rank for each GPU"
    ):
        refuse_shared_gpus(["a of x", "b of x", "b of x"])


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (2, 4), (8, 1)])
def test_all_reduces_take_in_a_plan_what_they_took(nodes: int, ranks: int) -> None:
    """Most messages of a ring among several GPUs a host stay within it, and a plan has those for less."""
    cluster = replace(FOUND, nodes=nodes, ranks_per_node=ranks).cluster()
    for length, took in FOUND.all_reduces.items():
        wire = torch.empty(length // 4, dtype=torch.float32, device="meta")
        planned = crossing_of(AllReduce(wire), 0, cluster, 8).seconds(cluster)
        assert planned == pytest.approx(took.value, rel=1e-3)


def test_a_ring_gives_the_rate(tmp_path: Path) -> None:
    cluster = FOUND.cluster()
    assert cluster.rate == pytest.approx(3e9)
    path = tmp_path / "c.toml"
    path.write_text(write_cluster(cluster))
    read = read_cluster(path)
    assert (read.size, read.backend, read.has_gpus, read.source("memory_rate")) == (8, "nccl", True, "measured")
    assert read.work["qsgd"].device == "gpu"
    assert ("ranks", "8, 4 on a host", 0.0) in FOUND.rows()


def test_an_all_reduce_between_far_hosts_takes_in_a_plan_what_it_took() -> None:
    far = replace(FOUND, all_reduces={4: Figure(0.1, 0.1), 2**24: Figure(0.2, 0.02)})
    wire = torch.empty(1, dtype=torch.float32, device="meta")
    planned = crossing_of(AllReduce(wire), 0, far.cluster(), 8).seconds(far.cluster())
    assert planned == pytest.approx(0.1, rel=1e-3)
    assert far.latency == pytest.approx((0.1 - 12 * 20e-6) / 2)


def on_processors(rank: int, size: int) -> Any:
    found = measured_on("cpu", recipes=["bf16"])
    return found.size, sorted(found.work), min(f.value for f in found.all_reduces.values()), found.rate


@pytest.mark.slow
def test_all_of_it_is_measured_between_ranks(gang2: Gang) -> None:
    for size, work, least, rate in gang2.run(on_processors):
        assert (size, work) == (2, ["bf16"])
        assert least > 0
        assert rate > 1e6
