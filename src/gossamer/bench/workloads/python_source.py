"""Language models of the Python standard library's own source, found wherever Python runs: nothing is downloaded."""

import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gossamer.bench.workloads import cache
from gossamer.bench.workloads.contract import workload
from gossamer.bench.workloads.errors import DataError
from gossamer.bench.workloads.pieces import BYTES, learn
from gossamer.bench.workloads.quality import LanguageModel
from gossamer.bench.workloads.recurrent import Recurrent
from gossamer.bench.workloads.shards import Data
from gossamer.bench.workloads.transformer import Transformer
from gossamer.bench.workloads.windows import as_data, cut, is_held

VOCABULARY = 2048
# Not part of every installation, or tables rather than prose.
SKIPPED = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"),
        *("turtledemo", "tkinter", "ensurepip", "distutils", "__pycache__"),
    )
)


@final
@workload("lm")
class PythonWords(LanguageModel):
    """The yardstick: 5.8 million parameters, a vocabulary of 2,048 tokens, 32 tokens of context."""

    summary: ClassVar[str] = "language model of Python's own source code, 5.8 M parameters, no download"
    group: ClassVar[str] = "file"

    def load(self) -> Data:
        return _word_rows(self.length)

    def network(self) -> nn.Module:
        return Transformer(VOCABULARY, length=self.length)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Adam at 1e-3 ends a little lower (4.69 against 4.77 after 100 steps), but magnifies what compression loses.
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@final
@workload("lm-lstm")
class PythonLstm(LanguageModel):
    """The yardstick's text through an LSTM: a quarter of its parameters, two thirds of them in tables of words."""

    summary: ClassVar[str] = "LSTM language model of Python's own source code, 1.6 M parameters, no download"
    group: ClassVar[str] = "file"

    def load(self) -> Data:
        return _word_rows(self.length)

    def network(self) -> nn.Module:
        return Recurrent(VOCABULARY)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        # Half of it ends 0.16 nats higher after 100 steps, twice as much at the same, four times 0.17 higher.
        return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)


@final
@workload("lm-bytes")
class PythonBytes(LanguageModel):
    """The smallest language model: bytes are the tokens, so there is no tokenizer."""

    summary: ClassVar[str] = "byte-level language model of Python's own source code, 0.9 M parameters, no download"
    metric: ClassVar[str] = "held-out loss (nats/byte)"
    group: ClassVar[str] = "file"

    length: int = 64

    def load(self) -> Data:
        return as_data(_cut(lambda text: np.frombuffer(text, dtype=np.uint8), self.length))

    def network(self) -> nn.Module:
        return Transformer(BYTES, width=128, layers=4, length=self.length)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=2e-3)


def sources() -> list[tuple[str, Path]]:
    """The library's modules, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_path("stdlib"))
    found = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    kept = sorted(
        (name.as_posix(), path)
        for name, path in found
        if not SKIPPED & set(name.parts) and not name.parts[0].startswith(("config-", "_sysconfigdata"))
    )
    if len(kept) < 100:
        raise DataError(f"this Python comes without its library's source ({len(kept)} files in {root})")
    return kept


def _version() -> str:
    """Which source code this is, without reading it: it differs between Pythons."""
    digest = blake2b(digest_size=8)
    for name, path in sources():
        digest.update(f"{name} {path.stat().st_size}\n".encode())
    return f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}-{digest.hexdigest()}"


def _word_rows(length: int) -> Data:
    return as_data(cache.arrays(f"lm-{VOCABULARY}-{length}-{_version()}", partial(_words, length)))


def _words(length: int) -> cache.Arrays:
    pieces = learn((path.read_bytes() for name, path in sources() if not is_held(name)), VOCABULARY)
    return _cut(lambda text: np.array(pieces.encode(text), dtype=np.int16), length)


def _cut(encode: Callable[[bytes], NDArray[np.integer]], length: int) -> cache.Arrays:
    files = [(is_held(name), encode(path.read_bytes())) for name, path in sources()]
    return cut((ids for held, ids in files if not held), (ids for held, ids in files if held), length)
