"""Shared code of memories with running estimates of gradients (DIANA, EF21)."""

from typing import Literal

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import those
from gossamer.core.contracts import Context, Memory, Policy, Sender
from gossamer.core.verbs import Program, all_reduce


class Learning(Memory):
    """A memory with two estimates: "own", h_i, of this rank's gradient, and "common", h, of the mean of all ranks' h_i.

    D_i = g_i - h_i;  send D_i;  h_i += a (the decoded part of mine);  h += a (the mean of the decoded parts).
    With `start="first"` h_i starts at each rank's first gradient, which is sent in full, once.
    """

    start: Literal["zero", "first"]

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(remembers_all=True)

    @property
    def begins(self) -> bool:
        return self.start == "first"

    def policy(self, key: str) -> Policy:
        return "equal" if key in ("common", "velocity") else "mean"

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        """Subtract a previous memory's residual from "own": common + residual = mean own, so mean own becomes common."""
        if "own" in state:
            state["own"] = torch.sub(state["own"], owed, alpha=times)
        return "own" in state

    def renew(self, state: State, size: int) -> Program[None]:
        """The common estimate is the mean of those of the ranks that are present."""
        if "own" in state:
            state["common"] = (yield from all_reduce(state["own"].clone())).div_(size)

    def join(self, state: State) -> State:
        """A rank that joins starts its own estimate at the common one."""
        return state | {"own": state["common"]} if "common" in state else state

    def learn(self, block: Bucket, state: State, send: Sender, context: Context, rate: float) -> Program[Tensor]:
        """Send the difference; return old h + mean difference, and move both estimates by `rate` of it."""
        if self.begins and "own" not in state:
            return (yield from _first(block, state, context))
        own = state["own"] if "own" in state else torch.zeros_like(block.flat)
        common = state["common"] if "own" in state else torch.zeros_like(block.flat)
        difference = torch.sub(block.flat, own, out=block.new())
        result = yield from send(block.like(difference), context._replace(feedback=rate))
        learned = block.new().copy_(own)
        result.add_sent(learned, rate)
        mean = result.mean
        del difference, result  # and what was sent with it
        state["own"], state["common"] = learned, torch.add(common, mean, alpha=rate, out=block.new())
        return mean.add_(common)


def _first(block: Bucket, state: State, context: Context) -> Program[Tensor]:
    """Average the first gradients in full, and start the estimates from them."""
    own = block.flat.clone()
    mean = (yield from all_reduce(block.flat.clone())).div_(context.size)
    state["own"], state["common"] = own, mean.clone()
    return mean
