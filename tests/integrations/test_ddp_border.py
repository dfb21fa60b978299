"""DDP with all its options, and a hook: what DDP hands over is averaged, what it keeps to itself is not waited for."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, flat
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError, PeerError

pytestmark = pytest.mark.gang


class Tagger(nn.Module):
    """An embedding, a trunk, two heads of which a step may leave one out, and a parameter of its own."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(12, 6, sparse=sparse)
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, heads: tuple[int, ...] = (0, 1)) -> Tensor:
        hidden = torch.tanh(self.trunk(self.words(x))) * self.scale
        return torch.stack([self.heads[i](hidden) for i in heads]).sum(0)


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(12, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int, *heads: Any) -> Tensor:
    return (model(batch(rank, step), *heads) - rank).square().mean()


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)


def train(
    ddp: DistributedDataParallel,
    rank: int,
    steps: int = 3,
    micro: int = 1,
    heads: Callable[[int], Any] = lambda step: (),
) -> Tensor:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for i in range(micro):
            with ddp.no_sync() if i < micro - 1 else nullcontext():
                (loss_of(ddp, rank, 10 * step + i, *heads(step)) / micro).backward()
        optimizer.step()
    return flat(ddp.module)


def one_head(step: int) -> tuple[tuple[int, ...]]:
    return ((step % 2,),)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {  # DDP's options, the loop's, sparse
    "plain": ({}, {}, False),
    "static_graph": ({"static_graph": True}, {}, False),
    "static_graph, one head": ({"static_graph": True}, {"heads": lambda step: ((1,),)}, False),
    "find_unused": ({"find_unused_parameters": True}, {"heads": one_head}, False),
    "views": ({"gradient_as_bucket_view": True}, {}, False),
    "no_sync": ({}, {"micro": 3}, False),
    "no_sync, views": ({"gradient_as_bucket_view": True}, {"micro": 3}, False),
    "no_sync, find_unused": ({"find_unused_parameters": True}, {"micro": 2, "heads": one_head}, False),
    "sparse": ({}, {}, True),
    "sparse, views, static_graph": ({"gradient_as_bucket_view": True, "static_graph": True}, {}, True),
    "sparse, no_sync": ({}, {"micro": 2}, True),
}


def both(rank: int, size: int, case: str) -> tuple[Tensor, Tensor]:
    """DDP as it is, and the same with a hook that says the same in our way."""
    options, loop, sparse = CASES[case]
    own = train(wrap(Tagger(sparse), **options), rank, **loop)
    ddp = wrap(Tagger(sparse), **options)
    hook = gossamer.ddp.register(ddp, "allreduce + bucket(0.0001)", seed=SEED, deadline=DEADLINE)
    try:
        hooked = train(ddp, rank, **loop)
        assert hook.step == 3
        hook.check_sync()
    finally:
        hook.close()
    return own, hooked


@pytest.mark.parametrize("case", CASES)
def test_a_hook_that_says_the_same_is_ddp(gang2: Gang, case: str) -> None:
    for own, hooked in gang2.run(both, case):
        torch.testing.assert_close(hooked, own, rtol=1e-5, atol=1e-6)


def uneven(rank: int, size: int) -> list[Tensor]:
    """Rank 1 has a batch less, and joins what rank 0 still does."""
    out = list[Tensor]()
    for hooked in (False, True):
        ddp = wrap(Tagger())
        hook = gossamer.ddp.register(ddp, "allreduce", seed=SEED, deadline=DEADLINE) if hooked else None
        with ddp.join():
            out.append(train(ddp, rank, steps=4 - rank))
        if hook is not None:
            assert hook.step == 4
            hook.close()
    return out


def test_a_rank_that_joins_sends_zeros(gang2: Gang) -> None:
    for own, hooked in gang2.run(uneven):
        torch.testing.assert_close(hooked, own, rtol=1e-5, atol=1e-6)


def ignoring(rank: int, size: int, names: list[str]) -> tuple[Tensor, Tensor, set[str]]:
    """DDP is told to leave some parameters alone; rank 1 begins with other values, and keeps them."""
    out = list[Tensor]()
    left = set[str]()
    for hooked in (False, True):
        model = Tagger()
        with torch.no_grad():
            model.heads[1].bias += rank
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        ddp = wrap(model)
        hook = gossamer.ddp.register(ddp, "allreduce", seed=SEED, deadline=DEADLINE) if hooked else None
        out.append(train(ddp, rank))
        if hook is not None:
            left = dict(model.named_parameters()).keys() - hook.worker.params.keys()
            hook.check_sync()
            hook.close()
    return out[0], out[1], left


@pytest.mark.parametrize("names", [["heads.1.bias"], ["heads.1.bias", "words.weight"], ["heads.1.bias", "scale"]])
def test_parameters_that_ddp_ignores_are_not_waited_for(gang2: Gang, names: list[str]) -> None:
    seen = gang2.run(ignoring, names)
    for own, hooked, left in seen:
        torch.testing.assert_close(hooked, own, rtol=1e-5, atol=1e-6)
        assert "heads.1.bias" in left <= set(names)  # torch 2.13 goes on averaging a parameter of the outermost module
    assert not torch.equal(seen[0][1], seen[1][1])


def refusals(rank: int, size: int) -> list[str]:
    said = list[str]()

    def refuse(ddp: DistributedDataParallel) -> None:
        with pytest.raises(AttachError) as caught:
            gossamer.ddp.register(ddp, "terngrad", deadline=DEADLINE)
        said.append(str(caught.value))

    model = Tagger()
    refuse(
        wrap(
            model,
            delay_all_reduce_named_params=[("heads.1.bias", model.heads[1].bias)],
            param_to_hook_all_reduce=model.words.weight,
        )
    )
    ddp = wrap(Tagger())
    ddp.module.scale.requires_grad_(False)
    refuse(ddp)
    model = Tagger()
    ddp = wrap(model)
    with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "terngrad", deadline=DEADLINE):
        refuse(ddp)
    hook = gossamer.ddp.register(ddp, "terngrad", deadline=DEADLINE)
    refuse(ddp)
    hook.close()
    return said


def test_what_a_hook_would_not_see_is_refused_with_what_to_do(gang2: Gang) -> None:
    for delayed, frozen, attached, twice in gang2.run(refusals):
        assert "make the DDP model without that argument" in delayed
        assert "make the DDP model again" in frozen
        assert "detach()" in attached
        assert "has a hook already" in twice


def swapped(rank: int, size: int) -> str:
    """As many parameters as DDP has, but others: one was thawed, and one frozen."""
    model = Tagger()
    model.scale.requires_grad_(False)
    ddp = wrap(model, find_unused_parameters=True)
    model.scale.requires_grad_(True)
    model.trunk.bias.requires_grad_(False)
    hook = gossamer.ddp.register(ddp, "terngrad", deadline=DEADLINE)
    try:
        with pytest.raises(AttachError) as caught:
            loss_of(ddp, rank, 1).backward()
        return str(caught.value)
    finally:
        hook.close()


def test_a_bucket_that_never_comes_is_an_error(gang2: Gang) -> None:
    for said in gang2.run(swapped):
        assert "make the DDP model again" in said


def alone_in_a_branch(rank: int, size: int) -> str:
    """Rank 1 leaves a head out and did not say so to DDP: its buckets do not fill, and rank 0 waits for them."""
    ddp = wrap(Tagger())
    hook = gossamer.ddp.register(ddp, "qsgd + bucket(0.0001)", deadline=1.0)
    heads = ((0,) if rank else (0, 1),)
    try:
        with pytest.raises(RuntimeError) as caught:
            train(ddp, rank, steps=2, heads=lambda step: heads)
        assert (rank == 0) == isinstance(caught.value, PeerError)
        return str(caught.value)
    finally:
        hook.close()


def test_a_rank_whose_buckets_do_not_fill_is_named_within_the_deadline(gang2: Gang) -> None:
    waited, alone = gang2.run(alone_in_a_branch)
    assert "rank 1" in waited.lower()
    assert "find_unused_parameters=True" in alone  # DDP's own words, at its next forward


def refused_on_one(rank: int, size: int) -> tuple[str, str]:
    """One rank's model lies on several devices; none is at hand here, so its refusal is put into the hook's mouth."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("gossamer.integrations.ddp.refuse_devices", nowhere)
        try:
            gossamer.ddp.register(wrap(nn.Linear(2, 2)), "qsgd", deadline=DEADLINE)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", "no error"


def nowhere(*_: Any) -> None:
    raise AttachError("parameter 'weight' is on cuda:0 and 'bias' on cuda:1")


def test_what_one_rank_refuses_all_are_told(gang2: Gang) -> None:
    words = "parameter 'weight' is on cuda:0 and 'bias' on cuda:1"
    assert gang2.run(refused_on_one) == [("PeerError", f"rank 1 cannot go on: {words}"), ("AttachError", words)]
