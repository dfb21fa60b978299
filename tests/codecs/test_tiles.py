"""Tiles, and the two codecs that keep a few elements of each: DeMo's and SparseLoCo's."""

import pytest
import torch
from tests.laws.blocks import block, context, roundtrip
from tests.runtime.gym import by_name, make, parameters, pull, sgd, train

from gossamer.codecs import DCTTopK, TileTopK
from gossamer.codecs.tiles import Tiling, tiling
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.errors import RecipeError

SHAPES = [(), (5,), (130,), (1, 1), (64, 64), (100, 30), (67, 129), (3, 5, 7), (1283, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_apart_and_together_nothing_is_lost_and_waves_turn_back(shape: tuple[int, ...]) -> None:
    tiles = Tiling.of(shape, 64, 64)
    flat = torch.randn(tiles.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apart = tiles.apart(flat)
    assert torch.equal(tiles.together(apart), flat)
    torch.testing.assert_close(tiles.cosines(tiles.cosines(apart), back=True), apart)
    torch.testing.assert_close(tiles.cosines(apart).norm(), flat.norm())


def test_of_a_full_tile_112_bytes_travel_and_16_of_a_tensor() -> None:
    layout = Layout.of({"w": (128, 128)})
    assert TileTopK().wire_bytes(layout) == 4 * 112 + 16


def test_two_bits_are_the_means_of_bins_that_are_not_symmetric() -> None:
    values = torch.tensor([10.0, 9.0, -1.0, 1.0, -2.0, -8.0, 2.0, -11.0])
    spread, middle = values.std(correction=0), values.mean()
    bins = ((values - middle) / (1.5 * spread)).round().clamp(-2, 1)
    read = roundtrip(TileTopK(keep=8), Bucket.of({"x": values}))
    for one in bins.unique():
        torch.testing.assert_close(read[bins == one], values[bins == one].mean().expand(int((bins == one).sum())))


@pytest.mark.parametrize("codec", [DCTTopK(4096), TileTopK(4096, bits=32)])
def test_with_all_of_a_tile_kept_nothing_is_lost(codec: DCTTopK | TileTopK) -> None:
    given = block("matrices")
    torch.testing.assert_close(roundtrip(codec, given), given.flat, rtol=0, atol=3e-6)


def test_what_was_sent_of_a_momentum_has_left_it() -> None:
    """The coefficients that travelled are zero in the residual."""
    ranks = make("demo(keep=2, side=4)", 2, optimizer=sgd(1e-3, 0.0))
    train(ranks, pull, 3)
    codec = DCTTopK(2, 4)
    for rank in ranks:
        (residual,) = [v for k, v in by_name(rank.worker.buckets, "memory", "residual").items() if k == "matrix"]
        tiles = tiling((17, 13), 4, 4)
        zero = (tiles.cosines(tiles.apart(residual.reshape(-1))).abs() < 1e-5).sum(1)
        whole = torch.arange(tiles.total).view(tiles.grid)[:4, :3].reshape(-1)  # those that an edge does not cut
        assert (zero[whole] >= codec.keep).all()


def test_demo_with_all_kept_is_sign_sgd_on_the_mean() -> None:
    demo, plain = (
        make(r, 3, optimizer=sgd(1e-3, 0.0)) for r in ("demo(keep=64, side=8)", "allreduce(fp32()) + signs()")
    )
    train(demo, pull, 20)
    train(plain, pull, 20)
    torch.testing.assert_close(
        parameters(demo)[0], parameters(plain)[0], rtol=0, atol=3e-3
    )  # a sign near zero may turn
    assert (parameters(demo)[0] == parameters(plain)[0]).float().mean() > 0.8


def test_sparse_loco_with_all_kept_is_local_sgd() -> None:
    kept, plain = (
        make(r, 3)
        for r in (
            "gather(tile_topk(keep=4096, bits=32)) + error_feedback(decay=0.95) + slowmo(3, 0.0, 1.0, by_lr=False)",
            "allreduce(fp32()) + local_sgd(3)",
        )
    )
    train(kept, pull, 9)
    train(plain, pull, 9)
    torch.testing.assert_close(parameters(kept)[0], parameters(plain)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "make_one", [lambda: DCTTopK(0), lambda: TileTopK(0), lambda: DCTTopK(1, 65), lambda: TileTopK(1, 0)]
)
def test_what_cannot_be_is_refused(make_one) -> None:
    with pytest.raises(RecipeError, match=r"at least 1|between 1 and 64"):
        make_one()


def test_a_place_beyond_its_tile_is_read_as_one_within() -> None:
    given = Bucket.of({"w": torch.ones(3)})
    for codec in (DCTTopK(), TileTopK()):
        wire = codec.encode(given, {}, context())
        wire[-5:] = 255
        assert codec.decode(wire, given).shape == (3,)
