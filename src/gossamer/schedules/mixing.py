"""Mixing: how a schedule runs its mixer over the buckets of a loop."""

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
    """Return the constraints of a schedule that sends whole models: no memory, no rules, an exact exchange."""
    return (
        excludes("memory", because="{memory} under {schedule}: " + partners),
        excludes("singles out", because="{rules} cannot single out parameters under {schedule}: " + singled),
        excludes(
            "control",
            because="{controller} under {schedule} has nothing to change: models travel uncompressed; drop it",
        ),
        requires("exact", because="{exchange} under {schedule} would send nothing: whole models go from " + compress),
    )


def mix(loop: Loop, mixer: Mixer, round: int) -> Program[None]:
    """Run one round, from push to absorb, bucket by bucket.

    At most two buckets are in flight: one travels and the next waits in its comm thread. This bounds memory.
    """
    blocks = [loop.part([i]) for i in range(len(loop.buckets))]
    pushed = list[Bucket]()
    for one, before in zip(blocks, [None, *blocks]):
        yield from _push(one, mixer, round, pushed)
        if before is not None:
            yield from _land(before, mixer, [pushed.pop(0)])
    for last in blocks[-1:]:
        yield from _land(last, mixer, pushed)


def overlap(loop: Loop, mixer: Mixer, round: int) -> Program[None]:
    """Absorb the messages of the last round, and start the next round, bucket by bucket."""
    for i in range(len(loop.buckets)):
        one = loop.part([i])
        landed = yield from land(one, mixer)
        yield from one.messages.post(partial(mixer.push, round=round), landed or None)


def land(loop: Loop, mixer: Mixer) -> Program[list[Tensor]]:
    """Absorb the messages in flight; returns the models, without those that exist only as parameters. Empty if none was sent."""
    return [*_absorb(loop, mixer, (yield from loop.messages.collect()))]


def settle(loop: Loop, mixer: Mixer) -> None:
    """Update the models after a local step, while a part of their mass is in flight."""
    for _ in _absorb(loop, mixer, [[] for _ in loop.buckets]):
        pass  # bucket by bucket, so that no second copy of the model is made


def agree(loop: Loop, mixer: Mixer) -> Program[None]:
    """Average the models exactly, after all messages in flight; then every rank has the weight 1 again.

    If the average is not finite, each rank keeps its own model.
    """
    yield from land(loop, mixer)
    means = yield from loop.averages.of(numerators(loop, mixer))
    if means is None:
        return
    loop.assign(means)
    for state in loop.mixing:
        state.clear()


def numerators(loop: Loop, mixer: Mixer) -> list[Tensor]:
    """Return the mixer's numerators, whose sum over all ranks mixing does not change."""
    return [mixer.numerator(block, state) for block, state in zip(loop.blocks(), loop.mixing)]


def shares(loop: Loop, mixer: Mixer) -> list[Share]:
    """Return this rank's numerators and weights, including messages that have arrived but are not absorbed."""
    out = list[Share]()
    for block, kept, wires in zip(loop.blocks(), loop.mixing, loop.messages.arrived(), strict=True):
        state: State = dict(kept)
        if wires:
            block, wires = mixer.heal(block, state, wires, _unheard)
            block = block.like(mixer.absorb(block, state, wires))
        out.append(Share(mixer.numerator(block, state), state.get("w", torch.ones((), dtype=torch.float32))))
    return out


def _unheard(rank: int | None, fine: bool | Tensor) -> bool | Tensor:
    """Looking ahead counts nobody."""
    return fine


def _push(loop: Loop, mixer: Mixer, round: int, pushed: list[Bucket]) -> Program[None]:
    """Send the buckets, and add them to `pushed`; they do not change before they are absorbed."""

    def message(block: Bucket, state: State, context: Context) -> Program[list[Tensor]]:
        pushed.append(block)
        return mixer.push(block, state, context, round)

    yield from loop.messages.post(message)


def _land(loop: Loop, mixer: Mixer, pushed: Sequence[Bucket]) -> Program[None]:
    for i, wires in enumerate((yield from loop.messages.collect())):
        _write(loop.part([i]), mixer, pushed[i], wires)


def _absorb(loop: Loop, mixer: Mixer, arrived: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Absorb and write each bucket; yields its model if it lies in one tensor."""
    for i, wires in enumerate(arrived):
        one = loop.part([i])
        (bucket,), (state,) = one.buckets, one.mixing
        followed = mixer.follow(bucket.pieces, bucket.layout, state, wires)
        yield from [_write(one, mixer, one.blocks()[0], wires)] if followed is None else followed


def _write(one: Loop, mixer: Mixer, block: Bucket, wires: Sequence[Tensor]) -> Tensor:
    """Absorb messages into one bucket, and write it; returns the model as the parameters hold it."""
    (state,) = one.mixing
    block, wires = mixer.heal(block, state, wires, one.record.finite)
    (taken,) = one.write([mixer.absorb(block, state, wires)])
    mixer.wrote(block.like(taken), state)
    return taken
