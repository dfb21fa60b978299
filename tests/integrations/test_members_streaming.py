"""Members come and go while fragments are in flight: what had not come begins again, and all end with one model."""

import random
import time
from collections.abc import Callable, Iterator

import pytest
from tests.integrations.test_members import Learners, made_by
from tests.integrations.test_members_recipes import FAR, SILENCE, Crew, learn_together

pytestmark = pytest.mark.gang


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_together)


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce + streaming(9, fragments=3, delay=3)",
        pytest.param("gather(qsgd(bits=8)) + streaming(8, fragments=2, delay=8)", marks=pytest.mark.slow),
        pytest.param("scatter(qsgd(bits=8)) + streaming(9, fragments=3, delay=3)", marks=pytest.mark.slow),
        pytest.param("gather(topk(ratio=0.2)) + error_feedback() + streaming(4, delay=0)", marks=pytest.mark.slow),
    ],
)
def test_fragments_in_flight_are_averaged_by_those_who_are_left(learners: Callable[..., Learners], recipe: str) -> None:
    crew = Crew(learners, recipe)
    crew.lose(1)
    time.sleep(0.2)
    came = crew.comes(1)
    assert came >= FAR
    outcomes = crew.ends(came + 200)
    for one in outcomes:
        assert one.present == (0, 1, 2)
        assert one.model == outcomes[0].model
        assert one.longest < SILENCE + 2
        assert all(after - before in (0, 1) for before, after in zip(one.steps, one.steps[1:]))
        assert not one.dropped


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["allreduce + streaming(9, fragments=3, delay=3)", "scatter(qsgd(bits=8)) + streaming(9, fragments=3, delay=3)"],
)
def test_they_are_killed_at_random_moments(learners: Callable[..., Learners], recipe: str) -> None:
    crew, draw = Crew(learners, recipe), random.Random(recipe)
    came = 0
    for _ in range(6):
        time.sleep(draw.uniform(0.0, 0.3))
        rank = draw.randrange(3)
        crew.lose(rank)
        came = crew.comes(rank)
    outcomes = crew.ends(came + 300)
    assert all(one.model == outcomes[0].model and one.longest < SILENCE + 2 for one in outcomes)
