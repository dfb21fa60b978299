"""What the doctor says, of this machine alone and as one of several ranks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.cli import doctor, network_cards
from gossamer.bench.compare.calibrate import Calibration, Figure
from gossamer.bench.compare.link import Crossed, RankCards, between_two_ranks
from gossamer.bench.compare.network_cards import Card
from gossamer.core.errors import PeerError

TWO_CARDS = Path(__file__).parent / "programs" / "two_cards.sh"
SLOW = Card("eth0", "10.0.0.5", "10.0.0.0/24", "e1000", False, 1e9)

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def examine(say: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Ask the doctor, of this machine and not as a rank."""
    for name in ("RANK", "WORLD_SIZE", "GOSSAMER_LAB_IFACE"):
        monkeypatch.delenv(name, raising=False)
    return partial(say, "doctor")


def test_a_quick_one_says_what_there_is(examine: Say) -> None:
    code, out, _ = examine("--quick", "--json")
    facts = json.loads(out)
    assert code == 0
    assert {
        "gossamer",
        "python",
        "torch",
        "system",
        "cores",
        "threads",
        "backends",
        "gpus",
        "kernels",
        "cards",
        "lab",
    } == set(facts)
    code, out, _ = examine("--quick")
    assert code == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert facts["torch"] in rows["torch"]
    assert facts["kernels"]["cpu"] in rows["CPU kernels"]
    assert "gloo" in rows["backends"]
    taken = facts["cards"]["gloo"]
    assert taken["variable"] == "GLOO_SOCKET_IFNAME"
    assert f" {taken['card']}, " in rows["card of gloo"]
    assert taken["variable"] in out


@pytest.mark.parametrize(
    ("how", "latency", "words"),
    [
        ("as root", None, ["can be made here, as root", "can be made here"]),
        ("in a user namespace", "no netem", ["can be made here, in a user namespace", "no netem"]),
    ],
)
def test_it_says_as_whom_a_lab_can_be_made(
    examine: Say, monkeypatch: pytest.MonkeyPatch, how: str, latency: str | None, words: list[str]
) -> None:
    monkeypatch.setattr(doctor, "available", lambda latency=False: refused if latency else None)
    monkeypatch.setattr(doctor, "privilege", lambda: how)
    refused = latency
    _, out, _ = examine("--quick")
    assert [line.split("  ", 1)[1].strip() for line in out.splitlines() if line.startswith("lab")] == words


def test_it_says_why_there_can_be_no_lab(examine: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available", lambda: "a lab cannot be made here (unshare: no): run as root")
    code, out, _ = examine("--quick")
    assert (code, "unshare: no" in out) == (0, True)
    assert json.loads(examine("--quick", "--json")[1])["lab"]["possible"] is False


@pytest.mark.parametrize(
    ("backend", "installed", "words"),
    [
        ("numba", True, "numba "),
        ("torch", False, "plain torch, which is slower; for numba: pip install '.[fast]' in the clone"),
        ("torch", True, "plain torch, which is slower"),
    ],
)
def test_it_says_which_kernels_are_in_use_and_how_to_have_faster_ones(
    monkeypatch: pytest.MonkeyPatch, backend: str, installed: bool, words: str
) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    text = doctor._compiler("cpu", backend)
    assert text.startswith(words)
    assert ("pip install" in text) == (backend == "torch" and not installed)


def test_a_compiler_that_is_packaged_under_another_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", none)
    assert doctor._compiler("cuda", "triton") == "triton"


def test_several_threads_come_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 8)
    rows = dict(doctor._rows(doctor.environment()))
    assert rows["torch threads"].startswith("8; with several ranks on a machine set OMP_NUM_THREADS=1")


def test_a_broken_link_does_not_keep_it_from_the_other_facts(examine: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.bench.compare.parent_death.sys.executable", "/bin/false")
    monkeypatch.setattr(doctor, "_kernel_speed", dict)
    code, out, _ = examine("--json")
    facts = json.loads(out)
    assert code == 1
    assert "could not exchange messages: they printed nothing" in facts["link"]["broken"]
    assert "torch" in facts
    code, out, _ = examine()
    assert (code, "broken: two ranks" in out) == (1, True)


def test_what_kept_the_ranks_from_starting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_interface(*args: Any) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr("gossamer.bench.compare.local.socket.create_server", no_interface)
    with pytest.raises(PeerError, match=r"^no rank could be started: .*Cannot assign.*loopback interface is up"):
        between_two_ranks()


def test_a_rank_without_its_launcher_says_what_is_missing(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(doctor, "_kernel_speed", dict)
    code, out, err = say("doctor", "--json")
    assert (code, err) == (1, "")
    assert "MASTER_ADDR" in json.loads(out)["link"]["broken"]


@pytest.mark.gang
def test_the_link_between_two_ranks_is_measured_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    link = between_two_ranks()
    assert link.size == 2
    assert 0 < link.alpha < 1
    assert link.rate > 1e7
    assert not list(tmp_path.iterdir())


# The ranks of a doctor listen for less than a second: a busy machine may look before and after it, and not within.
HELD = """
import sys
if sys.orig_argv[-1] == "gossamer.bench.compare.link":
    import time
    import torch.distributed as dist
    dist.barrier = lambda: time.sleep(600)
"""


@pytest.mark.gang
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_doctor_that_is_stopped_leaves_nothing(shell: Shell, number: int) -> None:
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    (shell.folder / "sitecustomize.py").write_text(HELD)
    held = os.pathsep.join([str(shell.folder), shell.environment["PYTHONPATH"]])
    shell.environment |= {"TMPDIR": str(temporary), "PYTHONPATH": held}
    process = shell.start("doctor")
    shell.expect_to_be_closed(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    shell.expect_nothing()
    assert {path.name.split("_")[0] for path in temporary.iterdir()} <= {"torchinductor"}
    assert "Traceback" not in err


@pytest.mark.gang
def test_under_torchrun_one_rank_speaks_for_all(shell: Shell) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "gossamer", "doctor", "--json"],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["link"]["ranks"] == 2
    assert facts["link"]["alpha_us"] > 0
    assert all(speed["gb_per_s"] > 0 for speed in facts["kernel_speed"].values())


@pytest.mark.lab
def test_in_a_lab_it_sees_the_labs_network(shell: Shell) -> None:
    command = [sys.executable, "-m", "gossamer", "doctor", "--json"]
    code, out, err = shell.run("lab", "--hosts", "3", "--rate", "50mbit", "--", *command)
    assert code == 0, err
    assert all(line.startswith("[0] ") for line in out.splitlines())
    facts = json.loads("\n".join(line[4:] for line in out.splitlines()))
    assert facts["lab"] == {"inside": True}
    assert facts["link"]["ranks"] == 3
    assert 1e6 < facts["link"]["bits_per_s"] < 55e6
    assert facts["link"]["severity"] == pytest.approx(32e6 / facts["link"]["bits_per_s"], rel=1e-3)
    shell.expect_nothing()


@pytest.mark.lab
def test_it_finds_the_faster_of_two_networks_and_says_what_to_export(shell: Shell) -> None:
    shell.environment["GLOO_SOCKET_IFNAME"] = "slow"
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--uts"]
    command = [*namespaces, str(TWO_CARDS), sys.executable, "-m", "gossamer", "doctor", "--json"]
    done = subprocess.run(command, env=shell.environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert [(card["host"], card["name"]) for card in facts["card_of_ranks"]] == [("left", "slow"), ("right", "slow")]
    slow, fast = facts["networks"]
    assert (slow["network"], slow["cards"], slow["taken"]) == ("10.9.1.0/24", ["slow", "slow"], True)
    assert (fast["network"], fast["cards"], fast["taken"]) == ("10.9.2.0/24", ["fast", "fast"], False)
    assert slow["bits_per_s"] == facts["link"]["bits_per_s"] < 44e6 < 2 * 44e6 < fast["bits_per_s"]
    (advice,) = (text for name, text in network_cards.of_ranks_in_words(facts) if name == "WARNING")
    assert advice.endswith("as fast as the network in use: export GLOO_SOCKET_IFNAME=fast on all ranks")


def test_what_is_said_of_ranks_cards_fits_what_was_found() -> None:
    cards = [SLOW, SLOW._replace(name="ens3", address="10.0.0.6"), None]
    everybody = [RankCards(f"host{i}", [c] if c else [], c.name if c else "") for i, c in enumerate(cards)]
    crossed = [
        Crossed("10.0.0.0/24", ["eth0", "ens3"], True, broken="timed out"),
        Crossed("10.1.0.0/24", ["eth1", "ens4"], False, rate=125e6),
    ]
    found = network_cards.found_on_ranks(everybody, crossed) | {"link": {"broken": "timed out"}}
    rows = network_cards.of_ranks_in_words(found)
    assert ("rank 0", "host0: eth0, 10.0.0.5, 1 Gbit/s by its driver") in rows
    assert ("rank 2", "host2: no card") in rows
    assert ("over eth0, ens3", "broken: timed out, on 10.0.0.0/24, the one in use") in rows
    assert ("over eth1, ens4", "1 Gbit/s each way, on 10.1.0.0/24") in rows
    name, advice = rows[-1]
    assert name == "WARNING"
    assert advice.startswith("10.1.0.0/24 works, and the network in use does not: ")
    assert advice.endswith("export GLOO_SOCKET_IFNAME on each host as its card: eth1 on rank 0, ens4 on rank 1")
    similar = [crossed[0]._replace(rate=100e6, broken=""), crossed[1]]
    found = network_cards.found_on_ranks(everybody, similar) | {"link": {"bits_per_s": 800e6}}
    assert all(name != "WARNING" for name, _ in network_cards.of_ranks_in_words(found))


def test_ranks_that_a_launcher_deals_out_in_turn_are_named_one_by_one() -> None:
    everybody = [RankCards(f"host{rank % 2}", [SLOW], SLOW.name) for rank in range(4)]
    rows = dict(network_cards.of_ranks_in_words(network_cards.found_on_ranks(everybody, [])))
    assert [*rows] == ["ranks 0, 2", "ranks 1, 3"]


def test_a_system_that_tells_no_cards_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_cards, "cards", list)
    found = network_cards.found_here()
    assert network_cards.in_words(found) == [("network card", "not known: only Linux tells which there are")]


def test_a_link_is_said_to_be_so_severe_for_each_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    link = {"severity": 0.16, "ranks": 2, "alpha_us": 30.0, "bits_per_s": 200_000_000}
    rows = dict(doctor._rows(doctor.environment() | {"link": link}))
    assert rows["severity"] == "0.16 for each million parameters, over the seconds that a step computes"


def test_links_are_saved_by_all_ranks_or_not_at_all(examine: Say, tmp_path: Path) -> None:
    code, out, err = examine("--save", str(tmp_path / "c.toml"))
    assert (code, out) == (2, "")
    assert "start it on all of them" in err
    assert "gossamer lab --hosts 4" in err
    assert examine("--save", str(tmp_path / "c.toml"), "--quick")[0] == 2
    assert "leave out --json" in " ".join(examine("--save", str(tmp_path / "c.toml"), "--json")[2].split())


def test_a_report_is_of_gpus_or_none_is_written(examine: Say, tmp_path: Path) -> None:
    for words in (("--quick",), (), ("--save", str(tmp_path / "c.toml"), "--gpu")):
        code, out, err = examine(*words, "--out", str(tmp_path / "report.md"))
        assert (code, out) == (2, "")
        assert "--out is for the report of --gpu" in err


def test_a_file_that_is_no_cluster_is_not_written_over(
    examine: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    code, _, err = examine("--save", str(path))
    assert (code, path.read_text()) == (2, "mine")
    assert "--force" in err


def test_what_was_measured_is_shown_and_the_earlier_file_stays_where_the_disk_is_full(
    examine: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    exact = Figure(0.001, 0.0)
    found = Calibration(2, exact, (25e6, 25e6), 0.0, exact, exact, exact, 1e-9, 1, 2, 0.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(doctor, "calibrate", lambda: found)
    path = tmp_path / "c.toml"
    assert examine("--save", str(path))[0] == 0
    before = path.read_text()
    monkeypatch.setattr("os.replace", full)
    code, out, err = examine("--save", str(path))
    assert (code, err) == (1, f"gossamer: {path} could not be written: No space left on device\n")
    assert "200 Mbit/s" in out
    assert "Written" not in out
    assert [each.read_text() for each in tmp_path.iterdir()] == [before]


def test_a_pipe_is_no_file_for_links(examine: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    os.mkfifo(tmp_path / "c.toml")
    code, _, err = examine("--save", str(tmp_path / "c.toml"))
    assert (code, "is a pipe, and only files are written over" in err) == (2, True)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    examine: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    for path in (tmp_path, tmp_path / "none" / "c.toml"):
        code, _, err = examine("--save", str(path))
        assert code == 2
        assert "in a folder that is there" in " ".join(err.split())


def test_ranks_that_share_a_host_are_told_to_start_one_each(shell: Shell, tmp_path: Path) -> None:
    words = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gossamer", "doctor"
    command = [sys.executable, *words, "--save", str(tmp_path / "c.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=shell.environment, check=False)
    assert done.returncode != 0
    assert "2 ranks are on 1 hosts: start doctor --save with one rank on each host" in done.stdout + done.stderr
    assert not (tmp_path / "c.toml").exists()
