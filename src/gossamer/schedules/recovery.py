"""Recovery of `quorum_rounds`: the state on which ranks agree after a rank was lost or came back."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.errors import WireError
from gossamer.core.hashes import hash_of
from gossamer.core.loop import BucketView, Loop, UntrainedTensors
from gossamer.core.verbs import Program, all_gather_ragged, all_reduce, receive, send
from gossamer.schedules import handing_over
from gossamer.schedules.merging import arrivals_since

LONGEST = 2**24  # bytes, at most, of a rank's description of its progress
EQUAL = ("anchor", "velocity", "arrived")  # state that is equal on all ranks, bit for bit


class FurthestProgress(NamedTuple):
    """The progress of the rank that is furthest ahead."""

    round: int  # the next round
    step: int
    members: tuple[int, ...]  # ranks merged in the last round
    states: list[State]  # state equal on all ranks after it, by bucket; empty if this rank has it
    leaving: list[dict[str, Any]]  # what each rank says of leaving


def agree(
    parts: Sequence[Loop], round: int, step: int, members: Sequence[int], leaving: dict[str, Any]
) -> Program[FurthestProgress]:
    """Exchange the progress of all ranks; the first rank that is furthest ahead sends its state to the others."""
    buckets = [bucket for part in parts for bucket in part.buckets]
    said: dict[str, Any] = {
        "round": round,
        "step": step,
        "members": list(members),
        "holds": [_held(bucket) for bucket in buckets],
        "leaving": leaving,
    }
    said["arrivals"] = arrivals_since(buckets[0].states["schedule"])
    said["untrained"] = _described(parts[0].untrained)
    wire = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8).to(buckets[0].device)
    answers = yield from all_gather_ragged(wire, LONGEST)
    everyone = [_read(answer, rank, len(buckets)) for rank, answer in enumerate(answers)]
    rounds = [int(told["round"]) for told in everyone]
    giver = rounds.index(max(rounds))
    given, states = everyone[giver], list[State]()
    takers = [rank for rank, number in enumerate(rounds) if number < rounds[giver]]
    mine = parts[0].ranks.rank
    for bucket, holds in zip(buckets, given["holds"]):
        if mine == giver:
            yield from _give(bucket, holds, takers)
        elif mine in takers:
            states.append((yield from _take(bucket, holds, giver)))
            if "arrived" in holds:
                states[-1]["arrivals"] = torch.tensor(float(given["arrivals"]), dtype=torch.float64)
    yield from _give_untrained(parts[0], everyone, giver)
    return FurthestProgress(
        rounds[giver], int(given["step"]), tuple(given["members"]), states, [told["leaving"] for told in everyone]
    )


def _give(bucket: BucketView, holds: Sequence[str], takers: Sequence[int]) -> Program[None]:
    """Send this rank's state to each of those that are behind. Neither this rank nor the others wait for it to arrive."""
    for key in holds if takers else ():
        wire = bucket.states["schedule"][key].view(torch.uint8).clone()
        for rank in takers:
            yield from send(rank, wire)


def _take(bucket: BucketView, holds: Sequence[str], giver: int) -> Program[State]:
    """Receive the state of the rank that is furthest ahead."""
    out: State = {}
    for key in holds:
        like = bucket.empty()
        wire = yield from receive(giver, like.numel() * like.element_size())
        out[key] = wire.clone().view(like.dtype)
    if "velocity" in out:
        out["lr"] = torch.tensor(1.0, dtype=torch.float64)  # these rounds ignore the learning rate
    return out


def _give_untrained(loop: Loop, everyone: Sequence[dict[str, Any]], giver: int) -> Program[None]:
    """Whoever has just come gets the frozen parameters and buffers that are other ones than the giver's; others keep theirs."""
    coming = [rank for rank, told in enumerate(everyone) if not told["round"] and rank != giver]
    theirs: dict[str, Any] = everyone[giver]["untrained"]
    wanted = {r: {n for n, what in theirs.items() if everyone[r]["untrained"].get(n) != what} for r in coming}
    if loop.untrained is None or not (sent := [n for n in theirs if any(n in names for names in wanted.values())]):
        return
    mine, got = loop.untrained.tensors(), dict[str, Tensor]()
    device = loop.buckets[0].device
    for name in sent:
        held = mine[name].detach()
        bits = held.to(device).contiguous().view(-1).view(torch.uint8)
        given = bits.clone() if loop.ranks.rank == giver else torch.zeros_like(bits)
        value = (yield from all_reduce(given)).view(held.dtype).view(held.shape)
        if name in wanted.get(loop.ranks.rank, ()):
            got[name] = value
    if got:
        loop.untrained.take(got, loop.ranks.present.ranks[giver])


def _described(untrained: UntrainedTensors | None) -> dict[str, int]:
    """By a hash each; shapes and types have been compared before."""
    return {n: hash_of(t) for n, t in untrained.tensors().items()} if untrained is not None else {}


def _held(bucket: BucketView) -> list[str]:
    return [key for key in EQUAL if key in bucket.states["schedule"]]


def _read(wire: Tensor, rank: int, blocks: int) -> dict[str, Any]:
    try:
        said: Any = json.loads(wire.cpu().numpy().tobytes())
        fits = all(isinstance(said[key], int) for key in ("round", "step", "arrivals")) and len(said["holds"]) == blocks
        fits = fits and all(isinstance(m, int) for m in [*said["members"], *said["untrained"].values()])
        fits = fits and handing_over.is_valid(said["leaving"], blocks)
        fits = fits and all(set(keys) <= set(EQUAL) for keys in said["holds"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        fits, said = False, None
    if not fits:
        raise WireError(f"rank {rank} sent no valid description of its progress: {bytes(wire[:80].tolist())!r}")
    return said
