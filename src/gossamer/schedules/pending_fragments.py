"""Pending fragments: a rank's part of the model, with its steps that are not merged yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gossamer.core.loop import Loop
from gossamer.kernels.finite import all_finite

Landing = Literal["", "progress", "anchor"]
LANDINGS: tuple[Landing, ...] = ("", "progress", "anchor")


class WorkerProgress(NamedTuple):
    """A rank's progress: its next round, steps since its last answer or write, and steps until the next write."""

    number: int
    since: int
    due: int | None


@dataclass(eq=False)
class PendingFragment:
    """A part of the model, its steps that are not merged yet, and what the next `write` does.

    `landing` is "progress" (write the anchor plus the progress since "start"), "anchor" (write the anchor), or "" (nothing).
    """

    loop: Loop
    steps: int = 0
    tokens: float = 0.0
    merged: int = 0  # steps merged so far
    landing: Landing = ""

    def write(self) -> None:
        """Write the moved anchor to the parameters, with the local progress if it is kept."""
        if not self.landing:
            return
        states, values = self.loop.states, self.landed()
        kept = self.landing == "progress" and self.steps
        # On a device the next answer finds it: here the host would wait for the device.
        if kept and values[0].device.type == "cpu" and not all_finite(values):
            self.steps, self.tokens, values = 0, 0.0, [s["anchor"] for s in states]
            self.loop.record.round_dropped()
            self.loop.record.finite(None, False)
        self.loop.write(values)
        for state in states:
            state.pop("start", None)
        self.landing = ""

    def landed(self) -> list[Tensor]:
        """The model that `write` sets the parameters to."""
        states = self.loop.states
        if self.landing == "progress" and self.steps:
            return [x.sub_(s["start"]).add_(s["anchor"]) for x, s in zip(self.loop.parameters(), states)]
        return [s["anchor"] for s in states] if self.landing else self.loop.parameters()

    def forget(self) -> None:
        """Discard the pending steps; the next `write` sets the parameters to the anchor."""
        self.steps, self.tokens, self.landing = 0, 0.0, "anchor"
        for state in self.loop.states:
            state.pop("start", None)

    def moved(self) -> list[Tensor]:
        """Return anchor minus "start", bucket by bucket."""
        out = list[Tensor]()
        for bucket, state in zip(self.loop.buckets, self.loop.states):
            room = bucket.layout.buffers.like(state["start"])
            out.append(torch.sub(state["anchor"], state["start"], out=room))
        return out

    def is_merged(self, steps: int, tokens: float) -> None:
        """Count steps that are part of the anchor now."""
        self.merged += steps
        self.steps, self.tokens, self.landing = self.steps - steps, self.tokens - tokens, "progress"

    def is_late(self, keeps: bool, before: Sequence[Tensor]) -> None:
        """Handle a round that closed without this rank: with `keeps`, progress since the anchor `before` is merged later."""
        if not keeps:
            self.forget()
        elif not self.landing:  # else an earlier round is not written yet
            for state, anchor in zip(self.loop.states, before):
                state["start"] = anchor
            self.landing = "progress"

    def keep(self, kept: WorkerProgress) -> None:
        """Write the progress to the schedule's state, for a checkpoint."""
        numbers = {
            "round": kept.number,
            "since": kept.since,
            "due": -1 if kept.due is None else kept.due,
            "steps": self.steps,
            "tokens": self.tokens,
            "merged": self.merged,
            "landing": LANDINGS.index(self.landing),
        }
        for state in self.loop.states:
            state.update({k: torch.tensor(float(v), dtype=torch.float64) for k, v in numbers.items()})


def restored(fragments: Sequence[PendingFragment], new: WorkerProgress) -> WorkerProgress:
    """Restore the progress from the schedule's state; returns `new` if there is none."""
    for fragment in fragments:
        state = fragment.loop.states[0]
        if "round" in state:
            new = new._replace(number=int(state["round"]))
        if "since" not in state:
            continue
        due = int(state["due"])
        new = new._replace(since=int(state["since"]), due=None if due < 0 else due)
        fragment.steps, fragment.tokens = int(state["steps"]), float(state["tokens"])
        fragment.merged, fragment.landing = int(state["merged"]), LANDINGS[int(state["landing"])]
    return new
