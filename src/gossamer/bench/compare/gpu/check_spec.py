"""The checks that ranks run in one launch, and their sizes; written by the launcher, read by every rank."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

Path = Literal["", "cpu", "nccl", "staged"]
WAYS: dict[str, str] = {"cpu": "gloo, on the CPU", "nccl": "NCCL", "staged": "staged gloo"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks; tests use smaller ones."""

    lengths: tuple[int, ...] = (0, 1, 5, 63, 320, 321, 513, 4099, 1_000_003)  # elements, most of them not powers of two
    elements: int = 25_600_000  # elements in timed calls
    side: int = 2048  # of the square matrices that keep a stream busy
    products: int = 60  # matrix products in a row: 20 ms or more
    copied: int = 2**28  # bytes
    steps: int = 10
    width: int = 256  # of the small model's layers
    deadline: float = 20.0  # seconds, gossamer's own
    limit: float = 120.0  # seconds for one subject


@dataclass(frozen=True)
class CheckSpec:
    """Subjects of one check. Without a path, each rank runs alone."""

    check: str
    subjects: tuple[str, ...]
    ranks: tuple[int, ...]  # ranks that take part
    path: Path = ""
    number: int = 0  # number of this launch
    sizes: Sizes = field(default_factory=Sizes)
    shared: bool = False  # ranks share a GPU

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
    """Where a check runs."""

    rank: int
    size: int
    device: torch.device
