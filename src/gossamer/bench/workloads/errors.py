"""What can go wrong before the first step."""

from gossamer.core.errors import GossamerError


class WorkloadError(GossamerError, ValueError):
    """A workload, or an option of one, that does not exist."""


class DataError(GossamerError, RuntimeError):
    """Data that cannot be fetched, or is not what it should be."""


class CacheError(DataError):
    """A cache folder that cannot be used."""
