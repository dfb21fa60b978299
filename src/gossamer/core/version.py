"""The version, where every floor can read it: checkpoints say who wrote them."""

__version__ = "0.1.0"
