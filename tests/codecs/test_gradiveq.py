"""GradiVeQ: slices in the directions that they had, learned anew now and then; messages that add up."""

import pytest
import torch
from tests.laws.blocks import agree, context, sent
from tests.runtime.gym import Flat, make
from torch import Tensor

from gossamer.codecs import GradiVeQ
from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError, RecipeError
from gossamer.exchanges import AllReduced
from gossamer.recipe import Recipe

LONG, ROWS = 16, 40


def gradient(rank: int, step: int, turned: int = 0) -> Bucket:
    """Rows that lie near three directions, the same at every step; and a vector."""
    fixed = torch.Generator().manual_seed(7 + turned)
    directions = torch.linalg.qr(torch.randn(LONG, 3, generator=fixed))[0].t()
    rng = torch.Generator().manual_seed(100 * step + rank)
    rows = torch.randn(ROWS, 3, generator=rng) @ directions + 0.01 * torch.randn(ROWS, LONG, generator=rng)
    return Bucket.of({"w": rows, "b": torch.randn(5, generator=rng)})


def run(codec: GradiVeQ, steps: list[list[Bucket]]) -> tuple[list[Tensor], list[int], list[dict[str, Tensor]]]:
    """The mean of every step, the bytes of it that a rank hands over, and what each rank keeps in the end."""
    states: list[dict[str, Tensor]] = [{} for _ in steps[0]]
    means, lengths = list[Tensor](), list[int]()
    for step, blocks in enumerate(steps, 1):
        size = len(blocks)
        programs = [
            AllReduced(codec).average(b, s, context(r, size, step))
            for r, (b, s) in enumerate(zip(blocks, states, strict=True))
        ]
        echoes, ledger = agree(programs)
        means.append(echoes[0].mean.clone())
        lengths.append(sum(e.sent for e in ledger if e.rank == 0))
        total = torch.stack([sent(e, b) for e, b in zip(echoes, blocks, strict=True)]).mean(0)
        torch.testing.assert_close(total, echoes[0].mean, rtol=1e-5, atol=1e-6)
    return means, lengths, states


def test_it_learns_in_full_then_sends_coordinates_and_learns_anew() -> None:
    codec = GradiVeQ(length=LONG, ratio=4, learn=2, every=3)
    steps = [[gradient(r, t) for r in range(2)] for t in range(1, 11)]
    means, lengths, states = run(codec, steps)
    dense, few = lengths[0], lengths[2]
    assert lengths == [dense, dense, few, few, few] * 2
    numel = ROWS * LONG + 5
    assert few / dense == pytest.approx((ROWS * 4 + 5) / numel)
    assert codec.sum_bytes(steps[0][0].layout, 2) == [4 * (ROWS * 4 + 5)]
    for mean, blocks in zip(means, steps, strict=True):
        whole = torch.stack([b.flat for b in blocks]).mean(0)
        assert float((mean - whole).norm() / whole.norm()) < 0.03
        assert torch.equal(mean[ROWS * LONG :], whole[ROWS * LONG :])
    assert torch.equal(states[0]["basis:w"], states[1]["basis:w"])


def test_no_other_directions_hold_more_of_what_was_learned() -> None:
    noise = [
        Bucket.of({"w": torch.randn(ROWS, LONG, generator=torch.Generator().manual_seed(3)) * torch.arange(1.0, 17)})
    ]
    _, _, (state,) = run(GradiVeQ(length=LONG, ratio=4, learn=1), [noise])
    x, basis = noise[0].flat.view(ROWS, LONG), state["basis:w"]
    best = torch.linalg.eigvalsh(x.t() @ x)[-4:].sum()
    assert float((x @ basis.t()).square().sum() / best) > 0.999
    torch.testing.assert_close(basis @ basis.t(), torch.eye(4), rtol=1e-5, atol=1e-5)


def test_many_ranks_are_one_whose_gradient_is_their_mean() -> None:
    codec = GradiVeQ(length=LONG, ratio=4, learn=2, every=3)
    many = [[gradient(r, t) for r in range(4)] for t in range(1, 7)]
    one = [[b[0].like(torch.stack([x.flat for x in b]).mean(0))] for b in many]
    for a, b in zip(run(codec, many)[0], run(codec, one)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_directions_that_turn_are_found_at_the_next_learning() -> None:
    codec = GradiVeQ(length=LONG, ratio=4, learn=1, every=2)
    steps = [[gradient(0, t, turned=t > 2)] for t in range(1, 6)]
    means, _, _ = run(codec, steps)
    lost = [float((m - b[0].flat).norm() / b[0].flat.norm()) for m, b in zip(means, steps, strict=True)]
    assert lost[1] < 0.1 < 0.5 < lost[2]
    assert lost[4] < 0.1


def test_another_number_of_directions_is_learned_anew() -> None:
    """As a controller may put in force, at any step of this one."""
    states: list[dict[str, Tensor]] = [{}, {}]
    lengths = list[int]()
    for step in range(1, 12):
        exchange = AllReduced(GradiVeQ(length=LONG, ratio=4 if step <= 4 or step > 9 else 8, learn=2, every=3))
        given = [(gradient(r, step), states[r], context(r, 2, step)) for r in range(2)]
        echoes, ledger = agree([exchange.average(*each) for each in given])
        lengths.append(sum(e.sent for e in ledger))
        assert torch.equal(echoes[0].mean, echoes[1].mean)
    dense, few, fewer = lengths[0], lengths[2], lengths[6]
    assert lengths == [dense, dense, few, few, dense, dense, fewer, fewer, fewer, dense, dense]
    assert dense > few > fewer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gradiveq(ratio=1)", "ratio must be from 2"),
        ("gradiveq(learn=0)", "learn must be at least 1"),
        ("gradiveq(every=0)", "every must be at least 1"),
        ("allreduce(gradiveq(length=4))", "ratio must be from 2 to length, 4"),
        ("allreduce(gradiveq())", "error_feedback()"),
        ("scatter(gradiveq()) + error_feedback()", "use allreduce(gradiveq())"),
    ],
)
def test_what_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(AttachError, match="the model has no matrix"):
        make("gradiveq", 2, lambda: Flat(7))
