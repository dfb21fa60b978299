"""`gossamer explain`: what it writes down of a recipe is what happened, for every recipe there is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gossamer.bench import catalogue
from gossamer.bench.explain import ExplainedStep, as_text, explain
from gossamer.bench.report import explained
from gossamer.recipes import presets

ENCODED = ("qsgd", "terngrad", "int8", "natural", "topk", "signsgd", "ef_signsgd", "ef21", "local_gradients")
Say = Callable[..., tuple[int, str, str]]


def kept(step: ExplainedStep, name: str, after: bool) -> list[torch.Tensor]:
    """What each rank keeps under this name; zeros where it keeps nothing yet."""
    ranks = [rank.kept if after else rank.kept_before for rank in step.ranks]
    return [next((k.values for k in each if k.name == name), torch.zeros(8)) for each in ranks]


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_followed(name: str) -> None:
    told = explain(catalogue.example(name))
    spoken = [step for step in told.steps if step.messages]
    assert len(spoken) == 2
    text = as_text(told)
    for step in spoken:
        assert f"\nStep {step.number}\n" in text
        assert all(rank.after.numel() == rank.before.numel() for rank in step.ranks)
        assert all(message.says in text for message in step.messages)
    if name in ENCODED:
        assert all(message.by for step in spoken for message in step.messages if message.hex), "what a codec wrote"


def test_what_is_kept_back_and_what_gets_through_add_up() -> None:
    for step in explain("topk").steps:
        owed = sum(kept(step, "residual", after=False)) + sum(rank.gradients[0] for rank in step.ranks)
        used = step.ranks[0].used
        assert used is not None
        torch.testing.assert_close(3 * used + sum(kept(step, "residual", after=True)), owed)
        torch.testing.assert_close(step.ranks[0].after, step.ranks[0].before - 0.5 * used)


def test_a_message_is_told_by_what_it_says_and_its_bytes() -> None:
    first = explain("scatter(sign()) + error_feedback()").steps[0].messages[0]
    assert first.way == "rank 0 to rank 1"
    assert first.says.startswith("signs ")
    assert (first.bytes, first.by) == (5, "sign()")
    assert len(first.hex.split()) == 5


def test_what_leaders_pass_on_within_a_node_is_read_as_well() -> None:
    (first, _) = explain("qsgd + per_node(2)", ranks=4).steps
    wires = [m for m in first.messages if "sum" not in m.way and m.bytes]
    assert wires
    assert all(m.by == "qsgd(bucket=128)" for m in wires)


def test_local_steps_are_told_in_a_line() -> None:
    text = as_text(explain("local_sgd(8)"))
    assert "\nSteps 1 to 7: nobody says anything" in text
    assert "\nStep 8\n" in text
    assert text.count("\nStep") == 4


def test_a_controllers_decision_is_told_and_what_comes_of_it(say: Say) -> None:
    code, out, _ = say("explain", "allreduce(fp32()) + switch_exchange(2, scatter(qsgd()))", "--steps", "3")
    before, told, after = out.partition("decided: from step 3 on scatter(qsgd()) for all 2 parameters")
    assert code == 0
    assert told
    assert "by qsgd()" in after
    assert "by qsgd()" not in before


def test_codecs_are_left_as_they_were() -> None:
    from gossamer.codecs import Sign

    before = Sign.encode
    explain("scatter(sign()) + error_feedback()")
    assert Sign.encode is before


def test_the_page_has_all_of_it_and_needs_nothing_else(say: Say, tmp_path: Path) -> None:
    assert say("explain", "topk", "--out", "page.html") == (0, "page.html\n", "")
    page = (tmp_path / "page.html").read_text()
    assert page == explained.render(explain("topk"), "topk")
    assert "http" not in page
    assert "<script" not in page
    for message in explain("topk").steps[0].messages:
        assert message.says in page
    assert "memory keeps residual" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["terngard"], "Did you mean 'terngrad'"),
        (["ternary"], "'ternary' is a part, not a recipe"),
        (["compute"], "is a baseline"),
        (["topk", "--ranks", "1"], "--ranks"),
        (["ad_psgd", "--ranks", "3"], "use an even number of ranks"),
        (["topk", "--out", "kept.html"], "kept.html"),
    ],
)
def test_wrong_words_are_refused_and_nothing_is_touched(say: Say, tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "kept.html").write_text("mine")
    code, out, err = say("explain", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert (tmp_path / "kept.html").read_text() == "mine"


def test_it_is_printed(say: Say) -> None:
    code, out, _ = say("explain", "terngrad")
    assert code == 0
    assert out == as_text(explain("terngrad"))


def test_the_page_of_the_documentation_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert as_text(explain("topk")).startswith(shown)
