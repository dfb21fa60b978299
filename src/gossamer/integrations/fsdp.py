"""FSDP2: models that `fully_shard` cuts inside a replica, and gossamer averages between replicas.

FSDP2 averages a gradient over the ranks of a replica, and each of them then holds a shard of it. With a two-dimensional mesh
(HSDP) it also averages densely between replicas; that hop is taken from it here, and given back by `detach()`. All private
names of FSDP2 are in this file.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from gossamer.core.errors import AttachError
from gossamer.core.torch_private import private_module, private_name
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks import introspection
from gossamer.integrations.groups import Given
from gossamer.integrations.groups import group_of as process_group_of
from gossamer.integrations.held_model import cut_again
from gossamer.integrations.member_shards import MemberShards
from gossamer.integrations.shard_group import ShardGroup, over_gloo
from gossamer.recipe import Recipe
from gossamer.runtime import ReplicaRanks, WholeReplica, is_sharded
from gossamer.runtime.outlasting import cannot_shard

_HERE = "torch.distributed.fsdp._fully_shard."
_USE = "averages between the replicas of a model that FSDP2 shards"
_common, _group = private_module(_HERE + "_fsdp_common", _USE), private_module(_HERE + "_fsdp_param_group", _USE)
_Inner: Any = private_name(_common, "FSDPMeshInfo", _USE)
_Both: Any = private_name(_common, "HSDPMeshInfo", _USE)
_state_of: Any = private_name(FSDPModule, "_get_fsdp_state", _USE)
# FSDP2's own function in the backward pass: no nested pass runs in it.
introspection.not_nested.add(private_name(_group, "RegisterPostBackwardFunction", _USE))

ONE_REPLICA = (
    "FSDP2 shards this model over all its ranks, so there are no replicas to average between: shard it over a part of them, with a "
    "mesh of two dimensions, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard')), or give attach "
    "the process group of the ranks that hold the same shard"
)


@final
class ShardedModel:
    """A model that FSDP2 shards over the ranks of a replica."""

    def __init__(self, model: nn.Module) -> None:
        cut_again(model)
        self.replica: ReplicaRanks = WholeReplica()
        self._groups = [*_groups_of(model)]
        if not self._groups:
            raise AttachError(
                "the model's FSDP modules hold no parameters; call fully_shard on the model itself as well"
            )
        self._before: list[tuple[Any, Any, Any]] = []  # param groups, and what they had
        self._owner = {id(p.sharded_param): group for group in self._groups for p in group.fsdp_params}
        self._shards: ShardGroup | None = None
        self._members: Members | None = None  # if nodes may be lost
        self._size = 1
        self._info = self._groups[0].mesh_info

    # -- which ranks -------------------------------------------------------------------------------------------------

    def group_of(self, given: Given) -> Given:
        """The replicate dimension of the mesh, or the group that was given, where the mesh has only the shards."""
        native = self._native()
        found = process_group_of(given) if given is not None else native
        if native is not None and given is None and self._info.mesh.device_type == "cuda":
            # FSDP2 uses NCCL inside the replica, from another thread, and two communicators of NCCL must be used in one order.
            found = over_gloo(native)
        if isinstance(found, dist.ProcessGroup):
            self._refuse_group(found, native)
            return found
        if isinstance(found, Members):
            self._refuse_members(found)
            found.by_shard, self._members = True, found
            return found
        if dist.get_world_size() == dist.get_world_size(self._shard_ranks()):
            raise AttachError(ONE_REPLICA)
        raise AttachError(
            "this model's mesh has no replicate dimension: give attach the process group, or the one-dimensional mesh, of the ranks "
            "that hold the same shard"
        )

    def _native(self) -> dist.ProcessGroup | None:
        """The group that FSDP2 averages over between replicas; None on a mesh of one dimension."""
        return self._info.replicate_process_group if isinstance(self._info, _Both) else None

    def _shard_ranks(self) -> dist.ProcessGroup:
        if not isinstance(self._info, _Inner):
            raise AttachError(
                "the model is replicated by FSDP2 and not sharded; use DistributedDataParallel, or attach it plain"
            )
        return self._info.shard_process_group

    def _refuse_group(self, group: dist.ProcessGroup, native: dist.ProcessGroup | None) -> None:
        ranks, inner = (dist.get_process_group_ranks(g) for g in (group, self._shard_ranks()))
        if native is not None and ranks != dist.get_process_group_ranks(native):
            raise AttachError(
                f"process_group holds ranks {ranks}, and the model's mesh replicates over {dist.get_process_group_ranks(native)}: leave "
                "process_group out"
            )
        if set(ranks) & set(inner) != {dist.get_rank()}:
            raise AttachError(
                f"process_group holds ranks {ranks}, and this rank's model is sharded over {inner}: give the group of the ranks that hold "
                "the same shard, one of each replica"
            )

    def _refuse_members(self, members: Members) -> None:
        """Refuse nodes whose ranks are not the shards of one replica."""
        shards = self._shard_ranks()
        if self._native() is not None:
            raise AttachError(
                "members() with a mesh of two dimensions: FSDP2 would wait for a lost node in its own hop between replicas; shard the model "
                "over the ranks of this node alone, fully_shard(module, mesh=init_device_mesh(device, (ranks of the node,)))"
            )
        if (shards.size(), shards.rank()) != (members.node.size, members.node.local):
            raise AttachError(
                f"members() with a model that FSDP2 shards over {shards.size()} rank(s), and a member here is a node of {members.node.size}, "
                f"of which this is rank {members.node.local}: start each node by a torchrun of its own, and shard the model over its ranks, "
                "in their order"
            )
        if self._info.mesh.device_type != "cpu":
            raise AttachError(
                "members() with a model that FSDP2 shards is for processors so far: on a GPU a rank that is behind cannot be given the one "
                "sum that it missed, and the shards of a node would be of two steps; use a whole model on each rank, or a process group"
            )

    # -- what is refused ---------------------------------------------------------------------------------------------

    def check(self, named: Mapping[str, Tensor], recipe: Recipe) -> None:
        if self._shard_ranks().size() > 1 and (why := cannot_shard(recipe)):
            raise AttachError(why)
        for group in self._groups:
            _refuse_settings(group, self._info)
        if torch.__version__ < "2.13" and self._info.mesh.device_type == "cpu":
            raise AttachError(f"FSDP2 trains on processors since torch 2.13, and this is {torch.__version__}")
        for name, p in named.items():
            if not is_sharded(p):
                raise AttachError(
                    f"parameter {name!r} is not sharded by FSDP2, which would average it over nobody: call fully_shard on the model itself "
                    "as well, without ignored_params, after all parameters are there, or freeze it"
                )
            if p.is_meta:
                raise AttachError(
                    f"parameter {name!r} is on the meta device: call model.to_empty(device=...) and initialise it before attach"
                )
            _refuse_placements(name, p)

    # -- the hop between replicas ------------------------------------------------------------------------------------

    def connect(self, size: int, deadline: float, patience: Patience) -> None:
        self._size = size
        if self._shard_ranks().size() > 1:
            self._shards = self.replica = ShardGroup(self._shard_ranks(), deadline, patience)

    def meet_others_over(self, fabric: TorchFabric) -> None:
        if self._members is not None and self._shards is not None:
            self.replica = MemberShards(self._shards, fabric)

    def agreed(self, refusal: Exception | None, facts: dict[str, Any]) -> Exception | None:
        if self._members is not None and self._members.joins:
            # Each rank of this node compares its set-up with that of the others, who meet it in turn: none may wait for another here.
            return refusal
        return refusal if self._shards is None else self._shards.agreed(refusal, facts)

    def take_over(self) -> None:
        """Take the hop between replicas from FSDP2, and prove that it is gone."""
        if self._size == 1:
            warnings.warn(
                "the replicate dimension of this model's mesh is 1, so there is nothing to average between replicas and the recipe sends "
                "nothing",
                stacklevel=3,
            )
        elif isinstance(self._info, _Both):
            inner = _inner_of(self._info)
            self._before = [(g, g.mesh_info, g.post_forward_mesh_info) for g in self._groups]
            for group in self._groups:
                _swap(group, inner)
            self._prove(inner)

    def _prove(self, inner: Any) -> None:
        """Train a throw-away layer on the same mesh, whose gradients tell whether replicas were averaged."""
        mine = float(self._info.replicate_process_group.rank() + 1)
        probe = _Probe(self._info.mesh.size(self._info.shard_mesh_dim), self._info.mesh.device_type)
        fully_shard(probe, mesh=self._info.mesh)
        for group in _groups_of(probe):
            _swap(group, inner)
        with torch.enable_grad():
            probe(torch.full((1, 1), mine, device=self._info.mesh.device_type, dtype=torch.float32)).sum().backward()
        found: Any = probe.weight.grad
        if not bool((found.to_local() == mine).all()):
            raise AttachError(
                f"torch {torch.__version__} averages between replicas in a way that gossamer does not know: shard the model over one "
                "dimension, fully_shard(module, mesh=mesh['shard']), and give attach the other, mesh['replicate']"
            )

    def remove(self) -> None:
        for group, info, after in self._before:
            group.mesh_info, group.post_forward_mesh_info = info, after
        self._before = []
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def syncs(self, parameter: Tensor) -> bool:
        """False after `set_requires_all_reduce(False)`, which FSDP2 no longer looks at once the hop is taken from it."""
        return self._owner[id(parameter)].all_reduce_grads

    def scale(self, parameter: Tensor, gradient: Tensor) -> None:
        """With a factor of the user's, FSDP2 divides by it and by nothing else: not by the number of replicas either."""
        if self._owner[id(parameter)].gradient_divide_factor is not None:
            gradient.mul_(self._size if self._members is None else len(self._members.present.ranks))

    @property
    def scales(self) -> bool:
        return any(group.gradient_divide_factor is not None for group in self._groups)

    def refuse_to_add(self) -> None:
        """With a factor of the user's, what was multiplied before would be so a second time."""
        if self.scales:
            raise AttachError(
                "several backward() passes before one optimizer.step(), and each of them divides by set_gradient_divide_factor(): the "
                "earlier ones would count as many times as there are replicas; run all but the last one under comm.no_sync(), or after "
                "model.set_requires_all_reduce(False)"
            )


class _Probe(nn.Module):
    def __init__(self, rows: int, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rows, 1, device=device, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def _groups_of(model: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters that are gathered together; torch 2.13 allows several in a module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = _state_of(module)
            several = getattr(state, "_fsdp_param_groups", None)
            yield from several if several is not None else filter(None, [state._fsdp_param_group])


def _inner_of(info: Any) -> Any:
    """The mesh of the shards alone."""
    names = info.mesh.mesh_dim_names
    shards: DeviceMesh = info.mesh[names[info.shard_mesh_dim]]
    return _Inner(shards, shard_mesh_dim=0)


def _swap(group: Any, inner: Any) -> None:
    if group.post_forward_mesh_info is group.mesh_info:
        group.post_forward_mesh_info = inner
    group.mesh_info = inner


def _refuse_settings(group: Any, first: Any) -> None:
    info = group.mesh_info
    if info.mesh != first.mesh or getattr(info, "dp_mesh_dims", None) is not None:
        raise AttachError(
            "the model's modules are sharded over different meshes, or with dp_mesh_dims, which is not supported: shard all of them "
            "over one mesh of a replicate and a shard dimension"
        )
    if getattr(group, "_all_reduce_hook", None) is not None:
        raise AttachError(
            "the model has a hook of set_all_reduce_hook, which would run beside the recipe: take it off, or do without attach"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy) and torch.__version__ < "2.13":
        raise AttachError(
            f"torch {torch.__version__} hands out gradients that it is still copying to the processor (CPUOffloadPolicy): use torch 2.13 "
            "or newer, or do without it"
        )


def _refuse_placements(name: str, parameter: Any) -> None:
    cut = [place for place in parameter.placements if not place.is_replicate()]
    if len(cut) != 1 or type(cut[0]) is not Shard:
        raise AttachError(
            f"parameter {name!r} is cut as {tuple(parameter.placements)}: tensor and pipeline parallel models are not supported, only "
            "what fully_shard cuts over one dimension of a mesh"
        )
