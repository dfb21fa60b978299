"""The model that all ranks agree on, the numbers a run gives, and what becomes of running statistics."""

from threading import Event
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SMALL, Awkward, attached, flat, loss_of, same, small_step
from torch import Tensor, nn

from gossamer.core.errors import PeerError
from gossamer.core.verbs import Compute, Program
from gossamer.integrations.consensus import remember, restore

pytestmark = pytest.mark.gang


def linear_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Gradients that do not depend on the model, so that the sum of all models is known whatever is mixed."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    return sum(((p * torch.randn(p.shape, generator=rng)).sum() for p in model.parameters()), start=torch.zeros(()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def agreeing(rank: int, size: int, recipe: str, steps: int) -> dict[str, Tensor]:
    out = dict[str, Tensor]()
    with attached(recipe, optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        out["own"] = flat(model)
        with comm.consensus():
            out["agreed"] = flat(model)
        out["restored"] = flat(model)
        for step in range(steps + 1, steps + 3):  # training goes on as if nothing had happened
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        out["later"] = flat(model)
    return out


RECIPES = [
    "allreduce",
    "local_sgd(4)" + SMALL,
    "slowmo_sgp(48)",
    "sgp(topology=ring())" + SMALL,
    "sgp(every=2)",
    "osgp" + SMALL,
    "osgp(topology=complete())",
    "osgp(every=3)",
    "d_psgd" + SMALL,
]


@pytest.fixture(scope="module")
def exact(gang4: Gang) -> Tensor:
    """Where the mean of all models goes, whatever the recipe."""
    return gang4.run(agreeing, "gather(fp32())", 7)[0]["own"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_consensus_is_the_mean_of_all_models_and_is_undone(gang4: Gang, exact: Tensor, recipe: str) -> None:
    outcomes = gang4.run(agreeing, recipe, 7)
    for outcome in outcomes:
        assert same(outcome["agreed"], outcomes[0]["agreed"])
        torch.testing.assert_close(outcome["agreed"], exact, rtol=1e-5, atol=1e-5)
        assert same(outcome["own"], outcome["restored"])
    assert same(outcomes[0]["own"], outcomes[1]["own"]) == (recipe == "allreduce")


def strayed(rank: int, size: int, recipe: str, steps: int) -> str:
    with attached(recipe, optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        if rank == 1:
            next(model.parameters()).data.view(-1)[0] += 1
        try:
            comm.check_sync()
        except PeerError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(2)", "slowmo(2)", "slowmo_sgp(2)"])
def test_a_model_that_strays_is_found_wherever_models_must_be_equal(gang2: Gang, recipe: str) -> None:
    assert all("at step 5, " in text and "differs between ranks" in text for text in gang2.run(strayed, recipe, 4))
    within = gang2.run(strayed, recipe, 3)  # within a round models differ as it is
    assert [bool(text) for text in within] == [recipe == "allreduce"] * 2


def undisturbed(rank: int, size: int, recipe: str, steps: int) -> Tensor:
    with attached(recipe, optimizer=sgd) as (model, optimizer, _):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        return flat(model)


@pytest.mark.parametrize("recipe", ["overlap_local_sgd(2)", "osgp", "topk(ratio=0.5) + slowmo(4)"])
def test_looking_at_the_consensus_changes_no_bit_of_training(gang2: Gang, recipe: str) -> None:
    looked, plain = gang2.run(agreeing, recipe, 5), gang2.run(undisturbed, recipe, 7)
    assert all(same(a["later"], b) for a, b in zip(looked, plain))
    mean = (looked[0]["own"] + looked[1]["own"]) / 2
    if recipe != "osgp":
        torch.testing.assert_close(looked[0]["agreed"], mean, rtol=1e-5, atol=1e-6)


def measured(rank: int, size: int, recipe: str) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    with attached(recipe, measure_every=3) as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        before = comm.metrics()
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        return before, comm.metrics(), dict(comm.worker.measurement.errors)


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [
        ("allreduce" + SMALL, 0.0, 1e-6),
        ("topk(ratio=0.1)" + SMALL, 0.05, 1.0),
        ("qsgd(bits=8)", 1e-5, 0.1),
        ("powersgd(rank=1)", 0.01, 1.0),
        ("qsgd(bits=8) + local_sgd(3)", 1e-5, 0.1),
        ("qsgd(bits=8) + local_sgd(4)", 1e-5, 0.1),  # no multiple of three ends a round
        ("scatter(qsgd(bits=8)) + backup_workers(backups=0)", 1e-5, 0.1),
    ],
)
def test_metrics_count_and_measure(gang2: Gang, recipe: str, least: float, most: float) -> None:
    for before, after, errors in gang2.run(measured, recipe):
        assert "relative_error" not in before
        assert errors.keys() == {name for name, _ in Awkward().named_parameters()}
        assert errors["empty"] == errors["still"] == 0
        assert least <= after["relative_error"] <= most
        assert (before["step"], after["step"]) == (2, 6)
        assert after["exposed_seconds"] > before["exposed_seconds"] > 0
        assert after["sent_bytes"] > before["sent_bytes"] > 0
        assert after["received_bytes"] > before["received_bytes"]
        assert (after["residual_norm"] > 0) == ("topk" in recipe or "powersgd" in recipe)
        assert after["ratio_to_dense"] > 0
        assert after["dropped_steps"] == 0


def measured_behind(rank: int, size: int) -> dict[str, float]:
    """Rank 1's lane begins with what was launched at step 2 when its loop is at step 3 already."""
    with attached("qsgd(bits=8) + overlap_local_sgd(2)", measure_every=2) as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        gate = Event()
        comm.fabric.start(_waiting(gate))
        small_step(model, optimizer, comm, rank)
        if rank == 0:
            gate.set()
        optimizer.zero_grad()
        loss_of(model, rank, 3).backward()
        gate.set()
        optimizer.step()
        comm.state_dict()  # waits for what is under way
        return comm.worker.measurement.errors


def _waiting(gate: Event) -> Program[None]:
    yield Compute(lambda: gate.wait(DEADLINE), "waiting")


def test_what_is_measured_is_decided_when_it_is_launched_not_when_it_runs(gang2: Gang) -> None:
    for errors in gang2.run(measured_behind):
        assert errors.keys() == {name for name, _ in Awkward().named_parameters()}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = nn.Linear(17, 9), nn.BatchNorm1d(9), nn.Linear(9, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.inner(x))))


def normed(rank: int, size: int, recipe: str, buffers: Any, steps: int) -> dict[str, Tensor]:
    with attached(recipe, Normed(), buffers=buffers) as (model, optimizer, comm):
        for _ in range(steps):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        own = torch.cat([model.norm.running_mean, model.norm.running_var]).clone()
        model.eval()
        with comm.consensus():
            agreed = torch.cat([model.norm.running_mean, model.norm.running_var]).clone()
        assert same(own, torch.cat([model.norm.running_mean, model.norm.running_var]))
        assert int(model.norm.num_batches_tracked) == steps
        return {"own": own, "agreed": agreed, "flat": flat(model)}


POLICIES = [
    (r, b) for r in ("local_sgd(2)", "overlap_local_sgd(2)", "allreduce") for b in ("average", "broadcast", "local")
]


@pytest.mark.parametrize(("recipe", "buffers"), [*POLICIES, ("allreduce", None)])
def test_running_statistics_follow_the_policy(gang2: Gang, recipe: str, buffers: Any) -> None:
    a, b = gang2.run(normed, recipe, buffers, 4)
    apart, _ = gang2.run(normed, recipe, "local", 4)
    assert same(a["own"], b["own"]) == (buffers in ("average", "broadcast"))
    if buffers == "local":
        assert same(a["agreed"], a["own"])
    else:
        assert same(a["agreed"], b["agreed"])
    if buffers == "broadcast":
        assert same(a["own"], apart["own"])  # rank 0's
    if buffers == "average":
        assert not same(a["own"], apart["own"])
    if "overlap" not in recipe:
        assert same(a["flat"], b["flat"])


def eval_between(rank: int, size: int) -> bool:
    """Evaluation and gradients taken by hand between steps disturb nothing."""
    finals = list[Tensor]()
    for look in (False, True):
        with attached("topk(ratio=0.3)" + SMALL) as (model, optimizer, comm):
            for _ in range(4):
                small_step(model, optimizer, comm, rank)
                if look:
                    with torch.no_grad():
                        loss_of(model, rank, 50)
                    torch.autograd.grad(loss_of(model, rank, 51), [model.get_parameter("bias")])
            finals.append(flat(model))
    return same(*finals)


def test_looking_at_losses_between_steps_changes_nothing(gang2: Gang) -> None:
    assert gang2.run(eval_between) == [True, True]


def test_buffers_that_are_made_or_grow_in_an_evaluation_stay() -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("cache", torch.zeros(2))
    weight, own = model.weight.detach().clone(), remember(model)
    with torch.no_grad():
        model.weight.add_(1.0)
    model.register_buffer("cache", torch.ones(4))
    model.register_buffer("made", torch.ones(1))
    restore(model, own)
    assert same(model.weight.detach(), weight)
    assert same(model.get_buffer("cache"), torch.ones(4))
    assert same(model.get_buffer("made"), torch.ones(1))
