"""gossamer doctor --gpu, from end to end on the pretended device: what is right passes, and what is wrong is reported."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.gpu.nursery import Nursery
from tests.gpu.patients import SMALL, Harm, Patients

from gossamer.bench.compare import script_launch
from gossamer.bench.compare.events import RankEvent, SubjectBegun, line_of
from gossamer.bench.compare.gpu import compile_ahead, launch, recipes, samples
from gossamer.bench.compare.gpu.check_spec import WAYS, CheckSpec, Sizes
from gossamer.bench.compare.gpu.examine import KILLED, Examination
from gossamer.bench.compare.gpu.findings import Finding, failures
from gossamer.bench.compare.gpu.launch import Reply
from gossamer.bench.compare.gpu.results import results_of
from gossamer.bench.compare.parent_death import PARENT
from gossamer.recipes import presets


def examined(nursery: Nursery, presets: Sequence[str], harm: Harm | None = None, shared: bool = False) -> list[Finding]:
    return Examination(Patients(nursery, 2, harm, shared), SMALL, lambda text: None, presets).run()


def outcomes(findings: Sequence[Finding], check: str) -> dict[str, str]:
    return {f.subject: f.outcome for f in findings if f.check == check}


@pytest.mark.gang
def test_all_that_is_right_passes(nursery: Nursery) -> None:
    found = examined(nursery, ("topk", "sgp", "backup"))
    fine = dict.fromkeys(("topk", "sgp"), "passed")
    assert failures(found) == []
    assert outcomes(found, "cards") == {"rank 0": "measured", "rank 1": "measured", "triton": "passed"}
    assert outcomes(found, "kernels") == dict.fromkeys(samples.names(), "passed")
    assert list(outcomes(found, "streams").values()) == ["passed"] * 3 + ["measured"]
    for way in WAYS.values():
        assert outcomes(found, f"recipes over {way}") == fine
    assert outcomes(found, "mean losses") == fine | {"backup": "left out"}
    for way in ("NCCL", "staged gloo"):
        assert outcomes(found, f"a killed peer over {way}") == dict.fromkeys(KILLED, "passed")
    waits = {f.subject: f.numbers["waits"] for f in found if f.check == "recipes over NCCL"}
    assert waits == {"topk": 1, "sgp": 0}


def everything_wrong(rank: int, order: CheckSpec) -> None:
    """A kernel writes other bits than the CPU's, a rank changes its model, another dies, and nobody dies who should."""
    from tests.gpu.programs import backends

    from gossamer.bench.compare.gpu import peers
    from gossamer.bench.compare.gpu import rank as ranks

    find, check, step, trying = backends._find, recipes.check, recipes.step, ""

    def finds(backend: Any, family: str, function: str) -> Any:
        right = find(backend, family, function)
        wrong = (backend, family, function) == ("triton", "quantise", "encode")
        return (lambda *given: (right(*given), given[-1].bitwise_xor_(4))) if wrong else right

    def checks(order: CheckSpec, placement: Any, subject: str) -> Finding:
        nonlocal trying
        trying = subject
        if (order.path, subject, rank) == ("nccl", "topk", 1):
            os._exit(9)
        return check(order, placement, subject)

    def steps(model: Any, optimizer: Any, comm: Any, batches: Any) -> Any:
        if (order.path, trying, rank, comm.step) == ("staged", "allreduce", 1, 3):
            model[0].bias.data.add_(0.01)
        return step(model, optimizer, comm, batches)

    backends._find, ranks.CHECKS["recipes"], recipes.step = finds, checks, steps
    if order.path == "staged":
        peers._end = lambda gradient: None


@pytest.fixture
def few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no others: that each of them passes is said above."""
    few = ("absmax", "quantise_decode", "quantise_encode", "topk")
    monkeypatch.setattr(samples, "names", lambda: [name for name in samples.CALLS if name in few])


@pytest.mark.gang
@pytest.mark.usefixtures("few_kernels")
def test_what_is_wrong_is_reported_and_takes_nothing_else_with_it(nursery: Nursery) -> None:
    found = examined(nursery, ("allreduce", "topk", "qsgd"), everything_wrong)
    kernel, dead, strayed, apart, *nobody_died = failures(found)
    assert kernel.startswith("kernels, quantise_encode: ranks 0, 1: of ")
    assert "values differ, the first at 0: " in kernel
    assert dead.startswith("recipes over NCCL, topk: rank 0: ")
    assert "no heartbeat from rank 1" in dead
    assert dead.endswith("rank 1: its process ended with code 9")
    assert strayed.startswith("recipes over staged gloo, allreduce: ranks 0, 1: at step 7, 0.bias differs")
    assert apart.startswith("mean losses, qsgd: over NCCL they are ")
    assert nobody_died == [
        f"a killed peer over staged gloo, {name}: rank 0: rank 1 ended in step 3, and this rank got no error"
        for name in KILLED
    ]
    assert outcomes(found, "kernels") == dict.fromkeys(samples.names(), "passed") | {"quantise_encode": "failed"}
    assert outcomes(found, "recipes over NCCL") == {"allreduce": "passed", "topk": "failed", "qsgd": "passed"}
    assert outcomes(found, "recipes over staged gloo") == {"allreduce": "failed", "topk": "passed", "qsgd": "passed"}
    assert outcomes(found, "mean losses") == {"allreduce": "passed", "topk": "passed", "qsgd": "failed"}
    assert outcomes(found, "a killed peer over NCCL") == dict.fromkeys(KILLED, "passed")


@pytest.mark.gang
@pytest.mark.usefixtures("few_kernels")
def test_where_ranks_share_a_gpu_each_is_a_machine_of_its_own_to_nccl(nursery: Nursery) -> None:
    found = examined(nursery, ("allreduce",), shared=True)
    assert failures(found) == []
    said = {f.subject: f.says for f in found if f.check == "cards"}
    assert said["shared"].startswith("ranks 0, 1 share one GPU, so each is a machine of its own to NCCL (NCCL_HOSTID)")
    for way in ("NCCL", "staged gloo"):
        assert outcomes(found, f"recipes over {way}") == {"allreduce": "passed"}
        assert outcomes(found, f"a killed peer over {way}") == dict.fromkeys(KILLED, "passed")


def test_a_new_kernel_and_a_new_preset_are_tried_without_anyone_remembering() -> None:
    """A kernel that nobody has said how to call is reported; here nobody has forgotten one."""
    assert set(samples.CALLS) == set(samples.names())
    assert not Examination(Patients.__new__(Patients)).recipes  # none named: all
    for name in presets():
        assert recipes.short(name)


# -- what is made of what ranks tell -------------------------------------------------------------------------------------

ORDER = CheckSpec("kernels", ("a", "b", "c"), (0, 1))


def told(*subjects: str, ending: str = "", words: str = "") -> Reply:
    lines = [
        line_of(RankEvent(SubjectBegun(s))) + line_of(RankEvent(Finding("kernels", s, "passed"))) for s in subjects
    ]
    return Reply([*"".join(lines).splitlines(), "noise of somebody", *([words] if words else [])], ending)


def test_after_a_death_the_rest_is_tried_anew() -> None:
    heard = results_of(
        ORDER, [told("a", "b", "c"), told("a", "b", ending="was ended by SIGABRT", words="NCCL WARN no")]
    )
    assert heard.left == ("c",)
    assert {s: [f.outcome for f in by.values()] for s, by in heard.findings.items()} == {
        "a": ["passed", "passed"],
        "b": ["passed", "failed"],
    }
    assert heard.findings["b"][1].says == "its process was ended by SIGABRT: NCCL WARN no"


def test_ranks_that_never_start_are_not_started_for_each_subject() -> None:
    heard = results_of(ORDER, [told("a"), Reply(["ImportError: libcuda"], "ended with code 1")])
    assert heard.left == ()
    assert heard.findings["a"][1].says == "its process ended with code 1: ImportError: libcuda"
    assert [f.outcome for s in "bc" for f in heard.findings[s].values()] == ["left out", "left out"]


def test_ranks_and_ways_that_do_not_agree_are_told_apart() -> None:
    def of(losses: list[float], hash: int = 1) -> Finding:
        return Finding("recipes", "allreduce", "passed", numbers={"losses": losses, "hash": hash})

    fine = {0: of([1.0, 2.0]), 1: of([3.0, 2.0])}
    assert recipes.compared("allreduce", {"cpu": fine, "nccl": fine}).outcome == "passed"
    strayed = recipes.compared("allreduce", {"cpu": fine, "nccl": {0: of([1.0, 2.0]), 1: of([3.0, 2.0], 2)}})
    assert (strayed.outcome, "differs between them over NCCL" in strayed.says) == ("failed", True)
    apart = recipes.compared("allreduce", {"cpu": fine, "nccl": {0: of([1.0, 2.1]), 1: of([3.0, 2.0])}})
    assert apart.says == "over NCCL they are 2, 2.05, and over gloo, on the CPU 2, 2"


def test_kernels_are_compiled_side_by_side_before_they_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in one process; the check itself, which is one process, finds them in the cache."""
    tried, started = list[str](), list[CheckSpec]()

    class Started:
        def __init__(self, command: Sequence[str], env: dict[str, str], **_: Any) -> None:
            assert env[PARENT] == str(os.getpid())
            started.append(CheckSpec.of_json(command[-1]))

        def wait(self, seconds: float = 0.0) -> None:
            pass

        kill = wait

    def failing(name: str, *of: Any) -> None:
        tried.append(name)
        if name == "absmax":
            raise RuntimeError("it does not compile")

    monkeypatch.setattr(compile_ahead.subprocess, "Popen", Started)
    monkeypatch.setattr(compile_ahead.kernels, "called", failing)
    spec = CheckSpec("kernels", tuple(samples.names()), (0,), sizes=replace(Sizes(), lengths=(5, 321)))
    compile_ahead.compile_ahead(spec, 1)
    assert not started, "one core is better left to the check itself"
    compile_ahead.compile_ahead(spec, 3)
    assert sorted(s for share in started for s in share.subjects) == sorted(spec.subjects)
    assert [len(share.subjects) for share in started] == [12, 12, 11]
    for share in started:
        compile_ahead.main(share.to_json())
    assert {*tried} == {*spec.subjects}


def timed(rank: int, size: int) -> list[str]:
    """What a kernel's speed is measured by, in turn."""
    import torch

    from gossamer.bench.compare.gpu import kernels

    done, seconds = list[str](), kernels.event_seconds

    def noted(do: Any, device: torch.device) -> float:
        done.append("timed")
        return seconds(do, device)

    kernels.keeps_busy, kernels.event_seconds = lambda sizes, device: lambda: done.append("busy"), noted
    kernels.speed("absmax", SMALL, torch.device("cuda", 1))
    return done


@pytest.mark.gang
def test_a_kernel_is_timed_on_a_device_that_is_busy_before(nursery: Nursery) -> None:
    """Else the host's launches are in its time: on an H200 `ternary` encoded 579 GB/s and not 1350."""
    (done,) = nursery.run(1, timed)
    assert done == ["busy", "timed"] * (len(done) // 2)
    assert done


def test_ranks_beside_those_of_a_launcher_end_when_one_is_lost_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would end the others minutes later: who starts ranks says that it is not to."""
    name = "TORCH_NCCL_DUMP_ON_TIMEOUT"
    command = [sys.executable, "-c", f"import os; print(os.environ['{name}'])"]
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(launch, "_command", lambda spec: command)
    ranks: Any = launch.JoinedRanks
    assert ranks(None, 0, 1)._part(ORDER).lines == ["0"]
    assert script_launch._beside(command, 1, lambda line: None) == (0, ["0"])


def one_is_late(rank: int, size: int) -> tuple[str, float]:
    """What is found of backup workers whose last rank misses all steps between its first and its last ones."""
    import time

    import torch
    from tests.gpu import users
    from tests.gpu.loops import Plan

    from gossamer.bench.compare.gpu import recipes
    from gossamer.bench.compare.gpu.check_spec import Placement

    users.begin(Plan("backup", ranks=3))
    real, turns = recipes.step, list[int]()

    def late(*given: Any) -> Any:
        turns.append(1)
        if rank == size - 1 and len(turns) == 2:
            time.sleep(3.0)
        return real(*given)

    recipes.step = late
    placement = Placement(rank, size, torch.device("cuda", rank + 1))
    torch.cuda.set_device(placement.device)
    sizes = replace(SMALL, steps=12, deadline=20.0)
    finding = recipes.check(CheckSpec("recipes", ("backup",), (0, 1, 2), "nccl", sizes=sizes), placement, "backup")
    return finding.says, finding.numbers["waits"]


@pytest.mark.gang
def test_waits_of_a_rank_that_catches_up_are_those_of_a_step(nursery: Nursery) -> None:
    """They were divided by its turns, in each of which it may take many steps, and its first steps were counted too."""
    for says, waits in nursery.run(3, one_is_late):
        assert says.startswith("the host waits")
        assert waits <= recipes.MOST_WAITS
