"""Sentences are paired and split rightly, and both decoders see neither the future nor the padding."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.bench.workloads import DataError, help_pages, translation
from gossamer.bench.workloads.sequence import BEGIN, END, PAD, RnnTranslator, TransformerTranslator, greedy

both = pytest.mark.parametrize("kind", [TransformerTranslator, RnnTranslator])
Kind = type[TransformerTranslator] | type[RnnTranslator]


def made(kind: Kind) -> TransformerTranslator | RnnTranslator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(50, 32).eval()


SOURCE = torch.tensor([[7, 8, 9, END, PAD], [5, END, PAD, PAD, PAD]])
TARGET = torch.tensor([[BEGIN, 4, 5], [BEGIN, 9, 3]])


@both
def test_padding_changes_nothing(kind: Kind) -> None:
    model = made(kind)
    alone = model(SOURCE[1:, :2], TARGET[1:])
    torch.testing.assert_close(model(SOURCE, TARGET)[1:], alone, atol=1e-5, rtol=1e-5)


@both
def test_the_future_changes_nothing(kind: Kind) -> None:
    model = made(kind)
    other = TARGET.clone()
    other[:, 2] = 11
    torch.testing.assert_close(model(SOURCE, TARGET)[:, :2], model(SOURCE, other)[:, :2])


@both
def test_the_source_matters(kind: Kind) -> None:
    model = made(kind)
    assert not torch.allclose(model(SOURCE, TARGET), model(SOURCE.flip(0), TARGET))


@both
def test_greedy_takes_the_likeliest(kind: Kind) -> None:
    model = made(kind)
    written = greedy(model, SOURCE, limit=6)
    seen = torch.cat((torch.full((2, 1), BEGIN), written), 1)
    likeliest = model(SOURCE, seen[:, :-1]).argmax(-1)
    for row, best in zip(written.tolist(), likeliest.tolist()):
        end = row.index(END) if END in row else len(row)
        assert row[: end + 1] == best[: end + 1]
        assert set(row[end + 1 :]) <= {PAD}


def page(*paragraphs: str) -> str:
    return "".join(f'<p id="par_id{i}" class="paragraph">{text}</p>' for i, text in enumerate(paragraphs))


def test_paragraphs_are_read_from_html() -> None:
    text = page("Press <b>Enter</b> &amp; wait.<br>Then go.", 'See <img src="x"> here.')
    found = [(name, help_pages._plain(body)) for _, name, _, body in help_pages._PARAGRAPH.findall(text)]
    assert found[0] == ("par_id0", "Press Enter & wait. Then go.")


def match(english: str, german: str) -> list[tuple[str, str]]:
    return [(x, y) for _, x, y in help_pages._match({"a/b": {"1": english}}, {"a/b": {"1": german}})]


def test_sentences_are_paired() -> None:
    assert match("Open the file. Then close it.", "Öffnen Sie die Datei. Schließen Sie sie.") == [
        ("Open the file.", "Öffnen Sie die Datei."),
        ("Then close it.", "Schließen Sie sie."),
    ]
    assert len(match("Open it now. Then close it.", "Öffnen und schließen Sie sie z.B. Jetzt.")) == 1


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("Open it", "Öffnen"),  # too short
        ("The same words here", "The same words here"),  # not translated
        ("One two three four", "Ein sehr viel längerer Satz, der gar nicht dazu passen kann"),
        ("123 456 789 = 12 / 3", "123 456 789 = 12 / 4"),
        ("word " * 13, "Wort " * 13),
        ("Open the file now", ""),
    ],
)
def test_what_is_no_pair_is_dropped(english: str, german: str) -> None:
    assert match(english, german) == []


def test_too_few_pairs_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(help_pages, "_pages", lambda package, language: {})
    with pytest.raises(DataError, match="0 sentence pairs"):
        help_pages.pairs()


def test_held_sentences_do_not_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = [(f"shared/{i}", f"Press key number {i} to go on") for i in range(500)]
    english = {name: {"1": text, "2": f"A sentence of page {name}"} for name, text in sentences}
    german = {
        name: {"1": "Drücken Sie die Taste, um fortzufahren", "2": f"Ein Satz von Seite {name}"} for name in english
    }
    monkeypatch.setattr(help_pages, "_pages", lambda package, _: english if "en" in package else german)
    monkeypatch.setattr(help_pages, "LEAST", 500)
    train, held = help_pages.pairs()
    assert {p.module for p in train} == {"shared"}
    assert not held  # they differ by digits only


@both
def test_bleu_is_asked_for_where_it_is_installed(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake: Any = types.ModuleType("sacrebleu")
    fake.corpus_bleu = lambda hypotheses, references: asked.append(references) or types.SimpleNamespace(score=12.5)
    monkeypatch.setitem(sys.modules, "sacrebleu", fake)
    monkeypatch.setattr(translation, "_sentences", lambda: None)
    monkeypatch.setattr(
        translation, "_tokenizer", lambda _: translation.Pieces(b"w%d" % i for i in range(translation.VOCABULARY))
    )
    model = kind(translation.VOCABULARY, 32)
    target = torch.tensor([[*(translation.SPECIAL + b for b in b"ja"), END, PAD]])
    assert translation._bleu(model, (SOURCE[:1], target)) == 12.5
    assert asked == [[["ja"]]]


def test_accuracy_skips_padding() -> None:
    class Copier(nn.Module):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(source[:, : target.shape[1]], 50).float()

    target = torch.tensor([[7, 8, END, PAD], [4, END, PAD, PAD]])
    source = torch.tensor([[7, 9, END, 5], [4, END, 6, 6]])
    assert translation._accuracy(Copier(), (source, target)) == pytest.approx(4 / 5)
