"""What the doctor says of network cards: which one gloo and NCCL take, how fast it is, and what changes that."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gossamer.bench.compare.link import Crossed, RankCards
from gossamer.bench.compare.network_cards import VARIABLES, Card, cards, choices
from gossamer.costs.quantities import say_rate

FASTER = 1.5  # times as fast a network must be before the doctor advises to take it: two measurements differ by less

Found = dict[str, Any]


def found_here() -> Found:
    """The cards of this host, and for each backend that torch has, the one it would take."""
    there = cards()
    if not there:
        return {"there": []}
    taken: Found = {"there": [card._asdict() for card in there]}
    for backend, choice in choices(there).items():
        if dist.is_available() and getattr(dist, f"is_{backend}_available")():
            taken[backend] = {
                "card": choice.card.name if choice.card else None,
                "why": choice.why,
                "warning": choice.warning,
                "variable": VARIABLES[backend],
            }
    return taken


def in_words(found: Found) -> list[tuple[str, str]]:
    """A row for each backend: its card, why, and what speaks against it."""
    if not found["there"]:
        return [("network card", "not known: only Linux tells which there are")]
    by_name = {card["name"]: Card(**card) for card in found["there"]}
    rows = list[tuple[str, str]]()
    for backend in (name for name in VARIABLES if name in found):
        taken = found[backend]
        card = by_name.get(taken["card"])
        against = f". WARNING: {taken['warning']}" if taken["warning"] else ""
        change = "" if taken["variable"] in f"{taken['why']}{against}" else f"; {taken['variable']} changes it"
        what = _card(card) if card else "none"
        rows.append((f"card of {backend}", f"{what} ({taken['why']}{change}){against}"))
    return rows


def _card(card: Card) -> str:
    kind = ", belongs to no device" * (card.virtual and card.name != "lo")
    rate = f", {say_rate(card.rate / 8)} by its driver" if card.rate else ""
    return f"{card.name}, {card.address}{kind}{rate}"


def found_on_ranks(everybody: Sequence[RankCards], crossed: Sequence[Crossed]) -> Found:
    """The card that gloo takes on each rank, and the measured rate over each network that all of them are on."""
    return {
        "card_of_ranks": [
            {"host": each.host, **next((c._asdict() for c in each.cards if c.name == each.taken), {"name": None})}
            for each in everybody
        ],
        "networks": [
            {"network": c.network, "cards": c.cards, "taken": c.taken}
            | ({"broken": c.broken} if c.broken else {"bits_per_s": round(8 * c.rate)})
            for c in crossed
        ],
    }


def of_ranks_in_words(found: Found) -> list[tuple[str, str]]:
    """A row for each host's card and for each network; and what to export where another one is faster."""
    rows, told = list[tuple[str, str]](), dict[str, list[int]]()
    for rank, taken in enumerate(found.get("card_of_ranks", ())):
        fields = {name: taken[name] for name in Card._fields if name in taken}
        what = _card(Card(**fields)) if taken["name"] else "no card"
        told.setdefault(f"{taken['host']}: {what}", []).append(rank)
    for what, ranks in told.items():
        rows.append((_numbered(ranks), what))
    networks = found.get("networks", [])
    for each in networks:
        names = ", ".join(dict.fromkeys(each["cards"]))
        how = f"broken: {each['broken']}" if "broken" in each else f"{say_rate(each['bits_per_s'] / 8)} each way"
        rows.append((f"over {names}", f"{how}, on {each['network']}" + ", the one in use" * each["taken"]))
    return rows + _advice(found["link"], networks) if networks else rows


def _numbered(ranks: list[int]) -> str:
    """
    >>> _numbered([3]), _numbered([0, 1, 2]), _numbered([0, 2, 4])
    ('rank 3', 'ranks 0 to 2', 'ranks 0, 2, 4')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    follow = len(ranks) == ranks[-1] - ranks[0] + 1
    return f"ranks {ranks[0]} to {ranks[-1]}" if follow else f"ranks {', '.join(map(str, ranks))}"


def _advice(link: Found, networks: Sequence[Found]) -> list[tuple[str, str]]:
    best = max(networks, key=lambda n: n.get("bits_per_s", 0.0))
    now, most = link.get("bits_per_s", 0.0), best.get("bits_per_s", 0.0)
    if best["taken"] or most < FASTER * now or not most:
        return []
    gain = (
        f"is {most / now:.3g} times as fast as the network in use" if now else "works, and the network in use does not"
    )
    names = dict.fromkeys(best["cards"])
    if len(names) == 1:
        return [("WARNING", f"{best['network']} {gain}: export {VARIABLES['gloo']}={best['cards'][0]} on all ranks")]
    each = ", ".join(f"{name} on rank {best['cards'].index(name)}" for name in names)
    return [("WARNING", f"{best['network']} {gain}: export {VARIABLES['gloo']} on each host as its card: {each}")]
