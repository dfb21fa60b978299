"""The properties that codecs and exchanges share: how lossy they are, and for which inputs."""

from abc import abstractmethod

from gossamer.core.parts import Part


class Lossy(Part):
    """A part that may lose information: the base of codecs and exchanges."""

    @property
    @abstractmethod
    def unbiased(self) -> bool: ...

    @property
    def needs_feedback(self) -> bool:
        """True if training need not converge without error feedback around it."""
        return not self.unbiased

    @property
    def contracts(self) -> bool:
        """True if E|x - sent|^2 < |x|^2, so that error feedback around it is stable."""
        return True

    @property
    def bounds_residual(self) -> bool:
        """True if the residual of error feedback around it stays bounded, although it does not contract."""
        return False

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

    @property
    def sum_rounding(self) -> float:
        """The relative rounding error of each addition in the reduction, which no memory keeps."""
        return 0.0

    @property
    def bucket_mb(self) -> float:
        """The default size of a bucket in megabytes, found by measurement."""
        return 25.0
