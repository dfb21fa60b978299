"""Byte-pair encoding: pieces of words by merging the commonest neighbours, for languages that build long words."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from gossamer.bench.workloads.pieces import BYTES, Pieces, split

Pair = tuple[bytes, bytes]


def learn_merged(texts: Iterable[bytes], size: int) -> Pieces:
    """The tokenizer whose `size` tokens are bytes and merges of two tokens that are common side by side.

    >>> learn_merged([b"low lower lowest"], 259).tokens[256:]
    [b'lo', b'low', b' low']
    """
    counts = Counter[bytes]()
    for text in texts:
        counts.update(split(text))
    words = [([bytes([b]) for b in word], count) for word, count in counts.items()]
    totals, places = Counter[Pair](), defaultdict[Pair, set[int]](set)
    for i, (word, count) in enumerate(words):
        for pair in pairwise(word):
            totals[pair] += count
            places[pair].add(i)
    # Totals change while they lie in the heap: a pair that comes up with an old one is put back with its new one.
    heap = [(-total, pair) for pair, total in totals.items()]
    heapq.heapify(heap)
    tokens = dict[bytes, None]()
    while heap and len(tokens) < size - BYTES:
        total, pair = heapq.heappop(heap)
        if -total != totals[pair]:
            if totals[pair]:
                heapq.heappush(heap, (-totals[pair], pair))
            continue
        tokens[pair[0] + pair[1]] = None
        for changed in _merge(pair, words, totals, places):
            heapq.heappush(heap, (-totals[changed], changed))
    return Pieces(tokens)


def _merge(
    pair: Pair, words: list[tuple[list[bytes], int]], totals: Counter[Pair], places: dict[Pair, set[int]]
) -> set[Pair]:
    """Merge a pair in all words; the pairs that are new by it."""
    new = set[Pair]()
    for i in places.pop(pair):
        word, count = words[i]
        for old in pairwise(word):
            totals[old] -= count
        k = 0
        while k < len(word) - 1:
            if (word[k], word[k + 1]) == pair:
                word[k : k + 2] = [pair[0] + pair[1]]
            k += 1
        for now in pairwise(word):
            totals[now] += count
            places[now].add(i)
            if pair[0] + pair[1] in now:
                new.add(now)
    del totals[pair]
    return new
