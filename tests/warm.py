"""Loads all compiled kernels: imported where processes are forked from, it saves each of them a second of its processor."""

from gossamer import kernels

kernels.warmup()
