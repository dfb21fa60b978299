"""What is held back until a step has been taken."""

from dataclasses import dataclass, field

from gossamer.core.bucket import PendingState
from gossamer.recipe import Recipe


@dataclass
class PendingCommit:
    """What an averaged gradient will change, once the optimizer has taken it."""

    drafts: list[PendingState] = field(default_factory=list[PendingState])
    decided: Recipe | None = None

    def commit(self) -> None:
        for draft in self.drafts:
            draft.commit()

    def settle(self) -> None:
        """The optimizer has descended, so what was drafted holds; what was decided waits for the end of the step."""
        self.commit()
        self.drafts = []
