"""The page for a slow script advises what the project's own planner and tables say."""

import re
from pathlib import Path

from gossamer.lab import parse_rate
from gossamer.planning import bytes_per_step
from gossamer.workloads import get

DOCS = Path(__file__).parents[2] / "docs"
RATES = {
    "100 Mbit/s": "100mbit",
    "200 Mbit/s": "200mbit",
    "1 Gbit/s": "1gbit",
    "10 Gbit/s": "10gbit",
    "25 Gbit/s": "25gbit",
}
MEASURED = {"terngrad(last='qsgd')": "terngrad", "powersgd": "powersgd(rank=4)", "slowmo": "slowmo(8)"}


def advice() -> dict[str, list[str]]:
    page = (DOCS / "slow.md").read_text()
    rows = re.findall(r"^\| (\d+ [MG]bit/s) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|", page, re.M)
    return {rate: [dense, tried, sent] for rate, dense, tried, sent in rows}


def milliseconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1e3, "ms": 1.0}[unit]


def test_what_is_sent_is_what_the_planner_says() -> None:
    shapes = dict(get("lm").model().named_parameters())
    sizes = dict[str, float]()

    def takes(recipe: str, rate: str) -> float:
        sizes.setdefault(recipe, bytes_per_step(recipe, shapes, 2))
        bits = parse_rate(RATES[rate])
        assert bits is not None
        return 8e3 * sizes[recipe] / bits

    assert advice().keys() == RATES.keys()
    for rate, (dense, tried, sent) in advice().items():
        assert abs(milliseconds(dense) - takes("allreduce", rate)) < max(0.5, 0.005 * takes("allreduce", rate))
        recipes = re.findall("`([^`]+)`", tried)
        times = [float(t) for t in re.findall(r"[\d.]+", sent)]
        assert len(recipes) == len(times), rate
        for recipe, time in zip(recipes, times, strict=True):
            assert abs(time - takes(recipe, rate)) <= 0.51, (rate, recipe)


def test_what_is_tried_first_was_fastest_when_it_was_measured() -> None:
    page = (DOCS / "performance.md").read_text()
    measured = page.split("## Steps on slow networks")[1].split("\n## ")[0]
    steps = {name: cells.split("|") for name, cells in re.findall(r"^\| `([^`]+)` \| ([^\n]*) \|$", measured, re.M)}
    columns = {"100 Mbit/s": 1, "1 Gbit/s": 3}
    for rate, column in columns.items():
        tried = re.findall("`([^`]+)`", advice()[rate][1])
        took = [float(steps[MEASURED.get(name, name)][column].split()[0]) for name in tried]
        if rate == "1 Gbit/s":
            assert took == sorted(took)
        assert max(took) < 0.5 * float(steps["ddp"][column].split()[0])
    reached = page.split("## Time to quality")[1].split("\n## ")[0]
    quality = dict(re.findall(r"^\| `([^`]+)` \| [\d., ]+ \| ([\d.]+)[\d., ]* \| \d+ \|", reached, re.M))
    order = re.findall("`([^`]+)`", advice()["200 Mbit/s"][1])
    assert [float(quality[name]) for name in order] == sorted(float(quality[name]) for name in order)
