"""Packages come from the registry's client or not at all, and only the right bytes are read."""

import hashlib
import io
import lzma
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench import workloads
from gossamer.bench.workloads import DataError, packages

NAME = "example_data-1.0-py3-none-any.whl"


def a_wheel(content: str = "hello") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("data.txt"), content)
    return file.getvalue()


def a_deb(content: bytes = b"hello") -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        entry = tarfile.TarInfo("./data.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    parts = [(b"debian-binary", b"2.0"), (b"data.tar.xz", lzma.compress(tar.getvalue()))]
    written = b"!<arch>\n"
    for name, body in parts:
        written += name.ljust(48) + str(len(body)).encode().ljust(10) + b"`\n" + body + b"\n" * (len(body) % 2)
    return written


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Callable[..., list[list[str]]]:
    """Stand in for pip and apt-get: each call leaves the next of these files behind, or fails."""

    def answer(name: str, *answers: bytes | Exception) -> list[list[str]]:
        calls, left = [], list(answers)

        def run(command: list[str], *, cwd: str, **_: Any) -> None:
            calls.append(command)
            content = left.pop(0)
            if isinstance(content, Exception):
                raise content
            (Path(cwd) / name).write_bytes(content)

        monkeypatch.setattr(packages.subprocess, "run", run)
        monkeypatch.setattr(packages.shutil, "which", lambda name: f"/bin/{name}")
        return calls

    return answer


def fetch(content: bytes) -> zipfile.ZipFile:
    return packages.wheel("example-data", "1.0", hashlib.sha256(content).hexdigest())


def test_a_wheel_is_fetched_once(client: Any) -> None:
    calls = client(NAME, a_wheel())
    for _ in range(2):
        assert fetch(a_wheel()).read("data.txt") == b"hello"
    assert len(calls) == 1
    assert calls[0][-1] == "example-data==1.0"
    assert {"--no-deps", "--only-binary"} <= set(calls[0])


def test_a_wrong_hash_is_refused_and_not_kept(client: Any, own_cache: Path) -> None:
    client(NAME, a_wheel("other"))
    with pytest.raises(DataError, match=r"example_data.*not the expected file: its SHA-256 is [0-9a-f]{64}, not"):
        fetch(a_wheel())
    assert not list(own_cache.glob("*.whl"))


def test_a_damaged_wheel_is_fetched_again_but_only_once(client: Any, own_cache: Path) -> None:
    calls = client(NAME, a_wheel(), a_wheel(), b"still broken")
    fetch(a_wheel())
    (own_cache / NAME).write_bytes(a_wheel()[:-9])
    assert fetch(a_wheel()).read("data.txt") == b"hello"
    (own_cache / NAME).write_bytes(b"")
    with pytest.raises(DataError, match="not the expected file"):
        fetch(a_wheel())
    assert len(calls) == 3


def test_a_deb_is_opened_without_dpkg(client: Any) -> None:
    calls = client("example_1.0_all.deb", a_deb())
    for _ in range(2):
        assert packages.member(packages.deb("example"), "./data.txt") == b"hello"
    assert calls == [["apt-get", "download", "example"]]
    with pytest.raises(DataError, match="another release"):
        packages.member(packages.deb("example"), "./other.txt")


@pytest.mark.parametrize("cut", [0, 7, 60, 100, 180, -1, -40])
def test_a_damaged_deb_is_fetched_again(client: Any, own_cache: Path, cut: int) -> None:
    calls = client("example_1.0_all.deb", a_deb(), b"!<arch>\nno")
    own_cache.mkdir()
    (own_cache / "example_1.0_all.deb").write_bytes(a_deb()[:cut])
    packages.deb("example")
    assert len(calls) == 1
    (own_cache / "example_1.0_all.deb").write_bytes(b"")
    with pytest.raises(DataError, match="not the expected file"):
        packages.deb("example")


def test_a_flipped_bit_in_a_deb_is_noticed(client: Any, own_cache: Path) -> None:
    whole = a_deb()
    calls = client("example_1.0_all.deb", *[whole] * 9)
    own_cache.mkdir()
    for place in range(len(whole) - 100, len(whole) - 30, 10):  # inside the compressed part
        broken = bytearray(whole)
        broken[place] ^= 4
        (own_cache / "example_1.0_all.deb").write_bytes(broken)
        assert packages.member(packages.deb("example"), "./data.txt") == b"hello"
    assert calls


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (subprocess.CalledProcessError(1, "x", stderr=b"WARNING: a\nERROR: no network\n"), "ERROR: no network"),
        (subprocess.TimeoutExpired("x", 600), "timed out"),
        (OSError("no space left"), "no space left"),
    ],
)
def test_offline_says_what_to_do(client: Any, own_cache: Path, failure: Exception, says: str) -> None:
    client(NAME, failure, failure)
    with pytest.raises(DataError, match=says) as caught:
        fetch(a_wheel())
    assert "pip download" in str(caught.value)
    assert str(own_cache) in str(caught.value)
    assert "lm" in str(caught.value)
    with pytest.raises(DataError, match="`apt-get update`"):
        packages.deb("example")
    assert {p.suffix for p in own_cache.iterdir()} == {".lock"}


def test_pips_last_word_is_not_taken_for_the_reason_when_there_is_no_connection(client: Any) -> None:
    said = b"WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching distribution found\n"
    client(NAME, subprocess.CalledProcessError(1, "pip", stderr=said))
    with pytest.raises(DataError, match="no connection to where packages come from") as caught:
        fetch(a_wheel())
    assert "No matching distribution" not in str(caught.value)


def test_offline_a_file_that_is_not_the_right_one_is_named_and_kept(client: Any, own_cache: Path) -> None:
    client(NAME, OSError("no network"))
    own_cache.mkdir()
    (own_cache / NAME).write_bytes(a_wheel()[:50])
    with pytest.raises(DataError, match=rf"no network.* What lies there as {NAME} does not serve: its SHA-256 is"):
        fetch(a_wheel())
    assert (own_cache / NAME).exists()


def test_a_cache_that_somebody_else_has_filled_need_not_be_writable(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache.mkdir()
    (own_cache / NAME).write_bytes(a_wheel())
    monkeypatch.setattr(packages.cache, "lock", lambda name: pytest.fail("was locked"))  # root may write everywhere
    assert fetch(a_wheel()).read("data.txt") == b"hello"


def test_a_full_disk_is_a_reason_too(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packages.tempfile, "TemporaryDirectory", full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch(a_wheel())


def test_a_client_that_fetches_nothing_is_an_error(client: Any) -> None:
    client("unrelated.txt", b"")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(a_wheel())


def test_without_clients(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match="pip is not installed"):
        workloads.get("digits").prepare()
    with pytest.raises(DataError, match="apt-get is not installed"):
        workloads.get("fashion").prepare()
    for name in ("lm-bytes", "ridge"):  # and these need none
        workloads.get(name).prepare()


def test_a_file_put_there_by_hand_is_taken(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_client", lambda _: pytest.fail("was fetched"))
    own_cache.mkdir()
    (own_cache / NAME).write_bytes(a_wheel())
    assert fetch(a_wheel()).read("data.txt") == b"hello"


def test_the_real_pip_offline(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataError, match="scikit-learn"):
        workloads.get("digits").prepare()
