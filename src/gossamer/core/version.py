"""The version of gossamer, which checkpoints record."""

__version__ = "0.1.0"
