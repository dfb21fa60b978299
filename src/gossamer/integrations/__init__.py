"""Floor 6: how a training loop that already exists is given a recipe."""

from gossamer.integrations import checkpoint, ddp
from gossamer.integrations.attach import attach
from gossamer.integrations.communicator import Communicator

__all__ = ["Communicator", "attach", "checkpoint", "ddp"]
