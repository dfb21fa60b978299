"""Models that FSDP2 shards inside a replica train as dense ones do, and send only between replicas."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, SEED, same
from tests.integrations.sharded import adamw, cut, dense, full, loss_of, mesh_of, sgd
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError
from gossamer.integrations.checks.wrappers import is_fsdp2

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
STEPS = 4


def flat(model: nn.Module) -> Tensor:
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def over_shards(rank: int, size: int, recipe: str, kind: str, how: dict[str, Any]) -> list[Tensor]:
    mesh, out = mesh_of(2), list[Tensor]()
    with sharded.attached(recipe, mesh, OPTIMIZERS[kind], **how) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, rank // 2, step).backward()
            optimizer.step()
            out.append(flat(model))
        assert comm.step == STEPS
        comm.check_sync()
    return out


def over_whole_models(rank: int, size: int, recipe: str, kind: str) -> list[Tensor]:
    model, out = dense(), list[Tensor]()
    optimizer = OPTIMIZERS[kind](model)
    with gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            out.append(flat(model))
    return out


@pytest.mark.parametrize("how", [{}, {"one_dimension": True}, {"blocks": False}], ids=["2-D", "1-D", "root only"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_allreduce_is_bit_equal_to_dense(gang2: Gang, gang4: Gang, kind: str, how: dict[str, Any]) -> None:
    (wanted, _) = gang2.run(over_whole_models, "allreduce", kind)
    for run in gang4.run(over_shards, "allreduce", kind, how):
        assert all(same(a, b) for a, b in zip(run, wanted, strict=True))


# -- beside torch's own HSDP ----------------------------------------------------------------------------------------------


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, how: str, comm: Any = None) -> list[Tensor]:
    """Two micro-batches a step, accumulated in one of the ways that loops have, and clipped."""
    out = list[Tensor]()
    fsdp: Any = model
    if how == "factor":
        fsdp.set_gradient_divide_factor(1.0)
        fsdp.set_force_sum_reduction_for_comms(True)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for micro in range(2):
            last = micro == 1
            if how in ("gradient sync", "factor"):
                fsdp.set_requires_gradient_sync(last)
            if how == "all-reduce":
                fsdp.set_requires_all_reduce(last)
            with comm.no_sync() if how == "no_sync" and comm is not None and not last else nullcontext():
                if how == "no_sync" and comm is None:
                    fsdp.set_requires_gradient_sync(last)
                (loss_of(model, rank // 2, 10 * step + micro, rank % 2) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        out.append(flat(model))
    return out


def beside(
    rank: int, size: int, how: str, kind: str
) -> tuple[list[Tensor], list[Tensor], int, list[Tensor], list[Tensor]]:
    mesh = mesh_of(2)
    native = cut(dense(), mesh)
    wanted = loop(native, OPTIMIZERS[kind](native), rank, how)
    with sharded.attached("allreduce", mesh, OPTIMIZERS[kind]) as (model, optimizer, comm):
        found = loop(model, optimizer, rank, how, comm)
        steps = comm.step
    after = loop(model, optimizer, rank, "gradient sync")  # detached: the hop is FSDP2's again
    with sharded.attached("allreduce", mesh, OPTIMIZERS[kind]) as (model, optimizer, comm):
        loop(model, optimizer, rank, how, comm)
        before = loop(model, optimizer, rank, "gradient sync", comm)
    return wanted, found, steps, after, before


@pytest.mark.parametrize(
    ("how", "kind"), [("gradient sync", "adamw"), ("all-reduce", "sgd"), ("no_sync", "sgd"), ("factor", "sgd")]
)
def test_allreduce_is_torchs_own_hsdp(gang4: Gang, how: str, kind: str) -> None:
    """With clipping and two micro-batches, whatever way the loop accumulates them; and detach gives the hop back."""
    for wanted, found, steps, after, before in gang4.run(beside, how, kind):
        assert steps == STEPS
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if how != "no_sync" else 1e-7)
        assert all(same(a, b) for a, b in zip(after, before, strict=True))


def averaged_one_by_one(rank: int, size: int, recipe: str) -> list[str]:
    """FSDP2 averages each of two micro-batches, in a loop that says nothing."""
    said = list[str]()
    for factor in (None, 1.0):
        with sharded.attached(recipe, mesh_of(2), OPTIMIZERS["sgd"]) as (model, _, _), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if factor is not None:
                for module in filter(is_fsdp2, model.modules()):
                    module.set_gradient_divide_factor(factor)  # pyright: ignore
                    module.set_force_sum_reduction_for_comms(True)  # pyright: ignore
            try:
                for micro in range(2):
                    loss_of(model, rank // 2, micro, rank % 2).backward()
                said.append("")
            except AttachError as refused:
                said.append(str(refused))
    return said


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)"])
def test_a_divide_factor_and_averages_of_each_micro_batch_are_refused(gang4: Gang, recipe: str) -> None:
    """The first gradient would count as many times as there are replicas."""
    for without, with_factor in gang4.run(averaged_one_by_one, recipe):
        assert without == ""
        assert "set_gradient_divide_factor()" in with_factor
        assert "comm.no_sync()" in with_factor


class TwoLayers(nn.Module):
    """Not each batch needs both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def with_either_last(rank: int, size: int, recipe: str) -> list[Tensor]:
    """The sum of two micro-batches, of which one does not need a layer, in both orders."""
    found = list[Tensor]()
    for order in ((False, True), (True, False)):
        torch.manual_seed(7)
        model: Any = cut(TwoLayers(), mesh_of(2))
        for module in filter(is_fsdp2, model.modules()):
            module.set_gradient_divide_factor(1.0)  # pyright: ignore
            module.set_force_sum_reduction_for_comms(True)  # pyright: ignore
        with gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE) as comm:
            for micro, both in enumerate(order):
                with nullcontext() if micro else comm.no_sync():
                    x, _ = sharded.batch(rank // 2, int(both), rank % 2)
                    model(x, both).square().mean().backward()
            found.append(torch.cat([full(p.grad).reshape(-1) for p in model.parameters()]))
    return found


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)"])
def test_a_divide_factor_holds_for_what_only_an_earlier_micro_batch_used(gang4: Gang, recipe: str) -> None:
    for used_last, used_first in gang4.run(with_either_last, recipe):
        torch.testing.assert_close(used_first, used_last)


def with_muon(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Muon for matrices and AdamW for the rest, with torch's own hop and with ours."""
    ends = list[Tensor]()
    for ours in (False, True):
        model = cut(dense(), mesh_of(2))
        matrices, others = ([p for p in model.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
        with gossamer.attach(model, optimizers, "allreduce", deadline=DEADLINE) if ours else nullcontext():
            for step in range(1, STEPS + 1):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(model, rank // 2, step, rank % 2).backward()
                for optimizer in optimizers:
                    optimizer.step()
        ends.append(flat(model))
    return ends[0], ends[1]


def test_torchs_muon_steps_as_under_its_own_hsdp(gang4: Gang) -> None:
    for native, ours in gang4.run(with_muon):
        assert same(native, ours)


def with_a_scaler(rank: int, size: int) -> tuple[list[bool], bool, float]:
    """An overflow on one shard of one replica costs one step on all ranks."""
    scaler, stepped = torch.amp.GradScaler("cpu", init_scale=64.0), list[bool]()
    with sharded.attached("topk(ratio=0.3)", mesh_of(2), scaler=scaler) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            factor = float("inf") if (rank, step) == (1, 3) else 1.0
            scaler.scale(loss_of(model, rank // 2, step, rank % 2) * factor).backward()
            before = flat(model)
            scaler.step(optimizer)
            scaler.update()
            stepped.append(not same(before, flat(model)))
        comm.check_sync()
        return stepped, bool(flat(model).isfinite().all()), comm.metrics()["skipped_steps"]


def test_a_scaler_skips_on_all_shards_of_all_replicas(gang4: Gang) -> None:
    for stepped, finite, skipped in gang4.run(with_a_scaler):
        assert stepped == [True, True, False, True]
        assert (finite, skipped) == (True, 1)


# -- auto -----------------------------------------------------------------------------------------------------------------


def chosen(rank: int, size: int) -> tuple[list[str], Tensor]:
    """What auto said, but for its hash of the shapes here, and the model in the end."""
    with sharded.attached("auto(gain=0.0)", mesh_of(2)) as (model, optimizer, comm):
        for step in range(1, 71):
            optimizer.zero_grad()
            loss_of(model, rank // 2, step).backward()
            optimizer.step()
        comm.check_sync()
        said = [d.decision for d in comm.ledger.decisions if d.decision.startswith("auto")]
        return [word for word in said if not word.startswith("auto begins")], flat(model)


def test_auto_says_and_chooses_the_same_on_all_shards(gang4: Gang) -> None:
    (said, model), *others = gang4.run(chosen)
    assert any(word.startswith("auto: ") for word in said)
    assert all(words == said and same(theirs, model) for words, theirs in others)


def replayed(rank: int, size: int, path: str) -> str:
    """A run under auto, and a replay of it; the shards of the uneven layers have other shapes on each rank of a replica."""
    mesh = mesh_of(2)
    with sharded.attached("auto(allow=('bf16',))", mesh) as (model, optimizer, comm):
        loss_of(model, rank // 2, 1).backward()
        optimizer.step()
        if rank == 0:
            comm.ledger.write(Path(path))
    dist.barrier()
    with sharded.attached(f"auto(allow=('bf16',), replay={path!r})", mesh) as (_, _, comm):
        return repr(comm.recipe.exchange)


def test_a_run_under_auto_is_replayed_whatever_shapes_shards_have(gang4: Gang, tmp_path: Path) -> None:
    assert gang4.run(replayed, str(tmp_path / "ledger.jsonl")) == 4 * ["allreduce(fp32())"]
