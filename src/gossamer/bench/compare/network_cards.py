"""The network cards of this host, and the one that gloo and NCCL would take; addresses and rates as Linux tells them."""

import array
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gossamer.fabrics.liveness.launch import usable_address

LOOPBACK = "lo"
VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_FLAGS, _ADDRESS, _NETMASK, _ETHTOOL = 0x8913, 0x8915, 0x891B, 0x8946  # requests to a socket (linux/sockios.h)
_UP, _SETTINGS, _DRIVER = 1, 1, 3  # a flag, and two requests of ethtool (linux/if.h, linux/ethtool.h)
_UNKNOWN = (0, 0xFFFF, 0xFFFFFFFF)  # rates that say that the driver knows none


class Card(NamedTuple):
    """A network card that is up and has an address; `rate` is in bits per second, as its driver says, 0 if it does not.

    `virtual` cards belong to no device: loopback, bridges of containers, tunnels, the ends of virtual cables.
    """

    name: str
    address: str
    network: str
    driver: str
    virtual: bool
    rate: float


class TakenCard(NamedTuple):
    """The card that a backend would take, or None if it finds none; why; and what speaks against it, or ""."""

    card: Card | None
    why: str
    warning: str


def cards() -> list[Card]:
    """The cards of this host (of this network namespace), in the kernel's order; none where the kernel is not Linux."""
    found = list[Card]()
    if not hasattr(socket, "if_nameindex") or not Path("/proc/net").exists():
        return found
    newer = _ipv6()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            place = _ipv4(asked, name) or newer.get(name)
            if place is not None and _ask(asked, _FLAGS, name, "H") & _UP:
                driver, device = _driver(asked, name)
                network = str(ipaddress.ip_interface(place).network)
                found.append(Card(name, place.partition("/")[0], network, driver, not device, _rate(asked, name)))
    return found


def choices(there: Sequence[Card], environment: Mapping[str, str] = os.environ) -> dict[str, TakenCard]:
    """What gloo and NCCL would take of these cards."""
    taken = {"gloo": _by_gloo(there, environment), "nccl": _by_nccl(there, environment)}
    return {name: TakenCard(card, why, _against(name, card, there)) for name, (card, why) in taken.items()}


def better(card: Card | None, there: Sequence[Card]) -> Card | None:
    """A card that other machines are likelier to reach, or that is faster by what the drivers say."""
    rivals = [c for c in there if c.name != LOOPBACK and c != card]
    if card is not None and card.name != LOOPBACK:
        rivals = [c for c in rivals if not c.virtual and (card.virtual or 0 < card.rate < c.rate)]
    return max(rivals, key=lambda c: (not c.virtual, c.rate), default=None)


def _against(backend: str, card: Card | None, there: Sequence[Card]) -> str:
    rival, variable = better(card, there), VARIABLES[backend]
    instead = f": export {variable}={rival.name}" if rival else ""
    if card is None:
        return f"{backend} finds no card{instead}"
    if card.name == LOOPBACK:
        return f"ranks on other machines cannot reach {LOOPBACK}{instead}"
    if rival is None:
        return ""
    if card.virtual:
        return (
            f"{card.name} belongs to no device, as bridges of containers and tunnels do, and {rival.name} does{instead}"
        )
    return f"{card.name} is slower than {rival.name}{instead}"


def _by_gloo(there: Sequence[Card], environment: Mapping[str, str]) -> tuple[Card | None, str]:
    """As torch does: the variable, or the address that the host's name leads to, or else the loopback."""
    if named := environment.get(VARIABLES["gloo"], ""):
        first = named.split(",")[0]
        return next((c for c in there if c.name == first), None), f"{VARIABLES['gloo']} says {named}"
    host = socket.gethostname()
    address = usable_address(host)
    for card in there:
        if address == card.address or (address.startswith("127.") and card.name == LOOPBACK):
            return card, f"the host's name, {host}, leads to {address}"
    loopback = next((c for c in there if c.name == LOOPBACK), None)
    return loopback, f"the host's name, {host}, leads to no address of this host"


def _by_nccl(there: Sequence[Card], environment: Mapping[str, str]) -> tuple[Card | None, str]:
    """As NCCL does for its sockets: the variable; else InfiniBand's, then any but these, then docker's, then the loopback."""
    if named := environment.get(VARIABLES["nccl"], ""):
        return _first_that(there, named), f"{VARIABLES['nccl']} says {named}"
    for rule in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        if card := _first_that(there, rule):
            return card, "NCCL's own order"
    return None, "there is none"


def _first_that(there: Sequence[Card], rule: str) -> Card | None:
    """The first card that a rule of NCCL takes: the beginnings of names, `^` for all but those, `=` for whole names."""
    but, rule = rule.startswith("^"), rule.removeprefix("^")
    whole, rule = rule.startswith("="), rule.removeprefix("=")
    words = [w for w in rule.split(",") if w]
    for card in there:
        fits = card.name in words if whole else card.name.startswith(tuple(words))
        if fits != but:
            return card
    return None


# -- what the kernel says; Windows has no fcntl ------------------------------------------------------------------------------


def _ask(asked: socket.socket, request: int, name: str, layout: str) -> int:
    import fcntl

    try:
        answer = fcntl.ioctl(asked, request, struct.pack("256s", name.encode()))
    except OSError:
        return 0
    return int(struct.unpack_from(layout, answer, 16)[0])


def _ipv4(asked: socket.socket, name: str) -> str | None:
    address, mask = (_ask(asked, request, name, "!4xI") for request in (_ADDRESS, _NETMASK))
    return f"{ipaddress.IPv4Address(address)}/{mask.bit_count()}" if address else None


def _ipv6() -> dict[str, str]:
    """The first address of each card that reaches further than its own cable."""
    found, listed = dict[str, str](), Path("/proc/net/if_inet6")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        digits, _, length, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(name, f"{address}/{int(length, 16)}")
    return found


def _ethtool(asked: socket.socket, name: str, request: int, size: int) -> bytes:
    """An answer of the driver; asked by a socket, since /sys may be that of another network namespace."""
    import fcntl

    room = array.array("B", struct.pack("I", request) + bytes(size - 4))
    try:
        fcntl.ioctl(asked, _ETHTOOL, struct.pack("16sP", name.encode(), room.buffer_info()[0]))
    except OSError:
        return b""
    return room.tobytes()


def _driver(asked: socket.socket, name: str) -> tuple[str, bool]:
    """The driver's name, and whether it drives a device: then it says on which bus."""
    answer = _ethtool(asked, name, _DRIVER, 196)
    driver, bus = (answer[at : at + 32].split(b"\0")[0].decode(errors="replace") for at in (4, 100))
    return driver, bus not in ("", "N/A", "tap", "tun")


def _rate(asked: socket.socket, name: str) -> float:
    answer = _ethtool(asked, name, _SETTINGS, 44)
    if not answer:
        return 0.0
    low, high = struct.unpack_from("=H", answer, 12)[0], struct.unpack_from("=H", answer, 28)[0]
    megabits = high << 16 | low
    return 0.0 if megabits in _UNKNOWN else 1e6 * megabits
