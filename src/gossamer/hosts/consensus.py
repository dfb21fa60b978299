"""What all ranks agree on: averages of parameters and buffers, and the check that replicas are equal."""

from zlib import crc32

import torch
from torch import Tensor, nn

from gossamer.core.block import Block
from gossamer.core.contracts import Mixer
from gossamer.core.errors import PeerError
from gossamer.core.verbs import Program, all_gather, all_reduce
from gossamer.worker import Worker


def remember(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def restore(model: nn.Module, own: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            t.copy_(own[name])


def swap_in(model: nn.Module, worker: Worker, average_buffers: bool) -> Program[None]:
    """Parameters become sum x / sum w over all ranks, messages in flight included; float buffers their mean."""
    yield from worker.quiesce()
    if not worker.recipe.schedule.averages_gradients:
        arrived = worker.pending()[1] or [[] for _ in worker.channels]
        for channel, numerator, wires in zip(worker.channels, worker.parameters(), arrived, strict=True):
            state = dict(channel.states["mixer"])
            if wires:
                held = Block(channel.read(), channel.layout)
                numerator = worker.mixer.numerator(held.like(worker.mixer.absorb(held, state, wires)), state)
            weight = state.get("w", torch.ones(()))
            total = yield from all_reduce(torch.cat([numerator, weight.to(numerator).view(1)]))
            channel.write(total[:-1] / total[-1])
    if average_buffers:
        yield from share_buffers(model, worker, "average")


def share_buffers(model: nn.Module, worker: Worker, policy: str) -> Program[None]:
    """Average the model's float buffers (running statistics), or give everybody rank 0's."""
    buffers = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if not buffers:
        return
    flat = torch.cat([b.reshape(-1).double() for b in buffers])
    if policy == "broadcast" and worker.rank != 0:
        flat.zero_()
    total = yield from all_reduce(flat)
    if policy == "average":
        total /= worker.size
    for buffer, value in zip(buffers, total.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(value.view_as(buffer))


def broadcast_model(model: nn.Module, worker: Worker) -> Program[None]:
    """Everybody starts from rank 0's parameters and buffers, bit for bit.

    Bits are summed as integers with everybody else's zeros: exact for every type, and no rank stores N copies.
    """
    tensors = [t for t in [*model.parameters(), *model.buffers()] if t.numel()]
    wire = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    padded = torch.nn.functional.pad(wire, (0, -wire.numel() % 4)).view(torch.int32)
    if worker.rank != 0:
        padded.zero_()
    total = yield from all_reduce(padded)
    position, agreed = 0, total.view(torch.uint8)
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        with torch.no_grad():
            tensor.copy_(agreed[position : position + size].clone().view(tensor.dtype).view(tensor.shape))
        position += size


def count(worker: Worker, flags: Tensor) -> Program[Tensor]:
    device = next(iter(worker.named.values())).device
    return (yield from all_reduce(flags.to(device)))


def check(worker: Worker) -> Program[None]:
    """Hashes of what should be equal: parameters of synchronous recipes, anchors of local ones; nothing under gossip."""
    yield from worker.quiesce()
    hashed = _hashes(worker)
    if not hashed:
        return
    device = next(iter(worker.named.values())).device
    table = torch.tensor([worker.step, *hashed.values()], dtype=torch.int64)
    answers = yield from all_gather(table.to(device).view(torch.uint8))
    rows = [a.clone().view(torch.int64).tolist() for a in answers]
    for i, name in enumerate(["the step count", *hashed]):
        values = [row[i] for row in rows]
        if len(set(values)) > 1:
            raise PeerError(
                f"at step {worker.step}, {name} differs {_strays(values)}: the replicas are no longer equal. "
                "Was something changed on one rank only (a parameter, a clipped gradient, the learning rate)?"
            )


def _strays(values: list[int]) -> str:
    """Who differs from the majority; where there is none, who holds what."""
    holders = dict[int, list[int]]()
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    groups = sorted(holders.values(), key=len)
    if 2 * len(groups[-1]) > len(values):
        return f"on rank(s) {sorted(r for g in groups[:-1] for r in g)} from the other ranks"
    return "between ranks " + " and ".join(map(str, sorted(groups)))


def _hashes(worker: Worker) -> dict[str, int]:
    if worker.recipe.schedule.averages_gradients:
        return {n: hash_of(p) for n, p in worker.named.items()}
    if isinstance(worker.recipe.exchange, Mixer):
        return {}
    out = dict[str, int]()
    for channel in worker.channels:
        if "anchor" in channel.states["schedule"]:
            block = Block(channel.states["schedule"]["anchor"], channel.layout)
            out |= {f"the anchor of {n}": hash_of(t) for n, t in block.tensors()}
    return out


def hash_of(tensor: Tensor) -> int:
    """Of its bits: tensors that are equal, and hardly any others, have equal ones."""
    return crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
