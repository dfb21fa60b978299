"""Sharded models of all sorts train as dense ones do; what cannot be trained is refused on all ranks, with the way out."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang, free_port
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, SEED, same, usual
from tests.integrations.sharded import WIDTHS, batch, cut, dense, full, mesh_of, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.torch_version import TorchVersion

import gossamer
from gossamer.bench import catalogue
from gossamer.core.errors import AttachError, GossamerError
from gossamer.integrations.held_model import parts_of_parameters
from gossamer.recipes import presets

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
ROOT = Path(__file__).parents[2]
STEPS = 4


class Tied(nn.Module):
    """Two layers share their weight, which is one row long: the second shard has none of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTHS[0], 1, bias=False), nn.Linear(WIDTHS[0], 1, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(2, WIDTHS[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.first(x), torch.tanh(self.second(x))], 1))


def half_frozen() -> nn.Module:
    model = dense()
    for p in model[0].parameters():
        p.requires_grad_(False)
    return model


def compiled() -> nn.Module:
    model = dense()
    for i in (0, 2):
        model[i].compile(backend="aot_eager")
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied, empty shard": Tied,
    "half frozen": half_frozen,
    "compiled": compiled,
}


def over_shards(rank: int, size: int, kind: str, shards: int) -> Tensor:
    model = KINDS[kind]()
    cut(model, mesh_of(shards), blocks=kind != "tied, empty shard")
    return trained(model, rank // shards)


def trained(model: nn.Module, replica: int) -> Tensor:
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler
        with torch.no_grad():
            model(batch(0, 0)[0])  # FSDP2 then holds the root's parameters gathered
        with gossamer.attach(model, optimizer, "allreduce", seed=SEED, deadline=60.0) as comm:
            for step in range(1, STEPS + 1):
                optimizer.zero_grad()
                x, y = batch(replica, step)
                (model(x) - y).square().mean().backward()
                optimizer.step()
            comm.check_sync()
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def over_whole_models(rank: int, size: int, kind: str) -> Tensor:
    return trained(KINDS[kind](), rank)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_the_whole_model(gang2: Gang, gang4: Gang, kind: str) -> None:
    (wanted, _) = gang2.run(over_whole_models, kind)
    for found in gang4.run(over_shards, kind, 2):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def in_bf16(rank: int, size: int) -> float:
    """bf16 parameters, reduced in fp32: as torch's own HSDP."""
    policy, ends = MixedPrecisionPolicy(reduce_dtype=torch.float32), list[Tensor]()
    for ours in (False, True):
        model = dense().to(torch.bfloat16)
        fully_shard(model, mesh=mesh_of(2), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        comm = gossamer.attach(model, optimizer, "allreduce", seed=SEED, deadline=DEADLINE) if ours else None
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            x, y = batch(rank // 2, step, rank % 2)
            (model(x.bfloat16()) - y).square().mean().backward()
            optimizer.step()
        if comm is not None:
            comm.detach()
        ends.append(torch.cat([full(p).float().reshape(-1) for p in model.parameters()]))
    return float((ends[0] - ends[1]).abs().max() / ends[0].abs().max())


def test_bf16_with_reductions_in_fp32(gang4: Gang) -> None:
    """torch casts each replica's mean to bf16 after, and we before the hop: a last bit of 8 may differ."""
    assert all(error <= 2**-8 for error in gang4.run(in_bf16))


# -- every preset ----------------------------------------------------------------------------------------------------------


def every(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """Eight steps on data that differ; then the consensus is equal everywhere, and put back to the bit, after evaluations too."""
    said = dict[str, str]()
    for name in names:
        recipe = catalogue.example(name)
        try:
            with sharded.attached(str(recipe), mesh_of(2), usual(recipe)) as (model, optimizer, comm):
                for step in range(1, 9):
                    optimizer.zero_grad()
                    x, y = batch(rank // 2, step, rank % 2)
                    (model(x) - y).square().mean().backward()
                    optimizer.step()
                comm.check_sync()
                said[name] = judged(model, comm, batch(0, 99)[0])
        except GossamerError as error:
            said[name] = str(error)
    return said


def judged(model: nn.Module, comm: gossamer.Communicator, x: Tensor) -> str:
    with torch.no_grad():
        before = model(x)  # leaves FSDP2's parameters gathered
    own = {n: t.clone() for n, t in parts_of_parameters(model).items()}
    with comm.consensus(), torch.no_grad():
        outputs = [torch.empty_like(before) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, model(x))
        agreed = torch.cat([full(p).reshape(-1) for p in parts_as_tensors(model)])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, agreed)
    with torch.no_grad():
        after = model(x)
    fine = all(same(one, agreed) for one in everyone) and all(same(o, outputs[0]) for o in outputs)
    back = same(before, after) and all(same(t, own[n]) for n, t in parts_of_parameters(model).items())
    return "" if fine and back and agreed.isfinite().all() else f"equal {fine}, put back {back}"


def parts_as_tensors(model: nn.Module) -> list[Tensor]:
    parts_of_parameters(model)  # after an evaluation parameters are gathered
    return list(model.parameters())


QUICK = [
    "allreduce",
    "topk",
    "powersgd",
    "terngrad",
    "diana",
    "local_sgd",
    "slowmo",
    "sgp",
    "streaming_diloco",
    "accordion",
]
REFUSED = {"accordion_batch", "ad_psgd", "async_diloco", "async_sgd", "backup", "decoupled_diloco", "onebit_lamb"}


@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param(sorted(set(presets()) - set(QUICK)), marks=pytest.mark.slow)],
    ids=["some", "all others"],
)
def test_presets_train_are_judged_and_put_back_or_refused(gang4: Gang, names: list[str]) -> None:
    for said in gang4.run(every, names, timeout=400):
        assert {name for name, words in said.items() if words} == REFUSED & set(names), said
        assert all("with a model that FSDP2 shards: " in words for words in said.values() if words)


def over_three(rank: int, size: int) -> Tensor:
    return over_shards(rank, size, "half frozen", 3)


@pytest.mark.slow
def test_three_uneven_shards(gang2: Gang) -> None:
    (wanted, _) = gang2.run(over_whole_models, "half frozen")
    gang = Gang(6)
    try:
        for found in gang.run(over_three):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    finally:
        gang.close()


# -- what crosses the network ------------------------------------------------------------------------------------------------


def sent(rank: int, size: int, recipe: str, shards: int) -> tuple[float, int, int]:
    """Bytes a step, those of a whole model, and questions to the other shard."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if shards > 1:
        cut(model, mesh_of(shards))
    optimizer = sgd(model)
    with gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE) as comm:
        begun, replica = comm.ledger.sent, comm.worker.replica
        asked = getattr(replica, "asked", 0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        return (comm.ledger.sent - begun) / STEPS, comm.step, getattr(replica, "asked", 0) - asked


@pytest.mark.parametrize("recipe", ["allreduce", "scatter(qsgd())", "topk"])
def test_a_rank_sends_its_shard_alone_and_asks_one_question_a_step(gang2: Gang, gang4: Gang, recipe: str) -> None:
    ((whole, _, _), _) = gang2.run(sent, recipe, 1)
    for mine, steps, asked in gang4.run(sent, recipe, 2):
        assert mine == pytest.approx(whole / 2, rel=0.05)
        assert asked == steps == STEPS


# -- what is refused -----------------------------------------------------------------------------------------------------------


def refusal(rank: int, size: int, case: str) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return refused(rank, size, case, monkeypatch)


def refused(rank: int, size: int, case: str, monkeypatch: pytest.MonkeyPatch) -> str:
    mesh, flat_mesh = mesh_of(2), init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    model, recipe, options = dense(), "allreduce", dict[str, Any]()
    match case:
        case "one dimension":
            cut(model, flat_mesh)
        case "no group":
            cut(model, mesh["shard"])
        case "wrong group":
            cut(model, mesh["shard"])
            options["process_group"] = mesh["shard"]
        case "another group":
            cut(model, mesh)
            options["process_group"] = flat_mesh
        case "ignored":
            fully_shard(model, mesh=mesh, ignored_params={model[0].weight})
        case "added later":
            cut(model, mesh)
            model.adapter = nn.Linear(2, 2)
        case "hook":
            cut(model, mesh)
            model[0].set_all_reduce_hook(lambda flat: None)
        case "two meshes":
            fully_shard(model[0], mesh=mesh["shard"])
            fully_shard(model, mesh=mesh)
        case "tensor parallel":
            model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), flat_mesh, [Shard(0)]))
        case "named dimensions":
            from torch.distributed.fsdp import DataParallelMeshDims

            for name, p in list(model.named_parameters()):
                model.get_submodule(name[: name.rindex(".")]).register_parameter(
                    name[name.rindex(".") + 1 :], nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()] * 2))
                )
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="replicate"))
        case "replicated":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            replicate(model, mesh=flat_mesh)
        case "no parameters":
            fully_shard(model[1], mesh=mesh)
        case "meta":
            model = cut(model.to("meta"), mesh)
        case "processors before 2.13":
            cut(model, mesh)
            monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
        case "offload before 2.13":
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
            monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
        case "unequal replicas":
            parts = [DeviceMesh("cpu", ranks, mesh_dim_names=("shard",)) for ranks in ([0, 1, 2], [3])]
            groups = [dist.new_group(ranks) for ranks in ([0, 3], [1], [2])]
            cut(model, parts[rank == 3])
            options["process_group"] = groups[rank % 3]
        case "twice":
            cut(model, mesh)
            first = gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE)
            with first, pytest.raises(AttachError) as caught:
                gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE)
            return str(caught.value)
        case "LBFGS":
            cut(model, mesh)
            with pytest.raises(AttachError) as caught:
                gossamer.attach(model, torch.optim.LBFGS(model.parameters()), recipe, deadline=DEADLINE)
            return str(caught.value)
        case "adapted later":
            cut(model, mesh)
            with gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE):
                model[0].adapter = nn.Linear(2, 2)
                with pytest.raises(AttachError) as caught:
                    model(batch(0, 1)[0]).sum().backward()
            return str(caught.value)
        case "two nodes":
            cut(model, mesh)
            options["nodes"] = 1
            monkeypatch.setenv("NCCL_HOSTID", f"node{rank % 2}")
        case "members":
            cut(model, mesh)
            options["process_group"] = gossamer.members()
        case "one rank differs":
            cut(model, mesh)
            recipe = "topk" if rank == 3 else "allreduce"
        case "one rank refuses":
            cut(model, mesh)
            options["buffers"] = "nonsense" if rank == 1 else "local"
        case "heterogeneity":
            cut(model, mesh)
            with (
                gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE) as comm,
                pytest.raises(AttachError) as caught,
            ):
                comm.heterogeneity([])
            return str(caught.value)
        case "unfrozen":
            for p in model[0].parameters():
                p.requires_grad_(False)
            cut(model, mesh)
            with gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE):
                for p in model[0].parameters():
                    p.requires_grad_(True)
                with pytest.raises(AttachError) as caught:
                    model(batch(0, 1)[0]).sum().backward()
            return str(caught.value)
        case _:
            raise ValueError(case)
    with pytest.raises(GossamerError) as caught:
        gossamer.attach(model, sgd(model), recipe, deadline=DEADLINE, **options)
    return str(caught.value)


WORDS = {
    "one dimension": "there are no replicas to average between: shard it over a part of them",
    "no group": "this model's mesh has no replicate dimension: give attach the process group",
    "wrong group": "this rank's model is sharded over",
    "another group": "the model's mesh replicates over",
    "ignored": "parameter '0.weight' is not sharded by FSDP2",
    "added later": "parameter 'adapter.weight' is not sharded by FSDP2",
    "hook": "has a hook of set_all_reduce_hook",
    "two meshes": "sharded over different meshes",
    "tensor parallel": "sharded by tensor parallelism",
    "named dimensions": "or with dp_mesh_dims, which is not supported",
    "replicated": "is replicated by FSDP2 and not sharded; use DistributedDataParallel",
    "no parameters": "hold no parameters; call fully_shard on the model itself as well",
    "meta": "parameter '0.weight' is on the meta device: call model.to_empty(device=...)",
    "processors before 2.13": "FSDP2 trains on processors since torch 2.13, and this is 2.12.1",
    "offload before 2.13": "torch 2.12.1 hands out gradients that it is still copying to the processor",
    "unequal replicas": "ranks with the same shard: 2 on rank(s) 0; 1 on rank(s) 1, 2",
    "twice": "the model is attached already; call detach() on its communicator first",
    "LBFGS": "LBFGS computes the gradient several times",
    "adapted later": "was unfrozen, added, replaced or removed after attach",
    "two nodes": "node: 'node0' on rank(s) 0; 'node1' on rank(s) 1",
    "members": "members() with a mesh of two dimensions",
    "one rank differs": "not set up alike",
    "one rank refuses": "buffers must be",
    "heterogeneity": "compares whole gradients",
    "unfrozen": "was unfrozen, added, replaced or removed after attach",
}


@pytest.mark.parametrize("case", WORDS)
def test_what_is_refused_is_so_on_all_ranks(gang4: Gang, case: str) -> None:
    for said in gang4.run(refusal, case):
        assert WORDS[case] in said


def one_replica(rank: int, size: int) -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
    model = cut(dense(), mesh)
    optimizer = sgd(model)
    with pytest.warns(UserWarning, match="replicate dimension of this model's mesh is 1") as warned:
        comm = gossamer.attach(model, optimizer, "topk", deadline=DEADLINE)
    with comm:
        for step in range(1, STEPS):
            optimizer.zero_grad()
            model(batch(0, step)[0]).sum().backward()
            optimizer.step()
        return str(warned[0].message), comm.metrics()["sent_bytes"]


def test_one_replica_is_warned_of_and_trains(gang2: Gang) -> None:
    for warned, bytes_sent in gang2.run(one_replica):
        assert "the recipe sends nothing" in warned
        assert bytes_sent == 0


def probed(rank: int, size: int) -> str:
    """The swap is left out: the probe must say so, and the model stay FSDP2's."""
    from gossamer.integrations import fsdp

    swap = fsdp._swap
    fsdp._swap = lambda group, inner: None
    try:
        model = cut(dense(), mesh_of(2))
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, sgd(model), "allreduce", deadline=DEADLINE)
        return str(caught.value)
    finally:
        fsdp._swap = swap


def test_without_the_swap_the_probe_fails(gang4: Gang) -> None:
    for said in gang4.run(probed):
        assert "averages between replicas in a way that gossamer does not know" in said
        assert "mesh=mesh['shard']" in said


def starts(rank: int, size: int) -> bool:
    """Replicas that begin unlike, their optimizers' states included, begin as the first one does."""
    torch.manual_seed(rank // 2)
    model = cut(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), mesh_of(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if rank < 2:  # only the first replica has a state
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        model(torch.ones(1, 6)).sum().backward()
        optimizer.zero_grad()
    with gossamer.attach(model, optimizer, "allreduce", deadline=DEADLINE) as comm:
        comm.check_sync()
        mine = [full(p) for p in model.parameters()]
        mine += [full(t) for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, DTensor)]
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, torch.cat([t.reshape(-1) for t in mine]))
    return all(same(one, everyone[0]) for one in everyone) and len(mine) == 12


def test_replicas_start_from_the_first_ones_model_and_optimizer(gang4: Gang) -> None:
    assert gang4.run(starts) == [True] * 4


def test_the_example_runs() -> None:
    recipe = "scatter(qsgd()) + local_sgd(8)"
    script = ROOT / "examples" / "hsdp.py"
    start = [sys.executable, str(ROOT / "tests" / "forked.py"), "4", str(script)]
    done = subprocess.run(
        [*start, "--steps", "12", "--recipe", recipe],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"STANDALONE_PORT": str(free_port())},
    )
    assert done.returncode == 0, done.stderr
    assert f"{recipe}: loss " in done.stdout
    assert "times fewer than dense" in done.stdout
