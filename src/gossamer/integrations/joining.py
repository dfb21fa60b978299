"""Joining a run: check on this rank, agree over all ranks, make the worker. The path of every front door.

What differs is where gradients come from: `attach` takes them from autograd (`backward.py`), `ddp.register` from DDP's buckets.
"""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.codecs.warm import warm
from gossamer.core.errors import GossamerError, PeerError
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.fabrics.torch.nccl import machine
from gossamer.integrations.broadcast import hyperparameters
from gossamer.integrations.groups import Where, host_names
from gossamer.integrations.handshake import LIMIT, agree, compare, differences, fingerprint
from gossamer.recipe import Recipe
from gossamer.runtime import ReplicaRanks, Together, Worker, params_of

# Hyperparameters that schedulers change, or keep beside those that they change.
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas")


class Plan(NamedTuple):
    """What this rank would train with, checked."""

    recipe: Recipe
    params: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer]
    facts: Mapping[str, Any]  # what must be equal on all ranks, besides model, recipe and hyperparameters


def agreed(
    fabric: TorchFabric,
    what: str,
    nodes: Where | None,
    check: Callable[[list[str]], Plan],
    inside: Callable[[Exception | None, dict[str, Any]], Exception | None] = lambda refusal, facts: refusal,
) -> Plan:
    """Return this rank's plan; if one rank refuses its arguments, all ranks raise an error.

    `check` gets the host name of each rank, if `nodes` asks for them; `inside` agrees among the ranks of a replica.
    """
    plan, refusal = None, None
    hosts = host_names(fabric) if nodes == "hosts" else []
    try:
        plan = check(hosts)
    except (GossamerError, TypeError) as error:
        refusal = error
    facts = {} if plan is None else {"recipe": repr(plan.recipe), "replica": fabric.place, **plan.facts}
    if facts and nodes is not None:
        facts["node"] = machine()
    refusal = inside(refusal, facts)
    if fabric.size > 1 and not fabric.present.joins:
        fabric.run(agree(refusal, fabric.device), what)
    if refusal is not None:
        raise refusal
    assert plan is not None
    return plan


def make_worker(
    plan: Plan, fabric: TorchFabric, what: str, model: nn.Module, seed: int, replica: ReplicaRanks | None = None
) -> Worker:
    """Make the worker, compile its kernels, compare the set-up of all ranks, and form the groups that it communicates in."""
    held = plan.optimizers
    if not held:  # a recipe that uses learning rates was refused: this one's rate is never read
        held = [torch.optim.SGD(list(plan.params.values()), lr=1.0)]
    joint = held[0] if len(held) == 1 else Together(held)
    worker = Worker(plan.recipe, params_of(plan.params), joint, fabric.rank, fabric.size, seed)
    if replica is not None:
        worker.replica = replica
    worker.ranks.regroup(fabric.present)
    if fabric.size == 1:
        return worker
    # Now, since the first step has a deadline; also for what a controller may put in force.
    warm([plan.recipe, *plan.recipe.reached], fabric.device, worker.buckets[0].layout.dtype)
    facts = fingerprint(worker, {**plan.facts, **hyperparameters(plan.optimizers)}, model)
    if fabric.present.joins:  # others are at work
        _compare_with_the_first(worker, facts, fabric)
    else:
        fabric.run(compare(worker, facts), what)
        _post(worker, facts, fabric)
    fabric.form_always(plan.recipe.groups, plan.recipe.ranks_per_node)
    return worker


def _post(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """Store the set-up of all ranks, for ranks that come later: compressed, since a store takes no long texts."""
    if fabric.members is not None and worker.rank == 0:
        text = b64encode(zlib.compress(json.dumps(facts).encode())).decode()
        fabric.members.beginning.raise_flag("setup", text)


def _compare_with_the_first(worker: Worker, facts: dict[str, Any], fabric: TorchFabric) -> None:
    """Raise an error if this process, which joins others at work, is set up differently."""
    assert fabric.members is not None
    store = fabric.members.beginning
    if not store.flag_is_up("setup"):
        return  # the rank that stores it was lost at the start
    (text,) = store.read(["setup"])
    try:
        theirs = json.loads(zlib.decompressobj().decompress(b64decode(text), LIMIT))
    except (ValueError, zlib.error):
        raise store.malformed("setup", text) from None
    lines = differences([_at_any_step(one) for one in (theirs, json.loads(json.dumps(facts)))])
    if lines:
        raise PeerError(
            f"rank {worker.ranks.number} has come to others that train, and its set-up differs (0: the others, 1: this rank):\n  "
            + "\n  ".join(lines)
            + "\nGive it the same arguments and model, and the same version of gossamer."
        )


def _at_any_step(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A set-up without what changes in training: who comes may have loaded its optimizer's state of a later step."""
    return {
        key: {k: v for k, v in fact.items() if k not in SCHEDULED} if isinstance(fact, dict) else fact
        for key, fact in facts.items()
    }
