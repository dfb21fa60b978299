"""The law of codecs: whoever writes alone can be read by anyone, and nothing that is read is trusted.

Statistical tests draw a fixed number of times with fixed keys; with other keys a correct codec would fail one comparison
with a chance of 6e-7 (z < 5).
"""

import contextlib
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.laws.blocks import FILLED, SHAPES, agree, bits, block, context, roundtrip, sent, vector
from tests.laws.samples import codecs, linear_codecs
from torch import Tensor

from gossamer.codecs import RandK
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec, Context, LinearCodec
from gossamer.core.errors import WireError

every_codec = pytest.mark.parametrize("codec", codecs(), ids=repr)
every_linear_codec = pytest.mark.parametrize("codec", linear_codecs(), ids=repr)
every_unbiased_codec = pytest.mark.parametrize("codec", [c for c in codecs() if c.unbiased], ids=repr)
every_biased_codec = pytest.mark.parametrize("codec", [c for c in codecs() if c.needs_feedback], ids=repr)
every_filled_shape = pytest.mark.parametrize("shape", FILLED)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

SPOILERS = [float("nan"), float("inf"), float("-inf")]
DRAWS = 400


def fine(dtype: torch.dtype) -> float:
    """What rounding may do: books kept in double precision balance in double precision, whatever the wire."""
    return 2e-6 if dtype == torch.float32 else 1e-13


# -- wires -------------------------------------------------------------------------------------------------------------


@every_codec
@every_dtype
def test_a_wire_has_the_length_that_was_promised(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        given = block(shape, dtype)
        wire = codec.encode(given, {}, context())
        assert (wire.dtype, wire.dim()) == (torch.uint8, 1)
        assert wire.is_contiguous()
        promised = codec.wire_bytes(given.layout)
        assert promised is None or wire.numel() == promised, shape
        assert wire.numel() <= codec.wire_limit(given.layout), shape


@every_codec
@every_dtype
def test_decoding_gives_finite_numbers_of_the_block_s_shape_and_precision(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        given = block(shape, dtype)
        out = roundtrip(codec, given)
        assert (out.shape, out.dtype) == (given.flat.shape, dtype), shape
        assert out.isfinite().all(), shape


@every_codec
@every_filled_shape
def test_chunks_are_written_and_read_like_blocks(codec: Codec, shape: str) -> None:
    if codec.whole:
        return
    for count in (2, 3, 7):
        for chunk in block(shape).chunks(count):
            out = roundtrip(codec, chunk)
            assert out.shape == chunk.flat.shape
            assert bits(out) == bits(roundtrip(codec, Bucket(chunk.flat.clone(), chunk.layout)))


@every_codec
@every_dtype
def test_encoding_leaves_block_state_and_global_dice_alone(codec: Codec, dtype: torch.dtype) -> None:
    given, state = block("several", dtype), {}
    before, rng = given.flat.clone(), torch.get_rng_state()
    codec.encode(given, state, context())
    assert torch.equal(given.flat, before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert state == {}


@every_codec
@every_dtype
def test_a_wire_may_start_at_any_byte(codec: Codec, dtype: torch.dtype) -> None:
    given = block("several", dtype)
    wire = codec.encode(given, {}, context())
    decoded = bits(codec.decode(wire, given))
    for offset in (1, 2, 3, 5, 7, 8):
        moved = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), wire, torch.ones(3, dtype=torch.uint8)])
        assert bits(codec.decode(moved[offset : offset + wire.numel()], given)) == decoded, offset


@every_codec
def test_a_wire_of_another_length_is_refused(codec: Codec) -> None:
    for shape in SHAPES:
        given = block(shape)
        wire = codec.encode(given, {}, context())
        wrong = [wire[:n] for n in {0, 1, wire.numel() // 2, wire.numel() - 1} if 0 <= n < wire.numel()]
        wrong += [torch.cat([wire, torch.zeros(n, dtype=torch.uint8)]) for n in (1, 4, 5, 8, 64)]
        for bad in wrong:
            with pytest.raises(WireError):
                codec.decode(bad, given)


@every_codec
@every_dtype
@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_read_as_numbers_and_nothing_else(
    codec: Codec, dtype: torch.dtype, data: st.DataObject
) -> None:
    given = block(data.draw(st.sampled_from(FILLED)), dtype)
    wire = codec.encode(given, {}, context()).clone()
    if data.draw(st.booleans()):
        wire = torch.tensor(list(data.draw(st.binary(min_size=wire.numel(), max_size=wire.numel()))), dtype=torch.uint8)
    else:
        for place in data.draw(st.lists(st.integers(0, wire.numel() - 1), min_size=1, max_size=8)):
            wire[place] = data.draw(st.integers(0, 255))
    fence = torch.full((given.numel + 200,), 7.0, dtype=dtype)
    into = fence[100:-100]
    with contextlib.suppress(WireError):
        codec.accumulate(wire, given.layout, into, 1.0)
    assert (fence[:100] == 7).all(), "written before the block"
    assert (fence[-100:] == 7).all(), "written past the block"


@every_codec
@every_dtype
def test_a_refused_wire_changes_nothing(codec: Codec, dtype: torch.dtype) -> None:
    given = block("several", dtype)
    wire = codec.encode(given, {}, context())
    into = torch.full_like(given.flat, 3.0)
    with pytest.raises(WireError):
        codec.accumulate(wire[:-1], given.layout, into, 1.0)
    assert (into == 3).all()


# -- values ------------------------------------------------------------------------------------------------------------


@every_codec
@every_dtype
def test_zero_in_is_exactly_zero_out(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        given = block(shape, dtype)
        given.flat.zero_()
        assert (roundtrip(codec, given) == 0).all(), shape


@every_codec
@every_dtype
def test_one_number_that_is_not_finite_makes_one_that_is_not(codec: Codec, dtype: torch.dtype) -> None:
    for value, shape, place in product(SPOILERS, [*FILLED, "one element"], (0, 1, -1)):
        given = block(shape, dtype)
        given.flat[place % given.numel] = value
        assert not roundtrip(codec, given).isfinite().all(), f"{value} in {shape} at {place}"


@every_codec
def test_a_block_of_nothing_but_nan_or_infinity_does_not_look_finite(codec: Codec) -> None:
    for value in SPOILERS:
        assert not roundtrip(codec, vector(torch.full((37,), value))).isfinite().all()


@every_codec
@pytest.mark.parametrize("size", [2.0**-66, 2.0**-20, 2.0**13, 2.0**60])  # a power of two is one afterwards
def test_the_size_of_a_gradient_does_not_matter(codec: Codec, size: float) -> None:
    given = block("several")
    scaled = roundtrip(codec, given.like(given.flat * size))
    if not codec.any_size:
        assert size in (2.0**-20, 2.0**13) or not torch.allclose(
            scaled / size, roundtrip(codec, given), rtol=1e-2, atol=1e-2
        )
        return
    torch.testing.assert_close(scaled / size, roundtrip(codec, given), rtol=1e-2, atol=1e-2)


@every_codec
@every_dtype
def test_accumulating_adds_the_weighted_decoding(codec: Codec, dtype: torch.dtype) -> None:
    given = block("several", dtype)
    wire = codec.encode(given, {}, context())
    start, close = torch.linspace(-2, 2, given.numel, dtype=dtype), fine(dtype)
    for weight in (1.0, -1.0, 0.5, 0.37, 8.0):
        into = start.clone()
        codec.accumulate(wire, given.layout, into, weight)
        torch.testing.assert_close(into, start + weight * codec.decode(wire, given), rtol=close, atol=close)


# -- dice --------------------------------------------------------------------------------------------------------------


def wires_of(codec: Codec, contexts: list[Context], given: Bucket | None = None) -> list[bytes]:
    given = given or block("long")
    return [bits(codec.encode(given, {}, s)) for s in contexts]


@every_codec
def test_equal_seats_write_equal_wires(codec: Codec) -> None:
    assert len(set(wires_of(codec, [context(rank=3, step=5)] * 3))) == 1


@every_codec
def test_every_rank_step_and_seed_has_its_own_dice_or_there_are_none(codec: Codec) -> None:
    kinds = {
        "rank": [context(rank=r, size=5) for r in range(5)],
        "step": [context(step=s) for s in range(5)],
        "seed": [context(seed=s) for s in range(5)],
        "again": [context(), context()._replace(rng=context().rng.again())],
    }
    rounds = codec.unbiased and codec.omega(block("long").layout) > 0
    for kind, contexts in kinds.items():
        different = len(set(wires_of(codec, contexts)))
        assert different == len(contexts) if rounds else different in (1, len(contexts)), kind


@every_unbiased_codec
def test_parameters_of_other_names_have_other_dice(codec: Codec) -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(4))
    wires = {bits(codec.encode(Bucket(values, Layout.of({n: (400,)})), {}, context())) for n in "abcd"}
    assert len(wires) == (4 if codec.omega(vector(values).layout) > 0 else 1)


def draws(codec: Codec, given: Bucket, count: int, rank: int = 0) -> Tensor:
    """Independent decodings, one a row, in double precision."""
    return torch.stack([roundtrip(codec, given, context(rank=rank, step=k)).double() for k in range(count)])


@every_unbiased_codec
@pytest.mark.parametrize("shape", ["several", "matrices", "two elements"])
def test_unbiased_codecs_are_right_on_average(codec: Codec, shape: str) -> None:
    given = block(shape)
    errors = draws(codec, given, DRAWS) - given.flat.double()
    spread = errors.std(0)
    # A coordinate that rarely moves may show little of its spread in so few draws: at least half the usual one counts.
    floor = (spread.square().mean().sqrt() / 2).clamp(min=1e-6)
    z = errors.mean(0) / (spread.clamp(min=floor) / DRAWS**0.5)
    assert float(z.abs().max()) < 5
    shrinkage = (errors * given.flat.sign()).sum(1)
    assert abs(float(shrinkage.mean())) <= 5 * float(shrinkage.std()) / DRAWS**0.5 + 1e-4


@every_unbiased_codec
@pytest.mark.parametrize("shape", ["several", "matrices", "long"])
def test_the_variance_of_unbiased_codecs_is_within_omega(codec: Codec, shape: str) -> None:
    given = block(shape)
    squares = (draws(codec, given, 100) - given.flat.double()).square().sum(1)
    bound = codec.omega(given.layout) * float(given.flat.double().square().sum())
    assert float(squares.mean()) <= bound * 1.001 + 5 * float(squares.std()) / 10 + 1e-12


@every_codec
def test_only_an_unbiased_codec_states_a_relative_variance(codec: Codec) -> None:
    for shape in SHAPES:
        omega = codec.omega(block(shape).layout)
        assert 0 <= omega < float("inf") if codec.unbiased else omega == float("inf")


def hard_cases() -> list[Bucket]:
    spike = torch.full((300,), 0.05)
    spike[11] = 1.0
    noise = torch.randn(300, generator=torch.Generator().manual_seed(5))
    return [vector(v) for v in (torch.ones(300), spike, noise, noise**5, torch.linspace(-1, 1, 300))]


@every_codec
def test_a_codec_that_contracts_loses_less_than_there_is(codec: Codec) -> None:
    if not codec.contracts:
        bears = (
            not codec.needs_feedback or codec.bounds_residual or not codec.any_size
        )  # of votes the size is no matter
        assert bears, "feedback around a codec that does not contract can diverge"
        return
    for case in hard_cases():
        lost = (draws(codec, case, 40) - case.flat.double()).square().sum(1).mean()
        assert float(lost) < float(case.flat.double().square().sum()) * (1 if codec.needs_feedback else 1.05)


@every_codec
def test_the_error_of_a_mean_over_ranks_falls_with_their_number(codec: Codec) -> None:
    if len(set(wires_of(codec, [context(rank=0), context(rank=1)]))) == 1:
        return  # no dice
    given, ranks, steps = block("long"), 8, 60
    decoded = torch.stack([draws(codec, given, steps, rank=r) for r in range(ranks)])
    center = decoded.mean((0, 1))
    one = (decoded - center).square().sum(2)
    together = (decoded.mean(0) - center).square().sum(1)
    # Each row averages 1283 coordinates and 60 steps: 10 % is beyond z = 5 for independent dice; equal dice give 8.
    assert float(together.mean() / one.mean() * ranks) == pytest.approx(1, abs=0.1)


# -- sums --------------------------------------------------------------------------------------------------------------


def averaged(codec: LinearCodec, blocks: list[Bucket], order: list[int] | None = None):
    """Everybody's echo; `order` contexts the ranks differently, each keeping its data and dice."""
    size, order = len(blocks), order or list(range(len(blocks)))
    contexts = [context(rank=r, size=size)._replace(rank=place) for place, r in enumerate(order)]
    echoes, ledger = agree([codec.average(blocks[r], {}, s) for r, s in zip(order, contexts, strict=True)])
    return echoes, ledger


def on_ranks(shape: str, size: int, dtype: torch.dtype = torch.float32) -> list[Bucket]:
    return [block(shape, dtype, seed=r) for r in range(size)]


@every_linear_codec
@every_dtype
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3, 8])
def test_the_mean_is_bit_equal_on_all_ranks_and_is_the_mean_of_what_got_through(
    codec: LinearCodec, dtype: torch.dtype, size: int
) -> None:
    loose = max(12 * codec.sum_rounding, 10 * fine(dtype))
    for shape in SHAPES:
        blocks = on_ranks(shape, size, dtype)
        before = [b.flat.clone() for b in blocks]
        echoes, _ = averaged(codec, blocks)
        assert len({bits(e.mean) for e in echoes}) == 1, shape
        assert (echoes[0].mean.shape, echoes[0].mean.dtype) == (blocks[0].flat.shape, dtype), shape
        through = sum(sent(e, b) for e, b in zip(echoes, blocks, strict=True)) / size
        torch.testing.assert_close(through, echoes[0].mean, rtol=loose, atol=loose)
        assert all(torch.equal(b.flat, old) for b, old in zip(blocks, before, strict=True)), shape


@every_linear_codec
@pytest.mark.parametrize("shape", ["several", "matrices"])
def test_permuting_the_ranks_changes_the_mean_by_rounding_only(codec: LinearCodec, shape: str) -> None:
    blocks = on_ranks(shape, 4, torch.float64)
    echoes, _ = averaged(codec, blocks)
    permuted, _ = averaged(codec, blocks, order=[2, 0, 3, 1])
    loose = max(5 * codec.sum_rounding, 1e-9)
    torch.testing.assert_close(permuted[0].mean, echoes[0].mean, rtol=loose, atol=loose)


@every_linear_codec
@pytest.mark.parametrize("shape", ["several", "matrices"])
@every_dtype
def test_zeros_on_all_ranks_average_to_zero(codec: LinearCodec, shape: str, dtype: torch.dtype) -> None:
    blocks = [b.like(torch.zeros_like(b.flat)) for b in on_ranks(shape, 3, dtype)]
    echoes, _ = averaged(codec, blocks)
    assert (echoes[0].mean == 0).all()
    assert (sent(echoes[0], blocks[0]) == 0).all()


@every_linear_codec
@pytest.mark.parametrize("value", SPOILERS)
@pytest.mark.parametrize("shape", ["several", "matrices"])
def test_one_rank_s_number_that_is_not_finite_is_seen_by_all(codec: LinearCodec, value: float, shape: str) -> None:
    for place in (0, 3, -1):
        blocks = on_ranks(shape, 3)
        blocks[1].flat[place] = value
        echoes, _ = averaged(codec, blocks)
        assert not any(e.mean.isfinite().all() for e in echoes)


@every_linear_codec
@pytest.mark.parametrize("value", SPOILERS)
def test_opposite_infinities_and_nan_on_two_ranks_do_not_cancel(codec: LinearCodec, value: float) -> None:
    blocks = on_ranks("matrices", 2)
    blocks[0].flat[5], blocks[1].flat[5] = value, -value
    echoes, _ = averaged(codec, blocks)
    assert not any(e.mean.isfinite().all() for e in echoes)


@every_linear_codec
@every_dtype
@pytest.mark.parametrize("shape", ["several", "matrices"])
def test_writing_the_mean_into_the_room_given_changes_no_bit(
    codec: LinearCodec, dtype: torch.dtype, shape: str
) -> None:
    plain, _ = averaged(codec, on_ranks(shape, 3, dtype))
    rooms = [torch.full_like(b.flat, 9.0) for b in on_ranks(shape, 3, dtype)]
    apart = [Bucket(b.flat, b.layout, room) for b, room in zip(on_ranks(shape, 3, dtype), rooms, strict=True)]
    echoes, _ = averaged(codec, apart)
    inside = [Bucket(b.flat, b.layout, b.flat) for b in on_ranks(shape, 3, dtype)]
    over, _ = averaged(codec, inside)
    for a, b, c, like in zip(plain, echoes, over, apart, strict=True):
        assert bits(a.mean) == bits(b.mean) == bits(c.mean)
        assert bits(sent(a, like)) == bits(sent(b, like))


@every_linear_codec
def test_linear_codecs_have_their_own_dice_on_every_rank_or_none(codec: LinearCodec) -> None:
    same = [block("long")] * 4
    echoes, _ = averaged(codec, same)
    through = {bits(sent(e, same[0])) for e in echoes}
    if isinstance(codec, RandK):  # all ranks send the same places
        assert len(through) == 1
        return
    rounds = codec.unbiased and codec.omega(same[0].layout) > 0
    assert len(through) == (4 if rounds else len(through))
    assert len(through) in (1, 4)
