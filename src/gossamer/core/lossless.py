"""Exchanges that schedules define themselves, without codecs."""

from gossamer.core.bucket import Layout
from gossamer.core.contracts import Exchange


class LosslessExchange(Exchange):
    """An exchange that sends numbers uncompressed."""

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def needs_feedback(self) -> bool:
        return False

    @property
    def contracts(self) -> bool:
        return True

    def omega(self, layout: Layout, size: int) -> float:
        return 0.0
