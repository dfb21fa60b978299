"""Sentence pairs from LibreOffice's help (MPL-2.0): a paragraph has the same id in English and German."""

import html
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from gossamer.bench.workloads.errors import DataError
from gossamer.bench.workloads.packages import deb

_PARAGRAPH = re.compile(r'<(p|h\d) id="((?:par|hd)_id[^"]+)" ?(?:class="([^"]*)")?[^>]*>(.*?)</\1>', re.DOTALL)
_ABBREVIATIONS = "".join(rf"(?<!{re.escape(a)})" for a in ("z.B.", "d.h.", "e.g.", "i.e.", "bzw.", "etc."))
_SENTENCE = re.compile(rf'(?<=[.!?]){_ABBREVIATIONS} +(?=["„“(]?[A-ZÄÖÜ0-9])')
LONGEST = 12  # words: longer sentences cost most of the time and teach little to a small model
LEAST = 13_000  # pairs: how many there are depends on the release; this one has 19,000

Pages = dict[str, dict[str, str]]  # page -> paragraph id -> text


class Pair(NamedTuple):
    page: str
    english: str
    german: str

    @property
    def module(self) -> str:
        """The program that the page is about: shared, scalc, swriter ..."""
        return self.page.split("/")[0]

    @property
    def is_held(self) -> bool:
        """By page, since neighbouring sentences resemble each other."""
        return zlib.crc32(self.page.encode()) % 40 == 0


def pairs() -> tuple[list[Pair], list[Pair]]:
    """To train on, and to be judged by; no sentence of the latter is in the former but for digits and signs."""
    english, german = _pages("libreoffice-help-en-us", "en-US"), _pages("libreoffice-help-de", "de")
    found = list(_match(english, german))
    if not LEAST <= len(found) <= 2 * LEAST:
        raise DataError(f"{len(found)} sentence pairs in the LibreOffice help, where some 19,000 were expected")
    train = [pair for pair in found if not pair.is_held]
    known = {_bare(pair.english) for pair in train}
    return train, [pair for pair in found if pair.is_held and _bare(pair.english) not in known]


def _pages(package: str, language: str) -> Pages:
    pages, archive = Pages(), deb(package)
    for entry in archive:
        file = archive.extractfile(entry) if entry.isfile() and entry.name.endswith(".html") else None
        if file is None or f"/help/{language}/text/" not in entry.name:
            continue
        page = pages.setdefault(entry.name.split("/text/")[1], {})
        for _, name, style, content in _PARAGRAPH.findall(file.read().decode()):
            if "code" not in style and "switchinline" not in content and "<img" not in content:
                page.setdefault(name, _plain(content))
    return pages


def _plain(content: str) -> str:
    text = html.unescape(re.sub(r"<[^>]+>", "", content.replace("<br>", " ")))
    return " ".join(text.replace("\u200b", "").split())


def _match(english: Pages, german: Pages) -> Iterator[Pair]:
    """Sentence by sentence where a paragraph has as many in both languages, else the whole paragraph."""
    seen = set[str]()
    for page in sorted(english):
        for name, ours in english[page].items():
            theirs = german.get(page, {}).get(name, "")
            a, b = _SENTENCE.split(ours), _SENTENCE.split(theirs)
            for x, y in zip(a, b) if len(a) == len(b) else [(ours, theirs)]:
                if x.lower() not in seen and _is_prose(x, y):
                    seen.add(x.lower())
                    yield Pair(page, x, y)


def _is_prose(x: str, y: str) -> bool:
    """Two short sentences of like length, mostly letters, and really translated."""
    short = 3 <= len(x.split()) <= LONGEST and 3 <= len(y.split()) <= 2 * LONGEST
    alike = short and x != y and 0.5 <= len(y) / len(x) <= 2.2
    return alike and sum(c.isalpha() or c == " " for c in x) / len(x) >= 0.75


def _bare(text: str) -> str:
    return re.sub(r"[\W\d_]+", " ", text.lower()).strip()
