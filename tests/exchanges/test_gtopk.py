"""gTop-k: any number of ranks, nothing lost, and bytes that do not grow with their number."""

import pytest
import torch
from tests.laws.blocks import agree, block, context, sent, vector
from tests.laws.crew import Crew, mean

from gossamer.core.bucket import Bucket
from gossamer.core.errors import RecipeError
from gossamer.core.verbs import Receive
from gossamer.exchanges import GTopK
from gossamer.kernels.layout import CorruptWire
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("size", SIZES)
def test_books_balance_for_any_number_of_ranks(size: int) -> None:
    crew, given, got = Crew("gtopk(ratio=0.05) + error_feedback()", size), torch.zeros(()), torch.zeros(())
    for step in range(8):
        blocks = [block("long", torch.float64, seed=50 * r + step) for r in range(size)]
        given, got = given + mean(blocks), got + crew.step(blocks)
        torch.testing.assert_close(got + crew.mean_of("residual"), given, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_all_get_the_k_largest_of_sums_of_what_was_not_left_out_before(size: int) -> None:
    """Merged by hand: dictionaries of whole numbers, ties to the lowest place."""
    numel, k = 40, 4
    rng = torch.Generator().manual_seed(size)
    blocks = [vector(torch.randint(-9, 10, (numel,), generator=rng).float()) for _ in range(size)]

    def largest(values: dict[int, float]) -> dict[int, float]:
        return dict(sorted(values.items(), key=lambda item: (-abs(item[1]), item[0]))[:k])

    held = [largest(dict(enumerate(b.flat.tolist()))) for b in blocks]
    reach = 1
    while reach < size:
        for r in range(0, size - reach, 2 * reach):
            a, b = held[r], held[r + reach]
            held[r] = largest({i: a.get(i, 0.0) + b.get(i, 0.0) for i in sorted(a.keys() | b.keys())})
        reach *= 2
    expected = torch.zeros(numel)
    for i, value in held[0].items():
        expected[i] = value / size
    echoes, _ = agree([GTopK(0.1).average(b, {}, context(r, size)) for r, b in enumerate(blocks)])
    for result in echoes:
        torch.testing.assert_close(result.mean, expected)
    through = sum(sent(e, b) for e, b in zip(echoes, blocks, strict=True)) / size
    torch.testing.assert_close(through, expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_hop_is_eight_bytes_an_element_and_a_rank_sends_two_at_most_on_average(size: int) -> None:
    """The golden row: 8,392 bytes a hop at one in a thousand of 1024 x 1024."""
    rng = torch.Generator().manual_seed(1)
    crew = Crew("gtopk(ratio=0.001) + error_feedback()", size)
    crew.step([Bucket.of({"w": torch.randn(1024, 1024, generator=rng)}) for _ in range(size)])
    assert {e.sent for e in crew.ledger if e.sent} == ({8392} if size > 1 else set())
    assert crew.ledger.sent == 2 * (size - 1) * 8392
    counted = bytes_per_step("gtopk(ratio=0.001) + error_feedback()", {"w": (1024, 1024)}, size)
    assert counted == pytest.approx(crew.ledger.sent / size)


def test_a_rank_that_is_not_finite_is_seen_by_all_through_every_merge() -> None:
    for place in (0, 700):
        blocks = [block("long", seed=r) for r in range(5)]
        blocks[3].flat[place] = torch.nan
        echoes, _ = agree([GTopK(0.01).average(b, {}, context(r, 5)) for r, b in enumerate(blocks)])
        assert not any(e.mean.isfinite().all() for e in echoes)


def test_a_place_outside_of_the_block_is_refused() -> None:
    program = GTopK(0.5).average(vector(torch.ones(4)), {}, context(0, 2))
    assert isinstance(next(program), Receive)
    wire = torch.cat([torch.ones(2).view(torch.uint8), torch.tensor([0, 4], dtype=torch.int32).view(torch.uint8)])
    with pytest.raises(CorruptWire, match="outside"):
        program.send(wire)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(RecipeError, match=r"ratio must lie in \(0, 1\], got .*; 0.01 sends one percent"):
        GTopK(ratio)
    with pytest.raises(RecipeError, match="without error feedback"):
        Recipe(GTopK())
