"""Sketched-SGD: two rounds find and fetch what true top-k would; one round does not train."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.laws.blocks import agree, bits, context, sent, vector
from tests.laws.crew import Crew, mean
from tests.runtime.gym import Flat, make, sgd
from torch import Tensor

from gossamer.codecs import CountSketch
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, LinearCodec, ReduceResult
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.verbs import AllReduce, Program, all_reduce
from gossamer.exchanges import AllReduced
from gossamer.kernels import sketch_encode, sketch_estimate
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe

SIZE, NUMEL = 8, 2000


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(numel: int = NUMEL, size: int = SIZE, dtype: torch.dtype = torch.float32) -> list[Bucket]:
    """Heavy-tailed, with a part that all ranks share."""
    common = torch.randn(numel, generator=rng(0), dtype=dtype) ** 5
    return [vector(common + torch.randn(numel, generator=rng(r + 1), dtype=dtype)) for r in range(size)]


def once(codec: LinearCodec, blocks: list[Bucket], step: int = 1) -> list[ReduceResult]:
    contexts = [context(r, len(blocks), step) for r in range(len(blocks))]
    return agree([codec.average(b, {}, s) for b, s in zip(blocks, contexts, strict=True)])[0]


def largest(x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).index_copy(0, (top := x.abs().topk(k).indices), x[top])


# -- one exchange ------------------------------------------------------------------------------------------------------


def test_where_few_elements_are_heavy_it_is_the_top_k_of_the_mean() -> None:
    blocks = gradients()
    for block in blocks:
        block.flat[::50] += 3000.0
    found = once(CountSketch(ratio=0.02, columns=300), blocks)[0].mean
    torch.testing.assert_close(found, largest(mean(blocks).float(), 40), rtol=1e-6, atol=1e-6)


def test_what_gets_through_is_exact_and_there_are_k_of_it() -> None:
    for dtype in (torch.float32, torch.float64):
        blocks = gradients(dtype=dtype)
        echoes = once(CountSketch(ratio=0.01), blocks)
        chosen = echoes[0].mean.nonzero().view(-1)
        assert chosen.numel() == 20
        torch.testing.assert_close(echoes[0].mean[chosen], mean(blocks)[chosen].to(dtype), rtol=1e-6, atol=0)
        for result, given in zip(echoes, blocks, strict=True):
            assert torch.equal(sent(result, given)[chosen], given.flat[chosen])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_heavy_tail_is_found_whatever_the_number_of_ranks(size: int) -> None:
    """Each of ten steps has hashes of its own; in a small table some of the ten largest are hidden now and then."""
    blocks, found = gradients(20_000, size), 0
    top = mean(blocks).abs().topk(10).indices
    for step in range(10):
        result = once(CountSketch(ratio=0.002), blocks, step)[0]
        found += int((result.mean[top] != 0).sum())
    assert found >= 90


def test_hashes_are_new_at_every_step() -> None:
    blocks = [vector(torch.randn(NUMEL, generator=rng(r))) for r in range(2)]
    assert len({bits(once(CountSketch(), blocks, step)[0].mean) for step in range(5)}) == 5


def test_a_block_that_a_sketch_would_not_shorten_travels_as_it_is() -> None:
    blocks = gradients(9)
    codec = CountSketch()
    result = once(codec, blocks)[0]
    torch.testing.assert_close(result.mean, mean(blocks).float())
    assert codec.sum_bytes(blocks[0].layout, SIZE) == [36]


@pytest.mark.parametrize("choice", ["largest", "heavymix"])
def test_the_messages_are_as_long_as_was_foretold(choice: str) -> None:
    codec = CountSketch(ratio=0.01, columns=30, candidates=3, choice=choice)  # pyright: ignore
    program, answer, lengths = codec.average(gradients()[0], {}, context(0, 1)), None, list[int]()
    try:
        while True:
            verb = program.send(answer)
            assert isinstance(verb, AllReduce)
            lengths.append(verb.tensor.numel() * 4)
            answer = verb.tensor
    except StopIteration:
        assert lengths == codec.sum_bytes(gradients()[0].layout, 1) == [4 * 150, 4 * 60]


# -- heavymix ----------------------------------------------------------------------------------------------------------


def test_heavymix_contracts_as_its_theorem_says_on_noise_and_on_peaks() -> None:
    """E|x - C(x)|^2 <= (1 - k/n) |x|^2 for a random choice, and less the more is heavy; means over 100 steps.

    A share of k/n = .05 of noise spreads by .007 in one step: 5 standard errors are .0035.
    """
    codec = CountSketch(ratio=0.05, columns=60, candidates=1, choice="heavymix")
    noise, peaks = torch.randn(1000, generator=rng(1)).sign(), torch.full((1000,), 0.01)
    peaks[::200] = 1.0
    for x, least in ((noise, 0.05 - 0.0035), (peaks, 0.9)):
        kept = [float(once(codec, [vector(x)], step)[0].mean.square().sum()) for step in range(100)]
        assert sum(kept) / 100 / float(x.square().sum()) > least


def test_heavymix_takes_every_light_element_as_often() -> None:
    """200 steps; each of 512 elements is taken 12.5 times in the mean, with a spread of 3.5 if it is taken at random."""
    codec = CountSketch(ratio=0.0625, columns=100, candidates=1, choice="heavymix", rows=3)
    ones = vector(torch.randn(512, generator=rng(2)).sign())
    taken = sum((once(codec, [ones], step)[0].mean != 0).float() for step in range(200))
    assert isinstance(taken, Tensor)
    assert float(taken.mean()) == pytest.approx(12.5, rel=0.1)
    assert float(taken.max()) < 12.5 + 6 * 3.5
    assert float(taken.min()) > 0


# -- training ----------------------------------------------------------------------------------------------------------

RANKS, WIDTH = 4, 1000
CURVES = torch.rand(RANKS, WIDTH, generator=rng(5)) * 1.5 + 0.5
TARGETS = torch.randn(RANKS, WIDTH, generator=rng(6))


def losses(exchange: Exchange, steps: int = 130, lr: float = 0.05) -> list[float]:
    """How far above its least value a quadratic is whose parts differ from rank to rank, under error feedback."""
    crew, x, found = Crew("topk", RANKS), torch.zeros(WIDTH), list[float]()
    crew.exchange = exchange
    best = (CURVES * TARGETS).mean(0) / CURVES.mean(0)
    for _ in range(steps):
        x = x - lr * crew.step([vector(a * (x - b)) for a, b in zip(CURVES, TARGETS, strict=True)])
        found.append(float((CURVES.mean(0) * (x - best).square()).sum() / 2))
        if found[-1] > 1e6:
            break
    return found


@dataclass(frozen=True, repr=False)
class Chosen(LinearCodec):
    """What gets through is what is largest in the mean, be it known or only estimated."""

    name: ClassVar[str] = "chosen"

    estimated: bool

    @property
    def unbiased(self) -> bool:
        return False

    def omega(self, layout: Layout) -> float:
        return float("inf")

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        if self.estimated:
            key = context.rng.shared_key("x")
            table = yield from all_reduce(sketch_encode(block.flat, 5, 120, key))
            mean = sketch_estimate(table, block.numel, key) / context.size
        else:
            mean = (yield from all_reduce(block.flat.clone())) / context.size
        places = mean.abs().topk(30).indices
        own = block.flat[places]

        def add_sent(into: Tensor, weight: float) -> None:
            into.index_add_(0, places, own, alpha=weight)

        return ReduceResult(torch.zeros_like(mean).index_add_(0, places, mean[places]), add_sent)


def test_two_rounds_track_true_top_k_and_one_round_diverges() -> None:
    """The second round is no refinement: with estimates for values training ends a thousand times as far away as it began."""
    two = losses(AllReduced(CountSketch(ratio=0.03, columns=120, candidates=6)))
    true, one = losses(AllReduced(Chosen(estimated=False))), losses(AllReduced(Chosen(estimated=True)))
    assert true[-1] < 0.01 * true[0]
    assert two[-1] < 0.01 * two[0]
    assert one[-1] > 100 * one[0]


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("count_sketch(ratio=0.0)", r"ratio must lie in \(0, 1\]"),
        ("count_sketch(ratio=1.5)", r"ratio must lie in \(0, 1\]"),
        ("count_sketch(rows=4)", "rows must be odd"),
        ("count_sketch(columns=0)", "columns must be at least 1"),
        ("count_sketch(candidates=0)", "candidates must be at least 1"),
    ],
)
def test_values_out_of_range_are_refused(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Recipe.of(f"allreduce({text}) + error_feedback()")


@pytest.mark.parametrize("exchange", ["allreduce(count_sketch(columns=1000))", "fetch_sgd(columns=1000, momentum=0.0)"])
def test_a_sketch_that_is_no_shorter_than_the_model_is_refused_with_the_fix(exchange: str) -> None:
    recipe = f"{exchange} + momentum_correction(momentum=0.0)" if "allreduce" in exchange else exchange
    with pytest.raises(AttachError, match=r"5,000 cells .* 4,000 elements; use fewer columns, or leave columns out"):
        make(recipe, 2, lambda: Flat(4000), sgd())
    make(recipe, 2, lambda: Flat(6000), sgd())


def test_bytes_do_not_grow_with_the_number_of_ranks() -> None:
    recipe = "allreduce(count_sketch()) + error_feedback()"
    few, many = (bytes_per_step(recipe, {"w": (1000, 1000)}, size) for size in (8, 64))
    assert many / few == pytest.approx((63 / 64) / (7 / 8))
