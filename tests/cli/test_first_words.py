"""What people try first."""

from collections.abc import Callable

import pytest

import gossamer

Say = Callable[..., tuple[int, str, str]]


def test_it_says_which_version_it_is(say: Say) -> None:
    assert say("--version") == (0, f"gossamer {gossamer.__version__}\n", "")


@pytest.mark.parametrize("words", [("-h",), ("compare", "-h"), ("bench", "steps", "-h")])
def test_a_short_word_helps_as_the_long_one_does(say: Say, words: tuple[str, ...]) -> None:
    code, out, _ = say(*words)
    assert code == 0
    assert out == say(*words[:-1], "--help")[1]
    assert "Usage:" in out


@pytest.mark.parametrize("words", [("--rate", "200mbit"), ("--workload", "lm"), ("--parameters", "1000")])
def test_bytes_are_of_some_recipe(say: Say, words: tuple[str, str]) -> None:
    code, out, err = say("recipes", *words)
    assert (code, out) == (2, "")
    assert f"{words[0]} counts the bytes of one recipe: name it" in err
