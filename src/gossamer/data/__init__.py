"""Data: which samples each rank takes, so that nothing is seen twice and nothing is missed when ranks change."""

from gossamer.data.order import Order
from gossamer.data.shards import Rows, Shards

__all__ = ["Order", "Rows", "Shards"]
