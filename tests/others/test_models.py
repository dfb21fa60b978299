"""Models that are copied, compiled, recomputed, or trained in part."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import same
from tests.others.both import attach, both, close, ours, randn, settled, torch_may_deprecate
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang

STEPS = 4
OTHER_RECIPES = ["topk(ratio=0.3)", "local_sgd(2)"]


class Mlp(nn.Module):
    """Three layers; the middle one may be computed again during backward."""

    def __init__(self, reentrant: bool | None = None, width: int = 10) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.middle, self.outer = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        again = self.reentrant
        x = self.middle(x) if again is None else checkpoint(self.middle, x, use_reentrant=again)
        return self.outer(torch.tanh(x))


def loss_of(model: nn.Module, ranks: Sequence[int], step: int) -> Tensor:
    return (model(randn(ranks, step, 4, 6)) - randn(ranks, 100 + step, 4, 3)).square().mean()


def train(
    model: nn.Module,
    ranks: Sequence[int],
    recipe: str | None,
    each: Callable[[int], object] = lambda step: None,
    run: nn.Module | None = None,
) -> None:
    """An ordinary loop; `each` is called when a step is done, `run` is what computes the loss if the model does not."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    comm = attach(model, optimizer, recipe)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch_may_deprecate():  # of torch.compile
                loss_of(model if run is None else run, ranks, step).backward()
            optimizer.step()
            each(step)
        settled(comm, STEPS)
    finally:
        comm.detach()


def ema(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    model = Mlp()
    averages = list[AveragedModel]()

    def update(step: int) -> None:
        if not averages:  # the copy is of a model that is attached, and gets no gradient of its own
            averages.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)))
        averages[0].update_parameters(model)

    train(model, ranks, recipe, update)
    return [model, averages[0].module]


def test_ema_is_one_process_on_both_ranks_data(gang2: Gang) -> None:
    for together, alone in gang2.run(both, ema):
        close(together, alone)
        assert not same(*together)


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
def test_ema_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (model, average), (other, others_average) = gang2.run(ours, ema, recipe)
    assert same(model, other)
    assert same(average, others_average) == ("local" not in recipe)  # local steps: each rank averages what it had


def copied(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor]:
    """A deepcopy of an attached model trains on alone, and disturbs nobody."""
    model, copies = Mlp(), list[nn.Module]()

    def branch(step: int) -> None:
        if rank == 0:
            copies.append(copy.deepcopy(model))
            loss_of(copies[-1], [rank], step).backward()

    train(model, [rank], recipe, branch)
    undisturbed = Mlp()
    train(undisturbed, [rank], recipe)
    return flat_of(model), flat_of(undisturbed)


def flat_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("recipe", ["allreduce", *OTHER_RECIPES])
def test_a_deepcopy_is_not_attached(gang2: Gang, recipe: str) -> None:
    for with_copies, without in gang2.run(copied, recipe):
        assert same(with_copies, without)


def compiled(ranks: Sequence[int], recipe: str | None, plain: bool = False) -> list[nn.Module]:
    """`plain`: attach the plain model, and run the compiled one."""
    torch._dynamo.reset()
    model = Mlp()
    with torch_may_deprecate():
        fast: Any = torch.compile(model, backend="eager")
    train(model if plain else fast, ranks, recipe, run=fast)
    return [model]


@pytest.mark.parametrize("plain", [False, True])
def test_a_compiled_model_is_one_process_on_both_ranks_data(gang2: Gang, plain: bool) -> None:
    for together, alone in gang2.run(both, compiled, plain):
        close(together, alone)


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
def test_a_compiled_model_under_other_recipes(gang2: Gang, recipe: str) -> None:
    (first,), (second,) = gang2.run(ours, compiled, recipe)
    assert same(first, second)


def recomputed(ranks: Sequence[int], recipe: str | None, reentrant: bool) -> list[nn.Module]:
    model = Mlp(reentrant=reentrant)
    train(model, ranks, recipe)
    return [model]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_one_process_on_both_ranks_data(gang2: Gang, reentrant: bool) -> None:
    for together, alone in gang2.run(both, recomputed, reentrant):
        close(together, alone)


class Ending(nn.Module):
    """What is computed again is the last layer, so that backward begins inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.outer, self.inner(x), use_reentrant=True)


def reentrant(rank: int, size: int) -> str:
    with pytest.raises(AttachError) as caught:
        train(Ending(), [rank], "allreduce")
    return str(caught.value)


def test_reentrant_checkpointing_is_refused_with_the_word_that_helps(gang2: Gang) -> None:
    for text in gang2.run(reentrant):
        assert "use_reentrant=False" in text


def thawed(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    """As adapters are trained first, and more of the model later: the optimizer knows all of it from the start."""
    model = Mlp(width=300)  # so large that the word about what was thawed is under 1 % of the bytes
    for layer in (model.inner, model.middle):
        layer.requires_grad_(False)
    before = flat_of(model.inner)

    def thaw(step: int) -> None:
        if step < 1:
            assert same(flat_of(model.inner), before)
        if step == 1:
            model.inner.requires_grad_(True)

    train(model, ranks, recipe, thaw)
    assert not same(flat_of(model.inner), before)
    return [model]


def frozen(ranks: Sequence[int], recipe: str | None) -> list[nn.Module]:
    """A layer is frozen half-way, and stays where it is, under weight decay and momentum too."""
    model = Mlp()
    kept = list[Tensor]()

    def freeze(step: int) -> None:
        if step == 1:
            model.middle.requires_grad_(False)
            kept.append(flat_of(model.middle))
        if step > 1:
            assert same(flat_of(model.middle), kept[0])

    train(model, ranks, recipe, freeze)
    return [model]


@pytest.mark.parametrize("loop", [thawed, frozen])
def test_layers_thawed_and_frozen_are_one_process_on_both_ranks_data(
    gang2: Gang, loop: Callable[[Sequence[int], str | None], list[nn.Module]]
) -> None:
    for together, alone in gang2.run(both, loop):
        close(together, alone)


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
@pytest.mark.parametrize("loop", [thawed, frozen])
def test_layers_thawed_and_frozen_under_other_recipes(
    gang2: Gang, loop: Callable[[Sequence[int], str | None], list[nn.Module]], recipe: str
) -> None:
    (first,), (second,) = gang2.run(ours, loop, recipe)
    assert same(first, second)


def grow(model: Mlp) -> None:
    model.extra = nn.Linear(3, 3)


def replace(model: Mlp) -> None:
    model.outer = nn.Linear(10, 3)


def assign(model: Mlp) -> None:
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


def lose(model: Mlp) -> None:
    model.outer.bias = None


CHANGES = {"extra.weight": grow, "outer.weight": replace, "inner.weight": assign, "outer.bias": lose}


def changed(rank: int, size: int, name: str, recipe: str) -> str:
    model = Mlp()

    def change(step: int) -> None:
        if step == 1:
            CHANGES[name](model)

    with pytest.raises(AttachError) as caught:
        train(model, [rank], recipe, change)
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_another_after_attach_is_an_error_with_the_name(gang2: Gang, name: str, recipe: str) -> None:
    for text in gang2.run(changed, name, recipe):
        assert name in text
