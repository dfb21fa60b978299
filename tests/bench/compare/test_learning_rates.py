"""Learning rates of a trial: whom a factor is for, and what is none."""

import sys

import pytest

from gossamer.bench.cli.app import run
from gossamer.bench.compare.learning_rates import rates_of
from gossamer.core.errors import RecipeError

NAMES = ["ddp", "topk", "terngrad(last='qsgd')"]


def test_one_s_own_goes_before_that_of_all() -> None:
    assert rates_of([], NAMES) == {}
    assert rates_of(["1.5"], NAMES) == dict.fromkeys(NAMES, 1.5)
    assert rates_of(["topk=0.5"], NAMES) == {"ddp": 1.0, "topk": 0.5, "terngrad(last='qsgd')": 1.0}
    assert rates_of(["terngrad(last='qsgd')=1e-1", "2"], NAMES) == {"ddp": 2, "topk": 2, "terngrad(last='qsgd')": 0.1}


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "topk=", "topk=fast", "fast"])
def test_what_is_no_factor_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="--lr takes a factor above 0"):
        rates_of([text], NAMES)


def test_a_recipe_that_takes_no_part_and_one_named_twice_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"no recipe here is called 'topkk'. Did you mean 'topk'\?"):
        rates_of(["topkk=2"], NAMES)
    with pytest.raises(RecipeError, match="gives topk two factors"):
        rates_of(["topk=2", "topk=3"], NAMES)
    with pytest.raises(RecipeError, match="gives all recipes two factors"):
        rates_of(["2", "3"], NAMES)


def test_the_command_refuses_it_before_anything_starts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gossamer", "compare", "ddp", "topk", "--lr", "qsgd=2"])
    assert run() == 2
    assert "no recipe here is called 'qsgd'" in capfd.readouterr().err
