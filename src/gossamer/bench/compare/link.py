"""Measure the link between ranks: alpha and beta, from all-reduces of growing size, over each network that they share."""

import json
import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from gossamer.bench.compare.calibrate import all_reduce_seconds
from gossamer.bench.compare.local import run_here
from gossamer.bench.compare.network_cards import LOOPBACK, VARIABLES, Card, cards, choices
from gossamer.bench.compare.parent_death import program
from gossamer.core.errors import PeerError

SIZES = [256 * 4**i for i in range(8)]  # float32 elements, up to 16 MB
LONG = 0.1  # seconds without latency: stop at an all-reduce this long; a larger one may take minutes on a slow link
PATIENCE = 120.0  # seconds for two ranks on this machine, from start to end
START = timedelta(seconds=60)  # for all ranks to come
TRY = timedelta(seconds=20)  # for a network over which they may not reach each other


class AlphaBeta(NamedTuple):
    """A ring all-reduce of B bytes takes about 2 (size - 1) alpha + 2 (size - 1) / size * B / rate seconds."""

    size: int
    alpha: float  # seconds per message
    rate: float  # bytes per second, each way


class RankCards(NamedTuple):
    """A rank's host, its cards, and the name of the one that gloo takes there."""

    host: str
    cards: list[Card]
    taken: str


class Crossed(NamedTuple):
    """A network that all ranks are on: the card of each, whether gloo takes it, and its rate, or why it was not measured."""

    network: str
    cards: list[str]
    taken: bool
    rate: float = 0.0
    broken: str = ""


def alpha_beta() -> AlphaBeta:
    """Measure the link between all ranks that a launcher has started; its slowest part counts."""
    dist.init_process_group("gloo", timeout=START)
    return _measured()


def over_each_network() -> tuple[AlphaBeta | str, list[RankCards], list[Crossed]]:
    """Measure the link over the cards that gloo takes, or say why that fails; then over each other network of all ranks.

    Returns the cards of all ranks besides. Names of cards may differ between ranks: each takes its own on that network.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=START)))
    everybody = _told_by_all(store, rank, size)
    found = _over(None, PrefixStore("taken", store), rank, size)
    several = len({each.host for each in everybody}) > 1
    crossed = list[Crossed]()
    for network in shared_networks(everybody) if several else ():
        taken = all(c.name == r.taken for c, r in zip(network, everybody))
        measured = found if taken else _over(network[rank].name, PrefixStore(network[0].network, store), rank, size)
        each = Crossed(network[0].network, [c.name for c in network], taken)
        how = each._replace(broken=measured) if isinstance(measured, str) else each._replace(rate=measured.rate)
        crossed.append(how)
    return found, everybody, crossed


def shared_networks(everybody: Sequence[RankCards]) -> list[list[Card]]:
    """For each network that all ranks are on, the card of each; without those on which hosts have one address, as docker's."""
    hosts, found = {each.host for each in everybody}, list[list[Card]]()
    for first in everybody[0].cards if everybody else ():
        there = [next((c for c in each.cards if c.network == first.network), None) for each in everybody]
        whole = [c for c in there if c is not None and c.name != LOOPBACK]
        if len(whole) == len(everybody) and len({c.address for c in whole}) >= len(hosts):
            found.append(whole)
    return found


def _told_by_all(store: Any, rank: int, size: int) -> list[RankCards]:
    mine = cards()
    card = choices(mine)["gloo"].card
    store.set(f"cards/{rank}", json.dumps([socket.gethostname(), mine, card.name if card else ""]))
    told = list[RankCards]()
    for other in range(size):
        host, there, taken = json.loads(store.get(f"cards/{other}"))
        told.append(RankCards(str(host), [Card(*fields) for fields in there], str(taken)))
    return told


def _over(card: str | None, store: Any, rank: int, size: int) -> AlphaBeta | str:
    """Measure over a card of this rank, or over the one that gloo takes; the reason, if ranks cannot reach each other."""
    variable = VARIABLES["gloo"]
    before = os.environ.get(variable)
    try:
        if card is not None:
            os.environ[variable] = card
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TRY if card else START)
        return _measured()
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before


def _measured() -> AlphaBeta:
    """Measure the link between the ranks of the process group, and end the group."""
    try:
        size = dist.get_world_size()
        if size == 1:
            return AlphaBeta(1, 0.0, float("inf"))
        least, elements, most = all_reduce_seconds(1).value, 0, 0.0
        for elements in SIZES:
            most = all_reduce_seconds(elements).value
            if most - least >= LONG:
                break
        crossed = 2 * (size - 1) / size * 4 * elements
        dist.barrier()  # torch 2.6 hangs if a group is destroyed while its threads still hold the last tensor
        return AlphaBeta(size, least / (2 * (size - 1)), crossed / max(most - least, 1e-9))
    finally:
        dist.destroy_process_group()


def between_two_ranks() -> AlphaBeta:
    """Measure the link between two new ranks on this machine."""
    said = list[str]()
    try:
        run_here(2, program("gossamer.bench.compare.link"), lambda rank, line: said.append(line), PATIENCE)
    except TimeoutError:
        raise PeerError(f"two ranks on this machine did not find each other within {PATIENCE:g} s") from None
    for line in said:
        if line.startswith("{"):
            return AlphaBeta(**json.loads(line))
    raise PeerError(f"two ranks on this machine could not exchange messages: {_last_word(said)}")


def _last_word(said: Sequence[str]) -> str:
    """The last error, or the last line, in the output of the ranks."""
    errors = re.findall(r"\b[\w.]+Error: .+", "\n".join(said))
    return (errors or list(said)[-1:] or ["they printed nothing"])[0][:300]


if __name__ == "__main__":
    found = alpha_beta()
    if os.environ.get("RANK") == "0":
        print(json.dumps(found._asdict()), flush=True)
