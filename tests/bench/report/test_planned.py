"""A plan's page: what its script reads from the grid is what the planner replays, and it opens without a complaint."""

import json
import random
from array import array
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.bench.report.browser import CHROMIUM, Browser
from tests.planning.models import SMALL

from gossamer.bench.report import planned
from gossamer.bench.report.grid import Grid, grid_of, located
from gossamer.core.errors import GossamerError
from gossamer.costs import Cluster, from_flags
from gossamer.costs.laws import ShiftedExponential
from gossamer.planning.baselines import baselines
from gossamer.planning.measured_model import with_step
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import known_model
from gossamer.planning.plan import TrainingPlan, plan, prepare
from gossamer.planning.scaling import of_hosts
from gossamer.planning.verdict import sentences
from gossamer.planning.work import MemoryPasses

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
RECIPES = ["qsgd", "topk", "local_sgd(8)", "osgp", "backup"]
WORK = MemoryPasses(1e9)
HERE = from_flags(nodes=8, rate=1.25e6, latency=1e-4)


def planned_grid(model: ModelCost, here: Cluster) -> tuple[TrainingPlan, Grid]:
    found = plan(model, here, RECIPES, work=WORK, curves=False)
    return found, grid_of(found, WORK)


@pytest.fixture(scope="module")
def small() -> tuple[TrainingPlan, Grid]:
    return planned_grid(SMALL, HERE)


@pytest.fixture(scope="module")
def page(small: tuple[TrainingPlan, Grid], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    planned.write_html(*small, path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as tab:
        yield tab


def test_a_page_is_one_small_file_and_goes_over_nothing_else(
    small: tuple[TrainingPlan, Grid], page: Path, tmp_path: Path
) -> None:
    text = page.read_text()
    assert len(text) < 600_000
    assert text.count("http") == text.count("http://www.w3.org/2000/svg")
    letter = tmp_path / "letter.txt"
    letter.write_text("dear all")
    with pytest.raises(GossamerError, match=r"letter\.txt"):
        planned.write_html(*small, letter)
    assert letter.read_text() == "dear all"


def test_a_recipe_that_needs_more_hosts_is_missing_where_there_are_too_few(small: tuple[TrainingPlan, Grid]) -> None:
    """Backup leaves one of three ranks out."""
    _, grid = small
    assert grid.hosts == [2, 8, 64]
    third = len(grid.seconds["backup"]) // 3
    assert {cell is None for cell in grid.seconds["backup"][:third]} == {True}
    assert {cell is None for cell in grid.seconds["backup"][third:]} == {False}


def test_steps_of_weeks_are_read_as_they_are(small: tuple[TrainingPlan, Grid]) -> None:
    """A model of billions of parameters takes days a step on the slowest links of the grid."""
    found, grid = small
    longer = {
        name: [None if s is None else replace(s, step=1e6 * s.step) for s in cells]
        for name, cells in grid.seconds.items()
    }
    told = planned.data(found, replace(grid, seconds=longer))
    code = told["code"]
    for (steps, _, _), cells in zip(told["seconds"], longer.values(), strict=True):
        read = [k and code["smallest"] * exp((k - 1) / code["steps"]) for k in array("H", b64decode(steps))]
        assert read == pytest.approx([0 if s is None else s.step for s in cells], rel=3e-4)


def test_a_page_begins_where_its_plan_is_also_beyond_the_usual_latencies() -> None:
    home = from_flags(nodes=8, rate=1.25e6, latency=14e-3)
    found = plan(SMALL, home, ["topk"], work=WORK, curves=False)
    grid = grid_of(found, WORK, rates=[home.rate])
    assert planned.data(found, grid)["at"]["latency"] == home.latency
    place = (grid.hosts.index(8) * len(grid.computing) + 3) * len(grid.latencies) + grid.latencies.index(home.latency)
    cell, row = grid.seconds["topk"][place], found.recipes[0].seconds
    assert cell is not None
    assert row is not None
    assert cell.step == pytest.approx(row.step)


def test_a_page_begins_where_its_plan_is_also_on_the_slowest_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """It began at 1 Mbit/s, and said another sentence."""
    monkeypatch.setattr("gossamer.bench.report.grid.HOSTS", ())
    monkeypatch.setattr("gossamer.bench.report.grid.FACTORS", (1.0,))
    radio = from_flags(nodes=2, rate=64e3 / 8, latency=1e-3)
    found = plan(SMALL, radio, ["topk"], work=WORK, curves=False)
    grid = grid_of(found, WORK)
    assert planned.data(found, grid)["at"]["rate"] == 64e3
    cell, row = grid.seconds["topk"][2 * len(grid.rates) + grid.rates.index(8e3)], found.recipes[0].seconds
    assert cell is not None
    assert row is not None
    assert cell.step == pytest.approx(row.step)
    assert len(grid_of(found, WORK, rates=[1e6]).seconds["topk"]) == len(grid.latencies)


def test_verdicts_of_the_grid_are_those_of_plans(small: tuple[TrainingPlan, Grid]) -> None:
    """At ten points: hidden, too small to be seen, and worth it."""
    _, grid = small
    kinds = set[str]()
    for i in range(0, 25, 3):
        point = (1 * len(grid.computing) + 3) * len(grid.latencies) * len(grid.rates) + i
        there = located(HERE, grid.rates[i], grid.latencies[0])
        first = sentences(plan(SMALL, there, RECIPES, work=WORK, curves=False))[0]
        kind, best = grid.verdicts[point]
        kinds.add(kind)
        assert first.startswith(f"{best}: ") == (kind == "pays"), (first, kind)
        assert ("hides behind" in first) == (kind == "hidden")
    assert {"hidden", "pays"} <= kinds


def test_a_round_waits_for_slow_ranks_as_often_as_in_a_plan() -> None:
    here = replace(HERE, law=ShiftedExponential(0.3))
    found = plan(SMALL, here, ["local_sgd(8)"], work=WORK, curves=False)
    grid = grid_of(found, WORK, rates=[here.rate])
    place = (grid.hosts.index(8) * len(grid.computing) + 3) * len(grid.latencies)
    cell = grid.seconds["local_sgd(8)"][place]
    there = located(here, here.rate, grid.latencies[0])
    assert cell is not None
    assert cell.step == pytest.approx(prepare("local_sgd(8)", SMALL, here, WORK).seconds(there).step)


def test_what_is_simulated_is_named_and_not_replayed(tmp_path: Path) -> None:
    found = plan(SMALL, HERE, ["decoupled_diloco(8)", "qsgd"], work=WORK, curves=False)
    grid = grid_of(found, WORK, rates=[HERE.rate])
    assert [name for name in grid.seconds if name not in grid.baselines] == ["qsgd"]
    planned.write_html(found, grid, tmp_path / "plan.html")
    assert "decoupled_diloco(8): not shown here." in (tmp_path / "plan.html").read_text()


@needs_chromium
@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390, "height": 844, "phone": True}], ids=str)
def test_it_opens_quietly_and_fits(browser: Browser, page: Path, look: dict[str, Any]) -> None:
    browser.open(page, **look)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= look.get("width", 1100)
    assert browser.run("[...document.querySelectorAll('text')].every(t => !/NaN|undefined|null/.test(t.textContent))")
    assert browser.run("document.querySelectorAll('#plan-steps .row').length") == 8


@needs_chromium
def test_sliders_move_everything(browser: Browser, page: Path) -> None:
    """On a fast link DDP is left alone; with two hosts backup cannot run."""
    browser.open(page)
    said = "document.getElementById('verdict').textContent"
    assert " of DDP." in browser.run(said)
    move = (
        "(s => {{ s.value = s.{end}; s.dispatchEvent(new Event('input')); }})(document.querySelector('[name={name}]'))"
    )
    browser.run(move.format(name="rate", end="max"))
    assert browser.run(said).startswith("Leave DDP alone: its network hides")
    browser.run(move.format(name="hosts", end="min"))
    row = "[...document.querySelectorAll('#crossings tr')].find(r => r.innerText.includes('backup')).innerText"
    assert "cannot run" in browser.run(row)
    assert browser.errors == []


@needs_chromium
def test_a_recipe_pays_below_the_rate_that_the_planner_finds(browser: Browser, page: Path) -> None:
    found = plan(SMALL, HERE, ["local_sgd(8)"], work=WORK)
    browser.open(page)
    row = browser.run(
        "[...document.querySelectorAll('#crossings tr')].find(r => r.innerText.includes('local_sgd')).cells[1].innerText"
    )
    number, unit = row.removeprefix("below ").split()
    assert unit == "Mbit/s"
    (interval,) = found.recipes[0].pays["ddp"]
    assert float(number) == pytest.approx(8 * interval.high / 1e6, rel=0.1)


def errors(browser: Browser, path: Path, model: ModelCost, here: Cluster, grid: Grid) -> list[float]:
    """Read at 200 random places, and replay there."""
    draw, places = random.Random(7), list[tuple[int, dict[str, float]]]()
    low, high = log(grid.rates[0]), log(grid.rates[-1])
    for _ in range(200):
        at = {
            "hosts": draw.randrange(1, len(grid.hosts)),
            "seconds": exp(draw.uniform(log(grid.computing[0]), log(grid.computing[-1]))),
            "latency": exp(draw.uniform(log(1e-5), log(grid.latencies[-2]))),
            "rate": 8 * exp(draw.uniform(low, high)),
        }
        places.append((draw.randrange(len(grid.seconds)), at))
    browser.open(path)
    read: list[float] = browser.run(f"{json.dumps(places)}.map(([run, at]) => read(run, at)[0])")
    cut = {
        (name, count): prepare(name, model, of_hosts(here, count), WORK)
        for name in grid.seconds
        if name not in grid.baselines
        for count in grid.hosts[1:]
    }
    off, names = list[float](), list(grid.seconds)
    for (run, at), got in zip(places, read, strict=True):
        count = grid.hosts[int(at["hosts"])]
        there, longer = located(of_hosts(here, count), at["rate"] / 8, at["latency"]), with_step(model, at["seconds"])
        if run < len(grid.baselines):
            replayed = baselines(longer, there, 4, 1)[run].seconds(there).step
        else:
            prepared = cut[names[run], count]
            replayed = replace(prepared, model=replace(longer, buckets=prepared.model.buckets)).seconds(there).step
        off.append(abs(got / replayed - 1))
    return off


@needs_chromium
def test_what_is_read_is_what_is_replayed(browser: Browser, small: tuple[TrainingPlan, Grid], page: Path) -> None:
    """At 200 random places: median within 3 %, worst within 10 %."""
    off = errors(browser, page, SMALL, HERE, small[1])
    assert median(off) <= 0.03
    assert max(off) <= 0.1


@pytest.mark.slow
@needs_chromium
def test_what_is_read_is_what_is_replayed_of_a_large_model(browser: Browser, tmp_path: Path) -> None:
    """A model on GPUs has several buckets, and bends where one of them begins to show."""
    here, model = from_flags(nodes=8, gpus=1, rate=1.25e8), known_model("resnet50", 0.07)
    found, grid = planned_grid(model, here)
    planned.write_html(found, grid, tmp_path / "plan.html")
    off = errors(browser, tmp_path / "plan.html", model, here, grid)
    assert median(off) <= 0.03
    assert max(off) <= 0.1
