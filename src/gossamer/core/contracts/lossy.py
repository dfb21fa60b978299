"""How much gets through, and of what: codecs and exchanges say it in the same words."""

from abc import abstractmethod

from gossamer.core.parts import Part


class Lossy(Part):
    """What codecs and exchanges promise alike: how much gets through, and of what."""

    @property
    @abstractmethod
    def unbiased(self) -> bool: ...

    @property
    def exact(self) -> bool:
        """True if everything gets through."""
        return False

    @property
    def any_size(self) -> bool:
        """True if small and large gradients are written alike; else there are some too small, or too large, for it."""
        return True

    @property
    def votes(self) -> bool:
        """True if a rank has one vote on each element, whatever the size of what it gives: no rank can count more than others."""
        return False

    @property
    def own_size(self) -> bool:
        """True if what travels is as large as its own number says, so that of small gradients nothing does, or too much."""
        return False

    @property
    def sparse(self) -> bool:
        """True if some elements get through as they are, and nothing of the others."""
        return False

    @property
    def whole(self) -> bool:
        """True if it must see all parameters in one block (a global top-k)."""
        return False
