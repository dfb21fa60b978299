"""What the dice must do: rounding without bias, variance as in the formulas, hashed keys without correlation.

Keys are fixed, so the tests are deterministic. Bounds are chosen such that correct dice would fail with a chance of
about 6e-7 per comparison (5 sigma), times the number of comparisons.
"""

from hashlib import blake2b

import pytest
import torch

from gossamer import kernels

DRAWS = 2000


def key(*words: object) -> tuple[int, int]:
    digest = blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def draws(decode) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean over many steps, and each step's squared error."""
    total, errors = torch.zeros(X.numel(), dtype=torch.float64), []
    for step in range(DRAWS):
        y = decode(key("rounding", step)).double()
        total += y
        errors.append((y - X.double()).square().sum())
    return total / DRAWS, torch.stack(errors)


X = torch.randn(1000, generator=torch.Generator().manual_seed(3))


def check(mean: torch.Tensor, errors: torch.Tensor, variance: torch.Tensor) -> None:
    """`variance` per element, from the formula."""
    z = (mean - X) / (variance / DRAWS).sqrt().clamp(min=1e-6)  # the clamp: float32 rounding where the variance is 0
    assert float(z.abs().max()) < 5  # 1000 elements: 6e-4 that any exceeds it
    assert abs(float((z**2).mean()) - 1) < 0.25
    assert float(errors.mean() / variance.sum()) == pytest.approx(1, abs=0.02)


def test_ternary_is_unbiased_with_the_variance_of_its_formula():
    bounds = (0, 1000)
    scale = kernels.absmax(X, bounds)

    def decode(k):
        out = torch.zeros(1000)
        kernels.ternary_decode(kernels.ternary_encode(X, bounds, scale, k), bounds, scale, out, 1.0)
        return out

    check(*draws(decode), (scale * X.abs() - X**2).double())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_quantise_is_unbiased_with_the_variance_of_its_formula(bits):
    norm = kernels.bucket_norms(X, 1000, "max")

    def decode(k):
        out = torch.zeros(1000)
        kernels.quantise_decode(kernels.quantise_encode(X, bits, 1000, norm, k), bits, 1000, norm, out, 1.0)
        return out

    top = max(2 ** (bits - 1) - 1, 1)
    a = ((X / norm + 1) / 2 if bits == 1 else X.abs() * top / norm).double()
    spacing = norm.double() * (2 if bits == 1 else 1) / top
    f = a - a.floor()
    check(*draws(decode), spacing**2 * f * (1 - f))


def top_bytes(k: tuple[int, int], n: int = 1 << 18) -> torch.Tensor:
    return kernels.mix3(torch.arange(n), k) >> 24


def test_top_bytes_are_uniform():
    n, z = 1 << 20, []
    for step in range(20):
        counts = top_bytes(key("chi2", step), n).bincount(minlength=256).double()
        chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
        z.append((float(chi2) - 255) / (2 * 255) ** 0.5)
    assert max(map(abs, z)) < 5
    assert abs(sum(z)) / len(z) ** 0.5 < 5


@pytest.mark.parametrize("what", ["step", "rank"])
def test_hashed_keys_do_not_correlate(what):
    n = 1 << 18
    previous = None
    for i in range(8):
        words = top_bytes(key(what, i)).double()
        words = (words - words.mean()) / words.std()
        for lag in (1, 2, 64, 320):
            assert abs(float((words[lag:] * words[:-lag]).mean())) * n**0.5 < 5
        if previous is not None:
            assert abs(float((words * previous).mean())) * n**0.5 < 5
        previous = words


def test_the_mean_over_ranks_averages_its_variance_down():
    ranks, bounds = 16, (0, 1000)
    scale = kernels.absmax(X, bounds)
    errors = []
    for step in range(200):
        out = torch.zeros(1000)
        for rank in range(ranks):
            wire = kernels.ternary_encode(X, bounds, scale, key(step, rank))
            kernels.ternary_decode(wire, bounds, scale, out, 1 / ranks)
        errors.append((out - X).double().square().sum())
    expected = float((scale * X.abs() - X**2).sum()) / ranks
    assert float(torch.stack(errors).mean()) == pytest.approx(expected, rel=0.02)


def test_a_later_first_counter_continues_the_same_stream():
    scale, k = torch.tensor([4.0]), key("later")
    whole = kernels.ternary_levels(X, (0, 1000), scale, k)
    part = kernels.ternary_levels(X[300:].contiguous(), (0, 700), scale, (k[0] + 300, k[1]))
    assert torch.equal(whole[300:], part)
