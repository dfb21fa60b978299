"""A small model for plans."""

from gossamer.planning.model_shapes import from_shapes

SHAPES = {"embed": (96, 32), "w1": (32, 64), "b1": (64,), "w2": (64, 32), "head": (32, 96)}
SMALL = from_shapes(SHAPES, 0.1, name="small", memory_rate=10e9, momenta=1)
