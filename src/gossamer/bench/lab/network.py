"""Plan the network of a lab: its links, and the `ip` and `tc` commands that make them."""

from typing import Any

from .rates import LaterLinks, Link

INTERFACE = "lab0"
MASTER_PORT = 29500  # always free, since rank 0's network is new
MOST_HOSTS = 250
MOST_RANKS = 1000
_PACKET = 1514
_SMALLEST_BURST = 9_000
_LARGEST_SEGMENT = 65_536
_DEEPEST_QUEUE = 1 << 28  # the kernel counts it in 32 bits


def address(host: int) -> str:
    """Return the address of a host; labs do not clash, since each has its own network."""
    return f"10.0.0.{host + 1}"


def port(host: int) -> str:
    """Return the name of the bridge's end of a host's cable."""
    return f"port{host}"


def plan_middle(links: tuple[Link, ...]) -> dict[str, str]:
    """Plan the bridge, its end of each cable, and what it may send to each host.

    `{namespaces[3]}` stands for host 3's network, which only the keeper knows.
    """
    ports = [port(host) for host in range(len(links))]
    ip = ["link set lo up", "link add name bridge0 type bridge mcast_snooping 0", _quiet("bridge0")]
    for host, name in enumerate(ports):
        ip += [f"link add name {name} type veth peer name {INTERFACE} netns {{namespaces[{host}]}}"]
        ip += [f"link set dev {name} master bridge0", _quiet(name)]
    tc = [shape(name, link.down, None) for name, link in zip(ports, links)]
    return {"ip": "\n".join(ip), "tc": "\n".join(tc)}


def plan_hosts(
    links: tuple[Link, ...], latency: int | None, later: tuple[LaterLinks, ...] = ()
) -> list[dict[str, Any]]:
    """Plan each host: its name, its address, its end of the cable, and what it may send."""
    every = (*links, *(link for change in later for link in change.links))
    cut = f"link set dev {INTERFACE} gso_max_size {segment(every)}"
    common = f"link set lo up\n{cut}\n{_quiet(INTERFACE)}"
    return [
        {
            "name": f"host{host}",
            "address": address(host),
            "ip": f"{common}\naddress add {address(host)}/24 dev {INTERFACE}",
            "tc": shape(INTERFACE, link.up, latency),
        }
        for host, link in enumerate(links)
    ]


def plan_changes(later: tuple[LaterLinks, ...], latency: int | None) -> list[dict[str, Any]]:
    """Plan each change of rates: its moment, and the `tc` lines for the bridge and for each host."""

    def changed(device: str, rate: int | None, latency: int | None) -> str:
        return shape(device, rate, latency).replace("qdisc add", "qdisc replace")

    return [
        {
            "at": change.seconds,
            "tc": "\n".join(changed(port(host), link.down, None) for host, link in enumerate(change.links)),
            "hosts": [changed(INTERFACE, link.up, latency) for link in change.links],
        }
        for change in later
    ]


def plan_ranks(hosts: int, per_host: int) -> list[dict[str, Any]]:
    """Plan each rank: its host, and the environment variables of its place."""
    return [
        {
            "host": rank // per_host,
            "environment": {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host), "GROUP_RANK": str(rank // per_host)},
        }
        for rank in range(hosts * per_host)
    ]


def _quiet(device: str) -> str:
    # Without an IPv6 link-local address the kernel sends nothing of its own: counters show the program only. Two
    # requests, since in one the kernel first sets the device up: the bridge would have its address before it hears
    # that it is to have none, and would announce it to every host in the next seconds.
    return f"link set dev {device} addrgenmode none\nlink set dev {device} up"


def shape(device: str, rate: int | None, latency: int | None) -> str:
    """Return the `tc` lines that limit, and perhaps delay, what leaves a device.

    The delay sits at the sender's end only: a packet from any host to any other meets it once.
    """
    lines: list[str] = []
    parent = "root"
    if latency is not None:
        waiting = 1000 + (rate or 10_000_000_000) // 8 * latency // 1_000_000 // _PACKET
        lines += [f"qdisc add dev {device} root handle 1: netem delay {latency}us limit {waiting}"]
        parent = "parent 1:1 handle 10:"
    if rate is not None:
        burst, limit = buckets(rate)
        lines += [f"qdisc add dev {device} {parent} tbf rate {rate}bit burst {burst}b limit {limit}b"]
    return "\n".join(lines)


def buckets(rate: int) -> tuple[int, int]:
    """Return how many bytes a shaper lets through at once, and how many may wait before it drops.

    A burst passes unshaped after every pause, which would favour recipes that send little: it is one millisecond of
    data, or one small segment. The queue is long: several senders to one host, or one with a faster link, fill
    it, and dropped packets would be sent and counted twice (at 0.1 s: up to 5 % in an all-reduce; at 0.4 s: none).
    """
    burst = max(rate // 8 // 1000, _SMALLEST_BURST)
    queue = min(max(rate // 8 * 2 // 5, 64 * _PACKET), _DEEPEST_QUEUE)
    return burst, queue + burst


def segment(links: tuple[Link, ...]) -> int:
    """Return how large a segment the hosts may hand to their interface: one that fits every burst.

    A larger one would be cut into packets by the shaper. That costs a core at high rates, and each packet's
    headers would be counted, 4.5 % of the bytes. A segment is counted as one packet, as on any card that cuts
    segments itself, yet pays for all its headers in time.
    """
    rates = [rate for link in links for rate in (link.up, link.down) if rate is not None]
    smallest = min((buckets(rate)[0] for rate in rates), default=_LARGEST_SEGMENT)
    return min(_LARGEST_SEGMENT, smallest * 9 // 10)
