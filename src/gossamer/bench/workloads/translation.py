"""English to German on LibreOffice's help, by the two model families that papers compare."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.bench.workloads import cache, quality
from gossamer.bench.workloads.contract import Workload, workload
from gossamer.bench.workloads.help_pages import Pair, pairs
from gossamer.bench.workloads.merges import learn_merged
from gossamer.bench.workloads.pieces import BYTES, Pieces
from gossamer.bench.workloads.sequence import BEGIN, END, PAD, RnnTranslator, TransformerTranslator, Translator, greedy
from gossamer.bench.workloads.shards import Batch, Data

SPECIAL = END + 1  # the tokenizer's ids come after those of padding, begin and end
VOCABULARY = 3000 + SPECIAL
LONGEST = 40  # tokens of a sentence
JUDGED = 200  # sentences: greedy decoding of more would take longer than many steps
HAS_BLEU = importlib.util.find_spec("sacrebleu") is not None
METRIC = "BLEU (200 held-out sentences)" if HAS_BLEU else "held-out token accuracy (install sacrebleu for BLEU)"


@dataclass(frozen=True, kw_only=True)
class Translation(Workload):
    """The 16,000 sentence pairs of 12 English words or fewer."""

    metric: ClassVar[str] = METRIC
    lower_is_better: ClassVar[bool] = False
    group: ClassVar[str] = "module"

    batch_size: int = 8

    def load(self) -> Data:
        return _data(_sentences())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy of each next German token, given the English sentence and the German so far."""
        source, target = (_trim(t) for t in batch)
        scores = model(source, _shift(target))
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD)

    def evaluate(self, model: nn.Module) -> float:
        return _bleu(model, self.data.held) if HAS_BLEU else _accuracy(model, self.data.held)


@final
@workload("translate")
class Translate(Translation):
    """A small Transformer."""

    summary: ClassVar[str] = "English to German, Transformer 2+2x128, 1.3 M parameters, 5 MB download (Debian)"

    def network(self) -> nn.Module:
        return TransformerTranslator(VOCABULARY)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)


@final
@workload("translate-rnn")
class TranslateRnn(Translation):
    """Recurrent networks with attention."""

    summary: ClassVar[str] = "English to German, GRU with attention, 1.7 M parameters, 5 MB download (Debian)"

    def network(self) -> nn.Module:
        return RnnTranslator(VOCABULARY)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=2e-3)


def _accuracy(model: nn.Module, held: Batch) -> float:
    """The share of German tokens that are the likeliest one, given the true beginning of the sentence."""
    with quality.judging(model):
        source, target = (_trim(t) for t in held)
        right = model(source, _shift(target)).argmax(-1) == target
        return float(right[target != PAD].float().mean())


def _bleu(model: nn.Module, held: Batch) -> float:
    pieces = _tokenizer(_sentences())
    source, target = (_trim(t) for t in held)
    with quality.judging(model):
        written = greedy(cast(Translator, model), source, limit=LONGEST)
    sacrebleu: Any = importlib.import_module("sacrebleu")
    return float(sacrebleu.corpus_bleu(_texts(written, pieces), [_texts(target, pieces)]).score)


def _trim(tokens: Tensor) -> Tensor:
    """Without the columns at the end that are padding in all rows."""
    return tokens[:, : int((tokens != PAD).sum(1).max())]


def _shift(target: Tensor) -> Tensor:
    """What the decoder has seen when it says each token of the target."""
    return torch.cat((torch.full_like(target[:, :1], BEGIN), target[:, :-1]), 1)


def _texts(rows: Tensor, pieces: Pieces) -> list[str]:
    kept = ([i - SPECIAL for i in row if i >= SPECIAL] for row in rows.tolist())
    return [pieces.decode(ids).decode(errors="replace") for ids in kept]


def _sentences() -> cache.Arrays:
    return cache.arrays(f"translate-{VOCABULARY}-{LONGEST}-1", _encode)


def _data(arrays: cache.Arrays) -> Data:
    keys = ("source", "target", "held_source", "held_target", "groups")
    source, target, held_source, held_target, groups = (torch.from_numpy(arrays[k].astype(np.int64)) for k in keys)
    return Data((source, target), (held_source, held_target), groups)


def _tokenizer(arrays: cache.Arrays) -> Pieces:
    ends = arrays["ends"].tolist()
    text = arrays["tokens"].tobytes()
    return Pieces(text[start:end] for start, end in zip([0, *ends], ends))


def _encode() -> cache.Arrays:
    train, held = pairs()
    pieces = learn_merged((text.encode() for p in train for text in (p.english, p.german)), VOCABULARY - SPECIAL)
    train, held = _short(train, pieces), _short(held, pieces)
    spread = np.linspace(0, len(held) - 1, min(JUDGED, len(held))).astype(np.int64).tolist()
    modules = sorted({pair.module for pair in train})
    words = pieces.tokens[BYTES:]
    return {
        "source": _padded([pieces.encode(p.english.encode()) for p in train]),
        "target": _padded([pieces.encode(p.german.encode()) for p in train]),
        "groups": np.array([modules.index(p.module) for p in train]),
        "held_source": _padded([pieces.encode(held[i].english.encode()) for i in spread]),
        "held_target": _padded([pieces.encode(held[i].german.encode()) for i in spread]),
        "tokens": np.frombuffer(b"".join(words), dtype=np.uint8),
        "ends": np.cumsum([len(word) for word in words]),
    }


def _short(sentences: list[Pair], pieces: Pieces) -> list[Pair]:
    return [p for p in sentences if max(len(pieces.encode(t.encode())) for t in (p.english, p.german)) < LONGEST]


def _padded(rows: list[list[int]]) -> NDArray[np.int16]:
    table = np.full((len(rows), LONGEST), PAD, dtype=np.int16)
    for line, ids in zip(table, rows):
        line[: len(ids) + 1] = [*(i + SPECIAL for i in ids), END]
    return table
