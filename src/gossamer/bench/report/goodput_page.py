"""The page of `gossamer goodput`: one HTML file, without a script, that needs no network to open."""

from typing import NamedTuple

from gossamer.bench.report.charts import spaced
from gossamer.bench.report.goodput_study import GoodputStudy, amount, percent
from gossamer.bench.report.pages import filled
from gossamer.bench.report.palette import HUES, INK, MARKS, Style
from gossamer.costs.goodput import Goodput
from gossamer.costs.quantities import Price
from gossamer.costs.spent import CAUSES, Spent

SHOWN = 60  # held-out values
STYLES = [Style(INK, MARKS[0], False), *(Style(hue, MARKS[0], False) for hue in HUES[: len(CAUSES) - 1])]


class CauseBar(NamedTuple):
    """One cause in a bar: where it begins and how long it is, in hundredths of the bar."""

    place: int
    name: str
    left: float
    width: float
    share: str


def pieces(spent: Spent) -> list[CauseBar]:
    """The bar of some time, cause by cause.

    >>> [(p.name, p.left, p.width) for p in pieces(Spent(steps=3.0, saving=1.0)) if p.width]
    [('steps that count', 0.0, 75.0), ('saving', 75.0, 25.0)]
    """
    out, left = list[CauseBar](), 0.0
    for index, (cause, value) in enumerate(spent.by_cause.items()):
        width = 100 * value / spent.paid if spent.paid else 0.0
        out.append(CauseBar(index, CAUSES[cause], left, width, percent(value, spent.paid)))
        left += width
    return out


def render(found: Goodput, price: Price | None) -> str:
    """The whole page as one HTML document."""
    study = GoodputStudy(found, price)
    return filled(
        "goodput.html",
        study=study,
        found=found,
        price=price,
        styles=STYLES,
        causes=CAUSES,
        pieces=pieces,
        percent=percent,
        money=study.money,
        per_thousand="" if price is None else amount(price, study.per_thousand),
        held_out=spaced(study.found.held_out, SHOWN),
    )
