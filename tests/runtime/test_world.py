"""Every part is asked whether it fits the world that a recipe is bound to: those inside of others, and those of rules."""

import re
from dataclasses import dataclass

import pytest
import torch
from tests.runtime.gym import Odd, make

from gossamer.codecs import FP32, QSGD
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Codec, CodecExchange, Context, ReduceResult
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program
from gossamer.exchanges import AllReduced, Gather
from gossamer.integrations import ddp
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.rules import Rule


@dataclass(frozen=True, repr=False)
class Pairs(CodecExchange):
    """Serves an even world only."""

    codec: Codec
    name = "pairs"

    def fits(self, world: Binding) -> None:
        super().fits(world)
        if world.size % 2:
            raise AttachError(
                f"{self} in a world of {world.size}: an odd one is left over; use an even number of ranks"
            )

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        return (yield from Gather(self.codec).average(block, state, context))


@dataclass(frozen=True, repr=False)
class Table(Codec):
    """Wants blocks of so many elements."""

    least: int
    unbiased = True  # pyright: ignore[reportAssignmentType]
    name = "table"

    def fits(self, world: Binding) -> None:
        shortest = min(layout.numel for layout in world.layouts)
        if shortest < self.least:
            raise AttachError(f"{self}: a block has {shortest} elements; use a larger model")

    def omega(self, layout: Layout) -> float:
        return 0.0

    def wire_bytes(self, layout: Layout) -> int:
        return 4 * layout.numel

    def encode(self, block: Bucket, state: State, context: Context) -> torch.Tensor:
        return FP32().encode(block, state, context)

    def accumulate(self, wire: torch.Tensor, layout: Layout, into: torch.Tensor, weight: float) -> None:
        FP32().accumulate(wire, layout, into, weight)


def test_a_world_is_refused_when_the_recipe_is_bound_and_on_paper() -> None:
    recipe = Recipe(Pairs(QSGD()))
    make(recipe, 2)
    with pytest.raises(AttachError, match=r"pairs\(qsgd\(\)\) in a world of 3: an odd one is left over"):
        make(recipe, 3)
    with pytest.raises(AttachError, match="in a world of 3"):
        bytes_per_step(recipe, {"w": (5, 5)}, 3)


@pytest.mark.parametrize(
    "recipe",
    [Recipe(Gather(Table(10**6))), Recipe(AllReduced(FP32()), rules=(Rule("ndim > 1", Gather(Table(10**6))),))],
    ids=str,
)
def test_parts_inside_and_those_of_rules_are_asked(recipe: Recipe) -> None:
    with pytest.raises(AttachError, match=r"table\(1000000\): a block has \d+ elements"):
        make(recipe, 2, Odd)


@pytest.mark.parametrize(
    "text", ["every_step(rate=2.0)", "every_step(micro_batches=2)", "every_step(l1=0.1)", "signs()"]
)
def test_what_acts_on_the_optimizer_is_no_hook_s(text: str) -> None:
    with pytest.raises(AttachError, match=rf"{re.escape(text)} acts on the optimizer, which a DDP hook does not see"):
        ddp.check(Recipe.of(f"allreduce + {text}"))
