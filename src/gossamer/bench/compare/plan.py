"""What a trial is to do; written once by the launcher, read by every rank."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MARK = "@gossamer "  # lines of a rank with this mark are events, all others are the program's own


@dataclass
class ComparePlan:
    """Contenders are recipes by name; "ddp" (and "ddp-fp16", "ddp-powersgd") and "compute" are yardsticks."""

    contenders: dict[str, str]
    workload: str = "lm"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 100  # of the baseline, or of everybody without one
    chunk: int = 10  # steps of a turn, which goes on to the end of a round; held-out quality is measured after each
    baseline: str = ""  # the others go on until they reach its quality, at most `patience` times its steps
    patience: float = 2.0
    seed: int = 0
    deadline: float = 120.0
    checkpoint: str = ""  # a folder; one contender only
    checkpoint_every: int = 50
    resume: bool = False
    network: str = "unshaped"  # as the record says it; a run that goes on stays on one network
    per_host: int = 1  # ranks that share a host and its link; they are numbered host by host
    measure_every: int = 20
    imports: list[str] = field(default_factory=list[str])  # modules and files with parts of somebody's own
    slow: list[str] = field(
        default_factory=list[str]
    )  # who sleeps: 'RANK:MS' in every step, 'RANK:MS:CHANCE' at random
    lr: dict[str, float] = field(default_factory=dict[str, float])  # multiples of the workload's rate, by contender

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> "ComparePlan":
        return ComparePlan(**json.loads(text))
