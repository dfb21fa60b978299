"""What is held back until a step has been taken."""

from dataclasses import dataclass, field

from gossamer.core.block import Draft
from gossamer.recipe import Recipe


@dataclass
class Held:
    """What an averaged gradient will change, once the optimizer has taken it."""

    drafts: list[Draft] = field(default_factory=list[Draft])
    decided: Recipe | None = None

    def commit(self) -> None:
        for draft in self.drafts:
            draft.commit()

    def settle(self) -> None:
        """The optimizer has descended, so what was drafted holds; what was decided waits for the end of the step."""
        self.commit()
        self.drafts = []
