"""A graph given by its edges."""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, final

from gossamer.core.binding import Binding
from gossamer.core.contracts import Peers, Topology
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import part, require
from gossamer.core.text import shown
from gossamer.core.topology import refuse_unsound

_EDGE = re.compile(r"(\d{1,6})([>-])(\d{1,6})(?::(\d*\.?\d+(?:e-?\d+)?))?")
_ONE = 1e-6  # tolerance of a column's sum


@final
@part("graph", sample="graph('0>1 1>2 2>3 3>0 0>2')")
class Graph(Topology):
    """A graph of the listed edges: `0>1` one way, `0-1` both ways, `0>1:.25` with the share that is sent.

    Without shares a rank with n peers sends each 1/(n+1). A rank keeps what it does not send, so mass is conserved.
    Semicolons separate rounds, which repeat in turn: `'0>1 1>0; 1>2 2>1'`. Over these rounds every rank's model must reach
    every other rank. `Graph.of(P)` takes one or more matrices: P[j][i] is the share of its mass that rank i sends to rank j.

    Use: when the links are fixed: a star, a line of sites, racks with one fast link between them.

    Not for: another number of ranks than the edges name.

    Wire: one message of d numbers per edge.

    >>> Graph("0-1 0-2").peers(0, 3, round=0)
    Peers(to=(1, 2), source=(1, 2), share=(0.3333333333333333, 0.3333333333333333))
    >>> Graph.of([[0.5, 0.25], [0.5, 0.75]])
    graph('0>1:0.5 1>0:0.25')
    """

    edges: str

    def __post_init__(self) -> None:
        if self.size > 1:
            try:
                refuse_unsound(self, self.size)
            except AttachError as error:
                raise RecipeError(str(error)) from None

    @staticmethod
    def of(*rounds: Sequence[Sequence[float]]) -> "Graph":
        """Build a graph from column-stochastic matrices, one per round."""
        return Graph("; ".join(map(_written, rounds)))

    @property
    def size(self) -> int:
        """Return the number of ranks that the edges name."""
        return _read(self.edges)[0]

    def period(self, size: int) -> int:
        return len(_read(self.edges)[1])

    def peers(self, rank: int, size: int, round: int) -> Peers:
        if size == 1:
            return Peers((), (), 0.0)
        rounds = _read(self.edges)[1]
        edges = rounds[round % len(rounds)]
        to = tuple(e.to for e in edges if e.source == rank)
        given = [e.share for e in edges if e.source == rank]
        shares = tuple(1 / (len(to) + 1) if share is None else share for share in given)
        return Peers(to, tuple(e.source for e in edges if e.to == rank), shares)

    def fits(self, binding: Binding) -> None:
        if binding.size not in (1, self.size):
            raise AttachError(
                f"{self} is of {self.size} ranks, and this world has {binding.size}; list edges for {binding.size} ranks"
            )


class _Edge(NamedTuple):
    source: int
    to: int
    share: float | None


@cache
def _read(text: str) -> tuple[int, tuple[tuple[_Edge, ...], ...]]:
    """Return the number of ranks, and the edges of each round."""
    rounds = tuple(_round(part) for part in text.split(";"))
    ranks = {rank for edges in rounds for e in edges for rank in (e.source, e.to)}
    require(bool(ranks), "graph: no edges given; list them, such as '0>1 1>2 2>0', or '0-1 1-2' for both ways")
    return max(ranks) + 1, rounds


def _round(text: str) -> tuple[_Edge, ...]:
    edges = dict[tuple[int, int], _Edge]()
    for word in text.replace(",", " ").split():
        found = _EDGE.fullmatch(word)
        require(
            found is not None, f"graph: {shown(word)} is not an edge; write '0>1', '0>1:.25', or '0-1' for both ways"
        )
        a, way, b, share = found.groups()  # pyright: ignore[reportOptionalMemberAccess]
        i, j, given = int(a), int(b), None if share is None else float(share)
        for one in [_Edge(i, j, given), _Edge(j, i, given)] if way == "-" else [_Edge(i, j, given)]:
            require(
                one[:2] not in edges, f"graph: {one.source}>{one.to} is listed twice in one round; list each edge once"
            )
            edges[one[:2]] = one
    return tuple(sorted(edges.values(), key=lambda e: e[:2]))


def _written(matrix: Sequence[Sequence[float]]) -> str:
    size = len(matrix)
    require(size > 0 and all(len(row) == size for row in matrix), "graph: a matrix must have as many rows as columns")
    for i in range(size):
        column = [float(row[i]) for row in matrix]
        require(
            abs(sum(column) - 1) <= _ONE and min(column) >= 0,
            f"graph: the matrix is not column-stochastic: column {i}, the shares that rank {i} sends and keeps, has the sum "
            f"{sum(column):.6g} and the minimum {min(column):.3g}; the sum must be 1, and no share may be negative",
        )
    entries = ((i, j, float(matrix[j][i])) for i in range(size) for j in range(size) if i != j)
    return " ".join(f"{i}>{j}:{share!r}" for i, j, share in entries if share > 0)
