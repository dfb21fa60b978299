"""Handshake: all ranks compare their set-up before the first step."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.core.errors import PeerError
from gossamer.core.verbs import Program, all_gather, all_gather_ragged
from gossamer.runtime import Worker

LIMIT = 64 * 2**20  # bytes of a fingerprint
CHECKPOINT = 2**30  # bytes that a rank tells of what it saves
WORDS = 4096  # bytes of an error that are sent to other ranks


def fingerprint(worker: Worker, extras: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return everything that must be equal on all ranks, by name."""
    facts: dict[str, Any] = {"gossamer": gossamer.__version__, "recipe": repr(worker.recipe), "seed": worker.ranks.seed}
    facts |= extras
    facts["content of the file that is replayed, as a hash"] = worker.recipe.controller.read_hash
    facts["number of parameters"] = len(worker.params)
    for name, param in worker.params.items():
        facts[f"parameter {name}"] = f"{str(param.dtype).removeprefix('torch.')} {param.shape}"
    facts["order of parameters"] = list(worker.params)
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    for name, t in [*frozen.items(), *model.named_buffers()]:
        facts[f"frozen parameter or buffer {name}"] = f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
    facts["parameters that travel together, by learning rate"] = [bucket.name for bucket in worker.buckets]
    return facts


def tell(facts: Any, device: torch.device, limit: int = LIMIT) -> Program[list[Any]]:
    """Send facts to all ranks as JSON; return those of every rank, in rank order."""
    wire = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(device)
    answers = yield from all_gather_ragged(wire, limit)
    return [json.loads(a.cpu().numpy().tobytes()) for a in answers]


def numbers_of_all(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Program[list[list[Any]]]:
    """Send a few numbers to all ranks, the same count on each; return those of every rank, in rank order."""
    own = torch.tensor(numbers, dtype=dtype, device=device)
    answers = yield from all_gather(own.view(torch.uint8))
    return [answer.clone().view(dtype).tolist() for answer in answers]


def compare(worker: Worker, facts: dict[str, Any]) -> Program[None]:
    """Compare the fingerprints of all ranks; if two differ, every rank raises the same error."""
    everyone = yield from tell(facts, worker.device)
    lines = differences(everyone)
    if lines:
        raise PeerError(
            "the ranks are not set up alike:\n  "
            + "\n  ".join(lines)
            + "\nGive all ranks the same arguments and model."
        )


def agree(error: BaseException | None, device: torch.device) -> Program[None]:
    """Raise an error on all ranks if one rank has an error.

    A rank with an error raises its own; the others raise an error that names the rank and quotes its error. All ranks call
    this, also those without an error, so no rank waits for one that has failed.
    """
    words = b"" if error is None else (str(error) or type(error).__name__).encode()[:WORDS]
    wire = torch.tensor(list(words), dtype=torch.uint8, device=device)
    answers = yield from all_gather_ragged(wire, WORDS)
    if error is not None:
        raise error
    texts = {rank: bytes(a.tolist()).decode(errors="ignore") for rank, a in enumerate(answers) if a.numel()}
    if texts:
        raise PeerError("; ".join(f"rank {rank} cannot go on: {text}" for rank, text in texts.items()))


def differences(everyone: list[dict[str, Any]]) -> list[str]:
    """List what differs between ranks: one line per key, with the values and their ranks; at most ten lines.

    >>> differences([{"recipe": "a"}, {"recipe": "b"}, {"recipe": "a"}])
    ["recipe: 'a' on rank(s) 0, 2; 'b' on rank(s) 1"]
    """
    lines = list[str]()
    for key in dict.fromkeys(k for facts in everyone for k in facts):
        holders = dict[str, list[str]]()
        for rank, facts in enumerate(everyone):
            holders.setdefault(repr(facts[key]) if key in facts else "missing", []).append(str(rank))
        if len(holders) > 1:
            lines.append(f"{key}: " + "; ".join(f"{v} on rank(s) {', '.join(r)}" for v, r in holders.items()))
    return lines if len(lines) <= 10 else [*lines[:9], f"and {len(lines) - 9} more"]
