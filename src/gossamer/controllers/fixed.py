"""No control: the recipe stays as it is."""

from typing import Any, final

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Facts
from gossamer.core.parts import part


@final
@part("fixed")
class Fixed(Controller):
    """The recipe that was given, from the first step to the last.

    Use: always, unless a recipe should change as training goes.

    >>> Fixed()
    fixed()
    """

    @property
    def traits(self) -> frozenset[str]:
        return frozenset()

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        return recipe
