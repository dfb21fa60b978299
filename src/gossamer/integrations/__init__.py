"""Integrations: attach a recipe to an existing training loop, or register it as a DDP hook."""

from gossamer.integrations import checkpoint, ddp
from gossamer.integrations.attach import attach
from gossamer.integrations.communicator import Communicator

__all__ = ["Communicator", "attach", "checkpoint", "ddp"]
