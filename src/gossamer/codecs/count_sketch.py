"""Count sketch: find the largest elements of a sum in a small summed table, then fetch them exactly."""

from math import ceil
from typing import Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.casts import FP32
from gossamer.codecs.topk import count_of
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Context, LinearCodec, ReduceResult
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part, part, require
from gossamer.core.rng import Key
from gossamer.core.verbs import Program, all_reduce
from gossamer.kernels.finite import peak


@final
@part("count_sketch")
class CountSketch(Biased, LinearCodec):
    """Top-k of the mean: found in a sum of count sketches, then fetched exactly in a second all-reduce.

    S = sum_i sketch(x_i), tables of `rows` by `columns`;  I = the P k largest |median over rows of S|, P = `candidates`;
    X = mean_i x_i[I], exactly;  the sent part of a rank's bucket is x_i where X is among its k largest, k = ceil(ratio n).
    The values come from the second round: those of a sketch are too noisy to train with, and diverge. Every step has its own
    hashes, the same on all ranks. `choice="heavymix"` is the paper's choice of candidates, for which its theorem holds:
    those whose estimate is above |x|^2 / (P k), and random ones in place of the rest. Biased: error feedback is needed.

    Without `columns` the table has two cells for every candidate. A bucket that would not get shorter is sent in full.

    Use: among many ranks, where few elements hold most of the gradient: all ranks send the same ones, whatever N.

    Not for: gradients without large elements, where it finds noise, nor few ranks: there `gather(topk())` sends more elements in
    as many bytes.

    Wire: all-reduces of 4 rows columns, and of 4 P k bytes (8 P k for float64).

    >>> from gossamer.core.rng import CounterRng
    >>> from gossamer.core.verbs import AllReduce
    >>> x = torch.zeros(1000); x[[3, 500]] = torch.tensor([5.0, -4.0])
    >>> codec, block = CountSketch(ratio=0.002, columns=50), Bucket.of({"w": x})
    >>> program = codec.average(block, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    >>> table = next(program); values = program.send(table.tensor); table.tensor.shape, values.tensor.shape
    (torch.Size([5, 50]), torch.Size([16]))

    Paper: Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora, Communication-Efficient Distributed SGD with Sketching, NeurIPS
    2019; Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, ICALP 2002.
    """

    ratio: float = 0.002
    rows: int = 5
    columns: int | None = None
    candidates: int = 8
    choice: Literal["largest", "heavymix"] = "largest"

    def __post_init__(self) -> None:
        require(
            0 < self.ratio <= 1, f"count_sketch: ratio must lie in (0, 1], got {self.ratio}; 0.002 sends one in 500"
        )
        require_table(self.name, self.rows, self.columns, "two cells a candidate")
        require(
            self.candidates >= 1,
            f"count_sketch: candidates must be at least 1, got {self.candidates}; 4 to 16 are usual",
        )

    @property
    def sparse(self) -> bool:
        return self.ratio < 1

    @property
    def bucket_mb(self) -> float:
        return 100.0  # the more elements share a table, the fewer are found where nothing is

    def fits(self, binding: Binding) -> None:
        refuse_long_table(self, self.rows * (self.columns or 0), binding)

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        if self._is_plain(layout):
            return [layout.numel * layout.dtype.itemsize]
        return [4 * self.rows * self._columns(layout), self._asked(layout) * layout.dtype.itemsize]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        if self._is_plain(block.layout):
            return (yield from FP32().average(block, state, context))
        key = context.rng.shared_key(f"{block.name}/count_sketch")
        mine = kernels.sketch_encode(block.flat.float(), self.rows, self._columns(block.layout), key)
        table = yield from all_reduce(mine)
        asked = self._choose(table, block, key)
        own = _once(block.flat[asked], asked)
        total = yield from all_reduce(own.clone())

        kept = kernels.topk(total.float(), count_of(self.ratio, block.numel)).long()
        # A number that is not finite may have hidden the others, and itself: the table shows it, so all that is said does.
        spoilt = peak(table).to(own.dtype) * 0
        places, sent, values = asked[kept], own[kept], total[kept] / context.size + spoilt
        mean = block.for_mean().zero_().index_add_(0, places, values)

        def add_sent(into: Tensor, weight: float) -> None:
            into.index_add_(0, places, sent, alpha=weight)

        return ReduceResult(mean, add_sent, peak(values))

    def _choose(self, table: Tensor, block: Bucket, key: Key) -> Tensor:
        """Ascending indices of the candidates."""
        count = self._asked(block.layout)
        apart = block.into is not block.flat and block.flat.dtype == torch.float32  # where the mean will be
        room = block.for_mean() if apart else block.layout.buffers.of(4 * block.numel, table.device).view(torch.float32)
        estimates = kernels.sketch_estimate(table, block.numel, key, room)
        largest = kernels.topk(estimates, count).long()
        if self.choice == "largest":
            return largest
        heavy = estimates[largest].double().square() * count >= _energy(table)
        return torch.where(heavy, largest, _one_of_each_run(count, block.numel, key, table.device)).sort().values

    def _asked(self, layout: Layout) -> int:
        return min(self.candidates * count_of(self.ratio, layout.numel), layout.numel)

    def _columns(self, layout: Layout) -> int:
        return ceil(2 * self._asked(layout) / self.rows) if self.columns is None else self.columns

    def _is_plain(self, layout: Layout) -> bool:
        return self.rows * self._columns(layout) + self._asked(layout) >= layout.numel


def require_table(name: str, rows: int, columns: int | None, usual: str) -> None:
    """Refuse a table that no bucket can have; `usual` is what it has without `columns`."""
    odd = 1 <= rows < 100 and rows % 2 == 1
    require(odd, f"{name}: rows must be odd (for the median) and below 100, got {rows}; 5 is usual")
    fits = columns is None or columns >= 1
    require(fits, f"{name}: columns must be at least 1, got {columns}; leave it out for {usual}")


def refuse_long_table(part: Part, cells: int, binding: Binding) -> None:
    """Refuse a table of so many cells if no bucket of the model is longer."""
    longest = max((layout.numel for layout in binding.layouts), default=0)
    if longest and cells >= longest:
        raise AttachError(
            f"{part}: a sketch of {cells:,} cells is no shorter than the longest bucket of this model, which has {longest:,} "
            "elements; use fewer columns, or leave columns out to follow the bucket's length"
        )


def _once(values: Tensor, places: Tensor) -> Tensor:
    """Zero for all but the first value of each index; indices are ascending."""
    again = torch.zeros_like(places, dtype=torch.bool)
    again[1:] = places[1:] == places[:-1]
    return values.masked_fill(again, 0.0)


def _energy(table: Tensor) -> Tensor:
    """An estimate of |x|^2, the median over rows of |row|^2: in whole numbers, of which a sum has the same bits everywhere."""
    top = table.abs().amax().double()
    units = (table.double() / torch.where(top > 0, top, torch.ones_like(top))).square() * 2.0**36
    return units.long().sum(1).median().double() * 2.0**-36 * top.square()


def _one_of_each_run(count: int, n: int, key: Key, device: torch.device) -> Tensor:
    """As many places, each somewhere in a run of its own; which run comes first is drawn as well."""
    turn, *_ = key
    run = (torch.arange(count, device=device) + turn) % count
    low, high = run * n // count, (run + 1) * n // count
    rng = kernels.mix3(run, (key[1], key[0]))
    return low + ((rng >> 1) * (high - low) >> 31)
