"""Documents cut into rows of equal length, for language models."""

import zlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from gossamer.bench.workloads.cache import Arrays
from gossamer.bench.workloads.shards import Data

HELD_ROWS = 96  # so that judging a model takes about as long as a few steps


def is_held(name: str) -> bool:
    """One document in twenty is never trained on. It depends on its name alone, so the split never changes."""
    return zlib.crc32(name.encode()) % 20 == 0


def windows(tokens: NDArray[np.integer], length: int) -> NDArray[np.integer]:
    """Rows of `length` tokens and the one that follows, which also begins the next row.

    >>> windows(np.arange(6), 2).tolist()
    [[0, 1, 2], [2, 3, 4]]
    """
    count = max(0, (len(tokens) - 1) // length)
    starts = np.arange(count)[:, None] * length
    return tokens[starts + np.arange(length + 1)]


def cut(train: Iterable[NDArray[np.integer]], held: Iterable[NDArray[np.integer]], length: int) -> Arrays:
    """The rows of all documents, and which document each training row is from."""
    documents = [windows(tokens, length) for tokens in train]
    judged = np.concatenate([windows(tokens, length) for tokens in held])
    spread = np.linspace(0, len(judged) - 1, min(HELD_ROWS, len(judged))).astype(np.int64)
    return {
        "train": np.concatenate(documents),
        "held": judged[spread],
        "groups": np.repeat(np.arange(len(documents)), [len(rows) for rows in documents]),
    }


def as_data(arrays: Arrays) -> Data:
    """The same as tensors that a model takes."""
    train, held, groups = (torch.from_numpy(arrays[key].astype(np.int64)) for key in ("train", "held", "groups"))
    return Data((train,), (held,), groups)
