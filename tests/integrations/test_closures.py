"""`optimizer.step(closure)`: the loop of trainers that always pass one trains as the loop without."""

from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, flat, loss_of, same
from torch import Tensor, nn

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}
RECIPES = [
    "allreduce",
    "topk(ratio=0.3)" + SMALL,
    "scatter(ternary()) + signs()",
    "slowmo(2)",
    "overlap_local_sgd(2)",
    "sgp" + SMALL,
    "backup(0)",
    "allreduce + every_step(l1=0.1)",
]


def stepped(rank: int, size: int, recipe: str, kind: str, how: str) -> tuple[list[Tensor], list[float], int]:
    """The model after every step, what `step` returned, and how often the loss was computed."""
    seen, losses, calls = list[Tensor](), list[float](), 0
    with attached(recipe, optimizer=OPTIMIZERS[kind]) as (model, optimizer, comm):
        while comm.step < 5:

            def closure() -> float:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = loss_of(model, rank, comm.step + 1)
                loss.backward()
                return float(loss.detach())

            match how:
                case "none":
                    losses.append(closure())
                    optimizer.step()
                case "named":
                    losses.append(optimizer.step(closure=closure))
                case _:
                    with torch.no_grad():  # as the closures of trainers may find it
                        losses.append(optimizer.step(closure))
            seen.append(flat(model))
        comm.check_sync()
    return seen, losses, calls


def are_one(some: tuple[list[Tensor], list[float], int], others: tuple[list[Tensor], list[float], int]) -> bool:
    return all(same(a, b) for a, b in zip(some[0], others[0], strict=True)) and some[1:] == others[1:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_with_a_closure_trains_as_one_without(gang2: Gang, recipe: str) -> None:
    for by_hand, given in zip(gang2.run(stepped, recipe, "SGD", "none"), gang2.run(stepped, recipe, "SGD", "given")):
        assert by_hand[2] == 5
        assert are_one(by_hand, given)


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad", "RMSprop"])
def test_every_optimizer_that_takes_one_gradient_a_step_may_have_a_closure(gang2: Gang, kind: str) -> None:
    for by_hand, named in zip(gang2.run(stepped, "qsgd", kind, "none"), gang2.run(stepped, "qsgd", kind, "named")):
        assert are_one(by_hand, named)


@pytest.mark.parametrize("recipe", ["allreduce + every_step(l1=0.1)", "allreduce + signs()", "slowmo(2)"])
def test_a_rank_alone_may_give_one_too(recipe: str) -> None:
    assert are_one(stepped(0, 1, recipe, "SGD", "none"), stepped(0, 1, recipe, "SGD", "given"))


class Twice(torch.optim.SGD):
    """Looks at the gradient ahead of it, as some optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def]
        assert closure is not None
        with torch.enable_grad():
            closure()
            loss = closure()
        super().step()
        return loss


def refused(rank: int, size: int) -> list[str]:
    said = list[str]()
    with pytest.raises(AttachError) as lbfgs, attached("qsgd", optimizer=lambda m: torch.optim.LBFGS(m.parameters())):
        pass
    said.append(str(lbfgs.value))
    with attached("qsgd", optimizer=lambda m: Twice(m.parameters(), lr=0.1)) as (model, optimizer, _):
        with pytest.raises(AttachError) as twice:
            optimizer.step(lambda: loss_of(model, rank, 1).backward())
        said.append(str(twice.value))
    model = Awkward()
    halves = [torch.optim.SGD(some, lr=0.1) for some in ([model.matrix, model.scale], [model.turned, model.bias])]
    model.still.requires_grad_(False), model.empty.requires_grad_(False)
    with attached("qsgd", model, lambda m: halves):  # pyright: ignore
        halves[0].step(lambda: loss_of(model, rank, 1).backward())
        with pytest.raises(AttachError) as second:
            halves[1].step(lambda: loss_of(model, rank, 1).backward())
        said.append(str(second.value))
        halves[1].step()
    scaler = torch.amp.GradScaler("cpu")
    with attached("qsgd", scaler=scaler) as (model, optimizer, _):
        scaler.scale(loss_of(model, rank, 1)).backward()
        with pytest.raises(AttachError) as scaled:
            scaler.step(optimizer, lambda: loss_of(model, rank, 1).backward())
        said.append(str(scaled.value))
    return said


def test_what_cannot_be_right_is_refused_by_name(gang2: Gang) -> None:
    for lbfgs, twice, second, scaled in gang2.run(refused):
        assert "LBFGS computes the gradient several times within one step" in lbfgs
        assert "Twice called its closure a second time" in twice
        assert all("such as SGD or AdamW" in text for text in (lbfgs, twice))
        assert "give the closure to the first optimizer" in second
        assert "call backward() yourself, then scaler.step(optimizer)" in scaled


def test_lbfgs_trains_alone() -> None:
    with attached("slowmo(2)", nn.Linear(17, 7), lambda m: torch.optim.LBFGS(m.parameters())) as (
        model,
        optimizer,
        comm,
    ):
        calls = list[float]()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 1)
            loss.backward()
            calls.append(float(loss.detach()))
            return loss

        optimizer.step(closure)
        assert comm.step == 1
        assert len(calls) > 2
        assert calls[-1] < calls[0]
