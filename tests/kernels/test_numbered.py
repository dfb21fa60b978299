"""Sets of places as numbers: each set has one, no number is two, and rows are as short as can be known beforehand."""

from itertools import combinations
from math import comb

import pytest
import torch

from gossamer import kernels
from gossamer.kernels.backends import Backend, twin
from gossamer.kernels.layout import Places, binomials

BACKENDS = [b for b in kernels.backends() if b != "triton"]  # that one is tried in its interpreter


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keep", "n"), [(3, 9), (6, 12), (7, 9)])
def test_every_set_has_a_number_of_its_own_and_other_numbers_are_refused(backend: Backend, keep: int, n: int) -> None:
    places, form = torch.tensor(list(combinations(range(n), keep))), Places(keep, n)
    assert form.number_bits > 0
    with kernels.using(backend):
        wire = kernels.places_encode(places, n)
        assert torch.equal(kernels.places_decode(wire, len(places), keep, n), places)
        known = [bytes(row) for row in wire.view(-1, form.row_bytes).tolist()]
        assert len({*known}) == comb(n, keep)
        numbers = range(2 ** (form.low_bits + form.number_bits))
        all_rows = [number.to_bytes(form.row_bytes, "little") for number in numbers]
        read = twin("numbered", "decode", wire.device)(torch.tensor(list(b"".join(all_rows)), dtype=torch.uint8), form)
        found = {row: own for row, own in zip(all_rows, read.tolist(), strict=True) if own != [n] * keep}
        assert found == dict(zip(known, places.tolist(), strict=True))
        wrong = next(row for row in reversed(all_rows) if row not in found)
        with pytest.raises(kernels.CorruptWire, match=f"a row is not {keep} strictly ascending places"):
            kernels.places_decode(torch.tensor(list(wrong), dtype=torch.uint8), 1, keep, n)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("keep", "n"), [(64, 4096), (32, 4096), (64, 256), (63, 64)])
def test_a_number_is_the_sum_of_its_places_coefficients(backend: Backend, keep: int, n: int) -> None:
    """As whole numbers of Python count it, which have any length."""
    draw, form = torch.Generator().manual_seed(n + keep), Places(keep, n)
    ends = torch.stack([torch.arange(keep), torch.arange(n - keep, n)])  # the first and the last of all sets
    places = torch.cat([ends, torch.rand(6, n, generator=draw).topk(keep).indices.sort(1).values])
    with kernels.using(backend):
        wire = kernels.places_encode(places, n).view(len(places), -1)
        assert torch.equal(kernels.places_decode(wire.view(-1), len(places), keep, n), places)
    for row, own in zip(wire.tolist(), places.tolist(), strict=True):
        high = [(place >> form.low) - (0 if form.low else j) for j, place in enumerate(own)]
        low = sum((place & (2**form.low - 1)) << (form.low * j) for j, place in enumerate(own))
        number = sum(comb(h + j, j + 1) for j, h in enumerate(high))
        assert int.from_bytes(bytes(row), "little") == low | number << form.low_bits


@pytest.mark.parametrize("keep", [1, 2, 16, 31, 32, 63, 64, 100, 128, 300])
@pytest.mark.parametrize("n", [64, 256, 1000, 4096, 2**20])
def test_a_row_is_no_longer_than_elias_and_fano_s_and_no_shorter_than_the_number_of_sets(keep: int, n: int) -> None:
    keep = min(keep, n - 1)
    ones = min(low * keep + keep + ((n - 1) >> low) for low in range(n.bit_length() + 1))
    assert (comb(n, keep) - 1).bit_length() <= 8 * kernels.place_bytes(keep, n) < ones + 8
    form = Places(keep, n)
    if form.number_bits:
        assert form.number_bits == (comb(keep + form.most, keep) - 1).bit_length() <= 256
        assert 8 * form.row_bytes < ones


def test_64_places_of_4096_take_7_6_bits_each_where_a_bound_is_7_4() -> None:
    form = Places(64, 4096)
    assert (form.low, form.number_bits, form.row_bytes) == (4, 227, 61)
    assert (comb(4096, 64) - 1).bit_length() == 472


def test_coefficients_are_those_of_pascal_s_triangle() -> None:
    form = Places(64, 4096)
    table = binomials(form, torch.device("cpu"))
    for j, high in ((0, 255), (1, 7), (31, 100), (63, 0), (63, 255)):
        said = sum(word << (32 * i) for i, word in enumerate(table[j, high].tolist()))
        assert said == comb(high + j, j + 1)
