"""How a model is cut into channels, and what crosses between channels and parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.gym import Odd, Zeros, bit_equal, make, noise, parameters, pull, resumed, saved, sgd, train
from torch import nn

from gossamer.core.errors import AttachError
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import build
from gossamer.runtime.optimizers import Together
from gossamer.runtime.params import params_of

NAMES = ["matrix", "turned", "empty", "still", "bias", "scale"]


def cut(recipe: str, model: nn.Module | None = None, groups: dict[str, int] | None = None) -> list[list[str]]:
    named = dict((model or Odd()).named_parameters())
    buckets = build(Recipe.of(recipe), params_of(named), groups or dict.fromkeys(named, 0), 1)
    assert sorted(s.name for c in buckets for s in c.layout.segments) == sorted(named)
    for c in buckets:
        assert c.layout.numel == sum(param.values.numel() for param in c.params) == c.read().numel()
        assert [named[s.name] is param.parameter for s, param in zip(c.layout.segments, c.params, strict=True)]
    return [[s.name for s in c.layout.segments] for c in buckets]


def test_one_bucket_holds_everything_in_the_order_of_backward() -> None:
    assert cut("allreduce") == [NAMES[::-1]]


def test_a_bucket_is_full_once_it_reaches_its_size() -> None:
    assert cut("allreduce + bucket(0.00002)") == [["scale", "bias"], ["still"], ["empty", "turned"], ["matrix"]]
    assert cut("allreduce + bucket(0.0005)") == [["scale", "bias", "still", "empty", "turned"], ["matrix"]]


def test_between_two_ranks_a_large_model_is_two_blocks_so_that_one_travels_during_backward() -> None:
    model = nn.ParameterDict({name: torch.empty(2**19) for name in "abcdef"})  # 2 MB each

    def blocks(recipe: str, size: int, of: str) -> list[int]:
        params = params_of({name: model[name] for name in of})
        return [len(c.params) for c in build(Recipe.of(recipe), params, dict.fromkeys(of, 0), size)]

    assert blocks("terngrad", 2, "abcdef") == [3, 3]
    assert blocks("terngrad", 2, "abc") == [2, 1]  # less than 4 MB is not worth it
    assert blocks("terngrad", 2, "ab") == [2]
    for recipe, size in (("terngrad", 3), ("allreduce", 2), ("terngrad + bucket(25)", 2)):
        assert blocks(recipe, size, "abcdef") == [6]


def test_a_codec_that_must_see_all_gets_one_block_whatever_the_bucket() -> None:
    assert cut("topk(scope='global') + bucket(0.00002)") == [NAMES[::-1]]


def test_a_quorum_gets_one_block_whatever_bucket_and_rates() -> None:
    assert cut("backup + bucket(0.00002)", groups={n: i for i, n in enumerate(NAMES)}) == [NAMES[::-1]]


def test_rules_and_rates_and_precisions_do_not_share() -> None:
    ruled = cut("powersgd + rule('ndim < 2', allreduce(fp32()))")
    assert ruled == [["scale", "bias", "still"], ["empty", "turned", "matrix"]]
    rated = cut("allreduce", groups={n: int(n == "still") for n in NAMES})
    assert sorted(map(sorted, rated)) == sorted(map(sorted, [["still"], [n for n in NAMES if n != "still"]]))
    model = Odd()
    model.bias.data = model.bias.data.double()
    model.scale.data = model.scale.data.bfloat16()
    assert sorted(map(sorted, cut("allreduce", model))) == [["bias"], sorted(n for n in NAMES if n != "bias")]


def test_channels_go_in_the_order_in_which_backward_fills_them() -> None:
    """The rule's channel is opened first but filled last."""
    last = cut("powersgd + rule(\"name == 'scale' or name == 'matrix'\", allreduce(fp32()))")
    assert last == [["bias", "still", "empty", "turned"], ["scale", "matrix"]]


def test_writing_reaches_the_very_tensors_others_hold() -> None:
    model = Odd()
    (bucket,) = build(Recipe.of("allreduce"), params_of(dict(model.named_parameters())), dict.fromkeys(NAMES, 0), 1)
    held = {n: (p, p.data_ptr(), p.stride()) for n, p in model.named_parameters()}
    values = noise(7, numel=bucket.layout.numel)
    bucket.write(values)
    assert bit_equal([bucket.read(), values])
    for name, p in model.named_parameters():
        assert held[name] == (p, p.data_ptr(), p.stride())
    assert not model.turned.is_contiguous()
    copied = bucket.read()
    copied.zero_()
    assert bit_equal([bucket.read(), values])


def test_groups_with_rates_of_their_own_train_as_the_optimizer_does_alone() -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        names = dict(model.named_parameters())
        slow = [names.pop("matrix"), names.pop("scale")]
        return torch.optim.SGD([{"params": slow, "lr": 0.01}, {"params": list(names.values())}], lr=0.1)

    for recipe in ("allreduce", "slowmo(2, beta=0.5)", "gather(fp32()) + error_feedback(units='update')"):
        ranks = make(recipe, 3, optimizer=grouped)
        assert sorted(ranks[0].worker.loop.optimizer.lrs) == ([0.01] if recipe == "allreduce" else [0.01, 0.1])
        train(ranks, pull, 4)
        assert bit_equal(parameters(ranks))
    alone, model = make("allreduce", 1, optimizer=grouped), Odd()
    optimizer = grouped(model)
    train(alone, pull, 3)
    for step in (1, 2, 3):
        optimizer.zero_grad()
        pull(model, 0, step)
        optimizer.step()
    assert bit_equal([*parameters(alone), torch.cat([p.detach().flatten() for p in model.parameters()])])


FOLLOWS = [
    "allreduce + every_step(l1=0.1)",
    "slowmo(2, beta=0.5)",
    "overlap_local_sgd(2)",
    "gather(fp32()) + error_feedback(units='update')",
    "powersgd(rank=1) + error_feedback(units='update')",
]


def parting(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups that start with one rate; a backward finds the optimizer, and moves them apart."""
    names = dict(model.named_parameters())
    first = [names.pop("matrix"), names.pop("scale")]
    optimizer = torch.optim.SGD([{"params": first}, {"params": list(names.values())}], lr=0.1)
    object.__setattr__(model, "optimizer", optimizer)
    return optimizer


def drifting(model: nn.Module, rank: int, step: int) -> float:
    optimizer = model.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1 / step, 0.1
    return pull(model, rank, step)


@pytest.mark.parametrize("recipe", FOLLOWS)
def test_groups_that_start_with_one_rate_are_followed_each(recipe: str) -> None:
    """Every group trains as it would in a model of its own; with powersgd a model of its own has other dice."""
    ranks = make(recipe, 2, optimizer=parting)
    train(ranks, drifting, 6)
    assert sorted(ranks[0].worker.loop.optimizer.lrs) == pytest.approx([0.1 / 6, 0.1])
    if "powersgd" not in recipe:
        for names, rate in (("matrix", "scale"), lambda step: 0.1 / step), (("turned", "bias"), lambda step: 0.1):
            alone = make(recipe, 2, optimizer=parting)

            def one_rate(model: nn.Module, rank: int, step: int, rate=rate) -> float:
                for group in model.optimizer.param_groups:  # pyright: ignore
                    group["lr"] = rate(step)
                return pull(model, rank, step)

            train(alone, one_rate, 6)
            for name in names:
                assert bit_equal([r.model.get_parameter(name).detach() for r in (*ranks[:1], *alone[:1])])
    half = make(recipe, 2, optimizer=parting)
    train(half, drifting, 3)
    again = resumed(recipe, saved(half), optimizer=parting)
    train(again, drifting, 3)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(again)))


@pytest.mark.parametrize("recipe", ["allreduce", "qsgd", "topk", "local_sgd(2)", "slowmo(2, beta=0.0)", "sgp", "diana"])
def test_where_nothing_follows_the_rate_groups_share_their_messages(recipe: str) -> None:
    def own_rates(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(model.parameters(), start=1)])

    assert len(make(recipe, 2, optimizer=own_rates)[0].worker.buckets) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("recipe", ["allreduce", "qsgd", "topk(ratio=0.2)", "powersgd", "slowmo(2)", "diana"])
def test_models_of_other_precisions_train_with_equal_replicas(recipe: str, dtype: torch.dtype) -> None:
    def pull_narrow(model: nn.Module, rank: int, step: int) -> float:
        loss = 0.0
        for i, p in enumerate(model.parameters()):
            target = noise(i, rank, numel=p.numel()).view(p.shape)
            p.grad = (p.detach().float() - target).to(p.dtype)
            loss += float((p.detach().float() - target).square().sum())
        return loss

    ranks = make(recipe, 3, lambda: Odd().to(dtype), sgd(0.05, 0.0))
    train(ranks, pull_narrow, 8)
    assert bit_equal(parameters(ranks))
    assert all(p.dtype == dtype and (p.grad is None or p.grad.dtype == dtype) for p in ranks[0].model.parameters())
    assert sum(r.losses[-1] for r in ranks) < sum(r.losses[0] for r in ranks)


@pytest.mark.parametrize(
    ("recipe", "most"), [("allreduce", 0.0), ("bf16", 0.01), ("qsgd(bits=8)", 0.2), ("topk(ratio=0.1)", 1.0)]
)
def test_the_measured_error_is_relative_to_what_was_given(recipe: str, most: float) -> None:
    ranks = make(recipe, 2)
    for r in ranks:
        r.worker.measurement.every = 1
    train(ranks, pull, 2)
    errors = ranks[0].worker.measurement.errors
    assert errors.keys() == set(NAMES)
    assert all(0 <= e <= most for e in errors.values())
    assert errors["still"] == errors["empty"] == 0.0
    assert bool(most) == (errors["matrix"] > 0)


@pytest.mark.parametrize("recipe", ["topk(scope='global')", "backup"])
def test_blocks_that_cannot_be_cut_are_not_longer_than_their_indices_count(recipe: str) -> None:
    def long(elements: int) -> Callable[[], nn.Module]:
        return lambda: nn.ParameterDict({k: torch.empty(elements, device="meta") for k in ("a", "b")})

    with pytest.raises(AttachError, match=r"2,147,483,648 elements as one, from 'b' on"):
        make(recipe, 3, long(2**30))
    make("topk", 3, long(2**30))


def test_a_group_that_is_added_to_the_first_of_two_optimizers_leaves_buckets_of_the_second_their_rate() -> None:
    one, other, late = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    first, second = torch.optim.SGD([one], lr=1.0), torch.optim.SGD([other], lr=2.0)
    both = Together([first, second])
    assert [group["lr"] for group in both.param_groups] == [1.0, 2.0]
    first.add_param_group({"params": [late], "lr": 3.0})
    assert [group["lr"] for group in both.param_groups] == [1.0, 2.0, 3.0]


class Unwalked(dict[Any, Any]):
    """What an optimizer keeps for each parameter, through all of which nobody may go."""

    def items(self) -> Any:
        raise AssertionError("to go through all parameters for each of them takes seconds in a large model")


def test_what_two_optimizers_keep_is_found_by_parameter() -> None:
    model = Zeros()
    both = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (model.layers[:1], model.layers[1:])]
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(i))
    for optimizer in both:
        optimizer.step()
        optimizer.state = Unwalked(optimizer.state)  # pyright: ignore
    (rank,) = make("allreduce", 1, lambda: model)
    rank.worker.optimizer = Together(both)
    assert [float(t) for t in rank.worker.optimizer_state.tensors()] == [0.0, 1.0, 2.0]
