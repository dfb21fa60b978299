"""Means and rank 0's tensors, in pieces of their own precision: what comes out, and what each rank sends for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.fabrics.sim import simulate
from gossamer.integrations.in_pieces import first_of, mean_of

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16)
SHAPES = ((3, 5), (7,), (2, 2), (), (1,))
BYTES = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(TYPES, SHAPES))


def tensors(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    out = [torch.randn(shape, generator=rng).to(dtype) for dtype, shape in zip(TYPES, SHAPES)]
    out[0] = out[0].t().contiguous().t()  # not as they lie in memory
    return out


def said(rank: int) -> Tensor:
    return torch.tensor([rank, 1, 200], dtype=torch.uint8)


def bits(values: list[Tensor]) -> list[Any]:
    return [(v.dtype, v.shape, bytes(v.contiguous().reshape(-1).view(torch.uint8).tolist())) for v in values]


@pytest.mark.parametrize("size", [2, 3, 5, 40])
def test_the_mean_is_that_of_double_precision_rounded_once(size: int) -> None:
    weights = [1.0 + rank % 3 for rank in range(size)]
    outcome = simulate([mean_of(tensors(r), said(r), weights, r) for r in range(size)])
    for values, answers in outcome.results:
        for i, value in enumerate(values):
            wide = [tensors(r)[i].double() * weights[r] for r in range(size)]
            expected = torch.stack(wide).cumsum(0)[-1] / sum(weights)
            assert bits([value]) == bits([expected.to(TYPES[i])])
        assert [a.tolist() for a in answers] == [said(r).tolist() for r in range(size)]
    # A ring of their own precision, and what ranks say besides.
    besides = (size - 1) * (len(TYPES) + 3)
    assert outcome.ledger.sent == 2 * (size - 1) * BYTES + size * besides


@pytest.mark.parametrize("size", [2, 3, 5, 40])
def test_the_first_ranks_are_everybodys_to_the_bit_and_nobody_sends_them_twice(size: int) -> None:
    outcome = simulate([first_of(tensors(r), said(r), r, size) for r in range(size)])
    for values, answers in outcome.results:
        assert bits(values) == bits(tensors(0))
        assert [a.tolist() for a in answers] == [said(r).tolist() for r in range(size)]
    by_rank = [sum(e.sent for e in outcome.ledger.entries if e.rank == rank) - 3 * (size - 1) for rank in range(size)]
    assert by_rank[0] == BYTES
    assert max(by_rank) <= BYTES + 8 * len(TYPES) * size
    assert sum(by_rank) == (size - 1) * BYTES


def test_what_is_not_finite_on_a_rank_is_left_out_of_that_tensors_mean() -> None:
    def spoilt(rank: int) -> list[Tensor]:
        out = tensors(rank)
        if rank == 1:
            out[0][2, 2] = float("nan")
        out[1][0] = float("inf")
        return out

    for values, _ in simulate([mean_of(spoilt(r), said(r), [1.0] * 3, r) for r in range(3)]).results:
        assert bits([values[0]]) == bits([((tensors(0)[0].double() + tensors(2)[0].double()) / 2).float()])
        assert not values[1].isfinite().any()
        assert values[2].isfinite().all()
