"""Train PyTorch models over slow, uneven or unreliable networks.

One line gives a training loop a recipe: `comm = gossamer.attach(model, optimizer, "terngrad")`.
"""

__version__ = "0.1.0"

from gossamer import recipes
from gossamer.core.errors import GossamerError
from gossamer.hosts import Communicator, attach, checkpoint, ddp
from gossamer.kernels import warmup
from gossamer.recipe import Recipe

__all__ = ["Communicator", "GossamerError", "Recipe", "__version__", "attach", "checkpoint", "ddp", "recipes", "warmup"]
