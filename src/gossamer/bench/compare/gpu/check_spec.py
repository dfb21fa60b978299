"""What the ranks are to try in one go, and how much of it; written by the launcher, read by every rank."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Path = Literal["", "cpu", "nccl", "staged"]
WAYS: dict[str, str] = {"cpu": "gloo, on the CPU", "nccl": "NCCL", "staged": "staged gloo"}


@dataclass(frozen=True)
class Sizes:
    """How much is done. Tests do less."""

    lengths: tuple[int, ...] = (0, 1, 5, 63, 320, 321, 513, 4099, 1_000_003)  # elements, few of them round
    elements: int = 25_600_000  # of what is timed
    side: int = 2048  # of the square matrices that keep a stream busy
    products: int = 60  # of such, one after the other: some 20 ms at least
    copied: int = 2**28  # bytes
    steps: int = 10
    width: int = 256  # of the small model's layers
    deadline: float = 20.0  # seconds, gossamer's own
    limit: float = 120.0  # seconds for one subject


@dataclass(frozen=True)
class CheckSpec:
    """Subjects of one check. Without a path, each rank is by itself."""

    check: str
    subjects: tuple[str, ...]
    ranks: tuple[int, ...]  # who takes part
    path: Path = ""
    number: int = 0  # of the orders so far
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def title(self) -> str:
        return f"{self.check} over {WAYS[self.path]}" if self.path else self.check

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> "CheckSpec":
        told: dict[str, Any] = json.loads(text)
        told["sizes"] = Sizes(**told["sizes"] | {"lengths": tuple(told["sizes"]["lengths"])})
        told |= {k: tuple(told[k]) for k in ("subjects", "ranks")}
        return CheckSpec(**told)


class Placement(NamedTuple):
    """Where a rank sits."""

    rank: int
    size: int
    device: torch.device
