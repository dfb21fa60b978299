"""No command opens the machine: what its processes listen on, nobody on another machine can reach."""

import os
import signal
import socket

import pytest
from tests.bench.cli.conftest import Shell
from tests.listening import listeners


def test_a_socket_that_is_open_to_all_is_seen() -> None:
    with socket.create_server(("", 0)) as wide, socket.create_server(("127.0.0.1", 0)) as narrow:
        seen = {x.port: x.open_to_others for x in listeners([os.getpid()])}
        assert (seen[wide.getsockname()[1]], seen[narrow.getsockname()[1]]) == (True, False)


@pytest.mark.gang
def test_nobody_on_another_machine_can_reach_what_a_command_listens_on(shell: Shell) -> None:
    """`train` and `doctor` are looked at where they are stopped, in test_runs and test_doctor."""
    forever = ("--workload", "ridge", "--hosts", "2", "--steps", "1000000", "--json")
    process = shell.start("compare", "ddp", "osgp", *forever)
    shell.await_steps(process)
    shell.expect_to_be_closed(process)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=300)
    shell.expect_nothing()
