"""Folders of events as processes would have written them, with every time known."""

import json
from pathlib import Path
from typing import Any

FOUND = 3.0  # seconds from a process's start to `attach`
WARM = 2.0  # and from there to the end of its first step
STEP, EXCHANGE = 0.1, 0.02  # seconds of a step, and of its exchange


class MadeProcess:
    """One process of a rank: its lines, on its own clock."""

    def __init__(self, rank: int, number: int = 1, born: float = 100.0, after: int = 0, **facts: Any) -> None:
        self.rank, self.number, self.born, self.step, self.count = rank, number, born, after, 0
        self.now, self.waited = 0.0, 0.0
        began = {
            "form": 1,
            "rank": rank,
            "size": 2,
            "process": f"{rank}-{number}",
            "machine": "m",
            "boot": "b",
            "launching": 0.0,
        }
        attached = {"recipe": "topk", "period": 1, "round": 1, "step": after, "model": "one"}
        self.lines = [{"event": "began", "at": 0.0, "born": born, **began, **_of(facts, began)}]
        self.now = FOUND
        self.say("attached", **attached | _of(facts, attached))

    def say(self, event: str, **facts: Any) -> None:
        self.lines.append({"event": event, "at": round(self.now, 6), **facts})

    def works(self, steps: int, slower: float = 0.0, waits: float = 0.0) -> "MadeProcess":
        """Take steps, with one line for ten of them; the first one also waits, or computes longer, by so much."""
        for done in range(steps):
            self.step, self.count = self.step + 1, self.count + 1
            extra = (slower + waits) * (done == 0)
            self.now += (WARM if self.count == 1 else STEP) + extra
            self.waited += EXCHANGE + waits * (done == 0)
            if self.count == 1 or (self.count - 1) % 10 == 0:
                event = "first step" if self.count == 1 else "steps"
                self.say(event, step=self.step, done=self.count, waited=round(self.waited, 6))
        return self

    def saves(self, seconds: float) -> "MadeProcess":
        self.now += seconds
        self.say("saved", step=self.step, path="x", seconds=seconds)
        return self

    def rests(self, seconds: float) -> "MadeProcess":
        self.now += seconds
        self.say("alive")
        return self

    def ends(self, how: str = "in order") -> "MadeProcess":
        self.say("ended", how=how)
        return self

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}.{self.number}.abcd.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path


def _of(facts: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name in names}


def restarted(folder: Path) -> Path:
    """Two ranks; both are killed at step 101, begin again at step 51, five seconds later, and end in order at step 152."""
    for rank in (0, 1):
        MadeProcess(rank).works(101).write(folder)
        MadeProcess(rank, 2, born=120.0, after=51).works(101).ends().write(folder)
    return folder
