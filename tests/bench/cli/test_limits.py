"""Input without measure: a short error of ours, soon, and no warning of Python's."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.bench.record import FORMAT, Record
from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe

Say = Callable[..., tuple[int, str, str]]
SUM = "allreduce(fp32()) + "

TEXTS = {
    "first()": "there is no part called 'first'",
    "scatter(push_sum())": "codec must be a codec",
    "0x1for x": "invalid hexadecimal literal",
    SUM + r"rule('name == \"\d\"', allreduce(fp32()))": r"invalid escape sequence '\d'",
    SUM + r"rule('name == \'\\d\'', allreduce(fp32()))": r"invalid escape sequence '\d'",
    "scatter(qsgd(bits=" + "9" * 5000 + "))": "a number in it has too many digits",
    "scatter(qsgd(bits=0x" + "f" * 5000 + "))": "a number in it has too many digits",
    "scatter(qsgd(bits=-1" + "0" * 100 + "))": "a number in it has too many digits",
    "(" * 100_000: "too many nested parentheses",
    "-" * 100_000 + "1": "it is nested",
    "allreduce(" * 30 + ")" * 30: "it is nested deeper than 20 levels",
    SUM + " + ".join(["accordion()"] * 600): "it has 601 parts; at most 500 are allowed",
    SUM * 40_000 + "1": "it is nested too deeply",
    "x" * 10_000_000: "it has 10000000 characters; at most 1000000 are allowed",
    "x" * 100_000: "there is no part called",
    f"allreduce('{'x' * 100_000}')": "codec must be",
    f"allreduce({'x' * 100_000}=1)": "has no argument",
    f"allreduce(fp32(), {', '.join(f'k{i}=1' for i in range(9_000))})": "has no argument",
    SUM + f"rule('{'not ' * 5_000}ndim < 2', allreduce(fp32()))": "it is nested",
    SUM + f"rule('{'x' * 100_000}', allreduce(fp32()))": "is not a condition",
    f"{'x' * 300}.toml": "File name too long",
    "a\0b.toml": "embedded null byte",
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda t: t[:40])
def test_a_text_without_measure_is_refused_in_a_few_words(text: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RecipeError) as refusal:
            Recipe.of(text)
    assert TEXTS[text] in str(refusal.value)
    words, _, names = str(refusal.value).partition("Known: ")
    assert len(words) < 1500
    assert len(names) < 2000  # of all parts and presets
    assert not told


def test_what_a_large_model_needs_is_read() -> None:
    names = ", ".join(f"'decoder.layers.{i}.attention.output.weight'" for i in range(10_000))
    rules = " + ".join(f"rule('ndim < {i}', allreduce(fp32()))" for i in range(300))
    text = repr(Recipe.of(f"allreduce(fp32()) + {rules} + route(({names}), allreduce(bf16()))"))
    assert len(text) > 400_000
    assert repr(Recipe.of(text)) == text
    assert (
        Recipe.of(SUM + "rule('ndim < 2" + " or ndim < 2" * 1000 + "', allreduce(fp32()))")
        .rules[0]
        .holds_for("w", (1,))
    )


TABLES = {
    "recipe = " + "[" * 100_000: "it is nested deeper than 20 levels",
    "recipe = " + "9" * 5000: "a number in it has too many digits",
    "a" + ".a" * 400_000 + " = 1": "a name in it has more than 20 dots",
    '"a"' + '."a"' * 200_000 + " = 1": "a name in it has more than 20 dots",
    "[" + "a." * 300_000 + "a]": "a name in it has more than 20 dots",
    'x = "' + '\\"' * 300_000: "Unterminated string",
    "recipe = [" + "'bf16', " * 100_000 + "]": "the recipe has more than 500 parts",
    "x" * 1_000_001: "it is larger than 1 MB",
    f"recipe = 'allreduce({'x' * 100_000})'": "there is no part called",
    f"{'x' * 100_000} = 1": "a recipe file has no entry",
    f"exchange = ['{'x' * 100_000}', 1]": "there is no part called",
    "exchange = {a = [" + "'x'," * 1000 + "]}": "exchange must be a text",
}


@pytest.mark.parametrize("text", TABLES, ids=lambda t: t[:20])
def test_a_recipe_file_without_measure_is_refused_in_a_few_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as refusal:
        Recipe.of(path)
    assert TABLES[text] in str(refusal.value)
    assert len(str(refusal.value)) < 1500


def test_dots_and_brackets_in_strings_are_no_depth(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    names = ", ".join(f"'a.b{i}.c'" for i in range(50))
    path.write_text(f'exchange = "allreduce(fp32())"  # {"." * 30}\nroutes = ["route(({names}), allreduce(bf16()))"]\n')
    recipe = Recipe.of(path)
    path.write_text(recipe.to_toml())
    assert Recipe.of(path) == recipe


RECORDS = {
    '{"format": 1' + "0" * 400 + "}": "a number in it has 401 digits",
    '{"format": ' + "1" * 5000 + "}": "a number in it has 5000 digits",
    '{"format": "' + "1" * 5_000_000 + '"}': "it has format '111",
    f'{{"format": {FORMAT}, "runs": [], "{"x" * 1_000_000}": 1}}': "is not what a run writes",
    "[" * 1_000_000: "is not what a run writes",
}


@pytest.mark.parametrize("text", RECORDS, ids=lambda t: t[:20])
def test_a_record_without_measure_is_refused_in_a_few_words(say: Say, tmp_path: Path, text: str) -> None:
    (tmp_path / "record.json").write_text(text)
    code, out, err = say("report", ".")
    assert (code, out, RECORDS[text] in err) == (2, "", True), err[:500]
    assert len(err) < 700


@pytest.mark.parametrize("name", ["zero", "pipe", "socketless"])
def test_what_has_no_end_is_not_read(say: Say, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "socketless").symlink_to("/dev/ptmx")
    for ending, words in ((".toml", ("recipes",)), (".json", ("report",))):
        (tmp_path / f"{name}{ending}").symlink_to(name)
        code, _, err = say(*words, f"{name}{ending}")
        assert (code, "cannot be read: it is no regular file" in err) == (2, True), err


def test_a_record_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "record.json").open("w") as file:
        file.truncate(10**13)
    with pytest.raises(OSError, match="larger than 1000 MB"):
        Record.read(tmp_path / "record.json")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("recipes", "x" * 100_000), "there is no recipe"),
        (("train", "bf16", "--workload", "x" * 100_000), "there is no workload"),
        (("train", "bf16", "--workload", "ridge", "--rate", "x" * 100_000), "is not a rate"),
        (("train", "bf16", f"--{'x' * 100_000}"), "No such option"),
        (("train", "bf16", "--workload", "ridge", "--hosts", "1000000000"), "--hosts"),
        (("train", "bf16", "--workload", "ridge", "--seed", "1" + "0" * 99), "seed must be a whole number of 64"),
        (("tune", "bf16", "--workload", "ridge", "--seed", str(2**64)), "seed must be a whole number of 64 bits"),
        (("train", "bf16", "--workload", "ridge", "--deadline", "inf"), "--deadline must be a finite number, not inf"),
        (("compare", "ddp", "--workload", "ridge", "--patience", "inf"), "--patience must be a finite number, not inf"),
        (("recipes", "bf16", "--hosts", "1000000000"), "--hosts"),
        (("recipes", "bf16", "--parameters", "100000000000000"), "--parameters"),
        (("recipes", "local_sgd(1000000000)"), "a round of more than 1,000,000 steps is not counted"),
        (("report", "x" * 100_000), "File name too long"),
    ],
)
def test_words_without_measure_are_told_shortly(say: Say, words: tuple[str, ...], what: str) -> None:
    code, out, err = say(*words)
    assert (code, out, what in err) == (2, "", True), err[:500]
    assert len(err) < 4200
