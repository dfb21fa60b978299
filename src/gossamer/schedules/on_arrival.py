"""Asynchronous SGD: a server applies every step when it arrives, however old its model was."""

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.contracts import Context
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program, all_reduce, start
from gossamer.core.wire import take
from gossamer.kernels.finite import all_finite
from gossamer.schedules import mixing
from gossamer.schedules.pair_server import send_shutdown
from gossamer.schedules.server import Server, answer, number_in, number_of, report


@final
@part("on_arrival")
class OnArrival(Schedule):
    """Asynchronous SGD: the last rank holds the model x and adds each rank's step to it when it arrives.

    A rank takes x, computes a gradient at it, and its optimizer makes a step u: under SGD -lr g(x). It sends u, the server
    sets x <- x + u, and the rank goes on from the new x. No rank waits for another's step. The staleness s of u is the number
    of other steps added to x since the rank took it: about N - 1 if all ranks have equal speed. With `by_staleness`,
    x <- x + u / max(s, 1).

    Each step counts in full, where an average divides by N: choose the learning rate for one rank's batch. Momentum is that of
    a rank's own gradients. Under plain SGD, a constant s and a curvature c it is stable if lr c < 2 sin(pi / (2 (2 s + 1))): 2, 1,
    .62 for s = 0, 1, 2.

    The last rank trains like all others, and a comm thread of it answers them. Each rank counts its own steps. All ranks must
    call `consensus`, `finish`, `state_dict` and `save` together; the consensus is x. A step that is not finite is sent as 0,
    and its rank goes on from x. Results depend on timing; in the simulator they are the same each time.
    `comm.metrics()` has the mean and the largest s of a rank, the ledger every s.

    Use: as the baseline for backup workers; on ranks of changing speed with fast links.

    Not for: slow links, because all messages pass the last rank's link; many ranks at a learning rate that is unstable with
    stale steps; runs that must be reproducible bit for bit.

    Wire: 4 d + 8 bytes from each other rank, and as much to each of them from the last rank (8 d + 8 in double precision).

    >>> OnArrival(by_staleness=True)
    on_arrival(by_staleness=True)

    Papers: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; Zhang, Gupta, Lian, Liu, Staleness-Aware Async-SGD for
    Distributed Deep Learning, IJCAI 2016.
    """

    by_staleness: bool = False

    @cached_property
    def shape(self) -> Shape:
        return Shape(is_async=True, counts_alike=True, lane="server", serves=True)

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(whole=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            *mixing.whole_models(
                "each step goes to the server once, and a residual of it would never be sent; drop the memory",
                "a step is added to the model as a whole; drop the {rules}",
                "server to rank, and steps back, uncompressed; use 'allreduce(fp32()) + {schedule}', or "
                "'{exchange} + quorum_rounds(4)', which waits for few and compresses",
            ),
            excludes(
                "two levels",
                because="{exchange} under {schedule}: each rank talks to the server on its own, without the ranks of its node; leave "
                "the nodes out",
            ),
        )

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if len(binding.layouts) != 1:
            raise AttachError(
                f"{self} sends a step as one message, so it needs all parameters in one bucket; give them all the same dtype and the same device"
            )

    def consensus_share(self, loop: Loop) -> list[Share]:
        if loop.ranks.rank == _server(loop.ranks.size):
            return Share.each([loop.live["server"].model() if loop.live else self._kept(loop)])
        return [Share(torch.zeros_like(x), torch.zeros((), dtype=torch.float32)) for x in loop.parameters()]

    def begin(self, loop: Loop) -> Program[None]:
        if loop.ranks.size == 1 or "server" in loop.live:
            return
        serves = loop.ranks.rank == _server(loop.ranks.size)
        loop.live["server"] = server = Server(loop, self.by_staleness, self.shape.lane) if serves else None
        if server is not None:
            yield from server.open()

    def step(self, loop: Loop) -> Program[None]:
        yield from self.begin(loop)  # if the forward hook did not run
        (before,), (state,) = loop.parameters(), loop.mixing
        if not (yield OptimizerStep()):
            return
        move, taken = self._moved(loop, before), number_of(state, "taken")
        server: Server | None = loop.live["server"]
        if server is None:
            number, model = yield from self._hand_in(loop, move)
        else:
            yield from server.look()
            number, model = server.add(move, taken)
        loop.write([model])
        state["taken"] = torch.tensor(number)
        loop.record.aged(number - 1 - taken)

    def quiesce(self, loop: Loop) -> Program[None]:
        """Wait for all ranks; a rank that is here has sent all its steps."""
        if loop.ranks.size > 1:
            yield from all_reduce(torch.zeros(1, dtype=torch.float32, device=loop.buckets[0].device))

    def leave(self, loop: Loop) -> Program[None]:
        """Send a shutdown message to the server, which answers until it has one from every other rank."""
        yield from self.begin(loop)
        if (server := _server(loop.ranks.size)) != loop.ranks.rank:
            yield from start(send_shutdown([server], loop.buckets[0].device), "goodbye", lane=self.shape.lane)

    def _moved(self, loop: Loop, before: Tensor) -> Tensor:
        """Return this rank's step; zeros if it is not finite."""
        (after,) = loop.parameters()
        move = after.sub_(before)
        if not all_finite([move]):
            loop.record.round_dropped()
            move.zero_()
        return move

    def _hand_in(self, loop: Loop, move: Tensor) -> Program[tuple[int, Tensor]]:
        yield from loop.messages.post(self._message, [move])
        ((number, wire),) = yield from loop.messages.collect()
        return number_in(number), take(wire, move.dtype, move.numel())[0]

    def _message(self, move: Bucket, state: State, context: Context) -> Program[list[Tensor]]:
        """Return the messages of a rank's step; on the server, its answers to all ranks (only a dry run uses them)."""
        server = _server(context.size)
        if context.rank != server:
            return report(server, number_of(state, "taken"), move)
        return _answers(move, range(server))

    def _kept(self, loop: Loop) -> Tensor:
        """Return the model of a server that has not started."""
        (state,), (model,) = loop.mixing, loop.parameters()
        return state.get("x", model)


def _server(size: int) -> int:
    return size - 1


def _answers(move: Bucket, callers: range) -> Program[list[Tensor]]:
    for caller in callers:
        yield from answer(caller, move.numel * move.flat.element_size(), lambda wire: (0, move.flat))
    return []
