"""auto on real processes: decisions are alike on all ranks whatever a clock says, and a replay is bit-equal."""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.codecs.warm import codecs_in
from gossamer.core.verbs import Program, now
from gossamer.integrations import joining
from gossamer.runtime import step_times

pytestmark = pytest.mark.gang
STEPS = 70
AGAIN = 40  # steps in which it has chosen although it had to measure its first window twice


class Outcome(NamedTuple):
    """What a rank found: its model, the exchange in force, and what auto said."""

    model: Tensor
    exchange: str
    said: list[str]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def found(model: nn.Module, comm: Any) -> Outcome:
    said = [d.decision for d in comm.ledger.decisions if d.decision.startswith("auto")]
    return Outcome(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), repr(comm.recipe.exchange), said)


def trained(rank: int, size: int, recipe: str, steps: int, lie: str, path: str) -> Outcome:
    clock = now
    lies: dict[str, Callable[[float], float]] = {
        "zero": lambda t: 0.0,
        "negative": lambda t: -t,
        "a million": lambda t: 1e6 * t,
        "nan": lambda t: float("nan"),
    }

    def told() -> Program[float]:
        return lies[lie]((yield from clock()))

    if lie and rank == 1:
        step_times.now = told  # type: ignore[assignment]
    try:
        model = small()
        with attached(recipe, model, sgd) as (inner, optimizer, comm):
            for step in range(1, steps + 1):
                learn(inner, optimizer, rank, step)
            if path and rank == 0:
                comm.ledger.write(Path(path))
            return found(inner, comm)
    finally:
        step_times.now = clock


def decided_alike(first: Outcome, second: Outcome) -> None:
    assert torch.equal(first.model, second.model)
    assert (first.exchange, first.said) == (second.exchange, second.said)
    assert first.said[0].startswith("auto begins: model ")
    assert any(word.startswith("auto: ") for word in first.said)


@pytest.mark.parametrize("lie", ["zero", "negative", "a million", "nan"])
def test_all_ranks_decide_alike_whatever_one_clock_says(gang2: Gang, lie: str) -> None:
    """Where no clock lies they do in the test of a replay."""
    first, second = gang2.run(trained, "auto(gain=0.0)", STEPS, lie, "")
    decided_alike(first, second)
    assert lie == "a million" or first.exchange == "allreduce(fp32())"


LEDGER = """
{"step": 2, "rank": 0, "decision": "HEAD"}
{"step": 4, "rank": 0, "decision": "auto tries qsgd from step 4"}
{"step": 7, "rank": 0, "decision": "auto tries dense from step 7"}
{"step": 9, "rank": 0, "decision": "auto: bf16 from step 9: 1 ms a step, 2 ms dense (predicted 1 ms)"}
"""


@pytest.fixture(scope="module")
def head(gang2: Gang) -> str:
    """What auto says of this model and two ranks as it begins."""
    return gang2.run(trained, "auto", 2, "", "")[0].said[0]


def made_up(head: str, folder: Path, ledger: str) -> str:
    """The path of a ledger whose decisions are replayed on this model."""
    path = folder / "made_up.jsonl"
    path.write_text(ledger.strip().replace("HEAD", head))
    return str(path)


def test_a_replay_is_bit_equal_to_the_run_that_wrote_it(gang2: Gang, head: str, tmp_path: Path) -> None:
    """The first run is itself a replay of decisions that are made up, so that there are some on every machine."""
    path = made_up(head, tmp_path, LEDGER)
    one, other = gang2.run(trained, f"auto(replay={path!r})", 12, "", "")
    assert torch.equal(one.model, other.model)
    assert one.exchange == "scatter(bf16())"


THERE_AND_BACK = """
{"step": 2, "rank": 0, "decision": "HEAD"}
{"step": 4, "rank": 0, "decision": "auto tries scatter(qsgd()) + local_sgd(3) from step 4"}
{"step": 10, "rank": 0, "decision": "auto tries dense from step 10"}
{"step": 13, "rank": 0, "decision": "auto tries terngrad(last='qsgd') from step 13"}
{"step": 16, "rank": 0, "decision": "auto tries dense from step 16"}
{"step": 19, "rank": 0, "decision": "auto: scatter(qsgd()) + local_sgd(3) from step 19: 1 ms a step"}
"""


def changed(rank: int, size: int, path: str) -> list[tuple[str, str, int, Tensor]]:
    """What is in force and the model after each step, under an optimizer with momentum."""
    recipe = f"""auto(allow=('scatter(qsgd()) + local_sgd(3)', "terngrad(last='qsgd')"), replay={path!r})"""
    model, out = small(), list[tuple[str, str, int, Tensor]]()
    with attached(recipe, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)) as (
        inner,
        opt,
        comm,
    ):
        for step in range(1, 25):
            now = comm.recipe
            learn(inner, opt, rank, step)
            flat = torch.cat([p.detach().reshape(-1) for p in inner.parameters()])
            out.append((repr(now.exchange), repr(now.schedule), len(now.rules), flat))
    return out


def test_to_rounds_and_back_and_to_rules_and_back_all_ranks_are_equal_when_models_agree(
    gang2: Gang, head: str, tmp_path: Path
) -> None:
    path = made_up(head, tmp_path, THERE_AND_BACK)
    one, other = gang2.run(changed, path)
    dense, rounds = ("allreduce(fp32())", "every_step()", 0), ("scatter(qsgd())", "local_sgd(3)", 0)
    ternary = ("scatter(ternary(), answer=qsgd(bits=3))", "every_step()", 1)
    wanted = [dense] * 3 + [rounds] * 6 + [dense] * 3 + [ternary] * 3 + [dense] * 3 + [rounds] * 6
    assert [step[:3] for step in one] == [step[:3] for step in other] == wanted
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True), 1):
        assert torch.equal(mine[3], theirs[3]) == (mine[1] == "every_step()" or number % 3 == 0), number


def test_rounds_are_timed_and_chosen_alike_on_all_ranks(gang2: Gang) -> None:
    recipe = "auto(allow=('scatter(qsgd()) + local_sgd(4)',), gain=0.0)"
    first, second = gang2.run(trained, recipe, 80, "", "")
    assert torch.equal(first.model, second.model)  # 80 is the end of a round
    assert (first.exchange, first.said) == (second.exchange, second.said)
    assert any(word.startswith("auto: ") for word in first.said)


def test_what_a_run_wrote_is_replayed_to_the_bit(gang2: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.jsonl")
    one, other = gang2.run(trained, "auto(gain=0.0)", STEPS, "", path)
    decided_alike(one, other)
    again, _ = gang2.run(trained, f"auto(gain=0.0, replay={path!r})", STEPS, "", "")
    assert torch.equal(one.model, again.model)
    assert one.exchange == again.exchange


def wrapped(rank: int, size: int, register: bool) -> Outcome:
    """Around DDP, by attach and as a communication hook."""
    model = DistributedDataParallel(small())
    optimizer = sgd(model)
    if register:
        hook = gossamer.ddp.register(model, "auto")
        for step in range(1, AGAIN):
            learn(model, optimizer, rank, step)
        out = found(model, hook)
        hook.close()
        return out
    with gossamer.attach(model, optimizer, "auto") as comm:
        for step in range(1, AGAIN):
            learn(model, optimizer, rank, step)
        return found(model, comm)


@pytest.mark.parametrize("register", [False, True])
def test_it_chooses_around_ddp_and_as_its_hook(gang2: Gang, register: bool) -> None:
    first, second = gang2.run(wrapped, register)
    assert torch.equal(first.model, second.model)
    assert first.said == second.said
    assert len(first.said) >= 2


def losses_told(rank: int, size: int) -> list[float]:
    """The losses that auto has kept of a run under DDP's hook."""
    model = DistributedDataParallel(small())
    optimizer, hook = sgd(model), gossamer.ddp.register(model, "auto")
    for step in range(1, 25):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        hook.log(loss=loss)
    kept = hook.worker.controller.state["before"].tolist()
    hook.close()
    return kept


def test_a_loss_that_is_logged_by_ddps_hook_is_heard(gang2: Gang) -> None:
    first, second = gang2.run(losses_told)
    assert any(map(isfinite, first))
    assert repr(first) == repr(second)


def vectors() -> nn.Module:
    return nn.LayerNorm(16)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def refused(
    rank: int, size: int, recipe: str, model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any]
) -> str:
    try:
        with attached(recipe, model(), optimizer):
            return ""
    except gossamer.GossamerError as error:
        return str(error)


ROUNDS = "scatter(qsgd()) + local_sgd(4)"


@pytest.mark.parametrize(
    ("allow", "model", "optimizer", "why"),
    [
        ("'nosuch',", small, sgd, "allow names 'nosuch'"),
        ("", small, sgd, "allow is empty"),
        ("'powersgd(rank=64)',", small, sgd, "no matrix of the model has a rank above 16"),
        ("'powersgd',", vectors, sgd, "the model has no matrix"),
        ("'gather(topk()) + ef21()',", small, momentum, "use torch.optim.SGD with momentum=0"),
        (f"'{ROUNDS}',", normed, sgd, "under local_sgd(4) they differ between ranks as parameters do; pass buffers="),
    ],
)
def test_what_a_candidate_refuses_is_refused_before_the_first_step_on_all_ranks(
    gang2: Gang, allow: str, model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Any], why: str
) -> None:
    assert all(why in said for said in gang2.run(refused, f"auto(allow=({allow}))", model, optimizer))


def warmed(rank: int, size: int) -> set[str]:
    """The codecs whose kernels are loaded when auto is attached."""
    seen, whole = set[str](), joining.warm

    def told(recipe: object, *more: Any) -> None:
        seen.update(map(repr, codecs_in(recipe)))
        whole(recipe, *more)

    joining.warm = told  # type: ignore[assignment]
    try:
        with attached("auto", small(), sgd):
            return seen
    finally:
        joining.warm = whole


def test_what_candidates_need_is_loaded_before_the_first_step(gang2: Gang) -> None:
    for seen in gang2.run(warmed):
        assert seen >= {"fp32()", "bf16()", "int8()", "qsgd(bucket=128)", "ternary()", "qsgd(bits=3)"}


def refused_as_hook(rank: int, size: int, recipe: str) -> str:
    try:
        gossamer.ddp.register(DistributedDataParallel(small()), recipe, deadline=20.0).close()
    except gossamer.GossamerError as error:
        return str(error)
    return ""


def test_a_hook_of_ddp_refuses_rounds(gang2: Gang) -> None:
    said = gang2.run(refused_as_hook, f"auto(allow=('{ROUNDS}',))")
    assert all("acts on the optimizer, which a DDP hook does not see; use gossamer.attach" in each for each in said)


def in_a_folder_of_its_own(rank: int, size: int, folders: list[str], register: bool) -> str:
    """A replay of a file that lies on each rank's own disk."""
    before = Path.cwd()
    os.chdir(folders[rank])
    try:
        recipe = "auto(replay='ledger.jsonl')"
        return refused_as_hook(rank, size, recipe) if register else refused(rank, size, recipe, small, sgd)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("register", [False, True])
def test_a_replay_that_ranks_do_not_read_alike_is_refused_on_all(
    gang2: Gang, head: str, register: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    asked = [str(folder) for folder in folders], register
    (folders[0] / "ledger.jsonl").write_text(LEDGER.strip().replace("HEAD", head))
    said = gang2.run(in_a_folder_of_its_own, *asked)
    assert all("auto: replay='ledger.jsonl' cannot be read: No such file or directory" in each for each in said)
    (folders[1] / "ledger.jsonl").write_text(LEDGER.strip().replace("HEAD", head).replace("step 7", "step 8"))
    said = gang2.run(in_a_folder_of_its_own, *asked)
    assert all("content of the file that is replayed, as a hash: '" in each for each in said)
    (folders[1] / "ledger.jsonl").write_text((folders[0] / "ledger.jsonl").read_text())
    assert gang2.run(in_a_folder_of_its_own, *asked) == ["", ""]


def accumulated(rank: int, size: int, path: str) -> list[tuple[list[str], Tensor]]:
    """What is in force in both micro-batches of a step, and the model after it; a loss scaler skips step 4."""
    scaler, out = torch.amp.GradScaler("cpu", init_scale=1024.0), list[tuple[list[str], Tensor]]()
    with attached(f"auto(replay={path!r})", small(), sgd, scaler=scaler) as (model, optimizer, comm):
        for step in range(1, 12):
            seen = list[str]()
            optimizer.zero_grad()
            for micro in range(2):
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + micro))
                factor = float("inf") if (rank, step) == (1, 4) else 1.0
                with comm.no_sync() if micro == 0 else nullcontext():
                    scaler.scale(model(x).square().mean() * factor).backward()
                seen.append(repr(comm.recipe.exchange))
            scaler.step(optimizer)
            scaler.update()
            out.append((seen, torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])))
    return out


BESIDE_A_SCALER = """
{"step": 2, "rank": 0, "decision": "HEAD"}
{"step": 3, "rank": 0, "decision": "auto tries qsgd from step 3"}
{"step": 5, "rank": 0, "decision": "auto tries dense from step 5"}
{"step": 8, "rank": 0, "decision": "auto: int8 from step 8: 1 ms a step"}
"""


def test_changes_come_between_steps_also_where_gradients_accumulate_and_a_scaler_skips(
    gang2: Gang, head: str, tmp_path: Path
) -> None:
    path = made_up(head, tmp_path, BESIDE_A_SCALER)
    one, other = gang2.run(accumulated, path)
    dense, qsgd, int8 = "allreduce(fp32())", "scatter(qsgd(bucket=128))", "scatter(int8())"
    wanted = [dense] * 2 + [qsgd] * 2 + [dense] * 3 + [int8] * 4
    assert [seen for seen, _ in one] == [seen for seen, _ in other] == [[name] * 2 for name in wanted]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))
    assert torch.equal(one[3][1], one[2][1]), "step 4 was skipped"
    assert not torch.equal(one[4][1], one[3][1])


def asleep(rank: int, size: int) -> Outcome:
    model = small()
    with attached("auto", model, sgd) as (inner, optimizer, comm):
        for step in range(1, 66):  # measuring and trials, which there are on a busy machine
            if rank == 1:
                time.sleep(0.02)
            learn(inner, optimizer, rank, step)
        return found(inner, comm)


def test_a_rank_that_sleeps_is_named(gang2: Gang) -> None:
    first, second = gang2.run(asleep)
    assert first.said == second.said
    assert any("; rank 1 computes " in said for said in first.said), first.said
