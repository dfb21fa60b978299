"""Law 9: with its knob at the neutral value a method is plain synchronous training, bit for bit."""

from functools import cache

import pytest
import torch
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, pull, sgd, train
from torch import Tensor

# One rank, an odd number, and many; what recipes do on two and four is compared with real ranks, in tests/integrations.
SIZES = [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow), 8]


@cache  # many are compared with the same plain one
def outcome(recipe: str, size: int) -> list[Tensor]:
    ranks = make(recipe, size)
    train(ranks, pull, 9)
    return parameters(ranks)


SAME = [
    ("slowmo(3, beta=0.0, alpha=1.0)", "local_sgd(3)"),
    ("qsgd + slowmo(3, beta=0.0)", "qsgd + local_sgd(3)"),
    ("allreduce + local_sgd(4, warmup=9)", "local_sgd(1)"),
    ("topk(ratio=1.0)", "gather(fp32())"),
    ("topk(ratio=1.0, scope='global')", "gather(fp32())"),
    ("gather(topk(ratio=1.0, index='rice')) + error_feedback()", "gather(fp32())"),
    ("allreduce + error_feedback()", "allreduce"),
    ("allreduce + error_feedback(units='update')", "allreduce"),
    ("gather(fp32()) + error_feedback(decay=0.5)", "gather(fp32())"),
    ("scatter(fp32()) + error_feedback()", "scatter(fp32())"),
    ("allreduce(randk(ratio=1.0)) + error_feedback()", "allreduce"),
    ("gather(fp32())", "allreduce"),
    ("allreduce + every_step(micro_batches=1, rate=1.0, l1=0.0)", "allreduce"),
    ("allreduce + bucket(0.00002)", "allreduce"),
    ("allreduce + accordion(allreduce(fp32()), allreduce(fp32()), 2, interval=1)", "allreduce"),
    (
        "powersgd + accordion(allreduce(powersgd()), allreduce(powersgd()), 2, interval=1, threshold=0.1)",
        "powersgd",
    ),
    (
        "gather(topk(ratio=0.1)) + error_feedback() + accordion(gather(topk(ratio=0.1)), gather(topk(ratio=0.1)), 2, interval=1)",
        "gather(topk(ratio=0.1)) + error_feedback()",
    ),
    (
        "scatter(qsgd()) + accordion(scatter(qsgd()), scatter(qsgd()), 2, interval=1, threshold=0.1) + bucket(0.00002)",
        "scatter(qsgd()) + bucket(0.00002)",
    ),
    ("allreduce + accordion_batch(1, 2, interval=1)", "allreduce"),
    ("allreduce(fp32()) + gossip(push_sum(), overlap=False)", "sgp"),
    ("nodes(scatter(qsgd(bits=4, bucket=16)), 1)", "scatter(qsgd(bits=4, bucket=16))"),
    ("nodes(gather(topk(ratio=0.3)), 1) + error_feedback()", "gather(topk(ratio=0.3)) + error_feedback()"),
    ("nodes(scatter(qsgd(bits=4, bucket=16)), 8)", "allreduce"),
    ("nodes(scatter(topk(ratio=0.3)), 1) + error_feedback()", "scatter(topk(ratio=0.3)) + error_feedback()"),
    ("nodes(gather(topk(ratio=0.3)), 1) + momentum_correction()", "gather(topk(ratio=0.3)) + momentum_correction()"),
    ("nodes(scatter(qsgd()), 1) + diana()", "scatter(qsgd()) + diana()"),
    ("nodes(allreduce(fp32()), 8, inside=scatter(qsgd()))", "scatter(qsgd())"),
    ("qsgd + per_node(1) + slowmo(3)", "qsgd + slowmo(3)"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("neutral", "plain"), SAME)
def test_a_neutral_knob_changes_no_bit(neutral: str, plain: str, size: int) -> None:
    assert bit_equal([torch.stack(outcome(neutral, size)), torch.stack(outcome(plain, size))])


@pytest.mark.parametrize("size", SIZES)
def test_no_backups_is_synchronous_training_bit_for_bit(size: int) -> None:
    assert bit_equal([torch.stack(outcome("backup(backups=0)", size)), torch.stack(outcome("allreduce", size))])
    over = "scatter(qsgd()) + backup_workers(backups=0)"
    assert bit_equal([torch.stack(outcome(over, size)), torch.stack(outcome("qsgd", size))])


@pytest.mark.parametrize("size", SIZES)
def test_scattered_plain_numbers_are_dense_up_to_the_order_of_summing(size: int) -> None:
    """An owner sums its own chunk first."""
    scattered, dense = outcome("scatter(fp32())", size), outcome("allreduce", size)
    torch.testing.assert_close(torch.stack(scattered), torch.stack(dense), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_full_rank_powersgd_is_dense_up_to_rounding(size: int) -> None:
    dense, low = outcome("allreduce", size), outcome("powersgd(rank=13)", size)
    full = outcome("allreduce(powersgd(rank=13, min_ratio=1.0)) + error_feedback()", size)
    for other in (low, full):
        torch.testing.assert_close(torch.stack(other), torch.stack(dense), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_with_equal_data_train_as_one_alone(size: int) -> None:
    """Up to rounding: three equal numbers have a sum that rounds."""

    def alike(model: torch.nn.Module, rank: int, step: int) -> float:
        return pull(model, 0, step)

    single, together = make("allreduce", 1), make("allreduce", size)
    train(single, alike, 6)
    train(together, alike, 6)
    torch.testing.assert_close(parameters(together)[0], parameters(single)[0], rtol=1e-6, atol=1e-6)


def dyadic(model: torch.nn.Module, rank: int, step: int) -> float:
    """Gradients that are multiples of 1/16 and small: sums, halves and strides of 1/4 are exact in float32."""
    p = next(model.parameters())
    p.grad = (noise(rank, step, numel=p.numel()) * 16).round().clamp(-64, 64).view(p.shape) / 16
    return 0.0


@pytest.mark.parametrize("size", [2, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 8))])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("recipe", ["local_sgd(1)", "slowmo(1, beta=0.0)"])
def test_local_steps_of_one_are_synchronous_sgd_where_arithmetic_is_exact(
    recipe: str, momentum: float, size: int
) -> None:
    def flat() -> Flat:
        return Flat(9, torch.float32, start=2.0)

    stride = sgd(lr=0.25, momentum=momentum)
    local, synchronous = make(recipe, size, flat, stride), make("allreduce", size, flat, stride)
    steps = 40 if momentum == 0 else 6  # a momentum of 1/2 takes one bit more at every step
    train(local, dyadic, steps)
    train(synchronous, dyadic, steps)
    assert bit_equal([*parameters(local), *parameters(synchronous)])
    moved = parameters(local)[0] - flat().x.detach()
    assert moved.abs().max() > 0.5


@pytest.mark.parametrize("size", [2, 4, 8])
def test_slow_momentum_over_single_steps_is_momentum_sgd_where_arithmetic_is_exact(size: int) -> None:
    def flat() -> Flat:
        return Flat(9, torch.float32, start=2.0)

    slow = make("slowmo(1, beta=0.5, alpha=1.0)", size, flat, sgd(lr=0.25, momentum=0.0))
    fast = make("allreduce", size, flat, sgd(lr=0.25, momentum=0.5))
    train(slow, dyadic, 6)
    train(fast, dyadic, 6)
    assert bit_equal([*parameters(slow), *parameters(fast)])
