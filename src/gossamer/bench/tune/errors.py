"""What a search complains about."""

from gossamer.core.errors import GossamerError


class TuningError(GossamerError, ValueError):
    """A search that cannot be made as it was asked for."""
