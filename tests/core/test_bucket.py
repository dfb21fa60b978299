"""Layouts lay parameters end to end, and cut them without losing an element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.bucket import SHORT, Bucket, Layout, PendingState, Segment, State

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


def layout_of(shapes: list[tuple[int, ...]]) -> Layout:
    return Layout.of({f"p{i}": s for i, s in enumerate(shapes)})


def ramp(layout: Layout) -> Bucket:
    return Bucket(torch.arange(layout.numel, dtype=torch.float32), layout)


@given(SHAPES)
def test_segments_lie_end_to_end_in_the_order_given(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    assert [s.shape for s in layout.segments] == shapes
    ends = [s.offset + s.numel for s in layout.segments]
    assert layout.bounds == (0, *ends) if shapes else layout.bounds == (0,)
    assert layout.numel == sum(torch.Size(s).numel() for s in shapes)


@given(SHAPES, st.integers(1, 9))
def test_chunks_cover_every_element_once_and_are_nearly_of_one_length(shapes: list[tuple[int, ...]], n: int) -> None:
    block = ramp(layout_of(shapes))
    chunks = block.chunks(n)
    assert len(chunks) == n
    assert torch.equal(torch.cat([c.flat for c in chunks]), block.flat)
    sizes = [c.numel for c in chunks]
    fair = block.numel // n
    assert all(fair - fair // SHORT <= size <= fair + 1 + fair // SHORT for size in sizes)
    assert [c.layout.numel for c in chunks] == [c.flat.numel() for c in chunks]


@given(SHAPES, st.integers(1, 9))
def test_a_chunk_knows_which_elements_of_which_parameter_it_holds(shapes: list[tuple[int, ...]], n: int) -> None:
    block = ramp(layout_of(shapes))
    whole = {s.name: s for s in block.layout.segments}
    for chunk in block.chunks(n):
        for name, piece in chunk.tensors():
            origin, _, begin = name.partition("@")
            first = whole[origin].offset + int(begin)
            assert torch.equal(piece.reshape(-1), torch.arange(first, first + piece.numel(), dtype=torch.float32))
        assert sum(p.numel() for _, p in chunk.tensors()) == chunk.numel
        assert all(p.numel() for _, p in chunk.tensors())


def test_chunks_of_a_matrix_are_matrices_where_rows_are_short() -> None:
    layout = Layout.of({"w": (106, 32), "b": (20,)})
    assert [[(s.name, s.shape) for s in c.segments] for c in layout.chunks(4)] == [
        [("w@0", (27, 32))],
        [("w@864", (26, 32))],
        [("w@1696", (27, 32))],
        [("w@2560", (26, 32)), ("b@0", (20,))],
    ]


def test_slices_of_a_convolution_stay_whole() -> None:
    pieces = [s.shape for c in Layout.of({"w": (64, 3, 2, 2)}).chunks(3) for s in c.segments]
    assert pieces == [(21, 3, 2, 2), (22, 3, 2, 2), (21, 3, 2, 2)]


def test_long_rows_are_cut_anywhere_for_chunks_of_one_length() -> None:
    layout = Layout.of({"w": (3, 1000)})
    assert [c.numel for c in layout.chunks(4)] == [750, 750, 750, 750]
    assert [s.shape for c in layout.chunks(4) for s in c.segments] == [(750,)] * 4


def test_chunks_are_views_and_layouts_are_cut_once() -> None:
    block = ramp(layout_of([(3, 5), (7,)]))
    block.chunks(4)[2].flat.fill_(-1.0)
    assert int((block.flat == -1).sum()) == block.chunks(4)[2].numel
    assert block.layout.chunks(4) is block.layout.chunks(4)
    assert block.layout.edges(4) == (0, *torch.tensor([c.numel for c in block.chunks(4)]).cumsum(0).tolist())


def test_a_chunk_of_a_bucket_with_older_values_has_its_share_of_the_latest() -> None:
    block = ramp(layout_of([(3, 5), (7,)]))
    chunks = block.with_older(block.flat + 100).chunks(3)
    assert torch.equal(torch.cat([c.latest for c in chunks if c.latest is not None]), block.flat)
    assert torch.equal(chunks[-1].flat, block.flat[chunks.edges[2] :] + 100)
    assert [c.numel for c in chunks[1:]] == [c.numel for c in chunks][1:]
    with pytest.raises(IndexError):
        chunks[3]


def test_a_block_of_tensors_copies_them_and_gives_them_back_in_shape() -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.0),
        "t": torch.ones(4, 2).t(),
    }
    block = Bucket.of(tensors)
    for (name, view), (expected_name, expected) in zip(block.tensors(), tensors.items(), strict=True):
        assert name == expected_name
        assert torch.equal(view, expected)
        assert view.shape == expected.shape
    tensors["a"].zero_()
    assert float(block.flat.abs().sum()) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layout_keeps_the_precision_of_its_block(dtype: torch.dtype) -> None:
    block = Bucket.of({"a": torch.ones(3, dtype=dtype)})
    assert block.layout.dtype == dtype
    assert all(c.layout.dtype == dtype for c in block.chunks(2))


def test_an_empty_layout_has_a_name_and_no_elements() -> None:
    layout = Layout.of({})
    assert (layout.name, layout.numel, layout.bounds) == ("empty", 0, (0,))
    assert [c.numel for c in layout.chunks(3)] == [0, 0, 0]


def test_a_scalar_is_one_element() -> None:
    assert Segment("s", (), 0).numel == 1


def test_like_keeps_the_layout_and_the_room() -> None:
    into = torch.zeros(6)
    block = Bucket(torch.ones(6), layout_of([(6,)]), into)
    other = block.like(torch.full((6,), 2.0))
    assert other.layout is block.layout
    assert other.for_mean() is into
    assert Bucket(torch.ones(6), block.layout).for_mean() is not into


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_a_draft_reads_what_is_settled_and_writes_nothing_until_commit() -> None:
    settled: State = {"kept": torch.ones(2), "gone": torch.ones(1)}
    draft = PendingState(settled)
    assert torch.equal(draft["kept"], torch.ones(2))
    draft["new"] = torch.zeros(3)
    draft["kept"] = torch.zeros(2)
    del draft["gone"]
    assert settled.keys() == {"kept", "gone"}
    assert torch.equal(settled["kept"], torch.ones(2))
    draft.commit()
    assert settled.keys() == {"kept", "new"}
    assert torch.equal(settled["kept"], torch.zeros(2))


def test_a_dropped_draft_leaves_no_trace() -> None:
    settled: State = {}
    PendingState(settled)["x"] = torch.ones(1)
    assert settled == {}


def test_drafts_made_one_after_another_see_what_was_committed() -> None:
    settled: State = {}
    for value in (1.0, 2.0):
        draft = PendingState(settled)
        draft["x"] = draft.get("x", torch.zeros(())) + value
        draft.commit()
    assert float(settled["x"]) == 3.0
