"""What is read from a wire is checked for length first, and may start at any byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.errors import WireError
from gossamer.core.wire import WireRows, expect, in_order, pack, rows_of, take, without
from gossamer.kernels import CorruptWire

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float32,
    torch.float64,
]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9)), min_size=1, max_size=5), st.integers(0, 9))
def test_what_is_packed_is_taken_back_bit_for_bit_at_any_offset(pieces: list[tuple[torch.dtype, int]], at: int) -> None:
    tensors = [torch.arange(n).to(dtype) for dtype, n in pieces]
    wire = pack(*tensors)
    assert (wire.dtype, wire.dim(), wire.numel()) == (torch.uint8, 1, sum(t.nbytes for t in tensors))
    rest = torch.cat([torch.zeros(at, dtype=torch.uint8), wire])[at:]
    for t in tensors:
        got, rest = take(rest, t.dtype, t.numel())
        assert torch.equal(got, t)
    assert rest.numel() == 0


def test_take_gives_shapes_and_the_rest() -> None:
    got, rest = take(pack(torch.arange(6, dtype=torch.int32), torch.ones(3, dtype=torch.uint8)), torch.int32, 2, 3)
    assert got.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert rest.tolist() == [1, 1, 1]


def test_pack_reads_views_in_their_logical_order() -> None:
    turned = torch.arange(6, dtype=torch.float32).view(2, 3).t()
    assert take(pack(turned), torch.float32, 6)[0].tolist() == [0, 3, 1, 4, 2, 5]


@given(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 80))
def test_a_wire_that_ends_early_is_refused(dtype: torch.dtype, count: int, missing: int) -> None:
    length = max(count * dtype.itemsize - missing, 0)
    with pytest.raises(WireError, match="ends too early"):
        take(torch.zeros(length, dtype=torch.uint8), dtype, count)


@pytest.mark.parametrize("length", [0, 6, 8, 700])
def test_a_wire_of_another_length_is_refused_with_both_lengths(length: int) -> None:
    with pytest.raises(WireError, match=rf"qsgd: expected 7 bytes, got {length}.*different recipes"):
        expect(torch.zeros(length, dtype=torch.uint8), 7, "qsgd")


@pytest.mark.parametrize(
    "wire", [torch.zeros(7), torch.zeros(7, 1, dtype=torch.uint8), torch.zeros(7, dtype=torch.int8)]
)
def test_something_else_than_bytes_is_refused(wire: torch.Tensor) -> None:
    with pytest.raises(WireError):
        expect(wire, 7, "qsgd")


def test_a_right_wire_passes() -> None:
    expect(torch.zeros(7, dtype=torch.uint8), 7, "qsgd")


@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 2, 3], [1, 0, 2]])
def test_rows_are_wires_like_a_list_of_them(lengths: list[int]) -> None:
    rows = WireRows(torch.arange(12, dtype=torch.uint8).view(3, 4), lengths)
    listed = [*rows]
    assert [w.tolist() for w in listed] == [[*range(4 * j, 4 * j + n)] for j, n in enumerate(lengths)]
    assert rows[-1].tolist() == listed[2].tolist()
    with pytest.raises(IndexError):
        rows[3]
    for of in (without(rows, 1), without(listed, 1)):
        assert [w.tolist() for w in of] == [listed[0].tolist(), [], listed[2].tolist()]
    for of in (in_order(rows, [2, 0]), in_order(listed, [2, 0])):
        assert [w.tolist() for w in of] == [listed[2].tolist(), listed[0].tolist()]
    for of in (rows, listed):
        if lengths == [3, 3, 3]:
            assert torch.equal(rows_of(of, 3, "qsgd")[:, :3], torch.stack(listed))
        with pytest.raises(WireError, match=r"qsgd: expected 5 bytes, got \d"):
            rows_of(of, 5, "qsgd")


def test_a_wire_of_another_length_among_rows_is_refused() -> None:
    rows = WireRows(torch.zeros(3, 4, dtype=torch.uint8), [4, 3, 4])
    with pytest.raises(WireError, match="expected 4 bytes, got 3"):
        rows_of(rows, 4, "qsgd")


def test_what_kernels_find_corrupt_is_a_wire_error() -> None:
    assert issubclass(CorruptWire, WireError)
