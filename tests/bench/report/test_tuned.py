"""The page of a search: whole, safe, and careful with what it claims."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gossamer.bench.report.scatter import Point, scatter
from gossamer.bench.report.tuned import headline, render, studied, styles, told, write_html, write_markdown
from gossamer.bench.tune import Candidate, Trial, Tuning, at_an_end

EMPTY = {"area", "br", "circle", "col", "hr", "img", "input", "link", "meta", "path", "wbr"}
QUALITIES = {"ddp": [4.9, 5.0, 4.95], "<b>& 'topk'": [4.92, 4.99, 4.96], "late": [5.3, 5.4, 5.3]}


def made(qualities: dict[str, list[float]] = QUALITIES, judged: int = 3) -> Tuning:
    """Three trials of each, the second of which is the best, and the third diverged."""
    tuning = Tuning(
        command="gossamer tune 'topk' --trials 3",
        created="2026-11-22T13:00:00+00:00",
        workload="lm",
        shards="iid",
        summary="a language model",
        metric="held-out loss (nats/token)",
        lower_is_better=True,
        parameters=10,
        rates=[0.1],
        ranks=4,
        steps=48,
        budget=None,
        trials_each=3,
        seeds=[10, 11, 12],
        seed=0,
        contenders=[
            Candidate(n, "scatter(qsgd())", {"lr": "0.125 to 4.0, by factors"}, {"qsgd.bits": "it costs"})
            for n in qualities
        ],
    )
    for name, values in qualities.items():
        for number, lr, quality in ((0, 1.0, 5.5), (1, 0.5, 5.0), (2, 3.0, math.nan)):
            tuning.trials.append(_trial(name, number, 0, lr, quality))
        tuning.trials += [_trial(name, -1, 10 + i, 0.5, q) for i, q in enumerate(values[:judged])]
    return tuning


def _trial(name: str, number: int, seed: int, lr: float, quality: float) -> Trial:
    lost = not math.isfinite(quality)
    recipe = f"scatter(qsgd()) + every_step(rate={lr})"
    values = {"lr": str(lr)} if number else {}
    return Trial(
        name,
        number,
        seed,
        recipe,
        lr,
        values,
        "diverged" if lost else "ok",
        48,
        quality,
        quality,
        10**6,
        1.0,
        "lost" * lost,
    )


class Balance(HTMLParser):
    """Every element is closed, and in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.text = list[str](), ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert tag in EMPTY or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_names_cannot_break_it() -> None:
    reader = Balance()
    reader.feed(render(made()))
    assert reader.open == []
    assert "<b>& 'topk'" in reader.text
    assert "NaN" not in reader.text
    assert "None" not in reader.text


def test_all_trials_are_there_and_the_best_is_marked() -> None:
    page = render(made())
    assert len(re.findall(r'<tr class="trial(?: best)?">', page)) == 9
    assert page.count("2, best") == 3
    assert page.count("diverged: lost") == 3
    svg = re.search(r"<svg class=\"trials\".*?</svg>", page, re.S)
    assert svg is not None
    assert (svg[0].count("<title>"), svg[0].count("<circle")) == (6, 3)


def test_it_claims_no_more_than_the_seeds_show() -> None:
    assert headline(studied(made())).title == (
        "ddp and <b>& 'topk': no difference in held-out loss that 3 trials each and 3 other seeds can show."
    )
    alone = headline(studied(made({"ddp": [4.9, 5.0, 4.95], "late": [5.3, 5.4, 5.3]}))).title
    assert alone == "ddp was best: held-out loss 4.950, by 3 trials each and 3 other seeds."
    one = headline(studied(made({"ddp": [4.9], "late": [5.3]}, judged=1)))
    assert one.title == "ddp and late: no difference in held-out loss that 3 trials each and 1 other seed can show."
    rows = studied(made()).rows
    assert [r.verdict for r in rows] == ["baseline", "no difference (−0.01909 to 0.03242)", "worse (0.3347 to 0.4320)"]


def test_what_is_missing_is_said() -> None:
    cut = studied(made(judged=0))
    assert cut.notes[0] == "The search is not complete: --resume goes on with it."
    assert cut.notes[1].startswith("3 trials diverged: 1 of ddp, ")
    assert headline(cut).title == "Nothing was judged on another seed."
    bare = made()
    bare.trials.clear()
    assert headline(studied(bare)).title == "No trial has ended."
    assert "No trial has ended." in render(bare)


@pytest.mark.parametrize("lower_is_better", [True, False])
def test_the_worst_trials_stand_at_the_edge_of_the_figure_and_the_best_at_their_own_values(
    lower_is_better: bool,
) -> None:
    good = [0.5 + 0.01 * i for i in range(19)]  # and one that is far worse
    points = [Point(0, 1.0, q, False, "") for q in [*good, 30.0 if lower_is_better else -30.0]]
    drawn = scatter(points, "quality", styles(made()), lower_is_better)
    heights = [float(y) for y in re.findall(r'transform="translate\([\d.]+ ([\d.]+)\)"', drawn)]
    assert len(set(heights)) == len(points)
    assert max(heights[:19]) - min(heights[:19]) > 150  # of 252: the good ones have most of the figure


def test_the_best_at_an_end_of_the_rates_is_told_to_look_beyond() -> None:
    tuning = made()
    for trial in tuning.trials:
        trial.lr = 4.0 if trial.lr == 0.5 else trial.lr
    assert any("best near the highest learning rate" in note for note in studied(tuning).notes)


def test_markdown_has_a_row_for_each_recipe(tmp_path: Path) -> None:
    text = write_markdown(made())
    assert text.startswith("**ddp and")
    assert text.count("`scatter(qsgd()) + every_step(rate=0.5)`") == 3
    write_html(made(), tmp_path / "report.html")
    write_html(made(), tmp_path / "report.html")  # over an earlier one
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(FileExistsError):
        write_html(made(), tmp_path / "mine.html")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("scatter(qsgd()) + every_step(rate=2.2)", True),
        ("allreduce(fp32())", True),  # a rate of 1, where the recipe was given with another
        ("allreduce(fp32()) + streaming(8, rate=0.331)", False),  # of its outer step
        ("allreduce(fp32()) + slowmo(8, inner=every_step(rate=0.5))", False),
        ("somebodys_own() + every_step(rate=2.2)", True),  # a part that is not imported here
        ("somebodys_own() + streaming(8, rate=0.331)", False),
    ],
)
def test_the_learning_rate_is_told_unless_the_recipe_says_it(recipe: str, says: bool) -> None:
    trial = _trial("", 1, 0, 2.2, 4.0)
    trial.recipe = recipe
    assert told(trial) == recipe + ("" if says else ", at 2.2 times the learning rate")


@pytest.mark.parametrize(
    ("searched", "end"),
    [
        ("0.0625 to 0.5, by factors", "highest"),
        ("0.45 to 8.0", "lowest"),
        ("0.5, 1.0 or 2.0", "lowest"),
        ("1.0 to 1.6e+1, by factors", "lowest"),  # the recipe as it was given may be beyond
        ("0.125 to 4.0, by factors", ""),
        ("0.5", ""),
    ],
)
def test_the_ends_of_rates_that_were_asked_for_are_told_too(searched: str, end: str) -> None:
    assert at_an_end(Candidate("", "", {"lr": searched}), _trial("", 1, 0, 0.5, 4.0)) == end
