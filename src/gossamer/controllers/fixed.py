"""No controller: the recipe stays the same."""

from typing import Any, final

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Facts
from gossamer.core.parts import part


@final
@part("fixed")
class Fixed(Controller):
    """Keep the recipe from the first step to the last.

    Use: unless a recipe should change during training; it is the default.

    >>> Fixed()
    fixed()
    """

    @property
    def traits(self) -> frozenset[str]:
        return frozenset()

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        return recipe
