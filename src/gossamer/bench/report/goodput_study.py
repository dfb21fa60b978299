"""What a run took, in words: a headline, money, and what a reader must know."""

from dataclasses import dataclass

from gossamer.bench.report.formatting import number, seconds
from gossamer.core.text import listed
from gossamer.costs.goodput import Goodput
from gossamer.costs.quantities import Price
from gossamer.costs.spent import CAUSES

HOUR = 3600


@dataclass(frozen=True)
class GoodputStudy:
    found: Goodput
    price: Price | None

    @property
    def title(self) -> str:
        """How much of the paid time became steps, and the largest of what did not."""
        spent = self.found.spent
        rest = {cause: value for cause, value in spent.by_cause.items() if cause != "steps" and value > 0}
        worst = max(rest, key=lambda cause: rest[cause], default=None)
        most = "" if worst is None else f"; the most of the rest, {percent(rest[worst], spent.paid)}: {CAUSES[worst]}"
        return f"{percent(spent.steps, spent.paid)} of the paid time became steps that count{most}."

    @property
    def detail(self) -> str:
        """How long, on how many ranks, to which step, for how much."""
        found, spent = self.found, self.found.spent
        starts = sum(len(rank.processes) for rank in found.ranks)
        ranks = f"{len(found.ranks)} rank{'s' * (len(found.ranks) != 1)}, {starts} process{'es' * (starts != 1)}"
        said = [ranks, f"{seconds(spent.paid)} paid for", f"to step {found.last}"]
        if spent.steps:
            said.append(f"{percent(spent.exchange, spent.steps)} of the steps' time is their exchange")
        if self.price is not None:
            total = f"{self.money(spent.paid)} in all"
            each = f", {amount(self.price, self.per_thousand)} for 1,000 steps" if self.per_thousand is not None else ""
            said.append(total + each)
        return "; ".join(said) + (f". Recipe: {found.recipe}" if found.recipe else "")

    @property
    def per_thousand(self) -> float | None:
        """The money for a thousand of the run's steps; None where no step was done, or no price is known."""
        total = self.cost(self.found.spent.paid)
        return None if total is None or not self.found.last else 1000 * total / self.found.last

    def cost(self, paid: float) -> float | None:
        return None if self.price is None else self.price.amount * paid / HOUR

    def money(self, paid: float) -> str:
        """What some seconds of one rank cost, in words; empty where no price is known."""
        return "" if self.price is None else amount(self.price, self.cost(paid))

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing it."""
        notes, found = list[str](), self.found
        if found.missing:
            ranks = listed([str(rank) for rank in found.missing])
            notes.append(f"No events of rank{'s' * (len(found.missing) > 1)} {ranks}: what they took is not in this.")
        if open_ := [str(rank.rank) for rank in found.ranks if not rank.has_ended]:
            word = "rank" if len(open_) == 1 else "ranks"
            notes.append(f"The last process of {word} {listed(open_)} has not ended: it is at work, or was killed.")
        away = [p.away for rank in found.ranks for p in rank.processes]
        if free := sum(each for each in away if each):
            notes.append(f"Not paid for, between processes: {seconds(free)}.")
        if unknown := sum(each is None for each in away):
            notes.append(
                f"{unknown} times a rank came back on another machine, or a restarted one: the time between is not counted."
            )
        return notes


def percent(part: float, whole: float) -> str:
    """
    >>> percent(1.0, 8.0), percent(0.0, 0.0), percent(0.0004, 1.0)
    ('12.5 %', '0.0 %', '0.0 %')
    """
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def amount(price: Price, value: float | None) -> str:
    """Money to the cent, and what is less than a unit to three digits.

    >>> amount(Price(2.1, ""), 1234.5), amount(Price(2.1, "EUR"), 0.01234)
    ('1234.50', '0.0123 EUR')
    """
    if value is None:
        return ""
    digits = f"{value:.2f}" if value >= 1 or not value else number(value)
    return f"{digits} {price.currency}".strip()
