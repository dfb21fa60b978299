"""Other things people do to a model: recomputing activations, compiling, second derivatives, failing half-way."""

from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, data, flat, loss_of, same, small_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang


class Recomputed(nn.Module):
    """Blocks whose activations are computed again in the backward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(17, 17), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(17, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = block(x) if self.how == "plain" else checkpoint(block, x, use_reentrant=self.how != "new")
        return checkpoint(self.head, x, use_reentrant=True) if self.how == "last" else self.head(x)


def recomputed(rank: int, size: int, how: str) -> Tensor | str:
    with attached("topk(ratio=0.3)" + SMALL, Recomputed(how)) as (model, optimizer, comm):
        try:
            for _ in range(4):
                small_step(model, optimizer, comm, rank)
        except AttachError as error:
            return str(error)
        comm.check_sync()
        return flat(model)


def test_recomputed_activations_change_no_bit_or_are_refused(gang2: Gang) -> None:
    plain = gang2.run(recomputed, "plain")[0]
    assert all(same(plain, result) for how in ("new", "reentrant") for result in gang2.run(recomputed, how))
    for said in gang2.run(recomputed, "last"):  # the outer pass has given no gradient yet when the inner one ends
        assert "use_reentrant=False" in said


def compiled(rank: int, size: int, recipe: str, attach_to: str) -> Tensor:
    model = Awkward()
    faster = torch.compile(model, backend="aot_eager")
    with attached(recipe, faster if attach_to == "compiled" else model) as (_, optimizer, comm):
        for _ in range(4):
            small_step(faster, optimizer, comm, rank)
        comm.check_sync()
        return flat(model)


def eager(rank: int, size: int, recipe: str) -> Tensor:
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        return flat(model)


@pytest.mark.parametrize(
    ("recipe", "to"), [("allreduce" + SMALL, "compiled"), ("backup(backups=0)", "model"), ("slowmo(2)", "model")]
)
def test_a_compiled_model_trains_alike(gang2: Gang, recipe: str, to: str) -> None:
    for a, b in zip(gang2.run(compiled, recipe, to), gang2.run(eager, recipe)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def penalised(rank: int, size: int) -> tuple[Tensor, bool]:
    """A gradient penalty, and a backward pass that keeps its graph."""
    with attached("allreduce" + SMALL) as (model, optimizer, comm):
        for step in (1, 2, 3):
            optimizer.zero_grad()
            x, _ = data(rank, step)
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (loss_of(model, rank, step) + slope.square().mean()).backward(create_graph=step == 2)
            optimizer.step()
        comm.check_sync()
        free = all(p.grad is None or p.grad.grad_fn is None for p in model.parameters())
        return flat(model), free


@pytest.mark.filterwarnings("ignore")
def test_second_derivatives_leave_no_graph_behind(gang2: Gang) -> None:
    (a, free), (b, _) = gang2.run(quietly, penalised)
    assert same(a, b)
    assert free


def quietly(rank: int, size: int, fn: Callable[[int, int], object]) -> object:
    """PyTorch warns of create_graph=True whoever uses it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(rank, size)


class Halting(nn.Module):
    """Raises in the backward pass where told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(17, 17), nn.Linear(17, 7)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out = self.last(hidden)
        for place, tensor in (("early", out), ("late", hidden)):
            if self.fail == place:
                tensor.register_hook(self._raise)
        return out

    def _raise(self, gradient: Tensor) -> None:
        raise ValueError("out of memory, say")


def failing(rank: int, size: int, place: str) -> Tensor | str:
    with attached("qsgd + bucket(0.0001)", Halting()) as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        model.fail = place
        with pytest.raises(ValueError, match="out of memory"):
            small_step(model, optimizer, comm, rank)
        model.fail = ""
        try:
            small_step(model, optimizer, comm, rank)
        except AttachError as error:
            return str(error)
        comm.check_sync()
        return flat(model)


def test_a_backward_that_fails_before_anything_was_sent_can_be_repeated(gang2: Gang) -> None:
    a, b = gang2.run(failing, "early")
    assert same(a, b)


def test_a_backward_that_fails_half_way_is_not_repeated_in_silence(gang2: Gang) -> None:
    for said in gang2.run(failing, "late"):
        assert "no longer at the same step" in said
