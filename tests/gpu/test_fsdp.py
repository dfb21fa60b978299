"""FSDP2's streams and gossamer's: a sharded model trains on the pretended device, and streams wait where they must.

FSDP2 reduces a gradient on a stream of its own and calls our hook on it; the loop's stream waits for it after backward only.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.gpu.loops import Plan, net, step
from tests.gpu.nursery import Nursery

import gossamer

pytestmark = pytest.mark.gang
FREED_BY_FSDP = (
    "at elsewhere, freed while"  # the next backward pass begins its stream after the loop's, and allocates only then
)


class Seen(NamedTuple):
    losses: list[float]
    races: Counter[str]
    lifetimes: list[str]  # of what gossamer allocated or used
    streams: set[str]  # on which hooks of gradients were called
    crossed: int


def train(rank: int, size: int, recipe: str, group: str, harm: Callable[[], None] | None = None) -> Seen:
    """`group`: none, and the mesh has two dimensions, or what the user's group of the same shards says of itself."""
    from tests.gpu import fsdp, users
    from tests.gpu.diary import diary

    users.begin(plan := Plan(recipe))
    fsdp.install()
    device, mesh = torch.device("cuda", rank + 1), fsdp.mesh_of(rank, size)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = fsdp.cut(net(plan).to(device), mesh["shard"] if group else mesh)
    if group:
        users.call_it(mesh["replicate"].get_group(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if harm is not None:
        harm()
    rng, streams = torch.Generator().manual_seed(rank), set[str]()
    with gossamer.attach(model, optimizer, recipe, mesh["replicate"] if group else None, deadline=20.0) as comm:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda _: streams.add(repr(torch.cuda.current_stream())))
        crossed = diary.crossings
        losses = [step(model, optimizer, comm, rng, device) for _ in range(4)]
        comm.finish()
        crossed = diary.crossings - crossed
    early = [text for text in diary.lifetimes if not (FREED_BY_FSDP in text and text.endswith("at elsewhere"))]
    return Seen([float(loss) for loss in losses], diary.races, early, streams, crossed)


CUT = " + bucket(0.025)"  # so that a bucket leaves while FSDP2 still reduces others


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "recipe", "group"),
    [
        (4, "topk(ratio=0.3)" + CUT, ""),
        (2, "allreduce" + CUT, ""),
        (2, "qsgd" + CUT, "nccl"),
        (2, "osgp", "nccl"),
        pytest.param(2, "overlap_local_sgd(2)", "nccl", marks=SLOW),
        pytest.param(4, "powersgd" + CUT, "gloo", marks=SLOW),
        pytest.param(4, "local_sgd(2)", "", marks=SLOW),
        pytest.param(4, "qsgd" + CUT, "nccl", marks=SLOW),
    ],
)
def test_streams_wait_for_fsdp_and_fsdp_for_them(nursery: Nursery, ranks: int, recipe: str, group: str) -> None:
    for seen in nursery.run(ranks, train, recipe, group):
        assert (seen.races, seen.lifetimes) == ({}, [])
        assert all(map(math.isfinite, seen.losses))
        assert seen.crossed > 0
        (stream,) = seen.streams
        assert not stream.startswith("the default stream")


def way_between_replicas(rank: int, size: int) -> str:
    """The path of gradients between replicas, where the mesh's groups have gloo for the CPU and NCCL for GPUs."""
    from tests.gpu import fsdp, users

    users.begin(plan := Plan("qsgd"))
    fsdp.install()
    device, mesh = torch.device("cuda", rank + 1), fsdp.mesh_of(rank, size)
    torch.cuda.set_device(device)
    model = fsdp.cut(net(plan).to(device), mesh)
    users.call_it(mesh["replicate"].get_group(), "cpu:gloo,cuda:nccl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gossamer.attach(model, optimizer, "qsgd", deadline=20.0) as comm:
        return comm.fabric.session.endpoint.path


def test_between_replicas_gradients_go_through_the_host_also_where_the_mesh_has_nccl(nursery: Nursery) -> None:
    """FSDP2 uses NCCL from another thread: two communicators at once may wait for each other for ever."""
    assert nursery.run(2, way_between_replicas) == ["staged", "staged"]


# -- the judge judged: each event that is left out is seen ----------------------------------------------------------------------


def lane_begins_after_the_loop() -> None:
    """As if gradients were ready on the loop's stream, and not on FSDP2's."""
    from gossamer.fabrics.torch.stream import StreamOrder

    real = StreamOrder.__init__

    def begin(order: Any, program: Any, device: torch.device) -> None:
        real(order, program, device)
        order._begin = torch.cuda.default_stream(device).record_event()

    StreamOrder.__init__ = begin


def copy_to_the_host_is_not_waited_for() -> None:
    torch.cuda.Event.synchronize = lambda event: None


def loop_does_not_wait_for_the_lane() -> None:
    from gossamer.fabrics.torch.stream import StreamOrder

    wait = torch.cuda.Stream.wait_event
    real = StreamOrder.land

    def land(order: StreamOrder, result: Any) -> Any:
        torch.cuda.Stream.wait_event = lambda stream, event: None
        try:
            return real(order, result)
        finally:
            torch.cuda.Stream.wait_event = wait

    StreamOrder.land = land


def results_are_not_kept_for_the_loop() -> None:
    from tests.gpu.tensors import Cuda

    Cuda.record_stream = lambda x, stream: None


def loop_does_not_wait_for_fsdp() -> None:
    """Torch's own event after the hooks: peaks of the gradients were written on its stream."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    private: Any = FSDPState
    real = private._root_post_backward_final_callback
    before = torch.cuda.Stream.wait_event

    def final(state: Any) -> None:
        torch.cuda.Stream.wait_event = lambda stream, event: None
        try:
            real(state)
        finally:
            torch.cuda.Stream.wait_event = before

    private._root_post_backward_final_callback = final


@pytest.mark.parametrize(
    ("harm", "recipe", "group"),
    [
        (lane_begins_after_the_loop, "topk(ratio=0.3)" + CUT, ""),
        (copy_to_the_host_is_not_waited_for, "topk(ratio=0.3)" + CUT, ""),
        (loop_does_not_wait_for_the_lane, "topk(ratio=0.3)" + CUT, ""),
        (results_are_not_kept_for_the_loop, "osgp", "nccl"),
        (loop_does_not_wait_for_fsdp, "topk(ratio=0.3)" + CUT, ""),
    ],
)
def test_an_event_that_is_left_out_is_seen(nursery: Nursery, harm: Callable[[], None], recipe: str, group: str) -> None:
    for seen in nursery.run(2, train, recipe, group, harm):
        assert seen.races or seen.lifetimes
