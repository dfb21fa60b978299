"""State changes that wait for the optimizer step."""

from dataclasses import dataclass, field

from gossamer.core.bucket import PendingState
from gossamer.recipe import Recipe


@dataclass
class PendingCommit:
    """The state changes of an averaged gradient, to commit after the optimizer step."""

    drafts: list[PendingState] = field(default_factory=list[PendingState])
    decided: Recipe | None = None
    words: list[str] = field(default_factory=list[str])  # that say what was decided

    # Buckets for which they also agree again on what is equal on all ranks, after a change of members.
    renewed: set[int] = field(default_factory=set[int])

    def commit(self) -> None:
        for draft in self.drafts:
            draft.commit()

    def settle(self) -> None:
        """Commit the pending states after the optimizer step; the controller's decision waits for the end of the step."""
        self.commit()
        self.drafts = self.drafts[:0]
