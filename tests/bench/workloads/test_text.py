"""Tokenizers lose nothing, and rows are cut where they should be."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.bench import workloads
from gossamer.bench.workloads.merges import learn_merged
from gossamer.bench.workloads.pieces import BYTES, learn, split
from gossamer.bench.workloads.python_source import SKIPPED, sources
from gossamer.bench.workloads.windows import cut, windows

SAMPLE = [
    b"for the theme of the day, we say: the day is the theme\n    and the rest",
    "Größe über alles".encode(),
]


@given(st.binary(max_size=60))
def test_the_words_are_the_text(text: bytes) -> None:
    assert b"".join(split(text)) == text


@pytest.mark.parametrize("method", [learn, learn_merged])
@given(text=st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | st.sampled_from(SAMPLE))
def test_every_text_comes_back(method: object, text: bytes) -> None:
    pieces = method(SAMPLE, 280)  # pyright: ignore[reportCallIssue]
    ids = pieces.encode(text)
    assert pieces.decode(ids) == text
    assert all(0 <= i < len(pieces.tokens) <= 280 for i in ids)


@pytest.mark.parametrize("method", [learn, learn_merged])
def test_the_tokenizer_does_not_depend_on_order(method: object) -> None:
    texts = [bytes(word) for word in SAMPLE for _ in range(3)]
    shuffled = random.Random(0).sample(texts, len(texts))
    assert method(texts, 290).tokens == method(shuffled, 290).tokens  # pyright: ignore[reportCallIssue]


def test_merges_are_those_of_the_plain_algorithm() -> None:
    """Count all pairs anew before each merge: slow and plainly right."""
    words = [[bytes([b]) for b in w] for text in SAMPLE for w in split(text)]
    expected = []
    for _ in range(30):
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        expected.append(best[0] + best[1])
        for word in words:
            k = 0
            while k < len(word) - 1:
                if (word[k], word[k + 1]) == best:
                    word[k : k + 2] = [best[0] + best[1]]
                k += 1
    assert learn_merged(SAMPLE, BYTES + 30).tokens[BYTES:] == list(dict.fromkeys(expected))


@given(length=st.integers(1, 9), tokens=st.lists(st.integers(0, 99), max_size=60))
def test_each_token_is_predicted_once(length: int, tokens: list[int]) -> None:
    rows = windows(np.array(tokens, dtype=np.int16), length)
    told = rows[:, 1:].ravel().tolist()
    assert told == tokens[1 : 1 + len(told)]
    assert len(tokens) - 1 - len(told) < length


def test_groups_name_the_document() -> None:
    made = cut([np.arange(9), np.arange(2), np.arange(5)], [np.arange(100)], 4)
    assert made["groups"].tolist() == [0, 0, 2]
    assert made["train"].shape == (3, 5)


def test_the_source_is_the_library_and_nothing_else() -> None:
    names = [name for name, _ in sources()]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/tasks.py"} <= set(names)
    assert not any(SKIPPED & set(name.split("/")) for name in names)


def test_most_of_the_vocabulary_is_used() -> None:
    rows = workloads.get("lm").data.train[0]
    assert len(rows.unique()) > 1800
    assert int(rows.max()) < 2048
    assert len(rows) > 30_000
