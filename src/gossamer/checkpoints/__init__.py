"""Checkpoints: what a run saves, how it is written and read, and whether it fits another run."""
