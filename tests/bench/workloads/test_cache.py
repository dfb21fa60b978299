"""The cache is never half-written, never trusted blindly, and never in the way."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gossamer.bench.workloads import DataError, cache, packages


def build() -> cache.Arrays:
    return {"x": np.arange(5)}


def never() -> cache.Arrays:
    raise AssertionError("was built again")


def test_it_is_built_once(own_cache: Path) -> None:
    for make in (build, never):
        assert cache.arrays("a", make)["x"].tolist() == [0, 1, 2, 3, 4]
    assert {p.name for p in own_cache.iterdir()} == {"a.npz", "a.lock"}


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"PK\x03\x04"])
def test_a_damaged_file_is_built_again(own_cache: Path, damage: bytes) -> None:
    cache.arrays("a", build)
    (own_cache / "a.npz").write_bytes(damage)
    assert cache.arrays("a", build)["x"].tolist() == [0, 1, 2, 3, 4]
    cache.arrays("a", never)


def test_any_flipped_bit_or_cut_is_noticed_or_harmless(own_cache: Path) -> None:
    cache.arrays("a", build)
    whole = (own_cache / "a.npz").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(whole)
        broken[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        (own_cache / "a.npz").write_bytes(broken if rng.random() < 0.7 else broken[: rng.integers(len(whole))])
        found = cache.arrays("a", build)
        assert found.get("x", np.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_other_users_of_a_shared_folder_may_read_it(own_cache: Path) -> None:
    cache.arrays("a", build)
    (own_cache / "usual").touch()
    assert (own_cache / "a.npz").stat().st_mode == (own_cache / "usual").stat().st_mode


def test_a_failed_build_leaves_nothing(own_cache: Path) -> None:
    with pytest.raises(DataError):
        cache.arrays("a", lambda: (_ for _ in ()).throw(DataError("no")))
    assert {p.name for p in own_cache.iterdir()} == {"a.lock"}


def test_a_failed_write_keeps_the_old_file(own_cache: Path) -> None:
    cache.arrays("a", build)

    def fail() -> None:
        with cache.write(own_cache / "a.npz") as part:
            part.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    cache.arrays("a", never)
    assert not list(own_cache.glob(".part*"))


def test_a_full_disk_is_no_obstacle(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.arrays("a", build)["x"].tolist() == [0, 1, 2, 3, 4]


def test_without_a_cache_it_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="nothing is remembered"):
        assert cache.arrays("a", build)["x"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="Set GOSSAMER_CACHE"):
        packages.deb("anything")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("GOSSAMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DataError, match=r"no home folder for a cache\. Set GOSSAMER_CACHE"):
        cache.folder()
    with pytest.warns(UserWarning, match="nothing is remembered: this user has no home"):
        assert cache.arrays("a", build)["x"].tolist() == [0, 1, 2, 3, 4]


def test_only_one_builds_and_the_others_wait(own_cache: Path) -> None:
    """Threads stand for processes here: a lock belongs to the opened file, and each opens its own."""
    built: list[int] = []

    def slowly() -> cache.Arrays:
        built.append(1)
        time.sleep(0.3)
        return build()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cache.arrays("a", slowly)["x"].tolist(), range(4)))
    assert found == [[0, 1, 2, 3, 4]] * 4
    assert built == [1]


def test_a_file_system_without_locks_is_no_obstacle(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home on NFS or Lustre may refuse them."""

    def refused(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    for make in (build, never):
        assert cache.arrays("a", make)["x"].tolist() == [0, 1, 2, 3, 4]


def test_the_lock_is_free_after_an_error(own_cache: Path) -> None:
    with pytest.raises(ValueError), cache.lock("a"):
        raise ValueError
    taken = threading.Event()

    def take() -> None:
        with cache.lock("a"):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert taken.wait(300.0)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOSSAMER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache.folder() == tmp_path / "shared" / "gossamer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "gossamer"
    monkeypatch.setenv("GOSSAMER_CACHE", str(tmp_path / "own"))
    assert cache.folder() == tmp_path / "own"
