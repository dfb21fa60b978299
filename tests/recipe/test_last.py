"""The last layer, which a recipe can single out without knowing the model."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, small_step
from tests.runtime.gym import make, parameters, resumed, saved, train
from torch import Tensor, nn

from gossamer.core.errors import RecipeError
from gossamer.core.last_layer import last_layer
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.rules import Rule
from gossamer.simulate import Replica

HEAD = ("head.weight", "head.bias")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 10)
        self.norm = nn.LayerNorm(10)


def pull(model: nn.Module, rank: int, step: int) -> float:
    rng = torch.Generator().manual_seed(100 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng)
    return 0.0


def sent_by(ranks: list[Replica]) -> dict[str, str]:
    return {name: repr(c.exchange) for c in ranks[0].worker.buckets for name in c.names}


@pytest.mark.parametrize(
    ("last", "way"), [("fp32", "allreduce(fp32())"), ("bf16", "scatter(bf16())"), ("qsgd", "scatter(qsgd())")]
)
def test_terngrad_leaves_the_last_layer_to_another(last: str, way: str) -> None:
    ways = sent_by(make(f"terngrad(last={last!r})", 2, Model))
    assert {n for n, exchange in ways.items() if exchange == way} == {*HEAD}
    assert {exchange for n, exchange in ways.items() if n not in HEAD} == {repr(Recipe.of("terngrad").exchange)}


def test_the_last_layer_is_exact_in_full_precision() -> None:
    ranks = make("terngrad(last='fp32')", 2, Model)
    for r in ranks:
        pull(r.model, r.worker.rank, 1)
    wanted = torch.stack([r.model.get_parameter("head.weight").grad for r in ranks]).mean(0)  # pyright: ignore
    train(ranks, pull, 1)
    assert torch.equal(ranks[0].worker.by_name(ranks[0].worker.averaging.means)["head.weight"], wanted)


def test_the_recipe_in_force_says_it_by_name_and_a_run_is_resumed() -> None:
    text = "terngrad(last='qsgd')"
    assert repr(Recipe.of(text)) == "scatter(ternary(), answer=qsgd(bits=3)) + rule('last', scatter(qsgd()))"
    ranks = make(text, 2, Model)
    in_force = "rule(\"name == 'head.weight' or name == 'head.bias'\", scatter(qsgd()))"
    assert repr(ranks[0].worker.recipe).endswith(in_force)
    train(ranks, pull, 2)
    again = resumed(text, saved(ranks), model=Model)
    for run in (ranks, again):
        train(run, pull, 2)
    for a, b in zip(parameters(ranks), parameters(again), strict=True):
        assert torch.equal(a, b)


def test_on_paper_it_is_what_training_sends() -> None:
    ranks = make("terngrad(last='fp32')", 3, Model)
    shapes = {n: tuple(p.shape) for n, p in ranks[0].model.named_parameters()}
    assert bytes_per_step("terngrad(last='fp32')", shapes, 3) * 3 == train(ranks, pull, 1).ledger.sent


@pytest.mark.parametrize(
    ("names", "last"),
    [
        ({"a.weight": (2, 2), "b.weight": (2, 2), "b.bias": (2,)}, ["b.weight", "b.bias"]),
        ({"a.b.weight": (2, 2), "a.b.bias": (2,), "norm.weight": (2,)}, ["a.b.weight", "a.b.bias"]),
        ({"w": (2, 2), "scale": ()}, ["w"]),
        ({"a.scale": (3,), "b.scale": (3,)}, ["b.scale"]),
    ],
)
def test_it_is_the_module_of_the_last_matrix(names: dict[str, tuple[int, ...]], last: list[str]) -> None:
    assert last_layer(names) == last


def test_the_word_goes_with_others() -> None:
    shapes = {"a[0].weight": (2, 2), "h[1].weight": (3, 2), "h[1].bias": (3,)}
    rule = Rule("last and ndim > 1 or numel < 2", Recipe.of("allreduce").exchange).bound(shapes)
    assert [n for n, shape in shapes.items() if rule.holds_for(n, shape)] == ["h[1].weight"]
    others = Rule("not last", Recipe.of("allreduce").exchange).bound(shapes)
    assert [n for n, shape in shapes.items() if others.holds_for(n, shape)] == ["a[0].weight"]


def test_another_word_is_refused_and_this_one_named() -> None:
    with pytest.raises(RecipeError, match="or say 'last', for the last layer"):
        Recipe.of("terngrad + rule('first', allreduce(fp32()))")
    with pytest.raises(RecipeError, match="last must be one of 'ternary', 'qsgd', 'bf16', 'fp32'"):
        Recipe.of("terngrad(last='fp64')")


def hooked(rank: int, size: int) -> tuple[str, list[Tensor]]:
    model: Any
    with attached("terngrad(last='qsgd')") as (model, optimizer, comm):
        for _ in range(3):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return repr(comm.recipe), [p.detach().clone() for p in model.parameters()]


@pytest.mark.gang
def test_on_gloo(gang2: Gang) -> None:
    one, other = gang2.run(hooked)
    assert "rule(\"name == 'turned'\", scatter(qsgd()))" in one[0]
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
