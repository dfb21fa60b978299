"""1-bit Adam: Adam until the freeze; then the momentum travels, divided by what the second moment was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, loss_of, same, small_step
from tests.laws.blocks import agree, context, vector
from tests.runtime.gym import Odd, bit_equal, make, parameters, pull, spoiled, train
from torch import Tensor, nn

from gossamer.codecs import Sign
from gossamer.core.errors import AttachError, RecipeError
from gossamer.exchanges import Scatter
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, replicas

EXACT = "allreduce(fp32()) + onebit_adam_update(4)"


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.02, "weight_decay": 0.1} | more)


def undecayed(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model, weight_decay=0.0)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.1)


def means(ranks: int, step: int, model: nn.Module) -> list[Tensor]:
    """The mean gradient of all ranks, at this model."""
    found = list[list[Tensor]]()
    for rank in range(ranks):
        pull(model, rank, step)
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    return [torch.stack(g).mean(0) for g in zip(*found, strict=True)]


@pytest.mark.parametrize("optimizer", [adamw, plain], ids=["AdamW", "SGD"])
def test_up_to_the_freeze_it_is_adamw(optimizer: Any) -> None:
    ranks = make("onebit_adam(6)", 3, optimizer=optimizer)
    twin = Odd()
    judge = adamw(twin)
    for step in range(1, 7):
        for p, g in zip(twin.parameters(), means(3, step, twin), strict=True):
            p.grad = g
        judge.step()
    train(ranks, pull, 6)
    torch.testing.assert_close(ranks[0].flat(), torch.cat([p.detach().reshape(-1) for p in twin.parameters()]))


def test_with_an_exact_exchange_it_is_preconditioned_momentum_sgd_from_then_on() -> None:
    ranks = make(EXACT, 3, optimizer=adamw)
    twin = Odd()
    m, v = ([torch.zeros_like(p) for p in twin.parameters()] for _ in range(2))
    for step in range(1, 13):
        for i, (p, g) in enumerate(zip(twin.parameters(), means(3, step, twin), strict=True)):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g**2 if step <= 4 else v[i]
            bias = 1 - 0.9**step if step <= 4 else 1.0
            root = (v[i] / (1 - 0.999 ** min(step, 4))).sqrt() + 1e-8
            with torch.no_grad():
                p.mul_(1 - 0.02 * 0.1).sub_(0.02 * m[i] / bias / root)
    train(ranks, pull, 12)
    torch.testing.assert_close(ranks[0].flat(), torch.cat([p.detach().reshape(-1) for p in twin.parameters()]))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_momentum_is_equal_on_all_ranks_and_what_never_had_a_gradient_stays(size: int) -> None:
    ranks = make("onebit_adam(3)", size, optimizer=undecayed)
    still = ranks[0].model.get_parameter("still").detach().clone()
    for _ in range(8):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks))
        for i in range(len(ranks[0].worker.buckets)):
            assert bit_equal([r.worker.buckets[i].states["update"]["m"] for r in ranks])
    assert torch.equal(ranks[0].model.get_parameter("still"), still)
    assert not ranks[0].optimizer.state  # all of it is the recipe's


def test_momenta_that_got_through_and_what_is_owed_are_momenta_that_were_given() -> None:
    ranks = make("onebit_adam(3)", 3, optimizer=adamw)
    train(ranks, pull, 3)
    for step in range(4, 10):
        given, owed = travelling(ranks, step), debts(ranks)
        train(ranks, pull, 1)
        got = ranks[0].worker.averaging.means[0]
        torch.testing.assert_close(got.double() + debts(ranks), given + owed, rtol=1e-6, atol=1e-6)


def travelling(ranks: list[Replica], step: int) -> Tensor:
    """The mean over ranks of b1 m + (1 - b1) g."""
    out = list[Tensor]()
    for r in ranks:
        pull(r.model, r.worker.rank, step)
        (bucket,) = r.worker.buckets
        out.append(0.9 * bucket.states["update"]["m"].double() + 0.1 * bucket.gradients().double())
    return torch.stack(out).mean(0)


def debts(ranks: list[Replica]) -> Tensor:
    """Mean residual, and what owners of chunks owe to the mean."""
    kept = [r.worker.buckets[0].states for r in ranks]
    held = [s["memory"].get("residual", torch.zeros(())).double() / len(ranks) for s in kept]
    return sum([s["exchange"].get("owed", torch.zeros(())).double() for s in kept], sum(held, torch.zeros(())))


def test_a_step_that_is_not_finite_changes_nothing_before_at_and_after_the_freeze() -> None:
    """It is not counted, so that the freeze and the signs come a step later, together."""
    ranks = make("onebit_adam(3)", 2, optimizer=adamw)
    train(ranks, spoiled([(0, 3), (1, 5), (0, 7)], float("inf")), 9)
    assert [r.worker.record.skipped for r in ranks] == [3, 3]
    assert all(p.isfinite().all() for p in parameters(ranks))
    assert bit_equal(parameters(ranks))
    calm = make("onebit_adam(3)", 2, optimizer=adamw)
    run = train(calm, lambda model, rank, step: pull(model, rank, (1, 2, 4, 6, 8, 9)[step - 1]), 6)
    assert torch.equal(calm[0].flat(), ranks[0].flat())
    dense, few = (sum(e.sent for e in run.ledger if e.step == s) for s in (3, 4))
    assert few < dense / 8  # small tensors pay for their scales


def test_bytes_of_a_frozen_step() -> None:
    exchange = Scatter(Sign("l2"), own="encoded")
    blocks = [vector(torch.full((2**20,), float(r))) for r in range(8)]
    _, ledger = agree([exchange.average(b, {}, context(r, 8)) for r, b in enumerate(blocks)])
    assert {sum(e.sent for e in ledger if e.rank == r) for r in range(8)} == {229_432}


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "RMSprop": (lambda m: torch.optim.RMSprop(m.parameters()), "use torch.optim.AdamW"),
    "SGD with momentum": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "both add momentum"),
    "amsgrad": (lambda m: adamw(m, amsgrad=True), "amsgrad is not supported"),
    "other betas": (lambda m: adamw(m, betas=(0.8, 0.99)), "beta1=0.8, beta2=0.99, eps=1e-08 in the recipe"),
    "Adam with decay": (
        lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1),
        "use AdamW, which decouples the decay",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_would_make_something_else_of_its_steps_is_refused(name: str) -> None:
    optimizer, fix = REFUSED[name]
    with pytest.raises(AttachError) as caught:
        make("onebit_adam(3)", 2, optimizer=optimizer)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("onebit_adam(0)", "warmup must be at least 1 step"),
        ("onebit_adam(3) + local_sgd(4)", "local_sgd(4) averages none"),
        ("allreduce(fp32()) + backup_workers() + onebit_adam_update(3)", "late ranks miss it"),
        ("dgc(momentum=0.9) + onebit_adam_update(3)", "leave that one out"),
        ("allreduce(fp32()) + momentum_correction(masking=False) + signs(momentum=0.9)", "leave that one out"),
        ("allreduce(fp32()) + error_feedback(units='update') + onebit_adam_update(3)", "use error_feedback()"),
        ("allreduce(fp32()) + onebit_adam_update(3) + switch_exchange(3, scatter(sign()))", "error_feedback()"),
        ("onebit_adam(3) + every_step(l1=0.1)", "leave l1 out"),
    ],
)
def test_what_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)


# -- real processes --------------------------------------------------------------------------------------------------


def stopped_and_resumed(rank: int, size: int, stops: list[int], dtype: torch.dtype) -> list[bool]:
    """A run of seven steps; and for each of these steps one that is saved after it, and goes on anew."""

    def run(comm_state: Any = None, start: Tensor | None = None, until: int = 7) -> tuple[Tensor, Any]:
        model = Awkward(dtype)
        if start is not None:
            with torch.no_grad():
                for p, new in zip(
                    model.parameters(), start.split([p.numel() for p in model.parameters()]), strict=True
                ):
                    p.copy_(new.view(p.shape))
        with attached("onebit_adam(3)", model, adamw) as (model, optimizer, comm):
            if comm_state is not None:
                comm.load_state_dict(comm_state)
            while comm.step < until:
                small_step(model, optimizer, comm, rank)
                comm.check_sync()
            return flat(model), comm.state_dict()

    whole, _ = run()
    out = list[bool]()
    for stop in stops:
        there, state = run(until=stop)
        out.append(bit_equal([whole, run(state, there)[0]]))
    return out


@pytest.mark.gang
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_it_resumes_bit_equal_around_the_freeze(gang2: Gang, dtype: torch.dtype) -> None:
    stops = [2, 3, 4] if dtype == torch.float32 else [3]
    for found in gang2.run(stopped_and_resumed, stops, dtype):
        assert found == [True] * len(stops)


def scaled(rank: int, size: int, factor: float) -> Tensor:
    """With a loss scale, whose steps are those without."""
    scaler = torch.amp.GradScaler("cpu", init_scale=factor, growth_interval=3)
    with attached("onebit_adam(3)", None, adamw, scaler=scaler) as (model, optimizer, comm):
        for step in range(1, 8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        comm.check_sync()
        return flat(model)


@pytest.mark.gang
def test_a_loss_scale_that_moves_changes_no_bit(gang2: Gang) -> None:
    one, many = gang2.run(scaled, 1.0), gang2.run(scaled, 1024.0)
    assert same(one[0], many[0])


def test_training_alone_is_the_method_with_an_exact_mean() -> None:
    ranks = replicas("onebit_adam(4)", Odd, adamw, 1, seed=3)
    exact = replicas(EXACT, Odd, adamw, 1, seed=3)
    for each in (ranks, exact):
        train(each, pull, 9)
    assert torch.equal(ranks[0].flat(), exact[0].flat())
