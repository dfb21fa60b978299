"""A recurrent language model, in plain PyTorch."""

from torch import Tensor, nn


class Recurrent(nn.Module):
    """Token ids in, a loss out; each row begins with nothing remembered.

    Words in and scores out have tables of their own: the gradient of the first has the rows of the batch's tokens and no
    others, that of the second all rows. Torch's own first values: words stay at 1.0, or a hundred steps would be spent on a
    plateau where the model only knows how common each word is.

    >>> sum(p.numel() for p in Recurrent().parameters())
    1576960
    """

    def __init__(self, vocabulary: int = 2048, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of predicting each token from those before it."""
        hidden = self.lstm(self.tokens(tokens[:, :-1]))[0]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
