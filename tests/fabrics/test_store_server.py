"""The process that hosts the store of members ends by itself, and not too early."""

import threading
import time

import pytest
from tests.fabrics.test_seats import CLEAN
from tests.gang import free_port
from tests.marked import wait_for

import gossamer
from gossamer.fabrics.liveness import store_server


def test_a_store_waits_for_who_has_come_since_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may load its data before it attaches, for longer than the store rests."""
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store_server, "REST", 0.5)
    monkeypatch.setattr(store_server, "PATIENCE", 100.0)
    port = free_port()
    server = threading.Thread(target=store_server.hold, args=(port,), daemon=True)
    server.start()
    wait_for(lambda: store_server._answers("127.0.0.1", port))
    first = gossamer.members(most=1, store=f"127.0.0.1:{port}")
    first.enter(20.0)
    first.leave()
    second = gossamer.members(most=1, store=f"127.0.0.1:{port}")
    time.sleep(3.5)
    assert server.is_alive()
    second.enter(20.0)
    second.leave()
    server.join(60.0)
    assert not server.is_alive()
