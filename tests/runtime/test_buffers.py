"""Memory serves again: in a steady step no recipe makes a tensor of a block's size."""

import sys
from collections import Counter
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from tests.laws.samples import required
from tests.runtime import fleet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gossamer
from gossamer.core.memory_pool import MemoryPool
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.simulate import replicas, train

SIDE, RANKS = 384, 3
LARGE = 4 * SIDE * SIDE // 4  # bytes: a quarter of the block
ELSEWHERE = (
    *("fabrics/", "simulate.py"),  # which in a simulation copy what would travel
    "controllers/",  # which add up gradients by parameter
    "kernels/reference/",
)
MAKING = (  # what is on nobody's hot path
    "allreduce(ternary())",  # levels in lanes
    "terngrad(levels=7)",
    "index='rice'",  # lengths that follow the data
    "atomo",  # all atoms of a tensor are weighed before some are kept
    "fetch",  # tables, which are no larger than a model worth the name
    *("strom", "adacomp"),  # lengths that follow the data
    "gtopk",  # merges, of what is kept and what is not
    *("lamb", "sign_columns"),  # steps and matrices are looked at one by one
    *("zero_one_adam_update", "lion("),  # their moments are new tensors, as states are
    "gradiveq",  # products of matrices
    *("tile_topk", "dct_topk"),  # tiles are sorted, or turned into waves
    "gather(topk(ratio=0.3)) + ef21",  # the indices of three tenths of a tensor that has a bucket of its own
    *("scale='one'", "signsgd"),  # coins for zeros
)
FEW = 4  # steps of a round: what one makes does not depend on its length
MEASURES = 60  # steps after which `auto` has measured, with a copy of a block at a time
SOURCE = gossamer.__path__[0]


class Watch(TorchDispatchMode):
    """Notes who makes large tensors, by line: a storage that none of an operation's arguments has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen = Counter[str]()
        empty = np.empty

        def watched(shape: Any, *args: Any, **kwargs: Any) -> Any:
            out = empty(shape, *args, **kwargs)
            self._note(out.nbytes)
            return out

        patch.setattr(np, "empty", watched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(t)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if _is(t) and t.untyped_storage().data_ptr() not in given:
                self._note(t.untyped_storage().nbytes())
        return out

    def _note(self, length: int) -> None:
        if length < LARGE:
            return
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
            frame = frame.f_back
        place = "" if frame is None else frame.f_code.co_filename[len(SOURCE) + 1 :]
        if frame is not None and not place.startswith(ELSEWHERE):
            self.seen[f"{place}:{frame.f_lineno}"] += 1


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.large = nn.Parameter(torch.randn(SIDE, SIDE, generator=rng))
        self.small = nn.Parameter(torch.randn(SIDE, generator=rng))
        self.last = nn.Parameter(torch.randn(SIDE, generator=rng))  # a third layer, for models in three fragments


def pull(model: nn.Module, rank: int, step: int) -> float:
    for p in model.parameters():
        p.grad = p.detach() * (1.0 + 0.1 * rank) + 0.01 * step
    return 0.0


def ranks_of(recipe: str) -> int:
    return RANKS + Recipe.of(recipe).schedule.shape.is_async  # pairs are of an even number


def made(recipe: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What a whole round makes when some have gone before."""
    period = Recipe.of(recipe).schedule.shape.period
    measures = MEASURES if Recipe.of(recipe).controller.hears_times else 0
    ranks = replicas(recipe, Model, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), ranks_of(recipe))
    train(ranks, pull, measures + 3 * period + 2)
    with monkeypatch.context() as patch, Watch(patch) as watch:
        train(ranks, pull, max(period, 2))
    return dict(watch.seen)


def in_short_rounds(make: Callable[..., Recipe]) -> Recipe:
    """A preset with what it must be told, and with fewer steps a round than it has by default."""
    given = dict.fromkeys(required(make), 2)
    length = signature(make).parameters.get("every")
    if length is not None and length.name not in given and length.default > FEW:
        given["every"] = FEW
    return make(**given)


def every() -> list[Any]:
    """Presets, and other parts with the last exchange that they are seen with; what is put together by hand is slow."""
    named = [repr(in_short_rounds(make)) for make in presets().values()]
    kept = [r for r in dict.fromkeys([*fleet.ALL, *named]) if not any(making in r for making in MAKING)]
    quick = {*named, *fleet.SHOWN}
    return [pytest.param(r, marks=[] if r in quick else pytest.mark.slow, id=r) for r in kept]


@pytest.mark.parametrize("recipe", every())
def test_a_steady_step_makes_nothing_large(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(recipe, monkeypatch) == {}


def test_the_watch_sees() -> None:
    """So that the test above can fail."""
    with pytest.MonkeyPatch.context() as patch, Watch(patch) as watch:
        MemoryPool().like(torch.empty(LARGE))
    assert sum(watch.seen.values()) == 1


def test_a_room_is_free_when_nobody_lies_in_it() -> None:
    buffers, like = MemoryPool(), torch.empty(100_000)
    first = buffers.like(like)
    place = first.data_ptr()
    assert place % 64 == 0
    assert buffers.like(like).data_ptr() != place
    part = first[7:9].numpy()
    del first
    assert buffers.like(like).data_ptr() != place  # a part of it is in use
    del part
    assert buffers.like(like).data_ptr() == place


def test_where_lengths_follow_the_data_memory_does_not_grow() -> None:
    buffers = MemoryPool()
    for length in range(70_000, 71_000):
        buffers.of(length, torch.device("cpu"))
    assert sum(map(len, buffers._buffers.values())) <= 64  # pyright: ignore[reportPrivateUsage]


def test_rooms_of_other_lengths_are_others() -> None:
    buffers = MemoryPool()
    a, b = buffers.like(torch.empty(100_000)), buffers.like(torch.empty(50_000, dtype=torch.float64))
    assert a.dtype == torch.float32
    assert b.shape == (50_000,)
    assert a.data_ptr() != b.data_ptr()
