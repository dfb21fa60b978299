"""Train PyTorch models over slow, uneven or unreliable networks."""

__version__ = "0.1.0"
