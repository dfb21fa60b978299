"""AdaComp: what travels of a bin follows from this step's gradient, which counts twice."""

import pytest
import torch
from tests.laws.blocks import block, context, roundtrip, vector
from tests.laws.crew import Crew
from torch import Tensor

from gossamer.codecs import AdaComp
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context
from gossamer.core.errors import RecipeError, WireError
from gossamer.recipe import Recipe


def test_it_is_the_paper_s_choice_step_by_step() -> None:
    """G = r + g, H = G + g; of each bin of 50 those with |H| >= max |G| leave, as signs times their mean."""
    crew, residual = Crew("gather(adacomp(50)) + error_feedback()", 1), torch.zeros(230)
    for step in range(8):
        g = torch.randn(230, generator=torch.Generator().manual_seed(step))
        both = residual + g
        chosen = torch.cat([(both + g)[a : a + 50].abs() >= both[a : a + 50].abs().max() for a in range(0, 230, 50)])
        told = torch.where(chosen, both.sign() * both[chosen].abs().mean(), torch.zeros(()))
        residual = both - told
        torch.testing.assert_close(crew.step([vector(g)]), told)
        torch.testing.assert_close(crew.kept[0]["residual"], residual, rtol=1e-5, atol=1e-5)


def test_chunks_know_of_this_step_s_gradient_too() -> None:
    whole = block("several", seed=1).with_older(block("several", seed=2).flat)
    latest = [chunk.latest for chunk in whole.chunks(3)]
    assert torch.equal(torch.cat([x for x in latest if x is not None]), block("several", seed=1).flat)


def test_owners_of_chunks_too_know_what_is_new_in_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner still owes is older than its mean, which alone counts twice."""
    crew, news = Crew("scatter(adacomp(16)) + error_feedback()", 2), list[bool]()
    encode = AdaComp.encode

    def watched(self: AdaComp, block: Bucket, state: State, context: Context) -> Tensor:
        news.append(block.latest is not None)
        return encode(self, block, state, context)

    monkeypatch.setattr(AdaComp, "encode", watched)
    crew.step([block("long", seed=rank) for rank in range(2)])
    news.clear()
    crew.step([block("long", seed=2 + rank) for rank in range(2)])
    assert news == [True] * 4  # on each rank the other's chunk, and the mean of its own


@pytest.mark.parametrize("bins", [1, 7, 128, 129, 500, 2**15])
@pytest.mark.parametrize("shape", ["several", "matrices", "long"])
def test_places_and_signs_survive_in_one_byte_or_two(bins: int, shape: str) -> None:
    x = block(shape)
    out = roundtrip(AdaComp(bins), x)
    for (_, told), (_, given) in zip(x.like(out).tensors(), x.tensors(), strict=True):
        there = told != 0
        assert torch.equal(told.sign()[there], given.sign()[there])
        if there.any():
            scale = float(given[there].abs().mean())
            torch.testing.assert_close(told[there].abs(), torch.full_like(told[there], scale))


def test_a_byte_an_element_and_a_bin_or_two() -> None:
    x = torch.zeros(1000)
    x[::100] = 1.0
    assert AdaComp(100).encode(vector(x), {}, context()).numel() == 4 + 10 + 10
    assert AdaComp(500).encode(vector(x), {}, context()).numel() == 4 + 2 * 2 + 2 * 10


def test_a_bin_of_zeros_sends_nothing_and_a_spike_does_not_swamp_the_others() -> None:
    x = torch.full((1000,), 1e-9)
    x[:500], x[3] = 0.0, 1.0
    told = roundtrip(AdaComp(500), vector(x))
    assert int((told[:500] != 0).sum()) == 1
    assert float((told - x).square().sum()) < float(x.square().sum())


def test_a_place_outside_of_its_bin_is_refused() -> None:
    wire = AdaComp(4).encode(vector(torch.tensor([0.0, 0, 0, 1, 0, 2])), {}, context()).clone()
    wire[-1] = 2 * 3  # the second bin has two elements
    with pytest.raises(WireError, match="outside of its bin"):
        AdaComp(4).decode(wire, vector(torch.zeros(6)))


@pytest.mark.parametrize("bins", [0, -1, 2**15 + 1])
def test_a_bin_that_is_none_is_refused(bins: int) -> None:
    with pytest.raises(RecipeError, match=r"bin must lie between 1 and 32768 elements, got .*; 50 for convolutions"):
        AdaComp(bins)
    with pytest.raises(RecipeError, match="without error feedback"):
        Recipe.of("gather(adacomp())")
