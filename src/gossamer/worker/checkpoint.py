"""What a worker remembers, as plain tensors by parameter name; and what becomes of it in another world."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.block import Block, State
from gossamer.core.contracts import Exchange, Policy
from gossamer.core.errors import CheckpointError
from gossamer.recipe import Recipe
from gossamer.worker.channels import ROLES, Channel

if TYPE_CHECKING:
    from gossamer.worker.worker import Worker

FORMAT = 1


def save(worker: "Worker") -> dict[str, Any]:
    """Everything but parameters and optimizer. Tensors of one rank carry its number, so no two ranks' keys are equal."""
    out: dict[str, Any] = {
        "format": FORMAT,
        "recipe": repr(worker.origin),
        "adopted": repr(worker.recipe),  # the controller's choice
        "due": repr(worker.due),
        "lost": worker.lost,
        "step": worker.step,
        "seed": worker.seed,
        "size": worker.size,
        f"rank{worker.rank}/present": torch.ones(()),
    }
    for key, value in worker.control.items():
        out[f"equal/control/{key}"] = value.clone()
    for channel, pending in zip(worker.channels, _pending(worker), strict=True):
        for role in ROLES:
            states = {**channel.states[role], **pending.get(role, {})}
            for key, tensor in _split(states, channel).items():
                where = "equal" if _policy(channel, role, key) == "equal" else f"rank{worker.rank}"
                out[f"{where}/{role}/{key}"] = tensor.clone()
    return out


def load(worker: "Worker", saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> None:
    """Take up where a checkpoint left off. A world of another size needs the dictionaries of all its old ranks."""
    dictionaries = [saved] if isinstance(saved, Mapping) else list(saved)
    _check(worker, dictionaries)
    merged = dict[str, Any]()
    for d in dictionaries:
        merged.update(d)
    size = int(merged["size"])
    present = [r for r in range(size) if f"rank{r}/present" in merged]
    if size == worker.size and worker.rank in present:
        ranks = [worker.rank]
    elif len(present) == size:
        ranks = present
    else:
        raise CheckpointError(
            f"this checkpoint is of {size} ranks and holds rank(s) {present}; rank {worker.rank} of {worker.size} needs "
            + ("its own" if size == worker.size else "those of all old ranks: load_state_dict([d0, d1, ...])")
        )
    worker.step, worker.seed = int(merged["step"]), int(merged["seed"])
    worker.control = {
        k.removeprefix("equal/control/"): v.clone() for k, v in merged.items() if k.startswith("equal/control/")
    }
    worker.restore_recipe(Recipe.of(merged["adopted"]), Recipe.of(merged["due"]))
    for channel in worker.channels:
        for role in ROLES:
            channel.states[role] = _restore(channel, role, merged, ranks, worker)
    _restore_pending(worker, bool(merged["lost"]))


def carry_over(old: Sequence[Channel], new: Sequence[Channel], size: int) -> None:
    """After a controller's change: every parameter keeps its memory, whatever channel it now lies in."""
    everything = dict[str, Tensor]()
    for channel in old:
        _fold_owed(channel, size)
        for role in ROLES:
            for key, tensor in _split(channel.states[role], channel).items():
                everything[f"{role}/{key}"] = tensor
    for channel in new:
        for role in ROLES:
            channel.states[role] = _join(
                channel,
                {k.removeprefix(f"{role}/"): v for k, v in everything.items() if k.startswith(f"{role}/")},
            )


def _fold_owed(channel: Channel, size: int) -> None:
    """Chunks get other owners: what an owner owes to the mean moves into its memory, which counts 1/size there."""
    owed, memory = channel.states["exchange"].pop("owed", None), channel.states["memory"]
    if owed is not None and "residual" in memory:
        memory["residual"] = torch.add(memory["residual"], owed, alpha=size)
    elif owed is not None and "own" in memory:  # DIANA: common + owed = mean own, so mean own becomes common
        memory["own"] = torch.sub(memory["own"], owed, alpha=size)


def _split(state: State, channel: Channel) -> dict[str, Tensor]:
    """Flat tensors by parameter; scalars for each parameter; keys with a colon name their parameter themselves."""
    out = dict[str, Tensor]()
    for key, tensor in state.items():
        if ":" in key:
            out[key] = tensor
        elif tensor.dtype == torch.uint8:
            out[f"{key}/{channel.name}"] = tensor
        elif tensor.dim() == 0:
            out |= {f"{key}/{s.name}": tensor for s in channel.layout.segments}
        else:
            # one dimension at least: a tensor of none is a scalar that all parameters share
            out |= {f"{key}/{n}": torch.atleast_1d(view) for n, view in Block(tensor, channel.layout).tensors()}
    return out


def _join(channel: Channel, entries: Mapping[str, Tensor]) -> State:
    """The inverse of `_split`; what a parameter lacks is zero."""
    state: State = {}
    for key in dict.fromkeys(k.split("/")[0] for k in entries if ":" not in k):
        found = {s.name: entries[f"{key}/{s.name}"] for s in channel.layout.segments if f"{key}/{s.name}" in entries}
        if not found:
            continue
        sample = next(iter(found.values()))
        if sample.dim() == 0 or sample.dtype == torch.uint8:
            state[key] = sample.clone()
        else:
            flat = channel.empty().to(sample.dtype)
            for name, view in Block(flat, channel.layout).tensors():
                if name in found:
                    view.copy_(found[name].view(view.shape))
            state[key] = flat
    names = {s.name for s in channel.layout.segments}
    state |= {k: v.clone() for k, v in entries.items() if ":" in k and k.split(":", 1)[1].split("/")[0] in names}
    return state


def _policy(channel: Channel, role: str, key: str) -> Policy:
    word = key if ":" in key else key.split("/", maxsplit=1)[0]
    if role == "memory":
        return channel.memory.policy(word)
    exchange = getattr(channel.exchange, "over", channel.exchange)  # what a quorum's gradients travel over
    if role == "exchange" and isinstance(exchange, Exchange):
        return exchange.policy(word)
    return "drop" if role == "mixer" else "equal"


def _restore(channel: Channel, role: str, merged: Mapping[str, Any], ranks: list[int], worker: "Worker") -> State:
    equal = _under(merged, f"equal/{role}/")
    own = [_under(merged, f"rank{r}/{role}/") for r in ranks]
    if int(merged["size"]) == worker.size:
        return _join(channel, {**equal, **own[0]})
    combined = dict(equal)
    for key in own[0]:
        policy = _policy(channel, role, key)
        if policy in ("mean", "owner"):
            total = torch.stack([o[key].double() for o in own]).sum(0)
            combined[key] = (total / len(ranks) if policy == "mean" else total).to(own[0][key].dtype)
    state = _join(channel, combined)
    if "owed" in state:
        mine = torch.zeros_like(state["owed"])
        for source, target in zip(_chunk(state["owed"], channel, worker), _chunk(mine, channel, worker)):
            target.copy_(source)
        state["owed"] = mine
    return state


def _chunk(flat: Tensor, channel: Channel, worker: "Worker") -> list[Tensor]:
    return [Block(flat, channel.layout).chunks(worker.size)[worker.rank].flat]


def _under(merged: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in merged.items() if k.startswith(prefix)}


def _check(worker: "Worker", dictionaries: Sequence[Mapping[str, Any]]) -> None:
    for d in dictionaries:
        if d.get("format") != FORMAT:
            raise CheckpointError(f"not a checkpoint of this version: format {d.get('format')!r}, expected {FORMAT}")
        if d["recipe"] != repr(worker.origin):
            raise CheckpointError(
                f"the checkpoint was made with\n  {d['recipe']}\nbut this run uses\n  {worker.origin}\n"
                "Load it with the same recipe, or start the communicator anew (parameters and optimizer load as ever)."
            )


def _pending(worker: "Worker") -> list[dict[str, State]]:
    """What has arrived but not landed, per channel."""
    landed, arrived = worker.pending()
    out: list[dict[str, State]] = [{} for _ in worker.channels]
    for i, mean in enumerate(landed or []):
        out[i]["schedule"] = {"pending": mean}
    for i, wires in enumerate(arrived or []):
        out[i]["mixer"] = {f"arrived{j}": w for j, w in enumerate(wires)}
    return out


def _restore_pending(worker: "Worker", lost: bool) -> None:
    landed = [c.states["schedule"].pop("pending", None) for c in worker.channels]
    arrived = [_pop_wires(c.states["mixer"]) for c in worker.channels]
    worker.restore_pending([m for m in landed if m is not None] or None, arrived if any(arrived) else None, lost)


def _pop_wires(state: State) -> list[Tensor]:
    keys = sorted((k for k in state if k.startswith("arrived")), key=lambda k: int(k.removeprefix("arrived")))
    return [state.pop(k) for k in keys]
