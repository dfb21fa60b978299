"""Find a way to make a private network: as root, or in a user namespace."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .errors import LabError

_PRIVATE = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_USER = ("--user", "--map-root-user")
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount", "umount": "mount"}
# An ordinary user's PATH often lacks the places where these tools live.
_ADMIN_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
_SHAPE = "{tc} qdisc add dev lo root tbf rate 1gbit burst 64kb limit 1mb"
_TRIAL = "{ip} link add name lab0 type veth peer name lab1 && {ip} link add name lab2 type bridge && " + _SHAPE
_DELAY_TRIAL = "{tc} qdisc add dev lo root netem delay 1ms"
# Kernel settings that forbid namespaces to ordinary users: where, the forbidding value, and how to allow them.
_LOCKS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)


def available(*, latency: bool = False) -> str | None:
    """Return None if a lab (with `latency`: one with delays) can be made here, else why not and what to do."""
    try:
        find_way()
    except LabError as error:
        return str(error)
    return None if not latency or _has_delay() else NO_DELAY


NO_DELAY = (
    "this kernel cannot delay packets (no netem), so a lab here has rates but no latency; where the module "
    "exists, 'sudo modprobe sch_netem' loads it (Ubuntu: package linux-modules-extra-$(uname -r))"
)


@functools.cache
def find_tool(name: str) -> str:
    """Return the full path of a system tool."""
    path = shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":" + _ADMIN_PATH)
    if path is None:
        package = _PACKAGES[name]
        raise LabError(f"a lab needs the program {name!r}: install it (Debian, Ubuntu: sudo apt install {package})")
    return path


@functools.cache
def find_way() -> tuple[str, ...]:
    """Return the command that starts a process in private namespaces, found by trying it."""
    if sys.platform != "linux":
        raise LabError(f"a lab is made of Linux namespaces; this is {sys.platform}")
    for tool in _PACKAGES:
        find_tool(tool)
    complaints: list[str] = []
    for user in ((), _USER) if os.geteuid() == 0 else (_USER,):
        way = (find_tool("unshare"), *user, *_PRIVATE)
        complaint = _try(way, _TRIAL)
        if not complaint:
            return way
        complaints.append(complaint)
    complaint = complaints[0]  # the error of the first way
    raise LabError(f"a lab cannot be made here ({complaint}): {_advice(complaint)}")


def privilege() -> str:
    """Return how a lab is made here; a LabError if it cannot be made.

    Both ways give the same lab: in a user namespace the user is root of that lab only.
    """
    return "in a user namespace" if "--user" in find_way() else "as root"


@functools.cache
def _has_delay() -> bool:
    return not _try(find_way(), _DELAY_TRIAL)


def _try(way: tuple[str, ...], trial: str) -> str:
    """Run a test script in temporary namespaces; return its error, or an empty string."""
    script = trial.format(ip=find_tool("ip"), tc=find_tool("tc"))
    done = subprocess.run([*way, "sh", "-c", script], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().replace("unshare: unshare failed: ", "unshare: ")
    return said.replace("\n", "; ") or f"exit {done.returncode}"


def _advice(complaint: str) -> str:
    """Return what to do to make a lab possible on this machine."""
    for name, locked, cure in _LOCKS:
        lock = Path("/proc/sys", name)
        if os.geteuid() != 0 and lock.exists() and lock.read_text().strip() == locked:
            return f"allow user namespaces with 'sudo sysctl -w {cure}', or run as root"
    if "qdisc" in complaint:
        return "the kernel module sch_tbf is missing: 'sudo modprobe sch_tbf'"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start the container with --privileged, or use the machine itself"
    return "run as root, or on a machine that allows user namespaces"
