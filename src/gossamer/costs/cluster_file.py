"""Reads and writes a cluster as a TOML file."""

import re
import tomllib
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from gossamer.core.errors import CostError
from gossamer.core.parts import nearest
from gossamer.costs import quantities
from gossamer.costs.cluster import Cluster, Hosts, WorkTable
from gossamer.costs.laws import ComputingLaw, Constant, Lognormal, ShiftedExponential, SlowRank, read_trace

FORMAT = 1


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise CostError(f"must be a whole number, not {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostError(f"must be a number, not {value!r}")
    return float(value)


def _text(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            raise CostError(f"must be a text with a unit, not {value!r}")
        return read(value)

    return parse


def _one_of(*known: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            raise CostError(f"must be {' or '.join(map(repr, known))}, not {value!r}")
        return value

    return parse


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CostError(f"must be a list, not {value!r}")
    return value


def _efficiency(value: Any) -> Mapping[str, float]:
    patterns = ("ring", "pairs", "one", "shared")
    if not isinstance(value, dict) or not value.keys() <= {*patterns}:
        raise CostError(f"must be a table with some of {', '.join(patterns)}")
    return {name: _number(share) for name, share in value.items()}


HOSTS: dict[str, Callable[[Any], Any]] = {
    "count": _whole,
    "ranks": _whole,
    "up": _text(quantities.rate),
    "down": _text(quantities.rate),
    "latency": _text(quantities.seconds),
    "inside": _text(quantities.rate),
    "cores": _number,
    "device": _one_of("cpu", "gpu"),
    "speed": _number,
    "memory": _text(quantities.size),
    "memory_rate": _text(quantities.rate),
    "price": _text(lambda text: quantities.price(text, "h")),
    "egress": _text(lambda text: quantities.price(text, "GB")),
    "mtbf": _text(quantities.seconds),
}
NETWORK: dict[str, Callable[[Any], Any]] = {
    "payload": _number,
    "efficiency": _efficiency,
    "byte_seconds": _number,
    "program_seconds": _number,
}
FAILURES: dict[str, Callable[[Any], Any]] = {
    "restart": _text(quantities.seconds),
    "checkpoint": _text(quantities.seconds),
}
LAWS: dict[
    str, tuple[Callable[..., ComputingLaw], tuple[str, ...]]
] = {  # and the fields that each takes, the first always
    "constant": (Constant, ()),
    "exponential": (ShiftedExponential, ("tail",)),
    "lognormal": (Lognormal, ("sigma",)),
    "slow": (SlowRank, ("factor", "share", "rank")),
    "trace": (read_trace, ("trace",)),
}
COMPUTE: dict[str, Callable[[Any], Any]] = {
    "law": _one_of(*LAWS),
    "trace": _text(Path),
    "rank": _whole,
    **dict.fromkeys(("tail", "sigma", "factor", "share"), _number),
}
WORK: dict[str, Callable[[Any], Any]] = {
    "device": _one_of("cpu", "gpu"),
    "bytes": _whole,
    "ranks": lambda value: tuple(map(_whole, _list(value))),
    "seconds": lambda value: tuple(tuple(map(_number, _list(row))) for row in _list(value)),
}
TOP = ("format", "name", "backend", "hosts", "network", "compute", "failures", "work", "sources")


def read_cluster(path: Path) -> Cluster:
    """Read a cluster. An error names the file, the line and the field."""
    try:
        text = path.read_text()
        table = tomllib.loads(text)
    except OSError as error:
        raise CostError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CostError(f"{path} is not TOML: {error}") from None
    return _ClusterReader(path, text).cluster(table)


class _ClusterReader:
    def __init__(self, path: Path, text: str) -> None:
        self._path, self._lines = path, text.splitlines()

    def cluster(self, table: dict[str, Any]) -> Cluster:
        self._known(table, TOP, "")
        if table.get("format") != FORMAT:
            self._fail("format", f"must be {FORMAT}, not {table.get('format')!r}")
        groups: Any = table.get("hosts")
        if not isinstance(groups, list) or not groups:
            self._fail("hosts", "must be one [[hosts]] table or several")
        hosts = tuple(self._hosts(group, n) for n, group in enumerate(groups))
        network = self._fields(table.get("network", {}), NETWORK, 0)
        network |= self._fields(table.get("failures", {}), FAILURES, 0)
        if "compute" in table:
            network["law"] = self._law(self._fields(table["compute"], COMPUTE, 0))
        sources = {str(k): str(v) for k, v in table.get("sources", {}).items()}
        network["work"] = {
            name: self._work(name, table, n) for n, (name, table) in enumerate(table.get("work", {}).items())
        }
        given = {name: "file" for group in groups for name in group} | dict.fromkeys(network, "file")
        backend: Any = table.get("backend", "gloo")
        if backend not in ("gloo", "nccl"):
            self._fail("backend", f"must be 'gloo' or 'nccl', not {backend!r}")
        try:
            return Cluster(
                hosts=hosts,
                name=str(table.get("name", "")),
                backend=backend,
                sources=given | {"rate": "file"} | sources,
                **network,
            )
        except CostError as error:
            raise CostError(f"{self._path}: {error}") from None

    def _hosts(self, group: Any, n: int) -> Hosts:
        if not isinstance(group, dict):
            self._fail("hosts", "must be one [[hosts]] table or several")
        fields = self._fields(group, HOSTS, n)
        if "count" not in fields:
            self._fail("hosts", f"table {n + 1} needs a count", n)
        if "down" in fields and "up" not in fields:
            self._fail("down", "is given without up; give both", n)
        try:
            return Hosts(**fields)
        except CostError as error:
            self._fail(str(error).split()[0], " ".join(str(error).split()[1:]), n)

    def _work(self, recipe: str, table: Any, n: int) -> WorkTable:
        if not isinstance(table, dict):
            self._fail(recipe, 'must be a table: [work."' + recipe + '"]')
        try:
            fields = self._fields(table, WORK, n)
            if missing := [name for name in ("bytes", "ranks", "seconds") if name not in fields]:
                raise CostError(f"{missing[0]} is missing")
            return WorkTable(**fields)
        except CostError as error:
            if str(error).startswith(str(self._path)):
                raise
            raise CostError(
                f'{self._path}, {self._line(f"[work.{chr(34)}{recipe}")}[work."{recipe}"]: {error}'
            ) from None

    def _line(self, begins: str) -> str:
        found = next((i for i, line in enumerate(self._lines, 1) if line.strip().startswith(begins)), 0)
        return f"line {found}: " if found else ""

    def _law(self, given: dict[str, Any]) -> ComputingLaw:
        """The law of computing; a trace lies beside this file unless its path is whole."""
        if "law" not in given:
            self._fail("compute", f"needs a law: {' or '.join(map(repr, LAWS))}")
        kind = given.pop("law")
        make, takes = LAWS[kind]
        for name in given:
            if name not in takes:
                self._fail(name, f"is not of the law {kind!r}, which takes {', '.join(takes) or 'nothing'}")
        if takes and takes[0] not in given:
            self._fail("law", f"{kind!r} needs {takes[0]}")
        if "trace" in given:
            given = {"path": self._path.parent / given["trace"]}
        try:
            return make(**given)
        except CostError as error:
            field, _, wrong = str(error).partition(" ")
            self._fail(*((field, wrong) if field in takes else ("trace", f"cannot be used: {error}")))

    def _fields(self, table: Any, known: Mapping[str, Callable[[Any], Any]], n: int) -> dict[str, Any]:
        self._known(table, tuple(known), " in a table")
        out = dict[str, Any]()
        for name, value in table.items():
            try:
                out[name] = known[name](value)
            except CostError as error:
                self._fail(name, str(error), n)
        return out

    def _known(self, table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
        for name in table:
            if name not in known:
                self._fail(name, f"is not known{where}. {nearest(name, list(known))}")

    def _fail(self, field: str, wrong: str, n: int = 0) -> NoReturn:
        """Raise an error with the line of the n-th such field."""
        pattern = re.compile(rf"\s*\[*\s*\"?{re.escape(field)}\b")
        found = [i for i, line in enumerate(self._lines, 1) if pattern.match(line)]
        line = f", line {found[min(n, len(found) - 1)]}" if found else ""
        raise CostError(f"{self._path}{line}: {field} {wrong}")


def write_cluster(cluster: Cluster) -> str:
    """The text of a cluster file, which `read_cluster` reads back."""
    lines = [f"format = {FORMAT}", f'name = "{cluster.name}"', f'backend = "{cluster.backend}"']
    for hosts in cluster.hosts:
        lines += ["", "[[hosts]]", f"count = {hosts.count}", f"ranks = {hosts.ranks}"]
        lines += [f'{name} = "{_rate(getattr(hosts, name))}"' for name in ("up", "inside", "memory_rate")]
        if hosts.down is not None:
            lines.append(f'down = "{_rate(hosts.down)}"')
        lines += [f'latency = "{1e6 * hosts.latency:.6g} us"', f'device = "{hosts.device}"', f"speed = {hosts.speed:g}"]
        if hosts.cores < inf:
            lines.append(f"cores = {hosts.cores:g}")
    lines += ["", "[network]", f"payload = {cluster.payload:g}", f"byte_seconds = {cluster.byte_seconds:.4g}"]
    lines.append(f"program_seconds = {cluster.program_seconds:.4g}")
    if cluster.efficiency:
        shares = ", ".join(f"{name} = {share:.3g}" for name, share in cluster.efficiency.items())
        lines.append(f"efficiency = {{ {shares} }}")
    lines += _compute_lines(cluster.law)
    for recipe, table in cluster.work.items():
        rows = ", ".join(f"[{', '.join(f'{x:.4g}' for x in row)}]" for row in table.seconds)
        lines += ["", f'[work."{recipe}"]', f'device = "{table.device}"', f"bytes = {table.bytes}"]
        lines += [f"ranks = {[*table.ranks]}", f"seconds = [{rows}]"]
    if cluster.sources:
        lines += ["", "[sources]", *(f'{name} = "{where}"' for name, where in cluster.sources.items())]
    return "\n".join(lines) + "\n"


def _compute_lines(law: ComputingLaw) -> list[str]:
    """The table of the law; a constant one is not written, and a trace stays the file that it was read from."""
    kind = next((kind for kind, (make, _) in LAWS.items() if make is type(law)), "constant")
    given = [f"{name} = {getattr(law, name):g}" for name in LAWS[kind][1]]
    return ["", "[compute]", f'law = "{kind}"', *given] if given else []


def _rate(value: float) -> str:
    return "unshaped" if value == inf else f"{8e-6 * value:.9g} Mbit/s"
