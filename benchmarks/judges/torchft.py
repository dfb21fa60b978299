"""torchft's judge of streaming DiLoCo, put to `streaming`: two ranks whose models are known at every step.

python benchmarks/judges/torchft.py

Of `DiLoCoMockedUpdateTest` in torchft/diloco_regression_test.py (meta-pytorch/torchft at 000c1760) these are the setting and
the tolerance: two layers of one weight, which begin at 1; a gradient of 2 at every step on both ranks; an inner rate of 1 and
an outer rate of 2, without momentum; each layer a fragment, averaged every 6 steps; every weight within 1e-5 relative and 1e-5
absolute. The figures are the weights before each of 15 steps and after the last, as its fixtures hold them: test_fixtures of
tushar00jain/torchft, a fork, at 24d9a81e, f69e778f, 7a841231 and 11314afc, and torchft/test/fixtures at d5f0b323 for the fourth.
The copies of torchft itself could not be read. Its LocalSGD has no figures, only counts of calls.

A fragment of torchft leaves `delay` steps before its turn, one of ours at its turn. So the model here has six layers, one for
each step of a round, and two are compared: those that leave when theirs do. `fragment_update_alpha` is our `mixing`. We refuse a
mixing of 1, which never synchronises, and of 0 with a delay, which throws steps away: there the closest that we take is used.
"""

import argparse
import sys
from typing import NamedTuple

import torch
from torch import nn

from gossamer.recipe import Recipe
from gossamer.simulate import replicas, train

ROUND, STEPS, START, GRADIENT, INNER, OUTER = 6, 15, 1.0, 2.0, 1.0, 2.0
RELATIVE = ABSOLUTE = 1e-5
CLOSEST = 1e-6  # to a mixing of 0 or 1, where we refuse these

ALONE = tuple(START - INNER * GRADIENT * step for step in range(STEPS + 1))


class Fixture(NamedTuple):
    delay: int
    alpha: float
    layers: tuple[tuple[float, ...], tuple[float, ...]]


FIXTURES = (
    Fixture(
        0,
        0.0,
        (
            (1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59),
            (1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53),
        ),
    ),
    Fixture(
        0,
        0.5,
        (
            (1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25),
            (1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38),
        ),
    ),
    Fixture(0, 1.0, (ALONE, ALONE)),
    Fixture(
        1,
        0.0,
        (
            (1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47),
            (1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45),
        ),
    ),
    Fixture(
        1,
        0.5,
        (
            (1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75),
            (1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35),
        ),
    ),
    Fixture(1, 1.0, (ALONE, ALONE)),
)


class Layers(nn.Module):
    """One weight for each step of a round: the weight of layer i leaves at step i + 1 of each round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.full((1,), START)) for _ in range(ROUND)])


def backward(model: nn.Module, rank: int, step: int) -> float:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, GRADIENT)
    return 0.0


def recipe_of(fixture: Fixture) -> Recipe:
    mixing = fixture.alpha
    if mixing == 1.0:
        mixing = 1 - CLOSEST
    elif mixing == 0.0 and fixture.delay:
        mixing = CLOSEST
    names = ", ".join(f"'layers.{i}'" for i in range(ROUND))
    return Recipe.of(
        f"allreduce(fp32()) + streaming({ROUND}, fragments=({names}), delay={fixture.delay}, mixing={mixing}, rate={OUTER}, "
        "momentum=0.0)"
    )


def weights(fixture: Fixture) -> list[list[list[float]]]:
    """By rank and layer of the fixture, the weight before each step and after the last."""
    ranks = replicas(recipe_of(fixture), Layers, lambda m: torch.optim.SGD(m.parameters(), lr=INNER), size=2)
    turns = [turn - fixture.delay - 1 for turn in (ROUND // 2, ROUND)]
    found = [[[START] for _ in turns] for _ in ranks]
    for _ in range(STEPS):
        train(ranks, backward, 1)
        for rank, replica in zip(found, ranks, strict=True):
            for layer, turn in zip(rank, turns, strict=True):
                layer.append(float(replica.flat()[turn]))
    return found


def largest_error(fixture: Fixture) -> float:
    """Of all weights at all steps, in units of what is allowed."""
    return max(
        abs(ours - theirs) / (ABSOLUTE + RELATIVE * abs(theirs))
        for rank in weights(fixture)
        for layer, known in zip(rank, fixture.layers, strict=True)
        for ours, theirs in zip(layer, known, strict=True)
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    failed = False
    for fixture in FIXTURES:
        error = largest_error(fixture)
        failed |= error > 1
        last = [layer[-1] for layer in weights(fixture)[0]]
        print(
            f"delay {fixture.delay}, alpha {fixture.alpha:3}: ours end at {last[0]:.6g} and {last[1]:.6g}, theirs at "
            f"{fixture.layers[0][-1]:g} and {fixture.layers[1][-1]:g}; {'FAILS' if error > 1 else 'passes'}, largest error "
            f"{error:.3g} of what is allowed"
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
