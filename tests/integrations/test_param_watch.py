"""A model that changes after attach: layers unfrozen, frozen, added, replaced, removed."""

import warnings
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, data, flat, same
from torch import Tensor, nn

from gossamer.core.errors import AttachError, PeerError

pytestmark = pytest.mark.gang


def network(frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 7))
    model[0].requires_grad_(not frozen)
    return model


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    x, y = data(rank, step)
    (model(x) - y).square().mean().backward()
    optimizer.step()


def finetuned(rank: int, size: int, recipe: str, swap: bool) -> tuple[Tensor, Tensor]:
    """The body is unfrozen after three steps (and the head frozen, with `swap`); and the same in one process."""

    def unfreeze(model: nn.Module) -> None:
        model[0].requires_grad_(True)
        model[2].requires_grad_(not swap)

    with attached(recipe, network(), decaying) as (model, optimizer, comm):
        for step in range(1, 8):
            if step == 4:
                unfreeze(model)
            one_step(model, optimizer, rank, step)
        comm.check_sync()
        assert comm.step == 7
        together = flat(model)
    alone = network()
    optimizer = decaying(alone)
    for step in range(1, 8):
        if step == 4:
            unfreeze(alone)
        optimizer.zero_grad()
        for r in range(size):
            x, y = data(r, step)
            ((alone(x) - y).square().mean() / size).backward()
        optimizer.step()
    return together, flat(alone)


@pytest.mark.parametrize("swap", [False, True])
def test_a_layer_unfrozen_later_is_averaged_and_one_frozen_later_stays(gang2: Gang, swap: bool) -> None:
    for together, alone in gang2.run(finetuned, "allreduce", swap):
        torch.testing.assert_close(together, alone, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("recipe", ["topk(ratio=0.3)", "slowmo(2)", "local_sgd(3)", "sgp"])
def test_other_recipes_follow_too(gang2: Gang, recipe: str) -> None:
    (a, alone), (b, _) = gang2.run(finetuned, recipe + " + bucket(0.0001)", False)
    moved = (a - flat(network())).abs()
    assert (moved[: 17 * 9] > 0).all()
    assert recipe in ("slowmo(2)", "local_sgd(3)", "sgp") or same(a, b)
    torch.testing.assert_close(a, alone, rtol=0.5, atol=0.5)


def met_late(rank: int, size: int) -> tuple[Tensor, list[Tensor]]:
    """After a round, anchors and models are equal; those of what joined as well."""
    with attached("slowmo(2, beta=0.5)", network(), decaying) as (model, optimizer, comm):
        for step in range(1, 9):
            if step == 4:
                model[0].requires_grad_(True)
            one_step(model, optimizer, rank, step)
        comm.check_sync()
        return flat(model), [c.states["schedule"]["anchor"] for c in comm.worker.buckets]


def test_what_joins_late_has_an_anchor_of_its_own(gang2: Gang) -> None:
    (a, anchors), (b, _) = gang2.run(met_late)
    assert same(a, b)
    assert len(anchors) == 2


def changed(rank: int, size: int, recipe: str, how: str) -> str:
    with attached(recipe, network(frozen=how == "unfrozen"), decaying) as (model, optimizer, _):
        one_step(model, optimizer, rank, 1)
        if how == "added":
            model.append(nn.Linear(7, 7))
            optimizer.add_param_group({"params": list(model[3].parameters())})
        elif how == "added elsewhere":
            optimizer.add_param_group({"params": list(nn.Linear(7, 7).parameters())})
        elif how == "replaced":
            model[2] = nn.Linear(9, 7)
        elif how == "removed":
            del model[2]
        elif how == "assigned":
            model.load_state_dict(network().state_dict(), assign=True)
        elif how == "unfrozen":
            model[0].requires_grad_(True)
        with pytest.raises(AttachError) as caught:
            two_more(model, optimizer, rank)
        return str(caught.value)


def two_more(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in (2, 3):
        x, _ = data(rank, step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("recipe", "how", "words"),
    [
        ("qsgd", "added", "parameter '3.weight' was added"),
        ("qsgd", "added elsewhere", "2 parameter(s) that are not in the model"),
        ("local_sgd(3)", "added elsewhere", "2 parameter(s) that are not in the model"),
        ("qsgd", "replaced", "parameter '2.weight' was replaced"),
        ("local_sgd(3)", "removed", "parameter '2.weight' was removed"),
        ("local_sgd(3)", "assigned", "load_state_dict(assign=True)"),
        ("overlap_local_sgd(1)", "unfrozen", "parameter '0.weight' was unfrozen"),
    ],
)
def test_other_changes_are_errors_that_name_the_parameter(gang2: Gang, recipe: str, how: str, words: str) -> None:
    for said in gang2.run(changed, recipe, how):
        assert words in said
        assert "attach" in said


def unequal(rank: int, size: int, what: str) -> str:
    """Something that should be equal and that no gradient touches is changed on one rank."""
    options: dict[str, Any] = {"buffers": "average"} if what == "buffer" else {}
    model = nn.Sequential(network(), nn.BatchNorm1d(7))
    with attached("allreduce", model, decaying, **options) as (model, optimizer, comm):
        one_step(model, optimizer, rank, 1)
        comm.check_sync()
        if rank == 1 and what == "frozen":
            with torch.no_grad():
                model[0][0].bias.add_(1)
        if what == "buffer":
            comm._steps.shared.agreed["1.running_mean"] += rank
            model[1].running_mean += rank
        with pytest.raises(PeerError) as caught:
            comm.check_sync()
        return str(caught.value)


def test_check_sync_sees_frozen_parameters_and_shared_buffers(gang2: Gang) -> None:
    assert all("0.0.bias differs" in said for said in gang2.run(unequal, "frozen"))
    assert all("1.running_mean differs" in said for said in gang2.run(unequal, "buffer"))


class WithPhases(nn.Sequential):
    """Holds something that cannot be averaged, frozen."""

    def __init__(self) -> None:
        super().__init__(*network(frozen=False))
        self.phases = nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)


def thawed(rank: int, size: int, recipe: str) -> tuple[str, list[str]]:
    """A parameter that cannot be averaged is unfrozen; before it one that no optimizer holds."""
    model = WithPhases()
    model[0].requires_grad_(False)
    with (
        warnings.catch_warnings(record=True) as said,
        attached(recipe, model, lambda m: decaying(m[2])) as (_, optimizer, _),  # type: ignore[index]
    ):
        warnings.simplefilter("always")
        one_step(model, optimizer, rank, 1)
        model[0].requires_grad_(True)
        one_step(model, optimizer, rank, 2)
        model.phases.requires_grad_(True)
        with pytest.raises(AttachError) as caught:
            one_step(model, optimizer, rank, 3)
    return str(caught.value), [str(w.message) for w in said]


@pytest.mark.parametrize("recipe", ["qsgd", "local_sgd(3)"])
def test_what_is_unfrozen_is_looked_at_as_what_is_attached(gang2: Gang, recipe: str) -> None:
    for refused, said in gang2.run(thawed, recipe):
        assert "parameter 'phases' is torch.complex64" in refused
        assert [text for text in said if "no optimizer given to attach steps '0.weight' and 1 more" in text]


def moved(rank: int, size: int, recipe: str) -> str:
    with attached(recipe, network(frozen=False), decaying) as (model, optimizer, comm):
        one_step(model, optimizer, rank, 1)
        comm.fabric.device = torch.device("cuda", 0)  # as if it had been attached there
        with pytest.raises(AttachError) as caught:
            one_step(model, optimizer, rank, 2)
        comm.fabric.device = torch.device("cpu")
    return str(caught.value)


@pytest.mark.parametrize("recipe", ["qsgd", "local_sgd(3)"])
def test_a_model_that_is_moved_to_another_device_is_an_error_that_says_so(gang2: Gang, recipe: str) -> None:
    assert all("was moved from cuda:0 to cpu after attach" in said for said in gang2.run(moved, recipe))
