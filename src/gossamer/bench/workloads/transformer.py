"""A decoder-only transformer, in plain PyTorch."""

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """Token ids in, a loss out.

    >>> sum(p.numel() for p in Transformer().parameters())
    5797888
    """

    def __init__(
        self, vocabulary: int = 2048, width: int = 256, layers: int = 6, heads: int = 4, length: int = 32
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        # Words stay at torch's 1.0, far above places and what the layers add at first: so the model soon is a good
        # bigram model, and does not spend a hundred steps on a plateau where it only knows how common each word is.
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of predicting each token from those before it."""
        x, y = tokens[:, :-1], tokens[:, 1:]
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.layers(hidden)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
