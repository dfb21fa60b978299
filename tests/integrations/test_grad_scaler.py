"""Loss scaling: an overflow on one rank costs one step, poisons nothing, and leaves all ranks' clocks aligned."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SMALL, Awkward, attached, flat, loss_of, same

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang

SPOILT = {(1, 3), (0, 4), (1, 42), (1, 48), (0, 72), (1, 73)}  # (rank, iteration)


def scaled_loop(rank: int, size: int, recipe: str, iterations: int, tell: bool, pause: int = 0) -> dict[str, Any]:
    """The usual loop with a GradScaler; the scale grows on its way, so memories see several scales."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=12)
    skipped = list[int]()
    with attached(recipe, scaler=scaler if tell else None) as (model, optimizer, comm):
        for i in range(1, iterations + 1):
            before = flat(model)
            optimizer.zero_grad()
            factor = float("inf") if (rank, i) in SPOILT else 1.0
            scaler.scale(loss_of(model, rank, i) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if same(before, flat(model)):
                skipped.append(i)
        comm.check_sync()
        state = comm.state_dict()
        finite = all(
            v.isfinite().all() for v in state.values() if isinstance(v, torch.Tensor) and v.is_floating_point()
        )
        with comm.consensus():
            agreed = flat(model)
        return {
            "step": comm.step,
            "skipped": skipped,
            "finite": finite,
            "flat": flat(model),
            "agreed": agreed,
            "residual": comm.metrics()["residual_norm"],
            "scale": scaler.get_scale(),
        }


GRADIENT = [
    "topk(ratio=0.2)" + SMALL,
    "powersgd" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana()" + SMALL,
    "terngrad",
]


@pytest.mark.parametrize(("recipe", "tell"), [*((r, True) for r in GRADIENT), ("terngrad", False)])
def test_an_overflow_anywhere_skips_the_step_everywhere(gang2: Gang, recipe: str, tell: bool) -> None:
    a, b = gang2.run(scaled_loop, recipe, 80, tell)
    assert a["skipped"] == b["skipped"] == [3, 4, 42, 48, 72, 73]
    assert a["step"] == b["step"] == 80
    assert a["finite"]
    assert b["finite"]
    assert a["scale"] == b["scale"]
    assert same(a["flat"], b["flat"])
    assert a["flat"].isfinite().all()


def growing(rank: int, size: int, recipe: str, scaled: bool) -> torch.Tensor:
    """A scale that doubles at every other step changes no bit where memories are free of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    with attached(recipe, scaler=scaler) as (model, optimizer, comm):
        for i in range(1, 13):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, i)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert comm.step == 12
        assert scaler.get_scale() == (4096.0 if scaled else 1.0)
        return flat(model)


@pytest.mark.parametrize(
    "recipe",
    [
        "topk(ratio=0.2)" + SMALL,
        "scatter(topk(ratio=0.2)) + error_feedback()" + SMALL,
        "diana(bits=4, bucket=16)" + SMALL,
        "scatter(qsgd(bits=4, bucket=16)) + diana(momentum=0.5)",
        "powersgd",
        "topk(ratio=0.2) + slowmo(3)",
    ],
)
def test_a_scale_that_grows_leaves_no_trace(gang2: Gang, recipe: str) -> None:
    scaled, plain = gang2.run(growing, recipe, True), gang2.run(growing, recipe, False)
    assert all(same(a, b) for a, b in zip(scaled, plain))


LOCAL = [
    "local_sgd(3)",
    "topk(ratio=0.2) + slowmo(3)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana() + local_sgd(3)",
    "overlap_local_sgd(3)",
    "sgp",
    "osgp",
]


@pytest.mark.parametrize("recipe", LOCAL)
def test_local_steps_skip_alone_and_clocks_stay_aligned(gang2: Gang, recipe: str) -> None:
    a, b = gang2.run(scaled_loop, recipe, 48, True)
    if "sgp" not in recipe:  # a mixing step moves the model even where the optimizer did not
        assert a["skipped"][0] == 4
    assert a["step"] == b["step"] == 48
    assert a["finite"]
    assert b["finite"]
    assert a["scale"] != b["scale"]
    assert same(a["agreed"], b["agreed"])
    assert a["agreed"].isfinite().all()
    if "sgp" not in recipe and "overlap" not in recipe:
        assert same(a["flat"], b["flat"])


def untold(rank: int, size: int, recipe: str, how: str) -> tuple[str, int]:
    """A scaler that attach does not know of, at the first step that it does not skip."""
    scaler = torch.amp.GradScaler("cpu", enabled=how != "disabled")

    def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, fused=how == "fused")

    model = torch.nn.Linear(17, 7)
    with attached(recipe, model, fused) as (model, optimizer, comm):
        try:
            for i in range(1, 5):
                optimizer.zero_grad()
                factor = float("inf") if (how, rank, i) in {("plain", 1, 1), ("fused", 0, 2)} else 1.0
                scaler.scale(loss_of(model, rank, i) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        except AttachError as error:
            return str(error), comm.step
        comm.check_sync()
        return "", comm.step


@pytest.mark.parametrize("recipe", ["local_sgd(3)", "overlap_local_sgd(3)", "sgp"])
def test_local_steps_must_be_told_of_the_scaler(gang2: Gang, recipe: str) -> None:
    for text, step in gang2.run(untold, recipe, "plain"):
        assert "call attach(..., scaler=scaler)" in text
        assert step == 0


def test_memories_must_be_told_of_the_scaler(gang2: Gang) -> None:
    for text, step in gang2.run(untold, "topk(ratio=0.3)", "late"):
        assert (
            "error_feedback() over gather(topk(ratio=0.3, scope='block')) would keep gradients of one loss scale"
            in text
        )
        assert step == 0


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        ("scatter(qsgd()) + local_sgd(3)", "under local_sgd(3) a rank would fall behind"),
        ("topk(ratio=0.3)", "error_feedback() over gather(topk(ratio=0.3, scope='block')) would keep gradients"),
    ],
)
def test_what_a_controller_may_put_in_force_must_be_told_of_the_scaler_from_the_first_step_on(
    gang2: Gang, candidate: str, why: str
) -> None:
    for text, step in gang2.run(untold, f"auto(allow=('{candidate}',))", "late"):
        assert why in text
        assert "call attach(..., scaler=scaler)" in text
        assert step == 0


@pytest.mark.parametrize("how", ["disabled", "fused"])
def test_a_scaler_that_skips_no_step_need_not_be_told_of(gang2: Gang, how: str) -> None:
    """An optimizer that knows of scales is stepped always, and leaves the parameters alone where it must."""
    assert gang2.run(untold, "local_sgd(3)", how) == [("", 4)] * 2


def test_backup_workers_refuse_a_scaler_that_they_were_not_told_of(gang2: Gang) -> None:
    assert all("use bf16" in text for text, _ in gang2.run(untold, "backup(0)", "late"))


def looked_at_again(rank: int, size: int) -> int:
    """A forward in training mode between backward and step, to log the loss; and then the scaler steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with attached("local_sgd(2)", scaler=scaler) as (model, optimizer, comm):
        for i in range(1, 5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, i)).backward()
            loss_of(model, rank, i)
            scaler.step(optimizer)
            scaler.update()
        comm.check_sync()
        torch.save(model, io.BytesIO())
        copy.deepcopy(model)
        assert comm.metrics()["skipped_steps"] == 0
        return comm.step


def test_a_forward_before_the_step_is_no_skipped_step(gang2: Gang) -> None:
    assert gang2.run(looked_at_again) == [4, 4]


def in_pieces(rank: int, size: int, recipe: str) -> dict[str, Any]:
    """Submodules are called, not the model, which is in eval(); rank 1 overflows in the second iteration."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    body = torch.nn.Sequential(torch.nn.Linear(17, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 7))
    with attached(recipe, body, scaler=scaler, buffers="average") as (model, optimizer, comm):
        model.eval()
        for i in range(1, 7):
            optimizer.zero_grad()
            x = torch.randn(4, 17, generator=torch.Generator().manual_seed(10 * i + rank))
            if (rank, i) == (1, 2):
                x = x * float("inf")
            y = model[2](model[1].train()(model[0](x)))
            scaler.scale(y.square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        comm.check_sync()
        metrics = comm.metrics()
        return {
            "step": comm.step,
            "finite": all(bool(t.isfinite().all()) for t in model.state_dict().values()),
            "statistics": model[1].running_mean.clone(),
            "skipped": metrics["skipped_steps"],
            "dropped": metrics["dropped_rounds"],
            "spoilt": comm.spoilt,
        }


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)"])
def test_a_skipped_step_spoils_no_running_statistics(gang2: Gang, recipe: str) -> None:
    a, b = gang2.run(in_pieces, recipe)
    for seen in (a, b):
        assert seen["step"] == 6
        assert seen["finite"]
    assert same(a["statistics"], b["statistics"])
    if recipe == "allreduce":
        assert a["skipped"] == b["skipped"] == 1
        assert a["spoilt"] == b["spoilt"] == {1: 1}
    else:  # a local step is skipped by the rank that overflows, and its model stays finite
        assert (a["skipped"], b["skipped"]) == (0, 1)


def spoiling(rank: int, size: int, recipe: str) -> tuple[float, dict[int, int], list[str]]:
    """Rank 1 gives NaN every time, and nobody skips anything."""
    with attached(recipe) as (model, optimizer, comm), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(1, 25):
            optimizer.zero_grad()
            (loss_of(model, rank, i) * (float("nan") if rank == 1 else 1.0)).backward()
            optimizer.step()
        return comm.metrics()["dropped_rounds"], comm.spoilt, [str(w.message) for w in said]


def test_a_rank_that_spoils_every_round_is_named(gang2: Gang) -> None:
    for dropped, spoilt, said in gang2.run(spoiling, "local_sgd(2)"):
        assert (dropped, spoilt) == (12, {1: 12})
        assert len(said) == 1
        assert "the last 10 averages were not finite because of rank 1" in said[0]


def first_of_two_left_out(rank: int, size: int) -> float:
    """The scaler leaves out the first of two optimizers, and the loop then leaves out the second."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = Awkward()
    parts = [[model.matrix], [p for name, p in model.named_parameters() if name != "matrix"]]
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in parts]
    with (
        gossamer.attach(model, optimizers, "allreduce", scaler=scaler, deadline=DEADLINE) as comm,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for i in range(1, 4):
            model.zero_grad()
            factor = float("inf") if (rank, i) == (1, 2) else 1.0
            scaler.scale(loss_of(model, rank, i) * factor).backward()
            for optimizer in optimizers[: 1 if i == 2 else 2]:
                scaler.step(optimizer)
            scaler.update()
        assert comm.step == 3
        return comm.metrics()["skipped_steps"]


def test_a_step_in_which_no_optimizer_stepped_is_a_skipped_one(gang2: Gang) -> None:
    assert gang2.run(first_of_two_left_out) == [1.0, 1.0]


def partly_spoilt(rank: int, size: int) -> list[tuple[bool, float]]:
    """Gradients of the first of two optimizers overflow at the third step, those of the second do not."""
    scaler, model, out = torch.amp.GradScaler("cpu", init_scale=1024.0), Awkward(), list[tuple[bool, float]]()
    parts = [[model.matrix], [p for name, p in model.named_parameters() if name != "matrix"]]
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in parts]
    recipe = "topk(ratio=0.3)" + SMALL
    with gossamer.attach(model, optimizers, recipe, scaler=scaler, deadline=DEADLINE) as comm:
        for i in range(1, 5):
            model.zero_grad()
            before, owed = flat(model), comm.metrics()["residual_norm"]
            extra = float("inf") * model.matrix[0, 0] if (rank, i) == (1, 3) else 0.0
            scaler.scale(loss_of(model, rank, i) + extra).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            out.append((same(flat(model), before), comm.metrics()["residual_norm"] - owed))
        comm.check_sync()
    return out


def test_an_overflow_in_one_optimizers_part_skips_the_step_of_all(gang2: Gang) -> None:
    """Else the others would apply what memories owe, and those would send it once more."""
    for found in gang2.run(partly_spoilt):
        assert [stands for stands, _ in found] == [False, False, True, False]
        assert found[2][1] == 0.0


def sparse_overflow(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, dict[int, int]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 4, sparse=True), torch.nn.Linear(4, 1))
    with attached("allreduce", model, scaler=scaler) as (model, optimizer, comm):
        held = list[torch.Tensor]()
        for i in range(1, 4):
            optimizer.zero_grad()
            factor = float("inf") if (rank, i) == (1, 2) else 1.0
            scaler.scale(model(torch.tensor([rank, i])).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            held.append(flat(model))
        assert comm.step == 3
        return held[0], held[1], comm.spoilt


def test_an_overflow_of_a_sparse_gradient_skips_the_step_too(gang2: Gang) -> None:
    for before, after, spoilt in gang2.run(sparse_overflow):
        assert same(before, after)
        assert spoilt == {1: 1}


def saved_after_a_skip(rank: int, size: int, resume: bool) -> torch.Tensor:
    """A checkpoint taken right after a skipped step counts that step."""
    with attached("qsgd") as (model, optimizer, comm):
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 2).backward()
        comm.skip()  # and no step
        if resume:
            comm.load_state_dict(comm.state_dict())
        for i in (3, 4):
            optimizer.zero_grad()
            loss_of(model, rank, i).backward()
            optimizer.step()
        assert comm.step == 4
        return flat(model)


def test_a_checkpoint_after_a_skipped_step_changes_no_bit(gang2: Gang) -> None:
    undisturbed, resumed = gang2.run(saved_after_a_skip, False), gang2.run(saved_after_a_skip, True)
    assert same(undisturbed[0], resumed[0])


def copied(rank: int, size: int) -> int:
    """A copy of the scaler, and one from a file, train another model beside this one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with attached("topk(ratio=0.3)", scaler=scaler) as (model, optimizer, comm):
        for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            twin = torch.nn.Linear(2, 1)
            before, own = flat(twin), torch.optim.SGD(twin.parameters(), lr=0.1)
            other.scale(twin(torch.full((1, 2), float(rank + 1))).sum()).backward()
            other.step(own)
            other.update(2.0)
            assert not same(flat(twin), before)
            assert (other.get_scale(), scaler.get_scale()) == (2.0, 8.0)
        scaler.scale(loss_of(model, rank, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        return comm.step


def test_a_copy_of_the_scaler_is_one_of_its_own(gang2: Gang) -> None:
    assert gang2.run(copied) == [1, 1]


def test_the_momentum_of_an_exchange_must_be_told_of_the_scaler_too(gang2: Gang) -> None:
    for text, step in gang2.run(untold, "fetchsgd", "late"):
        assert "would keep gradients of one loss scale and send them under another" in text
        assert step == 0
