"""The table of docs/gpu.md: what each preset costs on the pretended device.

python -m tests.gpu.table          # measure, and write it between its marks
"""

from collections.abc import Callable
from pathlib import Path

from tests.gpu.loops import Plan, Seen, World
from tests.gpu.nursery import Nursery, RankError
from tests.gpu.subjects import named, plan_of, short_presets, waits_for_few

from gossamer.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- python -m tests.gpu.table: begin -->", "<!-- end -->"
HEAD = [
    "| preset | host waits a step | in lanes | without Triton | launches a step | kept | peak |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
]
Row = tuple[str, ...]
# Launches, of which a lane may be a round behind, and bytes kept and at the peak: threads let go in an order of chance.
SLACK = (8, 2, 4)


def rows(run: Callable[[Plan], list[Seen]], without_triton: bool) -> dict[str, Row]:
    """Every preset's numbers as text; a dash where there are none."""
    return {name: _row(run, text, without_triton) for name, text in (short_presets() | EXTRA).items()}


EXTRA = {"allreduce(ternary())": named()["allreduce(ternary())"]}


def _row(run: Callable[[Plan], list[Seen]], text: str, without_triton: bool) -> Row:
    try:
        seen = run(plan_of(text))[0]
    except RankError:
        return ("does not run",) + ("",) * 5
    plain = "?"
    if without_triton:
        other = run(plan_of(text, triton=False))[0]
        plain = _number(other.syncs_a_step() + other.lane_syncs_a_step())
    waits = f"{_number(seen.syncs_a_step())}{_round(text)}"
    return (
        "1 or 2" if waits_for_few(text) else waits,  # as others are late
        _number(seen.lane_syncs_a_step()),
        plain,
        f"{seen.launches_a_step():.0f}",
        f"{seen.kept:.0f}",
        f"{seen.peak:.0f}",
    )


def _round(text: str) -> str:
    """The judges' rounds have two steps."""
    return "" if Recipe.of(text).schedule.shape.averages_gradients else ", rounds of 2" if "every=2" in text else ""


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def written(page: str) -> dict[str, Row]:
    """The rows that stand in the page."""
    inside = page.split(BEGIN)[1].split(END, maxsplit=1)[0]
    cells = [[c.strip() for c in line.strip("| ").split("|")] for line in inside.strip().splitlines()[2:]]
    return {name.strip("`"): tuple(rest) for name, *rest in cells}


def write(found: dict[str, Row]) -> None:
    lines = [*HEAD, *(f"| `{name}` | {' | '.join(row)} |" for name, row in found.items())]
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def differs(a: Row, b: Row) -> bool:
    """Whether a row is stale. What is not measured in tests is not compared."""
    exact = [(x, y) for x, y in zip(a[:3], b[:3]) if "?" not in (x, y)]
    near = [(float(x), float(y), slack) for x, y, slack in zip(a[3:], b[3:], SLACK) if x and y]
    return any(x != y for x, y in exact) or any(abs(x - y) > slack for x, y, slack in near)


def main() -> None:
    nursery = Nursery()
    write(rows(World(nursery).run, without_triton=True))
    nursery.close()


if __name__ == "__main__":
    main()
