"""Bytes on the wire, as the network interface counts them; ledgers are checked against them."""

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import LabError

INTERFACE_VARIABLE = "GOSSAMER_LAB_IFACE"
# Not /sys/class/net, which shows the network namespace of its mount. /proc/self follows the reading process.
_DEVICES = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that one interface has sent and received so far, with packet headers."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_packets: int = 0
    received_packets: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )


def in_lab() -> bool:
    """True if this process runs on a host of a lab."""
    return INTERFACE_VARIABLE in os.environ


def own_counters() -> Counters:
    """Return the counters of this lab host's interface: call it before and after, and subtract."""
    if not in_lab():
        raise LabError(f"not inside a lab ({INTERFACE_VARIABLE} is not set); run under 'gossamer lab'")
    return read_counters(os.environ[INTERFACE_VARIABLE])


def lab_bytes() -> int:
    """Bytes that this lab host has sent so far; 0 outside of a lab."""
    return own_counters().sent_bytes if in_lab() else 0


def read_counters(interface: str) -> Counters:
    """Return the counters of any interface that this process can see."""
    try:
        table = parse_devices(_DEVICES.read_text())
    except OSError as error:
        raise LabError(f"cannot read network counters: {error}") from error
    if interface not in table:
        raise LabError(f"no network interface {interface!r}; there are: {', '.join(table)}")
    return table[interface]


def parse_devices(text: str) -> dict[str, Counters]:
    """Read the kernel's table of network devices."""
    table: dict[str, Counters] = {}
    for line in text.splitlines()[2:]:
        name, _, fields = line.partition(":")
        received_bytes, received_packets, *_ = map(int, fields.split()[:8])
        sent_bytes, sent_packets, *_ = map(int, fields.split()[8:])
        table[name.strip()] = Counters(sent_bytes, received_bytes, sent_packets, received_packets)
    return table
