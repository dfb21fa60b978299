"""Rounds of one rank (SNOO: an outer Nesterov step on the rank's own progress), the control of every claim about rounds."""

import pytest
import torch
from tests.runtime.gym import bit_equal, make, parameters, pull, train
from torch import nn


def alike(model: nn.Module, rank: int, step: int) -> float:
    return pull(model, 0, step)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_ranks_on_equal_data_are_one_rank(size: int) -> None:
    recipe = "gather(fp32()) + slowmo(3, beta=0.9, alpha=0.7, by_lr=False, nesterov=True)"
    many, one = make(recipe, size), make(recipe, 1)
    for ranks in (many, one):
        train(ranks, alike, 15)
    assert bit_equal([*parameters(many), *parameters(one)])


def test_diloco_takes_its_outer_step_on_one_rank() -> None:
    snoo, plain = make("diloco(3)", 1), make("local_sgd(3)", 1)
    for ranks in (snoo, plain):
        train(ranks, pull, 9)
    assert not torch.equal(*parameters(snoo), *parameters(plain))


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_without_momentum_it_is_lookahead(alpha: float) -> None:
    recipes = f"lookahead(3, alpha={alpha})", f"diloco(3, rate={alpha}, momentum=0.0)"
    lookahead, snoo = (make(recipe, 1) for recipe in recipes)
    for ranks in (lookahead, snoo):
        train(ranks, pull, 15)
    assert bit_equal([*parameters(lookahead), *parameters(snoo)])
