"""Mixing: how a schedule drives its mixer over the blocks of a loop."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires
from gossamer.core.contracts import Context, Mixer
from gossamer.core.loop import Loop
from gossamer.core.schedule import Share
from gossamer.core.verbs import Program


def whole_models(partners: str, singled: str, compress: str) -> tuple[Constraint, ...]:
    """What bars a schedule in which whole models go from rank to rank: why no memory, why no rules, and how else to compress."""
    return (
        excludes("memory", because="{memory} under {schedule}: " + partners),
        excludes("singles out", because="{rules} cannot single out parameters under {schedule}: " + singled),
        excludes("control", because="{controller} has no knob to turn under {schedule}"),
        requires("exact", because="{exchange} under {schedule} would send nothing: whole models go from " + compress),
    )


def mix(loop: Loop, mixer: Mixer, round: int) -> Program[None]:
    """One round, from push to absorb, block by block.

    Two are on their way at any time: one travels and the next waits in its lane, and there need not be room for more.
    """
    blocks = [loop.part([i]) for i in range(len(loop.which))]
    pushed = list[Bucket]()
    for one, before in zip(blocks, [None, *blocks]):
        yield from _push(one, mixer, round, pushed)
        if before is not None:
            yield from _land(before, mixer, [pushed.pop(0)])
    for last in blocks[-1:]:
        yield from _land(last, mixer, pushed)


def overlap(loop: Loop, mixer: Mixer, round: int) -> Program[None]:
    """Absorb what the last round has brought, and start the next one, block by block."""
    for i in range(len(loop.which)):
        one = loop.part([i])
        landed = yield from land(one, mixer)
        yield from one.post(partial(mixer.push, round=round), landed or None)


def land(loop: Loop, mixer: Mixer) -> Program[list[Tensor]]:
    """The models with what has come, but for those that lie in pieces only; none where nothing had been sent."""
    return [*_absorb(loop, mixer, (yield from loop.collect()))]


def settle(loop: Loop, mixer: Mixer) -> None:
    """After a local step: the model of what this rank holds while the rest of its share is away."""
    for _ in _absorb(loop, mixer, [[] for _ in loop.which]):
        pass  # block by block: a model is not held twice


def agree(loop: Loop, mixer: Mixer) -> Program[None]:
    """An exact average of all there is: what is on its way lands first, and afterwards each rank holds a whole share.

    Where it is not finite, each rank keeps what it has.
    """
    yield from land(loop, mixer)
    means = yield from loop.average(numerators(loop, mixer))
    if means is None:
        return
    loop.assign(means)
    for state in loop.mixing:
        state.clear()


def numerators(loop: Loop, mixer: Mixer) -> list[Tensor]:
    """What sums to the same total over all ranks whatever is mixed."""
    return [mixer.numerator(block, state) for block, state in zip(loop.blocks(), loop.mixing)]


def shares(loop: Loop, mixer: Mixer) -> list[Share]:
    """The numerators and the weights that this rank holds, with what has come and is not absorbed yet."""
    return [*_shares(loop, mixer)]


def _shares(loop: Loop, mixer: Mixer) -> Iterator[Share]:
    for block, kept, wires in zip(loop.blocks(), loop.mixing, loop.arrived(), strict=True):
        state: State = dict(kept)
        if wires:
            block, wires = mixer.heal(block, state, wires, _unheard)
            block = block.like(mixer.absorb(block, state, wires))
        yield Share(mixer.numerator(block, state), state.get("w", torch.ones((), dtype=torch.float32)))


def _unheard(rank: int | None, fine: bool | Tensor) -> None:
    """Looking ahead counts nobody."""


def _push(loop: Loop, mixer: Mixer, round: int, pushed: list[Bucket]) -> Program[None]:
    """`pushed` gets the blocks as they are, for nobody touches them before they land."""

    def message(block: Bucket, state: State, context: Context) -> Program[list[Tensor]]:
        pushed.append(block)
        return mixer.push(block, state, context, round)

    yield from loop.post(message)


def _land(loop: Loop, mixer: Mixer, pushed: Sequence[Bucket]) -> Program[None]:
    for i, wires in enumerate((yield from loop.collect())):
        _write(loop.part([i]), mixer, pushed[i], wires)


def _absorb(loop: Loop, mixer: Mixer, arrived: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Each block's model, when it has been written, if it lies in one piece."""
    for i, wires in enumerate(arrived):
        one = loop.part([i])
        (place,), (state,) = one.places, one.mixing
        followed = mixer.follow(place.pieces, place.layout, state, wires)
        yield from [_write(one, mixer, one.blocks()[0], wires)] if followed is None else followed


def _write(one: Loop, mixer: Mixer, block: Bucket, wires: Sequence[Tensor]) -> Tensor:
    """One block absorbs what came; returns its model as the parameters took it."""
    (state,) = one.mixing
    block, wires = mixer.heal(block, state, wires, one.report_finite)
    (taken,) = one.write([mixer.absorb(block, state, wires)])
    mixer.wrote(block.like(taken), state)
    return taken
