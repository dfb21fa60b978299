"""What all ranks agree on: averages of parameters and buffers, and the check that replicas are equal."""

from collections.abc import Collection, Mapping
from zlib import crc32

import torch
from torch import Tensor, nn

from gossamer.core.bucket import Bucket
from gossamer.core.errors import PeerError
from gossamer.core.stream_events import copied_to
from gossamer.core.verbs import Program, all_gather, all_reduce
from gossamer.runtime import Worker

TOUCHED = -1  # instead of a hash


def remember(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def restore(model: nn.Module, own: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            t.copy_(own[name])


def swap_in(model: nn.Module, worker: Worker, average_buffers: bool) -> Program[None]:
    """Parameters become sum x / sum w over all ranks, messages in flight included; float buffers their mean."""
    yield from worker.quiesce()
    judged = worker.recipe.schedule.consensus_share(worker.loop)
    for bucket, share in zip(worker.buckets, judged or []):
        given = torch.cat([share.value, share.weight.to(share.value).view(1)])
        total = yield from all_reduce(given if worker.weight == 1 else given.mul_(worker.weight))
        bucket.write(total[:-1] / total[-1])
    if average_buffers:
        yield from share_buffers(model, worker, "average")


def share_buffers(
    model: nn.Module, worker: Worker, policy: str, before: Mapping[str, Tensor] | None = None
) -> Program[dict[str, Tensor]]:
    """Average the model's float buffers (running statistics), or give everybody rank 0's; returns copies of them.

    A buffer that is not finite on some ranks becomes the mean of the others'; one that is finite on none, what it was
    `before`.
    """
    buffers = floats(model)
    if not buffers:
        return {}
    sizes = [b.numel() for b in buffers.values()]
    counts = torch.stack([b.isfinite().all() for b in buffers.values()]).double()
    counts *= worker.weight if policy == "average" else float(worker.rank == 0)
    weights = counts.repeat_interleave(torch.tensor(sizes, device=counts.device))
    flat = torch.where(weights > 0, torch.cat([b.reshape(-1).double() for b in buffers.values()]), 0.0).mul_(weights)
    total = yield from all_reduce(torch.cat([flat, counts]))
    sums, givers = total.split([flat.numel(), len(buffers)])
    for (name, buffer), value, count in zip(buffers.items(), sums.split(sizes), givers.tolist(), strict=True):
        if count:
            buffer.copy_(value.view_as(buffer) / count)
        elif before is not None:
            buffer.copy_(before[name])
    return {name: buffer.clone() for name, buffer in buffers.items()}


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and b.numel()}


def count(worker: Worker, flags: Tensor) -> Program[Tensor]:
    return (yield from all_reduce(copied_to(flags, worker.device)))


def check(
    worker: Worker, model: nn.Module, shared: Mapping[str, Tensor], ignored: Collection[str] = ()
) -> Program[None]:
    """Hashes of what should be equal: parameters of synchronous recipes, anchors of local ones, frozen parameters of all
    that are not `ignored`; and buffers as they were `shared` last, those that no forward has touched since.
    """
    yield from worker.quiesce()
    trained = {id(param.parameter) for param in worker.params.values()}
    frozen = {n: p for n, p in model.named_parameters() if id(p) not in trained and n not in ignored}
    hashed = _hashes(worker) | {n: hash_of(p) for n, p in frozen.items()}
    now = dict(model.named_buffers())
    for name, agreed in shared.items():
        hashed[name] = hash_of(agreed) if torch.equal(now[name], agreed) else TOUCHED
    if not hashed:
        return
    counted = 0 if worker.recipe.schedule.is_async else worker.step
    table = torch.tensor([counted, *hashed.values()], dtype=torch.int64)
    answers = yield from all_gather(table.to(worker.device).view(torch.uint8))
    rows = [a.clone().view(torch.int64).tolist() for a in answers]
    for i, name in enumerate(["the step count", *hashed]):
        values = [row[i] for row in rows]
        if len(set(values)) > 1 and TOUCHED not in values:
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
    """Of all that must be equal on all ranks after the last step."""
    equal = worker.recipe.is_synced(worker.step - 1)
    out = {n: hash_of(param.values) for n, param in worker.params.items()} if equal else {}
    shared = worker.recipe.schedule.policy("anchor") == "equal"
    for bucket in worker.buckets if shared else ():
        if "anchor" in bucket.states["schedule"]:
            block = Bucket(bucket.states["schedule"]["anchor"], bucket.layout)
            out |= {f"the anchor of {n}": hash_of(t) for n, t in block.tensors()}
    return out


def hash_of(tensor: Tensor) -> int:
    """Of its bits: tensors that are equal, and hardly any others, have equal ones."""
    return crc32(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
