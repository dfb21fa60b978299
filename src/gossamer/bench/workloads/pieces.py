"""A tokenizer that follows from the text: the commonest words, and bytes for the rest."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import final

BYTES = 256


@final
class Pieces:
    """Token ids: first the 256 bytes, then `words`.

    A rare word becomes the longest known beginnings, so every text has ids, and every id list gives its text back.

    >>> pieces = Pieces([b"for", b" the"])
    >>> pieces.encode(b"forms the")
    [256, 109, 115, 257]
    >>> pieces.decode([256, 109, 115, 257])
    b'forms the'
    """

    def __init__(self, words: Iterable[bytes]) -> None:
        self.tokens = [bytes([i]) for i in range(BYTES)] + list(words)
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._longest = max(map(len, self.tokens))
        self._known = dict[bytes, list[int]]()

    def encode(self, text: bytes) -> list[int]:
        known = self._known
        ids = list[int]()
        for word in split(text):
            if word not in known:
                known[word] = self._spell(word)
            ids += known[word]
        return ids

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)

    def _spell(self, word: bytes) -> list[int]:
        ids = list[int]()
        while word:
            length = min(len(word), self._longest)
            while word[:length] not in self._ids:
                length -= 1
            ids.append(self._ids[word[:length]])
            word = word[length:]
        return ids


# A word with the space before it, parts of a camelCase name, a line break with its indent, a run of signs, any byte.
# Bytes above 127 count as letters: UTF-8 words of other languages stay whole.
_WORD = re.compile(rb" ?[A-Z]?[a-z\x80-\xff]+| ?[A-Z]+|\n[\n ]*| ?[^\sA-Za-z0-9_\x80-\xff]+|.", re.DOTALL)


def split(text: bytes) -> list[bytes]:
    """Words that put together are the text again.

    >>> split(b"x = camelCase_1")
    [b'x', b' =', b' camel', b'Case', b'_', b'1']
    """
    return _WORD.findall(text)


def learn(texts: Iterable[bytes], size: int) -> Pieces:
    """The tokenizer with `size` tokens for these texts (fewer if there are not so many different words)."""
    counts = Counter[bytes]()
    for text in texts:
        counts.update(split(text))
    words = sorted((w for w in counts if len(w) > 1), key=lambda w: (-counts[w], w))
    return Pieces(words[: size - BYTES])
