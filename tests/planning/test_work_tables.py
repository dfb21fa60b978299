"""Work of recipes that a cluster's file keeps: measured, written, read, and refused where it is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.models import SMALL

from gossamer import CostError
from gossamer.costs import from_flags
from gossamer.costs.cluster import WorkTable
from gossamer.costs.cluster_file import read_cluster, write_cluster
from gossamer.planning.model_shapes import from_shapes
from gossamer.planning.plan import plan, prepare
from gossamer.planning.replay import StartProgram
from gossamer.planning.work import MeasuredWork, MemoryPasses
from gossamer.planning.work_tables import WorkInFile, measure_tables, work_of

FILE = """format = 1
[[hosts]]
count = 4
up = "1 Gbit/s"

[work."qsgd"]
bytes = 4
ranks = [2, 4]
seconds = [[1.0, 0.0], [2.0, 0.0]]
"""


def test_tables_are_measured_once_for_programs_that_are_alike_and_read_back(tmp_path: Path) -> None:
    tables = measure_tables(["bf16", "local_sgd(8)", "local_sgd(32)"], MeasuredWork())
    assert list(tables) == ["bf16", "local_sgd(8)"]
    cluster = replace(from_flags(nodes=4, rate=1e9), work=tables)
    path = tmp_path / "c.toml"
    path.write_text(write_cluster(cluster))
    read = read_cluster(path)
    for name, table in tables.items():
        assert read.work[name].ranks == (2, 4, 8)
        assert read.work[name].seconds[0] == pytest.approx(table.seconds[0], rel=1e-3)
        assert sum(table.seconds[1]) > 0
    rows = plan(SMALL, read, ["bf16", "local_sgd(64)"], curves=False).recipes
    assert {row.work for row in rows} == {"in the file"}
    (lacks,) = plan(SMALL, read, ["topk"], curves=False).recipes
    assert lacks.work == "in the file; what it lacks as passes over memory, not measured"


@pytest.mark.slow
def test_messages_of_gossip_have_a_table_of_their_own() -> None:
    here = replace(from_flags(nodes=4, rate=1e9), work=measure_tables(["allreduce", "sgp"], MeasuredWork()))
    assert list(here.work) == ["allreduce", "sgp"]
    assert plan(SMALL, here, ["sgp"], curves=False).recipes[0].work == "in the file"


def test_the_clock_that_is_given_measures() -> None:
    """A clock that gains a second at each look: one between two requests, so tables have whole seconds."""
    ticks = iter(range(10**6))
    (table,) = measure_tables(["bf16"], MeasuredWork(clock=lambda: float(next(ticks)))).values()
    assert {*sum(table.seconds, ())} <= {0.0, 1.0}
    assert sum(table.seconds[0]) >= 2


def test_seconds_are_those_of_the_table_times_the_buckets_length() -> None:
    model = from_shapes({"w": (1000, 500)}, 0.1, name="w", memory_rate=1e10)
    table = WorkTable(1_000_000, (2, 4), ((0.1, 0.0, 0.1, 0.2, 0.0, 0.0), (0.2, 0.0, 0.2, 0.2, 0.0, 0.0)))
    for nodes, wanted in ((2, 0.4), (4, 0.6), (8, 1.0)):
        here = replace(from_flags(nodes=nodes, rate=1e9), work={"qsgd": table})
        prepared = prepare("qsgd", model, here, WorkInFile(here))
        pieces = [p for a in prepared.steps[0] if isinstance(a, StartProgram) for p in a.pieces]
        assert sum(p.work + p.inside for p in pieces) == pytest.approx(2 * wanted)


def test_what_one_recipe_lacks_in_the_file_is_not_said_of_another() -> None:
    """And its work is as uncertain as where no file has any."""
    table = WorkTable(1_000_000, (2, 4), ((0.1, 0.0, 0.1, 0.2, 0.0, 0.0), (0.2, 0.0, 0.2, 0.2, 0.0, 0.0)))
    bare = from_flags(nodes=4, rate=1e9)
    here = replace(bare, work={"qsgd": table})
    rows = {row.name: row for row in plan(SMALL, here, ["topk", "qsgd"], curves=False).recipes}
    assert rows["qsgd"].work == "in the file"
    assert rows["topk"].work == "in the file; what it lacks as passes over memory, not measured"
    passes = plan(SMALL, bare, ["topk"], work=MemoryPasses(bare.memory_rate), curves=False).recipes[0]
    assert (rows["topk"].low, rows["topk"].high) == pytest.approx((passes.low, passes.high))


def test_a_processors_tables_are_refused_for_gpus() -> None:
    here = replace(from_flags(nodes=4, gpus=1, rate=1e9), work={"qsgd": WorkTable(4, (2,), ((1.0, 0.0),))})
    with pytest.raises(CostError, match=r"were measured on processors.*--work-of-this-machine"):
        work_of(here)
    gpu = replace(here, work={"qsgd": WorkTable(4, (2,), ((1.0, 0.0),), "gpu")})
    assert work_of(gpu).name == "in the file"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("bytes = 4\n", "", r"line 6: \[work.\"qsgd\"\]: bytes is missing"),
        ("bytes = 4", "bytes = 0", r"line 6: \[work.\"qsgd\"\]: bytes must be at least 1"),
        ("bytes = 4", "bites = 4", r"line 7: bites is not known.*bytes"),
        ("[2, 4]", "[4, 2]", r"line 6: .*ranks must be whole numbers of 2 or more that rise"),
        ("[2, 4]", "2", r"line 8: ranks must be a list"),
        ("[2, 4]", "[2, 4, 8]", r"line 6: .*seconds must have a row for each of ranks"),
        ("[1.0, 0.0]", "[1.0]", r"line 6: .*two numbers for each request"),
        ("[1.0, 0.0]", "[-1.0, 0.0]", r"line 6: .*seconds must be 0 or more"),
        ("[1.0, 0.0]", '["x", 0.0]', r"line 9: seconds must be a number"),
    ],
)
def test_a_broken_table_is_refused_with_its_line_and_field(old: str, new: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(CostError, match=says) as refused:
        read_cluster(path)
    assert str(path) in str(refused.value)
