"""The properties that codecs and exchanges share: how lossy they are, and for which inputs."""

from abc import abstractmethod

from gossamer.core.parts import Part


class Lossy(Part):
    """A part that may lose information: the base of codecs and exchanges."""

    @property
    @abstractmethod
    def unbiased(self) -> bool: ...

    @property
    def exact(self) -> bool:
        """True if nothing is lost."""
        return False

    @property
    def any_size(self) -> bool:
        """True if gradients of any magnitude are encoded equally well; else some are too small or too large for it."""
        return True

    @property
    def votes(self) -> bool:
        """True if each rank has one vote per element, whatever the magnitude of its gradient, so ranks cannot be weighted."""
        return False

    @property
    def own_size(self) -> bool:
        """True if the sent magnitude is set by the part's argument, not by the gradient, so that small gradients send none or too much."""
        return False

    @property
    def sparse(self) -> bool:
        """True if some elements are sent exactly, and the others not at all."""
        return False

    @property
    def whole(self) -> bool:
        """True if it needs all parameters in one bucket (a global top-k)."""
        return False
