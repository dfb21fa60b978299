"""Which network card gloo and NCCL would take, by their rules, and what the doctor advises."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

import pytest

from gossamer.bench.compare import network_cards
from gossamer.bench.compare.link import RankCards, shared_networks
from gossamer.bench.compare.network_cards import Card, TakenCard, cards, choices

LO = Card("lo", "127.0.0.1", "127.0.0.0/8", "", True, 0.0)
SLOW = Card("eth0", "10.0.0.5", "10.0.0.0/24", "e1000", False, 1e9)
FAST = Card("eth1", "10.1.0.5", "10.1.0.0/24", "mlx5_core", False, 25e9)
DOCKER = Card("docker0", "172.17.0.1", "172.17.0.0/16", "bridge", True, 0.0)
ALL = [LO, DOCKER, SLOW, FAST]


def taken(
    there: list[Card], monkeypatch: pytest.MonkeyPatch, leads_to: str = "", environment: Mapping[str, str] | None = None
) -> dict[str, TakenCard]:
    monkeypatch.setattr(network_cards, "usable_address", lambda host: leads_to)
    return choices(there, environment or {})


@pytest.mark.parametrize(
    ("leads_to", "variable", "name", "warning"),
    [
        ("10.1.0.5", "", "eth1", ""),
        ("10.0.0.5", "", "eth0", "eth0 is slower than eth1: export GLOO_SOCKET_IFNAME=eth1"),
        ("127.0.1.1", "", "lo", "ranks on other machines cannot reach lo: export GLOO_SOCKET_IFNAME=eth1"),
        ("", "", "lo", "ranks on other machines cannot reach lo: export GLOO_SOCKET_IFNAME=eth1"),
        (
            "172.17.0.1",
            "",
            "docker0",
            "docker0 belongs to no device, as bridges of containers and tunnels do, and eth1 does",
        ),
        ("10.0.0.5", "eth1", "eth1", ""),
        ("10.0.0.5", "eth1,eth0", "eth1", ""),
        ("10.0.0.5", "eth7", None, "gloo finds no card: export GLOO_SOCKET_IFNAME=eth1"),
    ],
)
def test_gloo_goes_by_the_variable_or_by_the_name_of_the_host(
    monkeypatch: pytest.MonkeyPatch, leads_to: str, variable: str, name: str | None, warning: str
) -> None:
    environment = {"GLOO_SOCKET_IFNAME": variable} if variable else {}
    found = taken(ALL, monkeypatch, leads_to, environment)["gloo"]
    assert (found.card.name if found.card else None) == name
    assert found.warning.startswith(warning)
    assert bool(found.warning) == bool(warning)
    if variable:
        assert found.why == f"GLOO_SOCKET_IFNAME says {variable}"


@pytest.mark.parametrize(
    ("there", "variable", "name"),
    [
        (ALL, "", "eth0"),  # the first that is neither docker's nor the loopback
        ([LO, DOCKER], "", "docker0"),
        ([LO], "", "lo"),
        ([*ALL, Card("ib0", "10.2.0.5", "10.2.0.0/24", "ipoib", False, 0.0)], "", "ib0"),
        (ALL, "eth", "eth0"),  # beginnings of names
        (ALL, "=eth1", "eth1"),
        (ALL, "^lo,docker,eth0", "eth1"),
        (ALL, "=eth", None),
    ],
)
def test_nccl_goes_by_the_variable_or_by_an_order_of_names(
    monkeypatch: pytest.MonkeyPatch, there: list[Card], variable: str, name: str | None
) -> None:
    found = taken(there, monkeypatch, environment={"NCCL_SOCKET_IFNAME": variable} if variable else {})["nccl"]
    assert (found.card.name if found.card else None) == name


def test_a_host_with_virtual_cards_only_is_not_warned_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Card("eth0", "172.17.0.2", "172.17.0.0/16", "veth", True, 1e10)
    assert taken([LO, inside], monkeypatch, "172.17.0.2")["gloo"].warning == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_the_loopback_of_this_host_is_found() -> None:
    (loopback,) = (card for card in cards() if card.name == "lo")
    assert (loopback.address, loopback.network, loopback.virtual, loopback.rate) == (
        "127.0.0.1",
        "127.0.0.0/8",
        True,
        0.0,
    )
    assert all(card.address and card.network for card in cards())


LISTENS = """
import os
from torch._C._distributed_c10d import ProcessGroupGloo

def sockets():
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}

before = sockets()
device = ProcessGroupGloo.create_default_device()
made = sockets() - before
for line in open("/proc/self/net/tcp").readlines()[1:]:
    fields = line.split()
    if fields[9] in made:
        print(".".join(str(byte) for byte in bytes.fromhex(fields[1].partition(":")[0])[::-1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
@pytest.mark.parametrize("named", [None, "lo"])
def test_gloo_does_take_that_card(named: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    if named:
        environment["GLOO_SOCKET_IFNAME"] = named
    command = [sys.executable, "-W", "ignore", "-c", LISTENS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    card = choices(cards(), environment)["gloo"].card
    assert card is not None
    address = done.stdout.split()
    if not address and ":" in card.address:
        pytest.skip("the name of this host leads to an address of IPv6")
    assert address == [card.address] or (card.name == "lo" and address[0].startswith("127."))


def test_networks_of_all_ranks_are_those_on_which_each_host_has_an_address_of_its_own() -> None:
    def rank(host: str, last: int, fast: str) -> RankCards:
        there = [
            LO,
            DOCKER,
            SLOW._replace(address=f"10.0.0.{last}"),
            FAST._replace(name=fast, address=f"10.1.0.{last}"),
        ]
        return RankCards(host, there, "eth0")

    everybody = [rank("a", 5, "eth1"), rank("b", 6, "ens3")]
    found = shared_networks(everybody)
    assert [[card.name for card in network] for network in found] == [["eth0", "eth0"], ["eth1", "ens3"]]
    everybody[1].cards.pop()
    assert [network[0].network for network in shared_networks(everybody)] == ["10.0.0.0/24"]
    assert shared_networks([]) == []


def test_a_name_that_leads_nowhere_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert network_cards.usable_address("nowhere") == ""
