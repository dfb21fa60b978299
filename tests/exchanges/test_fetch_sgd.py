"""FetchSGD: one table travels, all that is kept is shared, and touched cells become zero."""

import pytest
import torch
from tests.laws.blocks import vector
from tests.laws.crew import Crew
from tests.runtime.gym import bit_equal, make, parameters, pull, remembered, train

RANKS, WIDTH = 4, 1000
DICE = torch.Generator().manual_seed(6)
CURVES, TARGETS = torch.rand(RANKS, WIDTH, generator=DICE) * 1.5 + 0.5, torch.randn(RANKS, WIDTH, generator=DICE)


def losses(recipe: str, steps: int = 150, lr: float = 0.05) -> list[float]:
    crew, x, found = Crew(recipe, RANKS), torch.zeros(WIDTH), list[float]()
    best = (CURVES * TARGETS).mean(0) / CURVES.mean(0)
    for _ in range(steps):
        x = x - lr * crew.step([vector(a * (x - b)) for a, b in zip(CURVES, TARGETS, strict=True)])
        found.append(float((CURVES.mean(0) * (x - best).square()).sum() / 2))
    return found


def test_zeroing_what_was_touched_trains_and_subtracting_diverges() -> None:
    sketch = "fetch_sgd(ratio=0.02, columns=150, momentum=0.0"
    zeroed, subtracted = losses(f"{sketch})"), losses(f"{sketch}, error='subtract')")
    assert zeroed[-1] < 0.7 * zeroed[0]
    assert subtracted[-1] > 5 * subtracted[0]


def test_a_heavy_element_is_extracted_with_its_momentum_and_owed_no_more() -> None:
    crew, x = Crew("fetch_sgd(ratio=0.002, columns=100, momentum=0.5)", 3), torch.zeros(WIDTH)
    x[[7, 700]] = torch.tensor([4.0, -2.0])
    for _ in range(3):
        torch.testing.assert_close(crew.step([vector(x)] * 3), x)
    assert all((t == 0).all() for state in crew.carried for t in state.values())


def test_ranks_keep_nothing_of_their_own() -> None:
    ranks = make("fetch_sgd(ratio=0.05)", 3)
    train(ranks, pull, 5)
    kept = [remembered(r.worker) for r in ranks]
    assert kept[0]
    for key in kept[0]:
        assert bit_equal([k[key] for k in kept])
    assert bit_equal(parameters(ranks))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_seen_whatever_the_estimates_say(value: float) -> None:
    crew, x = Crew("fetch_sgd(ratio=0.002, columns=100)", 2), torch.zeros(WIDTH)
    x[3] = value
    assert not crew.step([vector(x), vector(torch.ones(WIDTH))]).isfinite().all()


def test_only_one_table_travels() -> None:
    crew = Crew("fetch_sgd(columns=100)", RANKS)
    crew.step([vector(t) for t in TARGETS])
    assert {entry.handed for entry in crew.ledger} == {4 * 5 * 100}


def test_it_is_worse_than_fetching_exact_values_and_says_so() -> None:
    """Its own `Not for:`; at as many bytes."""
    two = losses("allreduce(count_sketch(ratio=0.02, columns=100, candidates=5)) + momentum_correction(momentum=0.0)")
    one = losses("fetch_sgd(ratio=0.02, columns=120, momentum=0.0)")
    assert two[-1] < one[-1]
