"""One loop, run twice: by two ranks under a recipe, and by one process that has the data of both.

A loop is a function of `ranks`, whose data it draws, and of a recipe; without one it is what its users have today.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from tests.integrations.loops import DEADLINE, SEED, flat
from torch import Tensor, nn

import gossamer
from gossamer.integrations import Communicator
from gossamer.recipe import Recipe

Loop = Callable[[Sequence[int], str | None], list[nn.Module]]

SYNCHRONOUS = ["allreduce", "topk(ratio=0.3)", "scatter(qsgd(bits=4, bucket=16))"]


class Alone:
    """Stands where a communicator would, in the loop of one process."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def detach(self) -> None: ...

    def check_sync(self) -> None: ...


def attach(model: nn.Module, optimizer: Any, recipe: str | None, **options: Any) -> Any:
    if recipe is None:
        return Alone()
    return gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE, **options)


def randn(ranks: Sequence[int], step: int, *shape: int) -> Tensor:
    """What these ranks draw at a step, one below the other."""
    rng = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    return torch.cat([torch.randn(shape, generator=d) for d in rng])


def randint(ranks: Sequence[int], step: int, high: int, *shape: int) -> Tensor:
    rng = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    return torch.cat([torch.randint(high, shape, generator=d) for d in rng])


def both(rank: int, size: int, loop: Loop, *more: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The models of this rank under `allreduce`, and those of one process on everybody's data."""
    together = loop([rank], "allreduce", *more)
    return [flat(m) for m in together], [flat(m) for m in loop(range(size), None, *more)]


def ours(rank: int, size: int, loop: Loop, recipe: str, *more: Any) -> list[Tensor]:
    """The models of this rank under a recipe."""
    return [flat(m) for m in loop([rank], recipe, *more)]


def close(together: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def settled(comm: Communicator | Alone, steps: int) -> None:
    """The replicas are equal, every optimizer step is one step, and the bytes are those of so many."""
    if isinstance(comm, Communicator):
        assert comm.step == steps
        ratio = comm.metrics()["ratio_to_dense"]
        assert 0.99 < ratio < 1.01 if comm.recipe == Recipe.of("allreduce") else ratio > 1.1, ratio
    comm.check_sync()


@contextmanager
def torch_may_deprecate() -> Iterator[None]:
    """Parts of torch warn of other parts of torch when they are loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def said(run: Callable[[], object]) -> list[str]:
    """What somebody is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]
