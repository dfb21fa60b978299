"""`gossamer doctor --save`: figures with their spread, and a file that `gossamer plan` reads."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.marked import LEAN

from gossamer.bench.compare import calibrate, link
from gossamer.bench.compare.calibrate import Calibration, Figure
from gossamer.bench.lab import available, run_lab
from gossamer.costs.cluster_file import read_cluster, write_cluster

FOUND = Calibration(
    size=4,
    latency=Figure(1e-4, 0.05),
    links=(24e6, 24.5e6, 23.9e6, 24.1e6),
    link_spread=0.01,
    ring=Figure(0.97, 0.01),
    pairs=Figure(0.9, 0.01),
    shared=Figure(1.02, 0.01),
    byte_seconds=5e-10,
    ranks_per_machine=4,
    cores=2,
    foreign=0.0,
)


def test_a_figure_is_a_median_with_half_the_range_of_its_middle_half() -> None:
    assert Figure.of([1.0]) == Figure(1.0, 0.0)
    found = Figure.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.value == 3.0
    assert found.spread > 0


def test_links_that_are_alike_are_one_group_at_the_slowest_rate() -> None:
    cluster = FOUND.cluster()
    assert [(h.count, h.cores) for h in cluster.hosts] == [(4, 0.5)]
    assert cluster.rate * cluster.payload == pytest.approx(23.9e6)
    assert cluster.efficiency == {"ring": 0.97, "pairs": 0.9, "one": 1.0, "shared": 1.0}
    assert cluster.source("latency") == "measured"


def test_a_slow_link_has_a_group_of_its_own() -> None:
    cluster = replace(FOUND, links=(24e6, 24e6, 5e6, 24e6)).cluster()
    assert len(cluster.hosts) == 4
    assert cluster.rate * cluster.payload == pytest.approx(5e6)


def test_what_is_written_is_read_with_its_sources(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(write_cluster(FOUND.cluster()))
    read = read_cluster(path)
    assert read.size == 4
    assert read.source("efficiency") == "measured"
    assert (read.inside, read.source("inside")) == (5e9, "default")


@pytest.mark.lab
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_the_ranks_of_a_lab_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    command = [sys.executable, "-m", "gossamer", "doctor", "--save", str(path)]
    result = run_lab(2, "100mbit", command, timeout=300, env={"PYTHONPATH": LEAN})
    assert result.exit_code == 0, result
    cluster = read_cluster(path)
    assert cluster.size == 2
    assert 0.6 * 12.5e6 < cluster.rate < 1.5 * 12.5e6
    assert all(0 < share <= 1 for share in cluster.efficiency.values())


RATE = 12.5e6  # bytes a second of a link in the tests below


@pytest.mark.parametrize(("waits", "length"), [(0.0, 4 * 2**20), (0.2, 4 * 2**20)])
def test_a_message_is_long_enough_for_its_bytes_to_be_seen_also_between_far_hosts(
    waits: float, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a link of 100 ms the shortest message took longer than all of a measurement, and the rate was what was left of noise."""
    sent = list[int]()
    monkeypatch.setattr(calibrate.dist, "barrier", lambda: None)
    monkeypatch.setattr(calibrate, "_agreed", lambda seconds: waits + sent[-1] / RATE)
    monkeypatch.setattr(calibrate, "_times", lambda act: [waits + sent[-1] / RATE])
    assert calibrate._long_enough(lambda wire: sent.append(wire.numel()), waits)[0] == length


@pytest.mark.parametrize("alpha", [1e-4, 0.3])
def test_the_rate_between_two_ranks_is_seen_also_from_afar(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.dist, "get_world_size", lambda: 2)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(link.dist, name, lambda: None)
    monkeypatch.setattr(link, "all_reduce_seconds", lambda n: Figure(2 * alpha + 4 * n / RATE + (n > 1) * 1e-3, 0.0))
    found = link._measured()
    assert found.alpha == pytest.approx(alpha, rel=1)
    assert found.rate == pytest.approx(RATE, rel=0.01)
