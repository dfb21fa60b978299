"""Clusters: values that refuse nonsense, and files that say where they are wrong."""

import os
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from gossamer import CostError
from gossamer.costs import Cluster, Hosts, from_flags
from gossamer.costs.cluster import WorkTable
from gossamer.costs.cluster_file import read_cluster, write_cluster
from gossamer.costs.laws import Constant, SlowRank, Trace
from gossamer.costs.quantities import Price
from gossamer.fabrics.links import ClusterLinks

GOOD = """format = 1
name = "office"
backend = "gloo"

[[hosts]]
count = 3
up = "1 Gbit/s"
latency = "120 us"
cores = 16
price = "2.10 USD/h"

[[hosts]]
count = 1
up = "40 Mbit/s"
down = "250 Mbit/s"
latency = "14 ms"
speed = 0.5
memory = "24 GB"

[network]
payload = 0.956
efficiency = { ring = 0.96, pairs = 0.88 }
"""


def test_flags_make_a_cluster_and_say_which_figures_are_defaults() -> None:
    cluster = from_flags(nodes=4, gpus=8, rate=3.125e9, latency=30e-6)
    assert (cluster.size, cluster.nodes, cluster.ranks_per_node, cluster.has_gpus) == (32, 4, 8, True)
    assert (cluster.source("rate"), cluster.source("latency"), cluster.source("inside")) == ("flag", "flag", "default")


def test_the_slowest_link_counts_and_rates_scale_together(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD)
    cluster = read_cluster(path)
    assert (cluster.size, cluster.rate, cluster.latency) == (4, 5e6, 14e-3)
    assert cluster.hosts[0].price == Price(2.10, "USD")
    twice = cluster.at_rate(10e6)
    assert (twice.rate, twice.hosts[0].up, twice.hosts[1].down) == (10e6, 250e6, 62.5e6)


def test_a_file_is_text_of_toml_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace("USD", "\N{EURO SIGN}"), encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from gossamer.costs.cluster_file import read_cluster; "
        "print(ascii(read_cluster(Path(sys.argv[1])).hosts[0].price.currency))"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # only ASCII
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("'\\u20ac'\n", "")


def test_an_unlimited_link_can_be_given_a_rate() -> None:
    assert from_flags(nodes=2).at_rate(1e6).rate == 1e6


@pytest.mark.parametrize("cluster", [from_flags(nodes=2, rate=25e6, cores=0.5), from_flags(nodes=4, gpus=8, rate=inf)])
def test_a_written_cluster_reads_back(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(write_cluster(replace(cluster, efficiency={"ring": 0.9})))
    read = read_cluster(path)
    for name in ("size", "rate", "inside", "cores", "backend", "payload", "byte_seconds", "efficiency", "memory_rate"):
        assert getattr(read, name) == pytest.approx(getattr(cluster, name)) or name in ("backend", "efficiency")
    assert read.latency == pytest.approx(cluster.latency)
    assert read.efficiency == {"ring": 0.9}


def test_prices_failures_and_memory_are_written_too(tmp_path: Path) -> None:
    """They were left out without a word, and a name with quotes was no TOML."""
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace('memory = "24 GB"', 'memory = "24 GB"\negress = "0.02 USD/GB"\nmtbf = "3600 s"'))
    asked = replace(read_cluster(path), name='the "old" ones', restart=300.0, checkpoint=45.0)
    recipe = 'qsgd + rule("ndim < 2", allreduce())'
    path.write_text(write_cluster(replace(asked, work={recipe: WorkTable(4, (2,), ((1.0, 0.0),))})))
    read = read_cluster(path)
    assert (read.name, read.restart, read.checkpoint) == ('the "old" ones', 300.0, 45.0)
    assert read.hosts == asked.hosts
    assert [*read.work] == [recipe]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("format = 1", "format = 2", r"line 1: format must be 1, not 2"),
        ("count = 3", "count = 0", r"line 6: count must be at least 1"),
        ("count = 1\n", "count = -1\n", r"line 13: count must be at least 1"),
        ("count = 3", "count = 3.5", r"line 6: count must be a whole number"),
        ("count = 3", "", r"line 5: hosts table 1 needs a count"),
        ('up = "1 Gbit/s"\n', "", r'line 5: hosts table 1 needs up = "1 Gbit/s", the rate of a link, or "unshaped"'),
        ('up = "1 Gbit/s"', 'up = "0 Gbit/s"', r"line 7: up '0 Gbit/s' must be more than 0"),
        ('up = "1 Gbit/s"', "up = 5", r"line 7: up must be a text with a unit"),
        ('up = "40 Mbit/s"\n', "", r"line 14: down is given without up"),
        ('latency = "120 us"', 'latency = "-1 us"', r"line 8: latency '-1 us' is negative"),
        ("cores = 16", "cores = 0", r"line 9: cores must be more than 0"),
        ("cores = 16", "kores = 16", r"line 9: kores is not known in a table.*cores"),
        ("price = ", "prise = ", r"line 10: prise is not known.*price"),
        ('price = "2.10 USD/h"', 'price = "2.10 USD/GB"', r"line 10: price .*USD/h"),
        ("speed = 0.5", "speed = -1", r"line 17: speed must be more than 0"),
        ('memory = "24 GB"', 'memory = "24"', r"line 18: memory .*24 GB"),
        ("payload = 0.956", "payload = 1.5", r"line 21: payload must lie above 0 and up to 1, not 1.5"),
        ("payload = 0.956", "pay = 1", r"line 21: pay is not known"),
        ("{ ring = 0.96, pairs = 0.88 }", "{ star = 0.9 }", r"line 22: efficiency must be a table"),
        ("{ ring = 0.96, pairs = 0.88 }", "0.9", r"line 22: efficiency must be a table"),
        ('backend = "gloo"', 'backend = "mpi"', r"line 3: backend must be 'gloo' or 'nccl'"),
        ('name = "office"', 'nane = "office"', r"line 2: nane is not known.*name"),
        ("[[hosts]]\ncount = 3", "hosts = 3\n[other]\ncount = 3", r"."),
        ("count = 3", "count = 3000000", r"line \d+: .* are too many to plan"),
        ('memory = "24 GB"', 'egress = "0.02 EUR/GB"', r"line 18: .*two currencies"),
        ("count = 1\n", "count = 1\nranks = 2\n", r"line 14: .*different numbers of ranks"),
        ("[network]\n", "[network]\nbyte_seconds = -1\n", r"line 21: byte_seconds must be 0 or more, not -1"),
        ("speed = 0.5", "speed = inf", r"line 17: speed must be a number of times, not inf"),
        ("speed = 0.5", 'mtbf = "0 s"', r"line 17: mtbf must be more than 0"),
        ('name = "office"', "compute = 3", r"line 2: compute must be a table, \[compute\], not 3"),
        ('name = "office"', "work = 3", r"line 2: work must be a table"),
        ('name = "office"', "sources = 3", r"line 2: sources must be a table"),
        ('name = "office"', "failures = 3", r"line 2: failures must be a table"),
        (
            "{ ring = 0.96, pairs = 0.88 }",
            "{ ring = -0.5 }",
            r"line 22: efficiency must lie above 0 and up to 1, not -0.5",
        ),
        ("format = 1", "format = ", r"is not TOML"),
        ("count = 3", "count = 3" + "0" * 5000, r"is not TOML: Exceeds the limit"),
        ("count = 3", "count = " + "[" * 100_000, r"is not TOML: "),
    ],
)
def test_a_broken_file_is_refused_with_its_line_and_field(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(CostError, match=says) as refused:
        read_cluster(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ("[[hosts]]\ncount = 1\nspeed = -1\n[[hosts]]\ncount = 1\nspeed = 2\n", "line 6: speed must be more than 0"),
        ('device = "cpu"\n[work."qsgd"]\ndevice = "tpu"\n', "line 6: device must be 'cpu' or 'gpu', not 'tpu'"),
    ],
)
def test_the_line_is_that_of_the_table_that_is_wrong(tables: str, says: str, tmp_path: Path) -> None:
    """Another one may lack the field, or have one of that name."""
    path = tmp_path / "c.toml"
    path.write_text(f"format = 1\n[[hosts]]\ncount = 1\n{tables}")
    with pytest.raises(CostError, match=says):
        read_cluster(path)


def test_a_file_of_gpus_has_the_figures_that_flags_have(tmp_path: Path) -> None:
    """NCCL is for GPUs, whose memory is no processor's, and whose bytes no comm thread copies."""
    path = tmp_path / "c.toml"
    hosts = 'count = 4\nranks = 8\nup = "25 Gbit/s"\nlatency = "30 us"\ninside = "20 GB/s"\n'
    path.write_text(f'format = 1\nbackend = "nccl"\n[[hosts]]\n{hosts}')
    read, flags = read_cluster(path), from_flags(nodes=4, gpus=8, rate=3.125e9, latency=30e-6)
    assert read.hosts == flags.hosts
    assert (read.byte_seconds, read.program_seconds) == (flags.byte_seconds, flags.program_seconds) == (0.0, 1e-4)
    path.write_text(f'format = 1\n[network]\nbyte_seconds = 1e-9\n[[hosts]]\ndevice = "gpu"\n{hosts}')
    mixed = read_cluster(path)
    assert (mixed.has_gpus, mixed.memory_rate, mixed.byte_seconds) == (True, 600e9, 1e-9)


@pytest.mark.parametrize("gpus", [0, 8])
def test_what_a_file_leaves_out_is_as_by_flags(gpus: int, tmp_path: Path) -> None:
    """Messages without latency, and ranks of a host whose bytes took no time, made recipes of many messages look free."""
    path = tmp_path / "c.toml"
    group = 'count = 4\nranks = 8\nup = "25 Gbit/s"\n'
    path.write_text(f'format = 1\nbackend = "{"nccl" if gpus else "gloo"}"\n[[hosts]]\n{group}')
    read = read_cluster(path)
    assert read.hosts == from_flags(nodes=4, gpus=gpus, ranks=8, rate=3.125e9).hosts
    assert (read.source("latency"), read.source("inside")) == ("default", "default")


def test_a_host_alone_needs_no_link(tmp_path: Path) -> None:
    """And on links that are said to have no limit there is none."""
    path = tmp_path / "c.toml"
    for hosts in ("count = 1\nranks = 8\n", 'count = 4\nup = "unshaped"\n'):
        path.write_text(f"format = 1\n[[hosts]]\n{hosts}")
        assert read_cluster(path).rate == inf


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none.toml")


def test_no_hosts_and_impossible_shares_are_refused() -> None:
    with pytest.raises(CostError, match="at least one group"):
        Cluster(hosts=())
    with pytest.raises(CostError, match="between 0 and 1"):
        Cluster(hosts=(Hosts(count=2),), efficiency={"ring": 0.0})


def test_a_slow_rank_keeps_its_machine_where_some_are_left_out() -> None:
    six = replace(from_flags(nodes=3, ranks=2, rate=1e6), law=SlowRank(2.0, rank=5))
    assert six.of_nodes([0, 2]).law == SlowRank(2.0, rank=3)
    assert six.of_nodes([0, 1]).law == Constant()
    assert six.of_nodes([0, 1, 2]).law == six.law


def test_ranks_keep_their_rows_of_a_trace_where_some_are_left_out() -> None:
    law = Trace(((2.0,) * 200, *((1.0,) * 200 for _ in range(3))))
    four = replace(from_flags(nodes=4, rate=1e6), law=law)
    left = four.of_nodes([1, 2, 3]).of_nodes([0, 2]).law
    assert [left.at(rank, 7) for rank in range(2)] == [law.at(1, 7), law.at(3, 7)]
    assert left.slowest(2, 1) == pytest.approx(law.at(1, 7), rel=1e-2)


def test_ranks_on_gpus_do_not_wait_for_the_cores_of_their_host() -> None:
    here = Cluster(hosts=(Hosts(count=2, ranks=8, cores=4, device="gpu"),), backend="nccl")
    assert here.turns == ClusterLinks(here).slowdown(0) == 1
    assert replace(here, hosts=(replace(here.hosts[0], device="cpu"),)).turns == 2
