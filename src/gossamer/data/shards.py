"""Shards: samples in files that are read from front to back, such as tar, JSON lines or compressed text."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple, final

import numpy as np
from torch.utils.data import Dataset

from gossamer.core.errors import GossamerError
from gossamer.data.shuffled import Permutation, Places


class FileRow(NamedTuple):
    """Where a sample is."""

    file: str
    row: int


@final
class Shards:
    """The samples of files, each read in its own order, and the files in another random order in each epoch.

    - `files`: how many samples each file has.
    - `streams`: how many files are read side by side by all ranks together; the more, the better they mix.
    - `run`: how many samples in a row come from one file. With `samples = streams * run` and a number of streams that the ranks
      divide, each rank goes on in the same files from step to step.

    The files of an epoch, one after the other in random order, are cut into `streams` equal pieces, and an `Order` takes
    `run` samples from each piece in turn.

    >>> shards = Shards({"a": 3, "b": 3}, streams=2, run=1)
    >>> [f"{file}{row}" for file, row in shards.items("seed 7, epoch 0", 0, 6)]
    ['b0', 'a0', 'b1', 'a1', 'b2', 'a2']
    """

    def __init__(self, files: Mapping[str, int], *, streams: int = 8, run: int = 1) -> None:
        for file, samples in files.items():
            if not isinstance(samples, int) or samples < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GossamerError(f"Shards: {file} must have a number of samples of 1 or more, got {samples!r}")
        if not files or streams < 1 or run < 1:
            raise GossamerError(
                f"Shards needs files, and streams and run of 1 or more, got {len(files)} files, streams={streams}, run={run}"
            )
        self._names, self._sizes = [*files], np.array([*files.values()], dtype=np.int64)
        self._n, self.run = int(self._sizes.sum()), run
        self.streams = min(streams, self._n)
        edges = np.arange(self.streams + 1, dtype=np.int64) * self._n // self.streams
        self._begins, self._lengths = edges[:-1], np.diff(edges)
        self._key, self._order, self._ends = "", np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self._n

    def describe(self) -> str:
        held = repr([*zip(self._names, self._sizes.tolist(), strict=True)]).encode()
        way = f"{self.streams} streams in runs of {self.run}"
        return f"{self._n} samples in {len(self._names)} files ({blake2b(held, digest_size=4).hexdigest()}), {way}"

    def items(self, key: str, begin: int, end: int) -> list[FileRow]:
        if key != self._key:
            order: Places = Permutation(len(self._names), key)(0, len(self._names))
            self._key, self._order = key, order.astype(np.int64)
            self._ends = np.cumsum(self._sizes[self._order])
        along = self._along(np.arange(begin, end, dtype=np.int64))
        numbers = np.searchsorted(self._ends, along, side="right")
        files = self._order[numbers]
        rows = along - self._ends[numbers] + self._sizes[files]
        return [FileRow(self._names[file], row) for file, row in zip(files.tolist(), rows.tolist(), strict=True)]

    def _along(self, places: Any) -> Any:
        """Where places of the order are along all files: runs of each stream in turn, and in the end what is left of each."""
        block = self.streams * self.run
        runs = self._n // self.streams // self.run  # whole ones of every stream
        turn, inside = places // block, places % block
        along = self._begins[inside // self.run % self.streams] + turn * self.run + inside % self.run
        rests = np.cumsum(self._lengths - runs * self.run)
        last = places - runs * block
        stream = np.minimum(np.searchsorted(rests, last, side="right"), self.streams - 1)
        first = rests[stream] - (self._lengths[stream] - runs * self.run)
        return np.where(last < 0, along, self._begins[stream] + runs * self.run + last - first)


@final
class Rows(Dataset[Any]):
    """Reads the samples of `Shards` with a function that opens a file and yields its samples from front to back.

    It keeps files open, and passes over what other ranks and workers take. At most `most` are open.

    >>> rows = Rows(lambda file: (f"{file}{i}" for i in range(3)))
    >>> rows["a", 0], rows["a", 2], rows["b", 1]
    ('a0', 'a2', 'b1')
    """

    def __init__(self, read: Callable[[str], Iterable[Any]], *, most: int = 64) -> None:
        self._read, self._most = read, most
        self._open, self._process = dict[str, tuple[int, Iterator[Any]]](), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Without its open files: a loader's worker opens its own."""
        return {**vars(self), "_open": {}}

    def __getitem__(self, place: tuple[str, int]) -> Any:
        file, row = place
        if self._process != os.getpid():  # forked: whoever reads on in a file moves its place for all who have it open
            self._open, self._process = {}, os.getpid()
        at, samples = self._open.pop(file, (row + 1, iter(())))
        if row < at:
            at, samples = 0, iter(self._read(file))
        for number, sample in enumerate(samples, at):
            if number == row:
                self._keep(file, row + 1, samples)
                return sample
        raise GossamerError(
            f"{file} ends before its sample {row}: count its samples again, and give Shards the new number"
        )

    def _keep(self, file: str, at: int, samples: Iterator[Any]) -> None:
        self._open[file] = at, samples
        if len(self._open) > self._most:
            self._open.pop(next(iter(self._open)))
