"""Exchanges: the mean they agree on, what they say got through, and the bytes that cross."""

from dataclasses import dataclass, field

import pytest
import torch
from tests.runtime.gym import bit_equal, noise
from torch import Tensor

from gossamer.codecs import BF16, FP16, FP32, QSGD, PowerSGD, Ternary, TopK
from gossamer.core.bucket import Bucket, Layout, PendingState, State
from gossamer.core.contracts import Codec, Context, Exchange
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate
from gossamer.runtime.loss_scale import rescale

SHAPES = {"a": (17, 13), "b": (12, 10), "none": (0, 3), "c": (7,), "d": ()}
SIZES = [1, 2, 3, 4, 8]

CODECS: list[Codec] = [
    FP32(),
    BF16(),
    FP16(),
    Ternary(),
    Ternary(clip=0.0, levels=5),
    QSGD(),
    QSGD(bits=1, bucket=8),
    QSGD(bits=3, bucket=20, norm="l2"),
    TopK(0.1),
    TopK(0.3, index="rice"),
]
WRITTEN: list[Exchange] = [*map(Gather, CODECS), Gather(TopK(0.2, "global")), *map(Scatter, CODECS)]
SUMMED: list[Exchange] = [AllReduced(c) for c in (FP32(), BF16(), FP16(), Ternary(), Ternary(0.0, 3), PowerSGD(2))]
ALL = [*WRITTEN, *SUMMED]


@dataclass
class Agreed:
    means: list[Tensor]
    sent: list[Tensor]
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def mean_sent(self) -> Tensor:
        return torch.stack(self.sent).double().mean(0)


def layout(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> Layout:
    return Layout.of(shapes, dtype)


def flats(size: int, of: Layout, step: int = 1) -> list[Tensor]:
    return [noise(5, rank, step, numel=of.numel, dtype=of.dtype) for rank in range(size)]


def agree(
    exchange: Exchange, given: list[Tensor], of: Layout, states: list[State] | None = None, step: int = 1, **context
) -> Agreed:
    size = len(given)

    def program(rank: int) -> Program[tuple[Tensor, Tensor]]:
        place = Context(rank, size, step, CounterRng(11, step, rank), **context)
        result = yield from exchange.average(Bucket(given[rank].clone(), of), states[rank] if states else {}, place)
        sent = torch.zeros(of.numel, dtype=of.dtype)
        result.add_sent(sent, 1.0)
        return result.mean, sent

    ledger = Ledger()
    results = simulate([program(r) for r in range(size)], ledger=ledger).results
    return Agreed([m for m, _ in results], [s for _, s in results], ledger)


def true_mean(given: list[Tensor]) -> Tensor:
    return torch.stack(given).double().mean(0)


# -- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_all_ranks_get_one_mean_bit_for_bit_and_what_got_through_averages_to_it(exchange: Exchange, size: int) -> None:
    of = layout()
    agreed = agree(exchange, flats(size, of), of)
    assert bit_equal(agreed.means)
    if not isinstance(exchange, Scatter):  # its owner encodes the mean once more
        summed_in_half = isinstance(exchange, AllReduced) and isinstance(exchange.codec, BF16 | FP16)
        close = 4 * 2.0**-8 if summed_in_half else 1e-5  # values reach 3.5; the backend rounds N times
        torch.testing.assert_close(agreed.means[0].double(), agreed.mean_sent, rtol=1e-5, atol=close)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exchange", [AllReduced(FP32()), Gather(FP32()), Scatter(FP32()), Gather(TopK(1.0))], ids=repr)
def test_plain_numbers_give_the_true_mean(exchange: Exchange, dtype: torch.dtype, size: int) -> None:
    of = layout(dtype=dtype)
    given = flats(size, of)
    plain = isinstance(exchange, AllReduced) or "fp32" in repr(exchange)
    close = 1e-15 if dtype == torch.float64 and plain else 1e-6
    torch.testing.assert_close(agree(exchange, given, of).means[0].double(), true_mean(given), rtol=close, atol=close)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", [BF16(), FP16()], ids=repr)
def test_half_precision_errs_by_its_rounding_at_most(codec: BF16 | FP16, size: int) -> None:
    of, step = layout(), 2.0**-8 if isinstance(codec, BF16) else 2.0**-11
    given = flats(size, of)
    largest = max(float(g.abs().max()) for g in given)
    for exchange in (Gather(codec), Scatter(codec)):
        error = (agree(exchange, given, of).means[0].double() - true_mean(given)).abs().max()
        assert error <= 2 * step * largest


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", [QSGD(8, 64), QSGD(4, 32), QSGD(2, 16)], ids=repr)
def test_quantised_means_err_by_one_level_of_each_encoding_at_most(codec: QSGD, size: int) -> None:
    of, given = layout(), flats(size, layout())
    top, s = max(float(g.abs().max()) for g in given), 2 ** (codec.bits - 1) - 1
    once = top / s * 1.001
    assert (agree(Gather(codec), given, of).means[0].double() - true_mean(given)).abs().max() <= once
    twice = once + (top + once) / s * 1.001
    assert (agree(Scatter(codec), given, of).means[0].double() - true_mean(given)).abs().max() <= twice


@pytest.mark.parametrize("exchange", [Gather(QSGD(4, 64)), Scatter(QSGD(4, 64)), Scatter(Ternary(0.0))], ids=repr)
def test_unbiased_exchanges_average_out_to_the_true_mean(exchange: Exchange) -> None:
    """200 draws; each element's mean within 5 standard errors of it, so a correct codec fails with p < 378 * 6e-7."""
    of, draws = layout(), 200
    given = flats(3, of)
    means = torch.stack([agree(exchange, given, of, step=k).means[0].double() for k in range(draws)])
    error = (means.mean(0) - true_mean(given)).abs()
    assert (error <= 5 * means.std(0) / draws**0.5 + 1e-6).all()
    assert means.std(0).max() > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_a_shared_matrix_of_low_rank_passes_powersgd_whole(size: int) -> None:
    of = layout({"m": (12, 10)})
    left, right = noise(1, numel=24).view(12, 2), noise(2, numel=20).view(2, 10)
    given = [(left @ right * (r + 1)).flatten() for r in range(size)]
    mean = agree(AllReduced(PowerSGD(2)), given, of).means[0]
    torch.testing.assert_close(mean.double(), true_mean(given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_zero_in_is_exactly_zero_out(exchange: Exchange) -> None:
    of = layout()
    agreed = agree(exchange, [torch.zeros(of.numel)] * 3, of)
    assert not any(t.any() for t in (*agreed.means, *agreed.sent))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_a_spoilt_element_anywhere_spoils_the_mean_everywhere(exchange: Exchange, value: float) -> None:
    of = layout()
    for position in (0, 200, of.numel - 1):
        given = flats(3, of)
        given[1][position] = value
        means = agree(exchange, given, of).means
        assert not any(m.isfinite().all() for m in means)


@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_what_is_given_is_not_written_to(exchange: Exchange) -> None:
    of = layout()
    given = flats(2, of)
    before = [g.clone() for g in given]

    def program(rank: int) -> Program[None]:
        place = Context(rank, 2, 1, CounterRng(0, 1, rank))
        yield from exchange.average(Bucket(given[rank], of), {}, place)

    simulate([program(r) for r in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(given, before))


# -- bytes ------------------------------------------------------------------------------------------------------------


def sent_by_rank(ledger: Ledger, size: int) -> list[int]:
    return [sum(e.sent for e in ledger if e.rank == r) for r in range(size)]


@pytest.mark.parametrize("codec", [c for c in CODECS if c.wire_bytes(layout()) is not None], ids=repr)
def test_gathered_bytes_grow_with_the_world(codec: Codec) -> None:
    of = layout()
    wire = codec.wire_bytes(of)
    assert wire is not None
    for size in SIZES:
        assert sent_by_rank(agree(Gather(codec), flats(size, of), of).ledger, size) == [(size - 1) * wire] * size


@pytest.mark.parametrize("codec", [c for c in CODECS if c.wire_bytes(layout()) is not None], ids=repr)
def test_scattered_bytes_are_the_chunks_and_the_answers(codec: Codec) -> None:
    of = layout()
    for size in SIZES:
        chunks = [codec.wire_bytes(c) or 0 for c in of.chunks(size)]
        ledger = agree(Scatter(codec), flats(size, of), of).ledger
        answers = (size - 1) * max(chunks)
        assert sent_by_rank(ledger, size) == [sum(chunks) - chunks[r] + answers for r in range(size)]


def test_scattered_bytes_do_not_depend_on_the_size_of_the_world() -> None:
    of = layout({"w": (128, 96)})
    for codec in (FP32(), BF16(), QSGD(4, 64), QSGD(8, 64)):
        message = codec.wire_bytes(of) or 0
        for size in (2, 4, 8, 16):
            sent = sent_by_rank(agree(Scatter(codec), flats(size, of), of).ledger, size)
            assert sent == pytest.approx([2 * (size - 1) / size * message] * size, rel=0.02)


def test_ragged_wires_cost_their_lengths_and_the_longest() -> None:
    of, codec, size = layout(), TopK(0.3, index="rice"), 3
    given = flats(size, of)
    lengths = [codec.encode(Bucket(g, of), {}, Context(0, 1, 1, CounterRng(0, 1, 0))).numel() for g in given]
    sent = sent_by_rank(agree(Gather(codec), given, of).ledger, size)
    assert sent == [(size - 1) * (8 + max(lengths))] * size


@pytest.mark.parametrize("size", SIZES)
def test_reduced_bytes_are_a_ring(size: int) -> None:
    of = layout()
    d, n = of.numel, len(of.segments)
    ring = 2 * (size - 1)
    assert sent_by_rank(agree(AllReduced(FP32()), flats(size, of), of).ledger, size) == [ring * 4 * d // size] * size
    assert sent_by_rank(agree(AllReduced(BF16()), flats(size, of), of).ledger, size) == [ring * 2 * d // size] * size
    r, plain = 2, 7 + 1
    low = ring * 4 * (r * (17 + 12) + plain) // size + ring * 4 * r * (13 + 10) // size
    assert sent_by_rank(agree(AllReduced(PowerSGD(r)), flats(size, of), of).ledger, size) == [low] * size
    ternary = agree(AllReduced(Ternary()), flats(size, of), of).ledger
    fields = 31 // (2 * size).bit_length()
    assert sent_by_rank(ternary, size) == [ring * 4 * n // size + ring * 4 * -(-d // fields) // size] * size


# -- short and empty blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [{"s": ()}, {"a": (3,)}, {"a": (1,), "none": (0,), "b": (2,)}, {"none": (0, 3)}], ids=str
)
@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_blocks_with_fewer_elements_than_ranks(exchange: Exchange, shapes: dict[str, tuple[int, ...]]) -> None:
    of = layout(shapes)
    states: list[State] = [{} for _ in range(8)]
    for step in (1, 2, 3):
        agreed = agree(exchange, flats(8, of, step), of, states, step)
        assert bit_equal(agreed.means)
        assert agreed.means[0].shape == (of.numel,)
        assert agreed.means[0].isfinite().all()


# -- what the second encoding owes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "exchange", [Scatter(TopK(0.1)), Scatter(TopK(0.3, index="rice")), Scatter(QSGD(2, 16), 1.0)], ids=repr
)
def test_the_owners_lose_nothing(exchange: Scatter, size: int) -> None:
    of = layout()
    states: list[State] = [{} for _ in range(size)]
    through, got = torch.zeros(of.numel, dtype=torch.float64), torch.zeros(of.numel, dtype=torch.float64)
    for step in range(1, 30):
        agreed = agree(exchange, flats(size, of, step), of, states, step)
        through += agreed.mean_sent
        got += agreed.means[0].double()
        owed = sum(s["owed"].double() for s in states)
        torch.testing.assert_close(got + owed, through, rtol=1e-5, atol=1e-4)
    assert float(owed.abs().max()) > 1e-3


@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_owner_owes_in_its_own_chunk_only(size: int) -> None:
    of = layout()
    states: list[State] = [{} for _ in range(size)]
    agree(Scatter(TopK(0.1)), flats(size, of), of, states)
    for rank, state in enumerate(states):
        for j, chunk in enumerate(Bucket(state["owed"], of).chunks(size)):
            assert bool(chunk.flat.any()) == (j == rank)


def test_what_is_owed_follows_the_loss_scale() -> None:
    """The same gradients under a scale that changes give the same numbers, scaled: powers of two change no bit."""
    of, size = layout(), 3
    plain: list[State] = [{} for _ in range(size)]
    scaled: list[State] = [{} for _ in range(size)]
    before = 1.0
    for step, scale in enumerate([1.0, 1024.0, 2.0, 2.0, 65536.0], 1):
        given = flats(size, of, step)
        for state in scaled:
            rescale(Scatter(TopK(0.1)), state, scale / before)
        a = agree(Scatter(TopK(0.1)), given, of, plain, step)
        b = agree(Scatter(TopK(0.1)), [g * scale for g in given], of, scaled, step)
        before = scale
        assert torch.equal(a.means[0] * scale, b.means[0])


def test_unbiased_codecs_owe_nothing_unless_asked() -> None:
    of = layout()
    for exchange, owes in ((Scatter(QSGD()), False), (Scatter(QSGD(), 0.5), True), (Scatter(BF16(), 0.0), False)):
        states: list[State] = [{}, {}]
        agree(exchange, flats(2, of), of, states)
        assert all(("owed" in s) == owes for s in states)


@pytest.mark.parametrize(
    ("exchange", "feedback", "owes"),
    [
        (Scatter(QSGD()), 1.0, True),  # error feedback loses nothing in the second encoding either
        (Scatter(QSGD()), 0.25, True),
        (Scatter(TopK(0.1)), 0.0, False),
        (Scatter(QSGD(), 1.0), 0.0, False),
        (Scatter(QSGD(), 0.0), 1.0, False),  # whoever says so himself is heard
    ],
)
def test_a_memory_says_how_much_of_the_second_encoding_is_owed(exchange: Scatter, feedback: float, owes: bool) -> None:
    of = layout()
    states: list[State] = [{}, {}]
    agree(exchange, flats(2, of), of, states, feedback=feedback)
    assert all(("owed" in s) == owes for s in states)


@pytest.mark.parametrize("exchange", ALL, ids=repr)
def test_a_draft_that_is_dropped_leaves_no_trace(exchange: Exchange) -> None:
    of, size = layout(), 3
    states: list[State] = [{} for _ in range(size)]
    agree(exchange, flats(size, of), of, states)
    before = [{k: v.clone() for k, v in s.items()} for s in states]
    agree(exchange, flats(size, of, 2), of, [PendingState(s) for s in states], 2)
    for old, new in zip(before, states, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[k], new[k]) for k in old)


def test_an_answer_in_more_bits_takes_most_of_the_noise_away() -> None:
    """Eight Gaussian gradients: the messages' own noise is .88 of the mean's square, a ternary answer makes it 2.7."""
    of = layout({"w": (20_000,)})
    given = flats(8, of)
    mean = torch.stack(given).double().mean(0)

    def noise_of(exchange: Exchange) -> float:
        return float((agree(exchange, given, of).means[0].double() - mean).square().sum() / mean.square().sum())

    unencoded = noise_of(Scatter(Ternary(), answer=FP32()))
    three = noise_of(Scatter(Ternary(), answer=QSGD(bits=3)))
    again = noise_of(Scatter(Ternary()))
    assert unencoded == pytest.approx(0.88, rel=0.1)
    assert three < 1.4 < 2.3 < again
    assert Scatter(Ternary(), answer=QSGD(bits=3)).answers == QSGD(bits=3)
    assert Scatter(Ternary()).answers == Ternary()
