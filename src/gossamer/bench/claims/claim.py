"""What a paper claims, how it is tried, and the rule by which it is judged: one frozen value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gossamer.bench.claims.evidence import ClaimFigure, Evidence
from gossamer.bench.claims.plan import ClaimStudy, Contest
from gossamer.bench.claims.verdict import Judgement, Verdict
from gossamer.core.errors import GossamerError


class ClaimError(GossamerError, ValueError):
    """A claim that does not exist, or a record that does not belong to it."""


class ClaimInterrupted(GossamerError, RuntimeError):
    """A claim whose processes were ended; what was finished is kept."""


@dataclass(frozen=True)
class PaperStatement:
    """One statement of a paper. The rule was written before anybody ran it; one without a judge waits.

    >>> PaperStatement("a", "It is faster.", "seconds", "holds", waits="an honest clock").judge is None
    True
    """

    key: str
    says: str
    rule: str
    expected: Verdict
    judge: Callable[[Evidence], Judgement] | None = None
    waits: str = ""  # for what, where there is no judge

    def __post_init__(self) -> None:
        if (self.judge is None) != bool(self.waits):
            raise ClaimError(f"statement {self.key}: give it a judge, or say what it waits for, and not both")


def _nothing(evidence: Evidence) -> list[ClaimFigure]:
    return []


@dataclass(frozen=True)
class PaperClaim:
    """The claims of one paper."""

    name: str
    paper: str  # authors and year, and where its words were read
    module: str  # `__name__` of the claim's file: its own parts are registered by importing it
    statements: tuple[PaperStatement, ...]
    setup: tuple[str, ...]  # what is run, in at most three lines
    limits: str  # what our scale cannot show
    plan: Mapping[str, ClaimStudy | Contest] = field(default_factory=dict[str, ClaimStudy | Contest])
    methods: tuple[str, ...] = ()  # modules of the library that studies use; contests name theirs by their recipes
    figures: Callable[[Evidence], list[ClaimFigure]] = _nothing

    def __post_init__(self) -> None:
        keys = [s.key for s in self.statements]
        if len({*keys}) < len(keys) or not keys:
            raise ClaimError(f"{self.name}: every statement needs a key of its own, and these are {keys}")
        if len(self.setup) > 3:
            raise ClaimError(f"{self.name}: say what is run in three lines, not {len(self.setup)}")
