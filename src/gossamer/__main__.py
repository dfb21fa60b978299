"""`python -m gossamer` is the command `gossamer`; so `torchrun -m gossamer` starts it as one of several ranks."""

from gossamer.bench.cli import entry

entry()
