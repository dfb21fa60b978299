"""Healing: models that are not finite neither give nor are merged."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts.mixer import Report
from gossamer.kernels.finite import all_finite, peak


def is_finite(tensor: Tensor) -> Tensor | bool:
    """The host's answer; a device keeps its own, so that nobody waits for it."""
    return all_finite([tensor]) if tensor.device.type == "cpu" else peak(tensor).isfinite()


def pick(condition: Tensor | bool, yes: Tensor, no: Tensor) -> Tensor:
    if isinstance(condition, bool):
        return yes if condition else no
    return torch.where(condition, yes, no)


def heal(
    block: Bucket, state: State, messages: Sequence[Tensor], weights: Sequence[float], kept: float, report: Report
) -> tuple[Bucket, Sequence[Tensor]]:
    """The block and the messages to absorb. A message is a model times its weight; `kept` is what this rank's counts in "x".

    In the place of a message that is not finite stands this rank's model, with the message's weight, so all weights sum to what
    they did. In the place of this rank's model stands the mean of what came, where anything finite did.
    """
    own, fine = is_finite(block.flat), [is_finite(message) for message in messages]
    sources = take_sources(state, len(messages))
    for source, answer in zip(sources, fine, strict=True):
        if source is not None:
            report(source, answer)
    own = report(None, own)
    if own is True and all(answer is True for answer in fine):
        return block, messages
    model, messages = _healed(block.flat, own, messages, fine, weights)
    return replaced(block, state, own, model, kept), messages


def _healed(
    model: Tensor,
    own: Tensor | bool,
    messages: Sequence[Tensor],
    fine: Sequence[Tensor | bool],
    weights: Sequence[float],
) -> tuple[Tensor, Sequence[Tensor]]:
    """This rank's model, or what stands in for it, and the messages, or what stands in for each."""
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    total, weight = torch.zeros_like(model), zero
    for message, answer, share in zip(messages, fine, weights, strict=True):
        total = pick(answer, total + message, total)
        weight = pick(answer, weight + share, weight)
    model = torch.where(own | (weight == 0), model, total / weight)
    stand_ins = [pick(answer, m, model * share) for m, answer, share in zip(messages, fine, weights, strict=True)]
    return model, stand_ins


def replaced(block: Bucket, state: State, own: Tensor | bool, model: Tensor, kept: float) -> Bucket:
    """A rank's model is another one now, unless its `own` is finite: what was kept of it in "x" and "z" follows."""
    if "x" in state:
        state["x"] = pick(own, state["x"], model * kept)
    if state.get("z") is block.flat:  # nobody has touched it
        state["z"] = model
    elif "z" in state:
        state["z"] = pick(own, state["z"], model)
    return block.like(model)


def finite_or_zero(tensor: Tensor) -> Tensor:
    fine = is_finite(tensor)
    return tensor if fine is True else pick(fine, tensor, torch.zeros_like(tensor))


def keep_sources(state: State, sources: Sequence[int]) -> None:
    """Whose messages will come, in their order."""
    state |= {f"from{i}": torch.tensor(source, dtype=torch.int64) for i, source in enumerate(sources)}


def take_sources(state: State, count: int) -> list[int | None]:
    """Whose messages came; None where a checkpoint of an earlier version does not say."""
    found = [state.pop(f"from{i}", None) for i in range(count)]
    return [None if source is None else int(source) for source in found]
