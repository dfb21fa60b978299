"""No command opens the machine: what its processes listen on, nobody on another machine can reach."""

import os
import signal
import socket

import pytest
from tests.cli.conftest import Shell
from tests.listening import listeners
from tests.marked import wait_for

FOREVER = ("--workload", "ridge", "--hosts", "2", "--steps", "1000000")
COMMANDS = [("train", "terngrad", *FOREVER, "--json"), ("compare", "ddp", "osgp", *FOREVER, "--json"), ("doctor",)]


def test_a_socket_that_is_open_to_all_is_seen() -> None:
    with socket.create_server(("", 0)) as wide, socket.create_server(("127.0.0.1", 0)) as narrow:
        seen = {x.port: x.open_to_others for x in listeners([os.getpid()])}
        assert (seen[wide.getsockname()[1]], seen[narrow.getsockname()[1]]) == (True, False)


@pytest.mark.gang
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_nobody_on_another_machine_can_reach_what_a_command_listens_on(shell: Shell, words: tuple[str, ...]) -> None:
    process = shell.start(*words)
    if "--json" in words:
        shell.await_steps(process)
    # All have found each other once each rank listens for its peers; and the store is there before.
    wait_for(lambda: len({x.pid for x in listeners(shell.processes())} & set(shell.ranks())) == 2)
    seen = listeners(shell.processes())
    assert {x.pid for x in seen} == {process.pid, *shell.ranks()}
    assert [x for x in seen if x.open_to_others] == []
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    shell.expect_nothing()
