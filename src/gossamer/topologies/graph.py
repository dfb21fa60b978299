"""A graph of the user's own, told by its edges."""

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
_ONE = 1e-6  # by how much a column may miss 1


@final
@part("graph", sample="graph('0>1 1>2 2>3 3>0 0>2')")
class Graph(Topology):
    """The edges that are named: `0>1` one way, `0-1` both ways; with the share that travels, `0>1:.25`, or without.

    Without shares a rank with n peers gives each 1/(n+1). What a rank does not give it keeps, so that mass is conserved.
    Rounds are parted by semicolons, and come again in turn: `'0>1 1>0; 1>2 2>1'`. Every rank must hear of every other over
    these rounds. `Graph.of(P)` takes a matrix, or several: P[j][i] is the share of its mass that i gives to j.

    Use: where the links are what they are: a star, a line of sites, racks with one fast link between them.

    Not for: any other number of ranks than it names.

    Wire: a message of d numbers an edge.

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
        """The graph of column-stochastic matrices, one a round."""
        return Graph("; ".join(map(_written, rounds)))

    @property
    def size(self) -> int:
        """How many ranks it names."""
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
            raise AttachError(f"{self} is of {self.size} ranks, and this world has {binding.size}; name its edges")


class _Edge(NamedTuple):
    source: int
    to: int
    share: float | None


@cache
def _read(text: str) -> tuple[int, tuple[tuple[_Edge, ...], ...]]:
    """How many ranks there are, and the edges of each round."""
    rounds = tuple(_round(part) for part in text.split(";"))
    ranks = {rank for edges in rounds for e in edges for rank in (e.source, e.to)}
    require(bool(ranks), "graph: name its edges, such as '0>1 1>2 2>0', or '0-1 1-2' for both ways")
    return max(ranks) + 1, rounds


def _round(text: str) -> tuple[_Edge, ...]:
    edges = dict[tuple[int, int], _Edge]()
    for word in text.replace(",", " ").split():
        found = _EDGE.fullmatch(word)
        require(found is not None, f"graph: {shown(word)} is no edge; say '0>1', '0>1:.25', or '0-1' for both ways")
        a, way, b, share = found.groups()  # pyright: ignore[reportOptionalMemberAccess]
        i, j, given = int(a), int(b), None if share is None else float(share)
        for one in [_Edge(i, j, given), _Edge(j, i, given)] if way == "-" else [_Edge(i, j, given)]:
            require(one[:2] not in edges, f"graph: {one.source}>{one.to} is named twice in one round")
            edges[one[:2]] = one
    return tuple(sorted(edges.values(), key=lambda e: e[:2]))


def _written(matrix: Sequence[Sequence[float]]) -> str:
    size = len(matrix)
    require(size > 0 and all(len(row) == size for row in matrix), "graph: a matrix must have as many rows as columns")
    for i in range(size):
        column = [float(row[i]) for row in matrix]
        require(
            abs(sum(column) - 1) <= _ONE and min(column) >= 0,
            f"graph: the matrix is not column-stochastic: column {i}, what rank {i} gives to each rank and keeps, adds up to "
            f"{sum(column):.6g} and has {min(column):.3g} as its least; it must add up to 1, and have nothing negative",
        )
    entries = ((i, j, float(matrix[j][i])) for i in range(size) for j in range(size) if i != j)
    return " ".join(f"{i}>{j}:{share!r}" for i, j, share in entries if share > 0)
