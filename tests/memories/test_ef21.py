"""EF21: DIANA with rate 1 around codecs that leave things out; exact where error feedback stalls."""

import pytest
import torch
from tests.laws.blocks import block
from tests.laws.crew import Crew
from tests.memories.convex import Problem
from tests.runtime.gym import bit_equal, make, parameters, pull, sgd, train

from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe

SPARSE = "gather(topk(ratio=0.1))"


@pytest.mark.parametrize("start", ["zero", "first"])
@pytest.mark.parametrize("exchange", ["gather(qsgd(bits=4, bucket=16))", "scatter(qsgd(bits=4, bucket=16))"])
def test_it_is_diana_with_rate_one_bit_for_bit(exchange: str, start: str) -> None:
    ef21, diana = (
        make(f"{exchange} + {memory}, start='{start}')", 3, optimizer=sgd(momentum=0.0))
        for memory in ("ef21(eta=1.0", "diana(alpha=1.0")
    )
    for ranks in (ef21, diana):
        train(ranks, pull, 6)
    assert bit_equal([*parameters(ef21), *parameters(diana)])


def test_it_reaches_the_optimum_where_error_feedback_stalls() -> None:
    problem = Problem(kappa=4.0, workers=3)
    left = {
        memory: problem.train(problem.ranks(f"{SPARSE} + {memory}", 0.8), 150)
        for memory in ("ef21(eta=1.0)", "error_feedback()")
    }
    assert left["ef21(eta=1.0)"] < 1e-12
    assert left["error_feedback()"] > 1e-4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("exchange", [SPARSE, "scatter(topk(ratio=0.1))"])
def test_what_all_ranks_know_is_the_mean_of_what_each_has_learned_but_for_what_is_owed(
    exchange: str, size: int
) -> None:
    crew = Crew(f"{exchange} + ef21(eta=0.3)", size)
    for step in range(6):
        got = crew.step([block("matrices", torch.float64, seed=50 * r + step) for r in range(size)])
        common = crew.kept[0]["common"]
        assert torch.equal(got, common)
        assert (crew.mean_of("own") - crew.owed() - common).abs().max() < 1e-12


def test_with_momentum_an_average_of_gradients_is_learned_that_begins_with_the_first() -> None:
    crew, average = Crew("gather(fp32()) + ef21(eta=0.25)", 2), torch.zeros(())
    for step in range(5):
        blocks = [block("long", torch.float64, seed=9 * step + r) for r in range(2)]
        new = (blocks[0].flat + blocks[1].flat) / 2
        average = new if step == 0 else 0.75 * average + 0.25 * new
        torch.testing.assert_close(crew.step(blocks), average, rtol=1e-6, atol=1e-6)


def test_in_noise_the_average_is_what_helps() -> None:
    """The mean distance of the last fifty steps."""

    def distance(memory: str) -> float:
        crew, x, total = Crew(f"gather(topk(ratio=0.05)) + {memory}", 4), torch.zeros(1283), 0.0
        targets = torch.stack([block("long", seed=r).flat for r in range(4)])
        for step in range(150):
            blocks = [block("long", seed=1000 + 10 * step + r) for r in range(4)]
            x = x - 0.02 * crew.step([b.like(x - t + b.flat) for b, t in zip(blocks, targets)])
            total += float((x - targets.mean(0)).square().sum()) / 50 if step >= 100 else 0.0
        return total

    assert distance("ef21(eta=0.1)") < 0.5 * distance("ef21(eta=1.0)")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (f"{SPARSE} + ef21(eta=0.0)", r"eta must lie in \(0, 1\], got 0.0; 0.1 for minibatches"),
        (f"{SPARSE} + ef21(eta=1.5)", "1.0 for full gradients"),
        ("gather(qsgd(bits=2)) + ef21()", r"can diverge: .* use diana\(\)"),
        ("scatter(topk(), feedback=0.5) + ef21()", "leave feedback out"),
        (f"{SPARSE} + ef21() + slowmo(8)", r"use ef21\(eta=1.0\)"),
        (f"{SPARSE} + ef21(eta=1.0) + backup_workers()", "a dropped gradient's residual would be lost"),
        (f"{SPARSE} + ef21(eta=1.0) + gossip(push_sum())", "."),
    ],
)
def test_what_it_would_spoil_is_refused(recipe: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Recipe.of(recipe)


def test_two_momenta_are_refused_unless_insisted_on() -> None:
    with pytest.raises(AttachError, match=r"would average it again; use .* momentum=0 .* beside_momentum=True"):
        make(f"{SPARSE} + ef21()", 2, optimizer=sgd())
    make(f"{SPARSE} + ef21(beside_momentum=True)", 2, optimizer=sgd())
    make(f"{SPARSE} + ef21(eta=1.0)", 2, optimizer=sgd())
    make(f"{SPARSE} + ef21()", 2, optimizer=lambda model: torch.optim.Adam(model.parameters()))
