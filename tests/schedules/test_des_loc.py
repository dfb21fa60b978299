"""DES-LOC: neutral intervals, equal data, which moments meet when, bytes, checkpoints, and what is refused."""

import pytest
import torch
from tests.runtime.gym import Optimizer, bit_equal, make, parameters, pull, resumed, saved, sgd, train
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.planning import bytes_per_step
from gossamer.schedules import DESLOC
from gossamer.simulate import Replica


def adam(amsgrad: bool = False) -> Optimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=amsgrad)


def moments(ranks: list[Replica], name: str) -> list[Tensor]:
    return [torch.cat([s[name].flatten() for s in r.optimizer.state.values()]) for r in ranks]


@pytest.mark.parametrize(
    ("desynced", "plain"),
    [
        ("des_loc(2, first=0, second=0)", "local_sgd(2)"),
        ("des_loc(2, first=1, second=1)", "slowmo(2, beta=0.0, buffers='average')"),
    ],
)
def test_never_is_local_sgd_and_always_is_local_adam(desynced: str, plain: str) -> None:
    crews = [make(f"allreduce + {schedule}", 3, optimizer=adam()) for schedule in (desynced, plain)]
    for ranks in crews:
        train(ranks, pull, 12)
    for results in zip(*(parameters(ranks) for ranks in crews), strict=True):
        assert bit_equal(results)
    for name in "exp_avg", "exp_avg_sq":
        assert all(bit_equal(pair) for pair in zip(*(moments(ranks, name) for ranks in crews), strict=True))


def test_equal_data_on_all_ranks_are_one_adam() -> None:
    """To rounding: a round averages differences to the anchor, and a - (a - x) is not x to the bit."""

    def alike(model: nn.Module, rank: int, step: int) -> float:
        return pull(model, 0, step)

    ranks, alone = (make("allreduce + des_loc(2)", size, optimizer=adam()) for size in (4, 1))
    train(ranks, alike, 12)
    train(alone, alike, 12)
    for model in parameters(ranks):
        torch.testing.assert_close(model, parameters(alone)[0], rtol=0, atol=1e-6)
    for name in "exp_avg", "exp_avg_sq":
        torch.testing.assert_close(moments(ranks, name)[2], moments(alone, name)[0], rtol=1e-5, atol=1e-6)


def test_moments_meet_at_their_own_rounds_only() -> None:
    ranks = make("allreduce + des_loc(2, first=2, second=3)", 3, optimizer=adam())
    for step in range(1, 13):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == (step % 2 == 0)
        assert bit_equal(moments(ranks, "exp_avg")) == (step % 4 == 0), step
        assert bit_equal(moments(ranks, "exp_avg_sq")) == (step % 6 == 0), step


def test_the_momentum_of_sgd_is_a_first_moment() -> None:
    ranks = make("allreduce + des_loc(2, first=2)", 3, optimizer=sgd())
    for step in range(1, 9):
        train(ranks, pull, 1)
        assert bit_equal(moments(ranks, "momentum_buffer")) == (step % 4 == 0), step


def test_six_rounds_send_nine_models() -> None:
    model = {"w": (1000,)}
    plain, desynced = (bytes_per_step(f"allreduce + {s}(4)", model, 4, momenta=2) for s in ("local_sgd", "des_loc"))
    checks = 2 * 1.5 * 16 / 24  # moments are averaged after two of the six rounds, and 16 bytes are compared before
    assert desynced == 9 / 6 * plain + checks
    first = bytes_per_step("allreduce + des_loc(4)", model, 4, momenta=1)
    assert plain * 8 / 6 < first < plain * 8 / 6 + checks + 1


def test_the_bytes_foretold_are_those_sent() -> None:
    ranks = make("allreduce + des_loc(2)", 3, optimizer=adam())
    train(ranks, pull, 2)
    run = train(ranks, pull, 12)
    shapes = {n: tuple(p.shape) for n, p in ranks[0].model.named_parameters()}
    assert run.ledger.sent / 3 / 12 == pytest.approx(
        bytes_per_step("allreduce + des_loc(2)", shapes, 3, momenta=2), rel=0.01
    )


@pytest.mark.parametrize("stop", [3, 6, 7])
def test_resuming_changes_no_bit(stop: int) -> None:
    whole, ranks = (make("allreduce + des_loc(2)", 3, optimizer=adam()) for _ in range(2))
    train(whole, pull, 14)
    train(ranks, pull, stop)
    again = resumed("allreduce + des_loc(2)", saved(ranks), optimizer=adam())
    train(again, pull, 14 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))


def test_other_optimizers_and_intervals_are_refused() -> None:
    refused = {
        torch.optim.RMSprop: "with RMSprop, which keeps square_avg: only exp_avg",
        torch.optim.Adamax: "with Adamax, which keeps exp_inf",
        torch.optim.Adagrad: "with Adagrad, which keeps sum",
    }
    for kind, reason in refused.items():
        with pytest.raises(AttachError, match=reason):
            make("allreduce + des_loc(2)", 2, optimizer=lambda model, kind=kind: kind(model.parameters()))
    make("allreduce + des_loc(2)", 2, optimizer=adam(amsgrad=True))
    with pytest.raises(RecipeError, match="every must be at least 1 step, got 0"):
        DESLOC(0)
    with pytest.raises(RecipeError, match=r"0 \(never\) or more, got -1 and 6"):
        DESLOC(4, first=-1)
