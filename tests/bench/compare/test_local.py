"""Ranks on this machine: how they are started, heard and ended. The programs are shells: quick, and without torch."""

import time

import pytest
from tests.marked import Marked

from gossamer.bench.compare import local
from gossamer.bench.compare.local import run_here
from gossamer.core.errors import PeerError

Lines = list[tuple[int, str]]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    monkeypatch.setattr(local, "GRACE", 1.0)
    marked = Marked()
    for name, value in marked.label.items():
        monkeypatch.setenv(name, value)
    return marked


def test_each_rank_knows_its_place_and_is_heard_to_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launcher above us")
    said: Lines = []
    names = "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $GLOO_SOCKET_IFNAME $TORCHELASTIC_RUN_ID"
    ending = run_here(3, ["sh", "-c", f"echo {names}; printf last >&2"], lambda *line: said.append(line))
    assert (ending.first, ending.frozen, ending.codes) == (None, [], {0: 0, 1: 0, 2: 0})
    assert sorted(said) == sorted([(r, f"{r} 3 {r} 127.0.0.1 lo") for r in range(3)] + [(r, "last") for r in range(3)])


@pytest.mark.parametrize(
    ("program", "first", "frozen"),
    [
        ("[ $RANK = 1 ] && kill -9 $$; sleep 60", (1, -9), []),
        ("[ $RANK = 1 ] && exit 3; sleep 60", (1, 3), []),
        ("[ $RANK = 1 ] && exit 3; kill -9 $$", (0, -9), []),  # who was killed, not who noticed
        ("[ $RANK = 0 ] && kill -STOP $$; sleep 0.5; exit 3", (1, 3), [0]),
        ("trap '' TERM; [ $RANK = 1 ] && exit 3; while :; do sleep 0.1; done", (1, 3), []),
    ],
)
def test_the_first_that_fails_is_told_and_the_others_are_ended(
    marked: Marked, monkeypatch: pytest.MonkeyPatch, program: str, first: tuple[int, int], frozen: list[int]
) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.5)
    ending = run_here(2, ["sh", "-c", program], lambda rank, line: None)
    assert (ending.first, ending.frozen) == (first, frozen)
    marked.expect_nothing()


def test_an_interruption_ends_all_and_no_line_is_heard_behind_one_that_is_lost(marked: Marked) -> None:
    said: Lines = []

    def hear(rank: int, line: str) -> None:
        said.append((rank, line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(2, ["sh", "-c", "echo one; echo two; sleep 60"], hear)
    assert [line for _, line in said] == ["one"]
    marked.expect_nothing()


def test_who_takes_too_long_is_ended(marked: Marked) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run_here(2, ["sleep", "60"], lambda rank, line: None, timeout=0.2)
    assert time.monotonic() - began < 30
    marked.expect_nothing()


def test_what_cannot_be_started_is_an_error_of_ours(marked: Marked) -> None:
    with pytest.raises(PeerError, match=r"^rank 0 of 2 could not be started: No such file or directory$"):
        run_here(2, ["/no/such/program"], lambda rank, line: None)
    with pytest.raises(PeerError, match=r"^rank 0 of 2 could not be started: Argument list too long$"):
        run_here(2, ["sh", "-c", ":", "x" * 200_000], lambda rank, line: None)
