"""A store that does not answer: gone, frozen, or out of reach, as a connection of one's own tells."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from gossamer.fabrics.liveness import store as reach
from gossamer.fabrics.liveness.store import why_silent

HERE = "127.0.0.1"


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind((HERE, 0))
        yield listening


def test_a_process_that_is_gone_refuses(door: socket.socket) -> None:
    assert "that hosts it (usually rank 0) has ended" in reach.why_silent_at(*door.getsockname())


def test_a_frozen_process_has_a_kernel_that_takes_connections() -> None:
    store = TCPStore(HERE, 0, None, True, wait_for_workers=False)
    said = why_silent(PrefixStore("lane", PrefixStore("gossamer", store)))
    assert said.startswith(f"the machine at {HERE}:{store.port} is up")
    assert "(usually rank 0) is frozen" in said


def test_out_of_reach_may_be_the_own_link(door: socket.socket) -> None:
    """As behind a cut cable: where too many knock, the kernel answers no more."""
    door.listen(0)
    with ExitStack() as knocking:
        for _ in range(4):
            other = knocking.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(door.getsockname())
        said = reach.why_silent_at(*door.getsockname())
    assert "is down or cut off, or this rank itself is cut off" in said


def test_a_store_without_an_address_names_all_that_it_may_be() -> None:
    assert "has ended, is frozen or cut off, or this rank itself is cut off" in why_silent(
        PrefixStore("a", HashStore())
    )
