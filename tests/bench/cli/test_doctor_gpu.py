"""gossamer doctor --gpu at the command line: what is refused, what is printed, and the file to send."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.bench.cli.conftest import Shell

from gossamer.bench.compare.events import RankEvent, SubjectBegun, line_of
from gossamer.bench.compare.gpu import launch, report
from gossamer.bench.compare.gpu.check_spec import CheckSpec
from gossamer.bench.compare.gpu.findings import Finding
from gossamer.bench.compare.gpu.launch import LocalRanks, Reply
from gossamer.bench.compare.local import run_here

Say = Callable[..., tuple[int, str, str]]
OUT = Path("gossamer-gpu.md")


class Canned:
    """Ranks that find everything in order but what is wrong."""

    wrong = ""

    def __init__(self, gpus: int) -> None:
        self.size = gpus

    def run(self, order: CheckSpec) -> list[Reply]:
        return [
            Reply([line for s in order.subjects for line in self._said(order, s, rank)]) for rank in range(self.size)
        ]

    def _said(self, order: CheckSpec, subject: str, rank: int) -> list[str]:
        outcome = "failed" if subject == self.wrong else "passed"
        numbers = {"place": f"card {rank}", "losses": [1.0], "hash": 1}
        found = Finding(order.title, subject, outcome, "it | does not" if subject == self.wrong else "", numbers)
        return [line_of(RankEvent(SubjectBegun(subject))), line_of(RankEvent(found))]


@pytest.fixture
def with_gpus(say: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """As if there were two."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "LocalRanks", Canned)
    monkeypatch.setattr(Canned, "wrong", "")
    return say


def written() -> dict[str, object]:
    return json.loads(OUT.read_text().split(report.BEGIN)[1].split(report.END)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    code, out, err = say("doctor", "--gpu")
    assert (code, out) == (2, "")
    assert err.startswith("gossamer: torch sees no GPU here, so there is nothing to check: ")
    assert not OUT.exists()


@pytest.mark.gang
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_as_a_rank_without_a_gpu_it_says_so_too(shell: Shell) -> None:
    shell.environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    code, out, err = shell.run("doctor", "--gpu")
    assert (code, out) == (2, "")
    assert err.startswith("gossamer: rank 0: torch sees no GPU here")
    assert list(shell.folder.iterdir()) == []


def test_it_prints_a_table_and_writes_a_report(with_gpus: Say) -> None:
    code, out, err = with_gpus("doctor", "--gpu")
    assert code == 0
    assert "the report to send is gossamer-gpu.md" in err
    rows = [line.split() for line in out.splitlines()]
    assert ["ternary_encode", "passed"] in rows
    assert rows.count(["powersgd", "passed"]) == 3
    assert "Nothing failed; " in out
    text, told = OUT.read_text(), written()
    assert text.startswith(report.AUTHOR)
    assert "| ternary_encode | passed |" in text
    assert told["failures"] == []
    assert {"gossamer", "torch", "python", "cuda", "triton"} <= set(told["facts"])  # pyright: ignore


def test_a_failure_is_a_sentence_and_an_exit_code(with_gpus: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canned, "wrong", "topk")
    code, out, _ = with_gpus("doctor", "--gpu", "--json")
    assert code == 1
    sentences = json.loads(out)["failures"]
    assert sentences[0] == "kernels, topk: ranks 0, 1: it | does not"
    assert written()["failures"] == sentences
    assert "| topk | failed | ranks 0, 1: it \\| does not |" in OUT.read_text()


def test_a_report_may_be_written_over_and_nothing_else(with_gpus: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_gpus("doctor", "--gpu")[0] == 0
    assert with_gpus("doctor", "--gpu")[0] == 0
    OUT.write_text("mine")
    monkeypatch.setattr(launch, "LocalRanks", lambda gpus: pytest.fail("it began"))
    code, _, err = with_gpus("doctor", "--gpu")
    assert (code, OUT.read_text()) == (2, "mine")
    assert (
        "is no report on GPUs that gossamer wrote; it stays as it is; name another file with --out, or --force" in err
    )
    code, _, err = with_gpus("doctor", "--gpu", "--out", "nowhere/x.md")
    assert (code, "there is no folder" in err) == (2, True)
    monkeypatch.setattr(launch, "LocalRanks", Canned)
    assert with_gpus("doctor", "--gpu", "--force")[0] == 0
    assert written()["failures"] == []


def test_quick_leaves_out_what_it_is_for(with_gpus: Say) -> None:
    code, _, err = with_gpus("doctor", "--gpu", "--quick")
    assert (code, "give one of them" in err) == (2, True)


# -- real processes, without a GPU ---------------------------------------------------------------------------------------

AMONG = """
import json, os, torch.distributed as dist
from gossamer.bench.compare.control_group import ControlGroup
from gossamer.bench.compare.gpu.results import results_of
from gossamer.bench.compare.gpu.launch import JoinedRanks
from gossamer.bench.compare.gpu.check_spec import CheckSpec, Sizes
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
order = CheckSpec("recipes", ("allreduce",), (0, 1), "cpu", number=1, sizes=Sizes(steps=3, width=8, limit=60.0))
heard = results_of(order, JoinedRanks(ControlGroup(100.0), rank, size).run(order))
for rank, finding in heard.findings["allreduce"].items():
    print(rank, finding.outcome, finding.says, len(finding.numbers["losses"]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.gang
def test_ranks_of_another_launcher_start_processes_for_their_parts() -> None:
    said = dict[int, list[str]]()
    run_here(2, [sys.executable, "-c", AMONG], lambda rank, line: said.setdefault(rank, []).append(line), 120)
    assert said == {rank: ["0 passed  3", "1 passed  3"] for rank in (0, 1)}


@pytest.mark.gang
def test_how_processes_on_this_machine_end_is_told() -> None:
    zero, one = LocalRanks(2).run(CheckSpec("no such check", ("a",), (1,)))
    assert zero == Reply([])
    assert one.lines[0] + "\n" == line_of(RankEvent(SubjectBegun("a")))
    assert "KeyError: 'no such check'" in one.lines[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_saved(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "c.toml"
    code, out, err = say("doctor", "--gpu", "--save", str(path))
    assert (code, out, path.exists()) == (2, "", False)
    assert "torch sees no GPU here" in err
