"""Two encoder-decoders in plain PyTorch. Token 0 is padding, 1 begins and 2 ends a sentence."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

PAD, BEGIN, END = 0, 1, 2


class Encoded(NamedTuple):
    """What an encoder hands to the decoder."""

    states: Tensor  # (batch, length, width)
    padding: Tensor  # (batch, length), true where there is no word
    summary: Tensor  # (batch, width)


class Translator(Protocol):
    """`model(source, target)` gives the scores of each next token; the two halves serve greedy decoding."""

    def encode(self, source: Tensor) -> Encoded: ...
    def decode(self, memory: Encoded, target: Tensor) -> Tensor: ...


class TransformerTranslator(nn.Module):
    """Two layers in, two out; one table of tokens for both languages and for the scores."""

    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width, padding_idx=PAD), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.normal_(self.places.weight, std=width**-0.5)
        # No dropout: its dice are global, and two runs of one seed should differ by their method alone.
        inner = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
        outer = nn.TransformerDecoderLayer(width, heads, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(inner, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(outer, layers, nn.LayerNorm(width))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(self.encode(source), target)

    def encode(self, source: Tensor) -> Encoded:
        padding = source == PAD
        states = self.encoder(self._embed(source), src_key_padding_mask=padding)
        return Encoded(states, padding, states[:, 0])

    def decode(self, memory: Encoded, target: Tensor) -> Tensor:
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.decoder(
            self._embed(target), memory.states, tgt_mask=future, memory_key_padding_mask=memory.padding
        )
        return hidden @ self.tokens.weight.T

    def _embed(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return (self.tokens(tokens) + places) * self.tokens.embedding_dim**0.5


class RnnTranslator(nn.Module):
    """A two-way GRU reads; a GRU writes, and looks back by attention before each word."""

    def __init__(self, vocabulary: int, width: int = 192) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.look = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(self.encode(source), target)

    def encode(self, source: Tensor) -> Encoded:
        lengths = (source != PAD).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.tokens(source), lengths, batch_first=True, enforce_sorted=False)
        states, last = self.encoder(packed)
        padded = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])[0]
        return Encoded(padded, source == PAD, torch.cat((last[0], last[1]), 1))

    def decode(self, memory: Encoded, target: Tensor) -> Tensor:
        hidden = self.decoder(self.tokens(target), memory.summary.unsqueeze(0).contiguous())[0]
        match = self.look(hidden) @ memory.states.transpose(1, 2)
        weights = match.masked_fill(memory.padding.unsqueeze(1), -torch.inf).softmax(-1)
        return self.head(torch.tanh(self.join(torch.cat((hidden, weights @ memory.states), -1))))


def greedy(model: Translator, source: Tensor, limit: int) -> Tensor:
    """The likeliest next token, again and again, until all sentences have ended or `limit` tokens are written."""
    memory = model.encode(source)
    written = torch.full((len(source), 1), BEGIN, dtype=torch.int64)
    ended = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(limit):
        best = model.decode(memory, written)[:, -1].argmax(-1)
        written = torch.cat((written, best.masked_fill(ended, PAD).unsqueeze(1)), 1)
        ended |= best == END
        if ended.all():
            break
    return written[:, 1:]
