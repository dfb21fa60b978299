"""Runs the command `gossamer` for `python -m gossamer`, and on each rank for `torchrun -m gossamer`."""

from gossamer.bench.cli import entry

entry()
