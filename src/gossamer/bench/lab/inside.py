"""The keeper: process 1 in a lab's private namespaces. It makes the network, starts the ranks and ends them.

It is run by path, as a script, so that it starts in milliseconds and imports only the standard library.
When it ends, for whatever reason, the kernel kills every process of the lab and removes its network, so
nothing is left to clean up. It reads its plan as one line of JSON from standard
input, which then stays open: when it closes, the owner has gone or wants the end. It writes one JSON object
per event to standard output.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
DEVICES = Path("/proc/self/net/dev")
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave a namespace for a new one (`os.unshare` exists from Python 3.12 on)."""
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def enter(namespace: int) -> None:
    """Enter the network namespace behind a file descriptor."""
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def read_line() -> bytes:
    """Read one line from the owner, who writes nothing after it."""
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            sys.exit()
        text += part
    return text


def tell(**event: Any) -> None:
    """Write one event to the owner, who may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(event).encode() + b"\n")


def batch(tool: str, text: str) -> None:
    """Feed lines to `ip` or `tc`."""
    done = subprocess.run([tool, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{Path(tool).name} failed: {done.stderr.strip()}")


def open_network() -> int:
    """Return a file descriptor of this process's network namespace."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def make_network(plan: dict[str, Any]) -> list[int]:
    """Make the bridge and the hosts' networks; return one namespace per host."""
    middle, hosts = open_network(), list[int]()
    for _ in plan["hosts"]:
        unshare(CLONE_NEWNET)
        hosts.append(open_network())
    enter(middle)
    batch(plan["tools"]["ip"], plan["ip"].format(namespaces=[f"/proc/1/fd/{host}" for host in hosts]))
    batch(plan["tools"]["tc"], plan["tc"])
    for host, namespace in zip(plan["hosts"], hosts):
        enter(namespace)
        batch(plan["tools"]["ip"], host["ip"])
        batch(plan["tools"]["tc"], host["tc"])
    enter(middle)
    return hosts


def change_rates(change: dict[str, Any], tc: str, hosts: list[int]) -> None:
    """Give all links other rates while ranks use them."""
    middle = open_network()
    batch(tc, change["tc"])
    for lines, namespace in zip(change["hosts"], hosts):
        enter(namespace)
        batch(tc, lines)
    enter(middle)
    os.close(middle)


def name_hosts(plan: dict[str, Any]) -> None:
    """Let names resolve: an /etc/hosts that only this lab sees, since no name server can be reached."""
    if not Path("/etc/hosts").exists():
        return  # there is no file to mount over; addresses still work
    mount, umount = plan["tools"]["mount"], plan["tools"]["umount"]
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in plan["hosts"]:  # the second form is the address of a client in a server that uses IPv6
        lines += [f"{host['address']} {host['name']}", f"::ffff:{host['address']} {host['name']}"]
    # The file needs a file system: one in memory, unmounted once the file is bound.
    subprocess.run([mount, "-t", "tmpfs", "tmpfs", "/tmp"], check=True)
    Path("/tmp/hosts").write_text("\n".join(lines) + "\n")
    subprocess.run([mount, "--bind", "/tmp/hosts", "/etc/hosts"], check=True)
    subprocess.run([umount, "/tmp"], check=True)


def start(rank: dict[str, Any], name: str, namespace: int, command: list[str], environment: dict[str, str]) -> int:
    """Start the command as one rank on the host of this name, in a session of its own; return its process id."""
    process = os.fork()
    if process:
        os.close(rank["output"])
        return process
    try:
        os.setsid()
        enter(namespace)
        unshare(CLONE_NEWUTS)
        socket.sethostname(name)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(rank["output"], 1)
        os.dup2(rank["output"], 2)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, {**environment, **rank["environment"]})
    except BaseException as error:  # this copy of the keeper must end after any error
        why = getattr(error, "strerror", None) or error
        os.write(2, f"gossamer lab: cannot run {command[0]!r}: {why}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def is_stopped(process: int) -> bool:
    """True if a signal such as SIGSTOP has stopped a process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in {"T", "t"}
    except OSError:  # the process has ended, or this is not Linux
        return False


def tell_group(process: int, number: int) -> None:
    """Send a signal to a rank's whole process group."""
    try:
        os.killpg(process, number)
    except ProcessLookupError:  # it has not reached setsid yet, or has just ended
        os.kill(process, number)


def _note(number: int, frame: object) -> None:
    """Do nothing: a signal needs a handler to write to the wakeup file descriptor."""


class Keeper:
    """Runs the ranks, and ends them after a failure, a timeout or the end of the owner."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.alive: dict[int, int] = {}
        self.failed = self.stopping = False
        self.ask_at = time.monotonic() + plan["timeout"] if plan["timeout"] else float("inf")
        self.kill_at = float("inf")
        self.began = float("inf")  # when all ranks had been started
        self.changes = [*plan["changes"]]  # of rates, in the order of time
        self.hosts = list[int]()

    def run(self, hosts: list[int]) -> None:
        """Start all ranks on their hosts and wait until the last has ended."""
        wake, bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(bell)
        signal.signal(signal.SIGCHLD, _note)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number, rank in enumerate(self.plan["ranks"]):
            name = self.plan["hosts"][rank["host"]]["name"]
            process = start(rank, name, hosts[rank["host"]], self.plan["command"], self.plan["environment"])
            self.alive[process] = number
        watched = [0, wake]
        self.began, self.hosts = time.monotonic(), hosts
        while self.alive:
            patience = min(self.ask_at, self.kill_at, self.change_at()) - time.monotonic()
            ready, _, _ = select.select(watched, [], [], max(0.0, min(patience, 3600.0)))
            if wake in ready:
                os.read(wake, 4096)
                self.collect()
            if 0 in ready and not os.read(0, 4096):
                watched.remove(0)
                self.ask("owner")
            self.look_at_clock()

    def collect(self) -> None:
        """Collect every process that has ended; process 1 also inherits processes that are no ranks."""
        while self.alive:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            rank = self.alive.pop(process, None)
            if rank is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            tell(event="exit", rank=rank, code=code if code >= 0 else 128 - code, stopped=self.stopping)
            if code != 0 and not self.failed:
                self.failed = True
                self.ask_at = min(self.ask_at, time.monotonic() + self.plan["grace"])

    def change_at(self) -> float:
        """When rates change next."""
        return self.began + self.changes[0]["at"] if self.changes else float("inf")

    def look_at_clock(self) -> None:
        """Change rates when it is time, and send SIGTERM or SIGKILL to the ranks when theirs is up."""
        now = time.monotonic()
        if now >= self.change_at():
            change_rates(self.changes.pop(0), self.plan["tools"]["tc"], self.hosts)
        if now >= self.kill_at:
            os.kill(-1, signal.SIGKILL)  # every process in this pid namespace but process 1
            self.kill_at = float("inf")
        elif now >= self.ask_at:
            self.ask("failure" if self.failed else "timeout")

    def ask(self, reason: str) -> None:
        """Send SIGTERM to every rank's process group, once."""
        self.ask_at = float("inf")
        if self.stopping:
            return
        self.stopping = True
        frozen = [rank for process, rank in self.alive.items() if is_stopped(process)]
        tell(event="stop", reason=reason, frozen=frozen)
        self.kill_at = time.monotonic() + self.plan["kill_after"]
        for process in self.alive:
            tell_group(process, signal.SIGTERM)
            tell_group(process, signal.SIGCONT)  # a frozen process handles SIGTERM only after SIGCONT


def main() -> None:
    """Read the plan, make the network, run the hosts, report."""
    plan = json.loads(read_line())
    for rank in plan["ranks"]:
        os.set_inheritable(rank["output"], False)
    try:
        name_hosts(plan)
        hosts = make_network(plan)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        tell(event="error", text=str(error))
        return
    tell(event="start", devices=DEVICES.read_text())
    try:
        Keeper(plan).run(hosts)
    except RuntimeError as error:  # rates could not be changed: the kernel ends all ranks with this process
        tell(event="error", text=str(error))
        return
    tell(event="end", devices=DEVICES.read_text())


if __name__ == "__main__":
    main()
