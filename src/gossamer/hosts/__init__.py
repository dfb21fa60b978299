"""Floor 6: how a training loop that already exists is given a recipe."""

from gossamer.hosts import checkpoint, ddp
from gossamer.hosts.attach import attach
from gossamer.hosts.communicator import Communicator

__all__ = ["Communicator", "attach", "checkpoint", "ddp"]
