"""Reads and writes a cluster as a TOML file."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from gossamer.core.errors import CostError
from gossamer.costs import quantities
from gossamer.costs.cluster import (
    COMM_THREADS,
    INSIDE,
    LATENCIES,
    MEMORY_RATES,
    Backend,
    Cluster,
    Device,
    Hosts,
    WorkTable,
)
from gossamer.costs.laws import ComputingLaw, Constant, Lognormal, ShiftedExponential, SlowRank, read_trace
from gossamer.costs.toml_reader import TomlReader, number, one_of, text_as, whole

FORMAT = 1
_HEAD = re.compile(r"\s*\[\[?[A-Za-z\"]")  # of a table; a row of numbers in a list begins otherwise


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CostError(f"must be a list, not {value!r}")
    return value


def _efficiency(value: Any) -> Mapping[str, float]:
    patterns = ("ring", "pairs", "one", "shared")
    if not isinstance(value, dict) or not value.keys() <= {*patterns}:
        raise CostError(f"must be a table with some of {', '.join(patterns)}")
    return {name: _share(share) for name, share in value.items()}


def _share(value: Any) -> float:
    found = number(value)
    if not 0 < found <= 1:
        raise CostError(f"must lie above 0 and up to 1, not {value!r}")
    return found


def _duration(value: Any) -> float:
    found = number(value)
    if not 0 <= found < inf:
        raise CostError(f"must be 0 or more, not {value!r}")
    return found


HOSTS: dict[str, Callable[[Any], Any]] = {
    "count": whole,
    "ranks": whole,
    "up": text_as(quantities.rate),
    "down": text_as(quantities.rate),
    "latency": text_as(quantities.seconds),
    "inside": text_as(quantities.rate),
    "cores": number,
    "device": one_of("cpu", "gpu"),
    "speed": number,
    "memory": text_as(quantities.size),
    "memory_rate": text_as(quantities.rate),
    "price": text_as(lambda text: quantities.price(text, "h")),
    "egress": text_as(lambda text: quantities.price(text, "GB")),
    "mtbf": text_as(quantities.seconds),
}
NETWORK: dict[str, Callable[[Any], Any]] = {
    "payload": _share,
    "efficiency": _efficiency,
    "byte_seconds": _duration,
    "program_seconds": _duration,
}
FAILURES: dict[str, Callable[[Any], Any]] = {
    "restart": text_as(quantities.seconds),
    "checkpoint": text_as(quantities.seconds),
}
# Laws of computing, and the fields that each takes, the first always.
LAWS: dict[str, tuple[Callable[..., ComputingLaw], tuple[str, ...]]] = {
    "constant": (Constant, ()),
    "exponential": (ShiftedExponential, ("tail",)),
    "lognormal": (Lognormal, ("sigma",)),
    "slow": (SlowRank, ("factor", "share", "rank")),
    "trace": (read_trace, ("trace",)),
}
COMPUTE: dict[str, Callable[[Any], Any]] = {
    "law": one_of(*LAWS),
    "trace": text_as(Path),
    "rank": whole,
    **dict.fromkeys(("tail", "sigma", "factor", "share"), number),
}
WORK: dict[str, Callable[[Any], Any]] = {
    "device": one_of("cpu", "gpu"),
    "bytes": whole,
    "ranks": lambda value: tuple(map(whole, _list(value))),
    "seconds": lambda value: tuple(tuple(map(number, _list(row))) for row in _list(value)),
}
BLAMED = {  # what stands in an error about a whole cluster, and the field that it is about
    "too many to plan": "count",
    "different numbers of ranks": "ranks",
    "two currencies": "egress",
    "is to be slow": "rank",
}
TOP = ("format", "name", "backend", "hosts", "network", "compute", "failures", "work", "sources")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster. An error names the file, the line and the field."""
    reader = _ClusterReader(path)
    return reader.cluster(reader.table)


class _ClusterReader(TomlReader):
    _here = range(0)  # the lines of the table that is read

    def _begin(self, head: str, n: int = 0) -> None:
        """Note the lines of the n-th table of this head; none where a table is written in another way."""
        heads = [i for i, line in enumerate(self.lines, 1) if line.strip().startswith(head)]
        if n >= len(heads):
            self._here = range(0)
            return
        later = (i for i, line in enumerate(self.lines, 1) if i > heads[n] and _HEAD.match(line))
        self._here = range(heads[n], next(later, len(self.lines) + 1))

    def line_of(self, field: str, n: int) -> int:
        """The line of a field in the table that is read, or else of the n-th such field."""
        return next((line for line in self.lines_of(field) if line in self._here), super().line_of(field, n))

    def cluster(self, table: dict[str, Any]) -> Cluster:
        self.known(table, TOP, "")
        if table.get("format") != FORMAT:
            self.fail("format", f"must be {FORMAT}, not {table.get('format')!r}")
        groups: Any = table.get("hosts")
        if not isinstance(groups, list) or not groups:
            self.fail("hosts", "must be one [[hosts]] table or several")
        backend: Any = table.get("backend", "gloo")
        if backend not in ("gloo", "nccl"):
            self.fail("backend", f"must be 'gloo' or 'nccl', not {backend!r}")
        hosts = tuple(self._hosts(group, n, backend) for n, group in enumerate(groups))
        self._need_rates(groups, hosts)
        network = self.fields(self._inner(table, "network"), NETWORK, 0)
        network |= self.fields(self._inner(table, "failures"), FAILURES, 0)
        if "compute" in table:
            network["law"] = self._law(self.fields(self._inner(table, "compute"), COMPUTE, 0))
        sources = {str(k): str(v) for k, v in self._inner(table, "sources").items()}
        network["work"] = {
            name: self._work(name, one, n) for n, (name, one) in enumerate(self._inner(table, "work").items())
        }
        self._here = range(0)
        given = {name: "file" for group in groups for name in group} | dict.fromkeys(network, "file")
        try:
            return Cluster(
                hosts=hosts,
                name=str(table.get("name", "")),
                backend=backend,
                sources=given | {"rate": "file"} | sources,
                **(dict(COMM_THREADS[backend]) | network),
            )
        except CostError as error:
            blamed = next((field for words, field in BLAMED.items() if words in str(error)), "hosts")
            line = self.line_of(blamed, len(self.lines))  # the last of them
            raise CostError(f"{self.path}{f', line {line}' if line else ''}: {error}") from None

    def _inner(self, table: dict[str, Any], name: str) -> dict[str, Any]:
        """A table of the file; empty where it has none."""
        found = table.get(name, {})
        if not isinstance(found, dict):
            self.fail(name, f"must be a table, [{name}], not {found!r}")
        self._begin(f"[{name}]")
        return found

    def _hosts(self, group: Any, n: int, backend: Backend) -> Hosts:
        """A group of hosts; NCCL is for GPUs, and what is not given is as by flags on such a device."""
        if not isinstance(group, dict):
            self.fail("hosts", "must be one [[hosts]] table or several")
        self._begin("[[hosts]]", n)
        fields = self.fields(group, HOSTS, n)
        if "count" not in fields:
            self.fail("hosts", f"table {n + 1} needs a count", n)
        if "down" in fields and "up" not in fields:
            self.fail("down", "is given without up; give both", n)
        device: Device = fields.get("device", "gpu" if backend == "nccl" else "cpu")
        usual: dict[str, Any] = {"device": device, "memory_rate": MEMORY_RATES[device]}
        usual |= {"latency": LATENCIES[device], "inside": INSIDE[device]}
        try:
            return Hosts(**(usual | fields))
        except CostError as error:
            field, _, wrong = str(error).partition(" ")
            self.fail(field, wrong, n)

    def _need_rates(self, groups: list[dict[str, Any]], hosts: Sequence[Hosts]) -> None:
        """Refuse hosts without a rate, unless there is one alone: on links without a limit nothing would ever pay."""
        bare = next((n for n, group in enumerate(groups) if "up" not in group), None)
        if bare is not None and sum(each.count for each in hosts) > 1:
            self._begin("[[hosts]]", bare)
            wrong = 'needs up = "1 Gbit/s", the rate of a link, or "unshaped" where it has no limit'
            self.fail("hosts", f"table {bare + 1} {wrong}", bare)

    def _work(self, recipe: str, table: Any, n: int) -> WorkTable:
        head = f'[work."{recipe}"'
        if not isinstance(table, dict):
            self.fail(recipe, f"must be a table: {head}]")
        self._begin(head)
        fields = self.fields(table, WORK, n)
        try:
            if missing := [name for name in ("bytes", "ranks", "seconds") if name not in fields]:
                raise CostError(f"{missing[0]} is missing")
            return WorkTable(**fields)
        except CostError as error:
            place = next((f"line {i}: " for i, line in enumerate(self.lines, 1) if line.strip().startswith(head)), "")
            raise CostError(f"{self.path}, {place}{head}]: {error}") from None

    def _law(self, given: dict[str, Any]) -> ComputingLaw:
        """The law of computing; a trace lies beside this file unless its path is whole."""
        if "law" not in given:
            self.fail("compute", f"needs a law: {' or '.join(map(repr, LAWS))}")
        kind = given.pop("law")
        make, takes = LAWS[kind]
        for name in given:
            if name not in takes:
                self.fail(name, f"is not of the law {kind!r}, which takes {', '.join(takes) or 'nothing'}")
        if takes and takes[0] not in given:
            self.fail("law", f"{kind!r} needs {takes[0]}")
        if "trace" in given:
            given = {"path": self.path.parent / given["trace"]}
        try:
            return make(**given)
        except CostError as error:
            field, _, wrong = str(error).partition(" ")
            if field not in takes:
                field, wrong = "trace", f"cannot be used: {error}"
            self.fail(field, wrong)


def write_cluster(cluster: Cluster) -> str:
    """The text of a cluster file, which `read_cluster` reads back."""
    name = json.dumps(cluster.name, ensure_ascii=False)  # as TOML writes a text
    lines = [f"format = {FORMAT}", f"name = {name}", f'backend = "{cluster.backend}"']
    for hosts in cluster.hosts:
        lines += ["", "[[hosts]]", *_host_lines(hosts)]
    lines += ["", "[network]", f"payload = {cluster.payload:g}", f"byte_seconds = {cluster.byte_seconds:.4g}"]
    lines.append(f"program_seconds = {cluster.program_seconds:.4g}")
    if cluster.efficiency:
        shares = ", ".join(f"{name} = {share:.3g}" for name, share in cluster.efficiency.items())
        lines.append(f"efficiency = {{ {shares} }}")
    lines += ["", "[failures]", f'restart = "{cluster.restart:.9g} s"', f'checkpoint = "{cluster.checkpoint:.9g} s"']
    lines += _compute_lines(cluster.law)
    for recipe, table in cluster.work.items():
        rows = ", ".join(f"[{', '.join(f'{x:.4g}' for x in row)}]" for row in table.seconds)
        lines += ["", f"[work.{json.dumps(recipe)}]", f'device = "{table.device}"', f"bytes = {table.bytes}"]
        lines += [f"ranks = {[*table.ranks]}", f"seconds = [{rows}]"]
    if cluster.sources:
        lines += ["", "[sources]", *(f'{name} = "{where}"' for name, where in cluster.sources.items())]
    return "\n".join(lines) + "\n"


def _host_lines(hosts: Hosts) -> list[str]:
    lines = [f"count = {hosts.count}", f"ranks = {hosts.ranks}"]
    lines += [f'{name} = "{_rate(getattr(hosts, name))}"' for name in ("up", "inside", "memory_rate")]
    if hosts.down is not None:
        lines.append(f'down = "{_rate(hosts.down)}"')
    lines += [f'latency = "{1e6 * hosts.latency:.6g} us"', f'device = "{hosts.device}"', f"speed = {hosts.speed:g}"]
    if hosts.cores < inf:
        lines.append(f"cores = {hosts.cores:g}")
    if hosts.memory is not None:
        lines.append(f'memory = "{hosts.memory:.9g} B"')
    for name, price, per in (("price", hosts.price, "h"), ("egress", hosts.egress, "GB")):
        if price is not None:
            lines.append(f'{name} = "{price.amount:.9g} {price.currency}/{per}"')
    if hosts.mtbf is not None:
        lines.append(f'mtbf = "{hosts.mtbf:.9g} s"')
    return lines


def _compute_lines(law: ComputingLaw) -> list[str]:
    """The table of the law; a constant one is not written, and a trace stays the file that it was read from."""
    kind = next((kind for kind, (make, _) in LAWS.items() if make is type(law)), "constant")
    given = [f"{name} = {getattr(law, name):g}" for name in LAWS[kind][1]]
    return ["", "[compute]", f'law = "{kind}"', *given] if given else []


def _rate(value: float) -> str:
    return "unshaped" if value == inf else f"{8e-6 * value:.9g} Mbit/s"
