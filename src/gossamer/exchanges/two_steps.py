"""Exchanges that encode twice: gradients, and then what came of them."""

from abc import abstractmethod

from gossamer.core.contracts import Codec, Exchange


class TwoSteps:
    """Promises what both steps promise: `class MyExchange(TwoSteps, Exchange)`."""

    @property
    @abstractmethod
    def both(self) -> tuple[Codec, Codec] | tuple[Exchange, Exchange]:
        """What encodes in the first step, and in the second."""

    @property
    def unbiased(self) -> bool:
        return all(step.unbiased for step in self.both)

    @property
    def needs_feedback(self) -> bool:
        return any(step.needs_feedback for step in self.both)

    @property
    def contracts(self) -> bool:
        return all(step.contracts for step in self.both)

    @property
    def bounds_residual(self) -> bool:
        return not self.contracts and all(step.contracts or step.bounds_residual for step in self.both)

    @property
    def exact(self) -> bool:
        return all(step.exact for step in self.both)

    @property
    def any_size(self) -> bool:
        return all(step.any_size for step in self.both)

    @property
    def own_size(self) -> bool:
        return any(step.own_size for step in self.both)
