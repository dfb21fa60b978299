"""Warm-up of codecs: encode a few elements before training, so that kernels are compiled or loaded by then."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import cast

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Codec, Context, LinearCodec, ReduceResult
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import AllReduce, Program

# Kernels for GPUs are compiled anew for lengths that are multiples of 16.
_SHAPES = ({"w": (64, 64)}, {"w": (64, 64), "b": (3,)})


def warm(recipe: object, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Encode and decode a few elements with every codec of a recipe, and check that they are finite, as training does.

    >>> from gossamer.codecs import QSGD
    >>> warm(QSGD(bits=3), torch.device("cpu"))
    """
    for shapes in _SHAPES:
        block = Bucket.of({n: torch.ones(s, dtype=dtype, device=device) for n, s in shapes.items()})
        kernels.absmax(block.flat.float(), (0, block.numel))
        for codec in set(codecs_in(recipe)):
            _try(codec, block, Context(0, 1, 0, CounterRng(0, 0, 0)))


def codecs_in(part: object) -> Iterator[Codec | LinearCodec]:
    """All codecs of a recipe or a part, at any depth."""
    if isinstance(part, (Codec, LinearCodec)):
        yield part
    if is_dataclass(part):
        yield from codecs_in([getattr(part, field.name) for field in fields(part)])
    elif isinstance(part, Mapping):
        yield from codecs_in(list(cast("Mapping[object, object]", part).values()))
    elif isinstance(part, (list, tuple)):
        for inner in cast("Sequence[object]", part):
            yield from codecs_in(inner)


def _try(codec: Codec | LinearCodec, block: Bucket, context: Context) -> None:
    if isinstance(codec, Codec):
        wire = codec.encode(block, {}, context)
        codec.mean([wire], block.layout, codec.decode(wire, block))
    if isinstance(codec, LinearCodec):
        _alone(codec.average(block, {}, context))


def _alone(program: Program[ReduceResult]) -> None:
    """Run a sum over the ranks with this rank only."""
    answer: Tensor | None = None
    with suppress(StopIteration):
        while True:
            verb = program.send(answer)
            if not isinstance(verb, AllReduce):
                return  # it asks for more than a sum: its kernels load at the first step
            answer = verb.tensor
