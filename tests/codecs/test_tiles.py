"""Tiles, and the two codecs that keep a few elements of each: DeMo's and SparseLoCo's."""

from typing import Literal

import pytest
import torch
from tests.laws.blocks import block, context, roundtrip
from tests.runtime.gym import by_name, make, parameters, pull, sgd, train

from gossamer import kernels
from gossamer.bench.workloads import get
from gossamer.codecs import DCTTopK, TileTopK
from gossamer.codecs.tiles import Tiling, spread
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec
from gossamer.core.errors import RecipeError, WireError
from gossamer.kernels.layout import Places
from gossamer.kernels.reference import numbered as reference
from gossamer.planning.bytes import bytes_per_step

SHAPES = [(), (5,), (130,), (1, 1), (64, 64), (100, 30), (67, 129), (3, 5, 7), (1283, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_apart_and_together_nothing_is_lost_and_waves_turn_back(shape: tuple[int, ...]) -> None:
    tiles = Tiling.of(shape, 64, 64)
    flat = torch.randn(tiles.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    apart = tiles.apart(flat)
    assert torch.equal(tiles.together(apart), flat)
    torch.testing.assert_close(tiles.cosines(tiles.cosines(apart), back=True), apart)
    torch.testing.assert_close(tiles.cosines(apart).norm(), flat.norm())


def test_of_a_full_tile_77_bytes_travel_and_16_of_a_tensor() -> None:
    layout = Layout.of({"w": (128, 128)})
    assert TileTopK().wire_bytes(layout) == 4 * 77 + 16
    assert DCTTopK().wire_bytes(layout) == 4 * (32 * 4 + 34)
    assert TileTopK(places="rice").wire_bytes(layout) is None


def test_the_wire_of_two_places_is_known_to_the_bit() -> None:
    """Places 1 and 14 of 16: three low bits of each, 001 and 110, then the number of their high parts 0 and 1, which is 1."""
    x = torch.zeros(4, 4)
    x.view(-1)[[1, 14]] = torch.tensor([5.0, 6.0])
    given = Bucket.of({"w": x})
    wire = TileTopK(keep=2, side=4, bits=32).encode(given, {}, context())
    assert wire[:8].view(torch.float32).tolist() == [5.0, 6.0]
    assert wire[8:].tolist() == [0b01_110_001]


TILED = {"a": (130, 70), "b": (300,), "c": (5,), "d": (8, 8), "e": (1, 1), "f": (3, 5, 7)}


def all_kept(keep: int, side: int, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What a codec decodes that loses no value and knows no places: each tile's largest elements, with zeros around them."""
    tiles = Tiling.of(shape, side, side**2)
    apart = tiles.apart(x)
    places = apart.abs().topk(min(keep, tiles.places), dim=1).indices
    return tiles.together(torch.zeros_like(apart).scatter(1, places, apart.gather(1, places)))


@pytest.mark.parametrize("places", ["fixed", "rice"])
def test_both_codes_decode_to_the_same_bits_whatever_the_tiling(places: Literal["fixed", "rice"]) -> None:
    """A hundred tilings: edges, vectors, one place of a tile, all of them."""
    rng = torch.Generator().manual_seed(4)
    for case in range(100):
        keep, side = (1, 2, 7, 64, 4096)[case % 5], (1, 3, 8, 64)[case // 5 % 4]
        given = Bucket.of({name: torch.randn(shape, generator=rng) for name, shape in TILED.items()})
        read = given.like(roundtrip(TileTopK(keep, side, 32, places), given))
        for (_, found), (_, x), shape in zip(read.tensors(), given.tensors(), TILED.values(), strict=True):
            assert torch.equal(found.reshape(-1), all_kept(keep, side, x.reshape(-1), shape)), (keep, side, shape)
        two = [roundtrip(TileTopK(keep, side, 2, code), given) for code in ("fixed", "rice")]
        assert torch.equal(*two)


@pytest.mark.parametrize("codec", [TileTopK(4, 8), TileTopK(4, 8, places="rice"), DCTTopK(4, 8)], ids=str)
def test_truncated_and_random_wires_are_refused_or_read(codec: Codec) -> None:
    given = Bucket.of({name: torch.randn(shape, dtype=torch.float32) for name, shape in TILED.items()})
    wire, rng, refused = codec.encode(given, {}, context()), torch.Generator().manual_seed(7), 0
    for length in range(0, wire.numel(), 37):
        with pytest.raises(WireError):
            codec.decode(wire[:length], given)
    for case in range(200):
        damaged = wire.clone()
        damaged[int(torch.randint(wire.numel(), (1,), generator=rng))] = case
        try:
            assert codec.decode(damaged, given).shape == given.flat.shape
        except WireError:
            refused += 1
    assert refused > 10  # of places, that is; any value is one


def test_a_tile_with_another_number_of_places_is_refused() -> None:
    given = Bucket.of({"w": torch.randn(8, 8)})
    wire = TileTopK(4, 8).encode(given, {}, context())
    wire[-1] = 255
    with pytest.raises(WireError, match=r"places: a row is not 4 strictly ascending places in \[0, 64\)"):
        TileTopK(4, 8).decode(wire, given)
    two = Bucket.of({"w": torch.randn(16, 8)})
    other = kernels.index_encode(torch.tensor([1, 2, 3, 70, 71, 72, 73, 74], dtype=torch.int32), 128)
    wire = torch.cat([TileTopK(4, 8, places="rice").encode(two, {}, context())[: 16 + 2], other])
    with pytest.raises(WireError, match="tile_topk: a tile does not have 4 places"):
        TileTopK(4, 8, places="rice").decode(wire, two)


def test_where_nobody_waits_a_damaged_tile_s_places_lie_beyond_it_and_spoil_it() -> None:
    """As on a GPU, where the host is not told."""
    wire, form = kernels.places_encode(torch.tensor([[1, 5], [3, 9]]), 16), Places(2, 16)
    wire[0] ^= 0b11  # a place's low bits, so that it is another; and a number that no set has
    wire[form.row_bytes] = 255
    places = reference.decode(wire, form)
    assert places.tolist() == [[2, 5], [16, 16]]
    assert spread(places, torch.ones(2, 2), 16).isnan().sum(1).tolist() == [0, 1]


def test_the_model_difference_of_a_transformer_takes_a_two_hundredth() -> None:
    """The bound, C(4096, 64) for each full tile, is 1/212 of this model; 1/140 were 12 bits a place."""
    model = get("lm").model()
    shapes, dense = (
        {n: tuple(p.shape) for n, p in model.named_parameters()},
        4 * sum(p.numel() for p in model.parameters()),
    )
    assert dense / (30 * bytes_per_step("sparse_loco", shapes, 2)) == pytest.approx(206.5, abs=0.1)
    assert dense / (30 * bytes_per_step('sparse_loco(places="rice")', shapes, 2)) > 205


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
        tiles = Tiling.of((17, 13), 4, 4)
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
    "make_one", [lambda: DCTTopK(0), lambda: TileTopK(0), lambda: DCTTopK(1, 65_537), lambda: TileTopK(1, 0)]
)
def test_what_cannot_be_is_refused(make_one) -> None:
    with pytest.raises(RecipeError, match=r"at least 1|between 1 and 65,536, got \d+: a place in a tile"):
        make_one()
