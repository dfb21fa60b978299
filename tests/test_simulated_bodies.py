"""Ranks that share a body train, bit for bit, as with bodies of their own."""

from collections.abc import Callable

import pytest
import torch
from tests.laws.samples import preset_recipes
from tests.runtime.gym import Odd, bit_equal, parameters, pull, sgd, spoiled, usual
from torch import nn

from gossamer.checkpoints import state as checkpoint
from gossamer.core.errors import AttachError, RecipeError
from gossamer.costs import from_flags
from gossamer.costs.events import Begin, Events, SlowSteps
from gossamer.planning.model_shapes import from_shapes
from gossamer.planning.work import NoWork
from gossamer.recipe import Recipe
from gossamer.simulate import Backward, Replica, costs_on, replicas, replicas_of_one_body, train
from gossamer.simulated_bodies import stay_equal

PRESETS = {name: recipe for name, recipe in preset_recipes().items() if not recipe.schedule.shape.is_async}
STEPS = 5


def bodies(ranks: list[Replica]) -> int:
    return len({id(r.model) for r in ranks})


def alike(own: list[Replica], shared: list[Replica], backward: Backward = pull) -> None:
    """After each of some steps both crews have the same bits, in models, memories, losses and on the wire."""
    for step in range(STEPS):
        first, second = train(own, backward, 1), train(shared, backward, 1)
        assert bit_equal([torch.cat(parameters(crew)) for crew in (own, shared)]), f"step {step + 1}"
        assert (first.ledger.sent, first.seconds) == (second.ledger.sent, second.seconds)
    assert [r.losses for r in own] == [r.losses for r in shared]
    for one, other in zip(own, shared, strict=True):
        kept, same = checkpoint.save(one.worker), checkpoint.save(other.worker)
        assert kept.keys() == same.keys()
        for key, value in kept.items():
            assert torch.equal(value, same[key]) if isinstance(value, torch.Tensor) else value == same[key], key


@pytest.mark.parametrize("size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_as_with_bodies_of_its_own(name: str, size: int) -> None:
    recipe, made = PRESETS[name], list[list[Replica]]()
    for make in (replicas, replicas_of_one_body):
        try:
            made.append(make(recipe, Odd, usual(recipe), size, 3))
        except (AttachError, RecipeError):  # it does not fit so many ranks
            return
    assert bodies(made[0]) == size
    if bodies(made[1]) == 1:
        alike(made[0], made[1])
    else:
        assert bodies(made[1]) == size


def test_an_outer_step_is_taken_by_each_rank_on_a_body_of_its_own() -> None:
    recipe = "allreduce + slowmo(2, inner=every_step())"
    made = [make(recipe, Odd, sgd(), 4, 3) for make in (replicas, replicas_of_one_body)]
    assert [bodies(ranks) for ranks in made] == [4, 4]
    alike(*made)


def test_presets_that_average_gradients_without_momentum_of_their_own_share_one() -> None:
    shared = {name for name, recipe in PRESETS.items() if stay_equal(recipe, Odd())}
    assert shared >= {"allreduce", "qsgd", "terngrad", "topk", "powersgd", "bf16", "ef21", "atomo"}
    assert not shared & {
        "local_sgd",
        "sgp",
        "diloco",
        "slowmo",
        "onebit_adam",
        "local_gradients",
        "accordion",
        "signum",
    }


class Differs(nn.Module):
    """A model that draws numbers, at its birth and in each pass, and has a buffer if asked to."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        if buffer:
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def learn(model: nn.Module, rank: int, step: int) -> float:
    loss = (model(torch.full((3, 6), 0.1 * (rank + step))) - rank).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("recipe", ["allreduce", "topk", "terngrad + per_node(2)", "minibatch(3)"])
def test_models_that_draw_numbers_draw_the_same(recipe: str) -> None:
    runs = list[tuple[torch.Tensor, list[list[float]]]]()
    for make in (replicas, replicas_of_one_body):
        torch.manual_seed(7)
        ranks = make(recipe, Differs, sgd(), 4)
        train(ranks, learn, STEPS)
        runs.append((ranks[3].flat(), [r.losses for r in ranks]))
    assert bit_equal([runs[0][0], runs[1][0]])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("allreduce", lambda: Differs(buffer=True)),
        ("allreduce + delayed()", Differs),
        ("allreduce + every_step(micro_batches=1, rate=0.5)", Differs),
        ("allreduce + every_step(l1=0.01)", Differs),
        ("local_sgd(4)", Differs),
    ],
)
def test_ranks_that_differ_have_bodies_of_their_own(recipe: str, model: Callable[[], nn.Module]) -> None:
    assert bodies(replicas_of_one_body(recipe, model, sgd(momentum=0.0), 3)) == 3


def test_a_step_that_is_skipped_is_skipped_by_all() -> None:
    backward = spoiled([(1, 2), (0, 4)], float("inf"))
    own, shared = (make("topk", Odd, sgd(), 3) for make in (replicas, replicas_of_one_body))
    alike(own, shared, backward)


def test_the_optimizer_steps_once_for_all_ranks() -> None:
    steps = [0]

    class Counting(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            steps[0] += 1
            super().step(closure)

    ranks = replicas_of_one_body("allreduce", Odd, lambda model: Counting(model.parameters(), lr=0.1), 6)
    train(ranks, pull, 3)
    assert steps == [3]


def test_on_a_cluster_with_slow_ranks_times_and_bits_are_those_of_bodies_of_their_own() -> None:
    cluster, shapes = (
        from_flags(nodes=4, rate=1e6, latency=1e-3),
        {n: tuple(p.shape) for n, p in Odd().named_parameters()},
    )
    late = Events(slow=(SlowSteps(rank=2, factor=5.0, steps=2, begin=Begin(step=2)),))
    costs = costs_on(cluster, "topk", from_shapes(shapes, 0.01, name="odd", memory_rate=1e10), NoWork(), late)
    crews = [make(Recipe.of("topk"), Odd, sgd(), 4) for make in (replicas, replicas_of_one_body)]
    own, shared = (train(crew, pull, 6, costs) for crew in crews)
    assert own.seconds == shared.seconds
    assert own.spans == shared.spans
    assert bit_equal([r.flat() for crew in crews for r in crew])
