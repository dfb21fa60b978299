"""The plan of a comparison, written by the launcher and read by every rank."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ComparePlan:
    """What to train, on which data, for how long. `contenders` are recipes or baselines such as "ddp", by name."""

    contenders: dict[str, str]
    workload: str = "lm"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 100  # of the baseline, or of all runs without one
    chunk: int = 10  # steps of a slice, which goes on to the end of a round; quality is measured after each slice
    baseline: str = ""  # the others train until they reach its quality, at most `patience` times its steps
    patience: float = 2.0
    seed: int = 0
    deadline: float = 120.0
    checkpoint: str = ""  # a folder; for a plan with one run
    checkpoint_every: int = 50
    resume: bool = False
    network: str = "unshaped"  # as in the record; a resumed run must stay on one network
    per_host: int = 1  # ranks that share a host and its link; they are numbered host by host
    measure_every: int = 20
    imports: list[str] = field(default_factory=list[str])  # the user's own modules and files with parts
    slow: list[str] = field(default_factory=list[str])  # ranks that sleep: 'RANK:MS' or 'RANK:MS:CHANCE'
    lr: dict[str, float] = field(default_factory=dict[str, float])  # multiples of the workload's learning rate, by run
    compute: str = ""  # how long an emulated accelerator computes, such as "150ms"; empty: the workload computes itself
    timing: bool = False  # compare steps, not quality: every run has as many steps, and none is a target

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> "ComparePlan":
        return ComparePlan(**json.loads(text))
