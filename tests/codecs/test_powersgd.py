"""PowerSGD's own tests: what it converges to, what stays bounded, what it must not disturb."""

from typing import Any

import pytest
import torch
from tests.laws.blocks import agree, context, sent
from tests.laws.crew import Crew, mean
from tests.runtime.gym import make
from torch import Tensor

from gossamer.codecs import PowerSGD
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Exchange, Memory, Sender
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import parse
from gossamer.core.verbs import Program
from gossamer.recipe import Recipe

Shape = tuple[int, int]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def once(codec: PowerSGD, blocks: list[Bucket], states: list[State] | None = None, step: int = 1):
    size = len(blocks)
    states = states or [{} for _ in blocks]
    return agree(
        [codec.average(b, s, context(rank=r, size=size, step=step)) for r, (b, s) in enumerate(zip(blocks, states))]
    )[0]


def best(m: Tensor, rank: int) -> float:
    return float(torch.linalg.svdvals(m)[rank:].square().sum()) ** 0.5


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(24, 30), (30, 24), (24, 24)])
def test_a_matrix_of_its_rank_or_less_is_exact_in_one_step(rank: int, shape: Shape) -> None:
    for true in range(1, rank + 1):
        blocks = [Bucket.of({"w": matrix(*shape, true, seed=3)}) for _ in range(3)]
        echoes = once(PowerSGD(rank, min_ratio=1.0), blocks)
        torch.testing.assert_close(echoes[0].mean, blocks[0].flat, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sent(echoes[1], blocks[1]), blocks[1].flat, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_warm_start_on_a_fixed_matrix_converges_to_the_best_approximation(rank: int) -> None:
    left, right = (torch.linalg.qr(normal(40, 30, seed=s))[0] for s in (5, 6))
    m = left @ torch.diag(0.8 ** torch.arange(30.0, dtype=torch.float64)) @ right.T
    states: list[State] = [{}]
    for step in range(120):
        echoes = once(PowerSGD(rank), [Bucket.of({"w": m})], states, step)
    error = float((echoes[0].mean - m.reshape(-1)).norm())
    assert error / best(m, rank) == pytest.approx(1, abs=1e-6)


def test_without_its_warm_start_it_does_not() -> None:
    m = torch.diag(0.8 ** torch.arange(30.0, dtype=torch.float64))
    errors = [float((once(PowerSGD(2), [Bucket.of({"w": m})], None, k)[0].mean - m.view(-1)).norm()) for k in range(20)]
    assert min(errors) > 1.01 * best(m, 2)


MODEL: dict[str, tuple[int, ...]] = {
    "w": (24, 18),
    "v": (18, 24),
    "bias": (24,),
    "twin": (24, 18),
    "conv": (12, 4, 3, 2),
}


def gradient(rank: int, step: int) -> Bucket:
    tensors = {n: normal(*s, seed=int(n) + 17 * rank + 1009 * step) for n, s in named_shapes()}
    return Bucket.of(tensors)


def named_shapes():
    return [(str(i), s) for i, s in enumerate(MODEL.values())]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_many_workers_are_one_worker_on_the_mean_gradient(size: int) -> None:
    many, one = Crew("powersgd", size), Crew("powersgd", 1)
    for step in range(50):
        blocks = [decaying(r, step) for r in range(size)]
        together = many.step(blocks)
        alone = one.step([blocks[0].like(mean(blocks))])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-7)


def decaying(rank: int, step: int) -> Bucket:
    """Spectra with clear gaps, so that round-off is not amplified by near ties."""
    given = gradient(rank, step // 10)
    for _, view in given.tensors():
        if view.dim() > 1:
            u, s, v = torch.linalg.svd(view.reshape(view.shape[0], -1), full_matrices=False)
            view.copy_((u @ torch.diag(0.5 ** torch.arange(len(s), dtype=s.dtype)) @ v).view(view.shape))
    return given


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_lost_with_feedback(size: int) -> None:
    crew, given, got = Crew("powersgd(rank=1)", size), 0.0, 0.0
    for step in range(40):
        blocks = [gradient(r, step) for r in range(size)]
        got = got + crew.step(blocks)
        given = given + mean(blocks)
    torch.testing.assert_close(got + crew.mean_of("residual"), given, rtol=1e-9, atol=1e-9)


class AgainstTheMean(Memory):
    """The residual of PyTorch's hook: what the mean does not hold. It conserves too, but it grows."""

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        pending = block.flat + state.get("residual", torch.zeros_like(block.flat))
        result = yield from send(block.like(pending), context)
        state["residual"] = pending - result.mean
        return result.mean


def unequal(rank: int, step: int) -> Bucket:
    """Data that differ between ranks: a constant of each rank's own, and noise."""
    return Bucket.of({"w": normal(16, 12, seed=rank) + 0.3 * normal(16, 12, seed=1000 + 4 * step + rank)})


def residuals(crew: Crew, steps: int) -> list[float]:
    norms = list[float]()
    for step in range(steps):
        crew.step([unequal(r, step) for r in range(crew.size)])
        norms.append(max(float(s["residual"].norm()) for s in crew.kept))
    return norms


def test_the_residual_stays_bounded_on_unequal_data() -> None:
    norms = residuals(Crew("powersgd(rank=2)", 4), 1200)
    assert max(norms[600:]) < 1.2 * max(norms[100:600])


def test_a_residual_against_the_mean_would_grow_without_bound() -> None:
    own = residuals(Crew("powersgd(rank=2)", 4), 300)
    against = residuals(Crew("powersgd(rank=2)", 4, AgainstTheMean()), 300)
    assert against[299] > 1.8 * against[149]
    assert against[299] > 5 * own[299]


def test_zero_matrices_are_zero_and_finite() -> None:
    zero = Bucket.of({"w": torch.zeros(20, 20), "v": torch.zeros(30, 10), "b": torch.zeros(3)})
    states: list[State] = [{}, {}]
    for step in range(3):
        echoes = once(PowerSGD(2), [zero, zero], states, step)
        assert (echoes[0].mean == 0).all()
        assert all(t.isfinite().all() for s in states for t in s.values())


def test_what_was_always_zero_is_sent_as_soon_as_it_lives() -> None:
    crew = Crew("powersgd(rank=2)", 2)
    for _ in range(5):
        crew.step([Bucket.of({"w": torch.zeros(20, 20, dtype=torch.float64)})] * 2)
    alive = Bucket.of({"w": matrix(20, 20, 2)})
    torch.testing.assert_close(crew.step([alive] * 2), alive.flat, rtol=1e-9, atol=1e-9)


def test_one_step_of_zeros_does_not_erase_the_direction_found_before() -> None:
    m = Bucket.of({"w": matrix(20, 20, 6)})
    states: list[State] = [{}]
    for step in range(60):
        once(PowerSGD(2), [m], states, step)
    before = states[0]["q:w"].clone()
    once(PowerSGD(2), [m.like(torch.zeros_like(m.flat))], states, 61)
    assert torch.equal(states[0]["q:w"], before)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (1, 3), (3, 3)])
def test_another_rank_keeps_the_leading_rows_and_their_meaning(old: int, new: int) -> None:
    m = Bucket.of({"w": torch.diag(0.5 ** torch.arange(24.0, dtype=torch.float64))})
    states: list[State] = [{}]
    for step in range(40):
        once(PowerSGD(old), [m], states, step)
    echoes = once(PowerSGD(new), [m], states, 40)
    assert states[0]["q:w"].shape == (new, 24)
    error = float((echoes[0].mean - m.flat).norm())
    assert error <= best(m.flat.view(24, 24), min(old, new)) * (1 + 1e-6)


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 1, 0]])
def test_permuting_workers_changes_rounding_only(order: list[int]) -> None:
    straight, permuted = Crew("powersgd", 3), Crew("powersgd", 3)
    for step in range(20):
        blocks = [decaying(r, step) for r in range(3)]
        torch.testing.assert_close(
            permuted.step([blocks[r] for r in order]), straight.step(blocks), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_not_compressed_is_bit_equal_to_an_all_reduce(size: int) -> None:
    blocks = [Bucket.of({n: t.float() for n, t in gradient(r, 0).tensors()}) for r in range(size)]
    low, dense = Crew("powersgd", size).step(blocks), Crew("allreduce", size).step(blocks)
    pieces = zip(blocks[0].like(low).tensors(), blocks[0].like(dense).tensors(), strict=True)
    for (name, a), (_, b) in pieces:
        assert torch.equal(a, b) == (a.dim() == 1), name


def test_what_is_not_compressed_has_no_residual() -> None:
    crew = Crew("powersgd", 3)
    for step in range(4):
        crew.step([gradient(r, step) for r in range(3)])
    for state in crew.kept:
        rest = dict(gradient(0, 0).like(state["residual"]).tensors())
        assert all(bool(t.any()) == (t.dim() > 1) for t in rest.values())


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (2, 3), (0, 4), (4, 0), (64,), ()])
def test_what_would_not_shrink_travels_as_it_is(shape: tuple[int, ...]) -> None:
    blocks = [Bucket.of({"w": normal(*shape, seed=r), "b": normal(3, seed=9 + r)}) for r in range(2)]
    states: list[State] = [{}, {}]
    echoes = once(PowerSGD(4), blocks, states)
    torch.testing.assert_close(echoes[0].mean, mean(blocks), rtol=1e-12, atol=1e-12)
    assert states == [{}, {}]


def test_full_rank_is_exact_when_it_is_asked_for() -> None:
    blocks = [gradient(r, 0) for r in range(2)]
    echoes = once(PowerSGD(rank=64, min_ratio=1.0), blocks)
    torch.testing.assert_close(echoes[0].mean, mean(blocks), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_passed_on_not_thrown(value: float) -> None:
    blocks = [gradient(r, 0) for r in range(2)]
    blocks[1].flat[7] = value
    echoes = once(PowerSGD(2), blocks)
    assert all(not e.mean.isfinite().all() for e in echoes)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_tiny_and_huge_gradients_keep_their_shape(size: float) -> None:
    m = matrix(20, 20, 2).float()
    echoes = once(PowerSGD(2), [Bucket.of({"w": m * size})] * 2)
    torch.testing.assert_close(echoes[0].mean / size, m.view(-1), rtol=1e-3, atol=1e-3)


def test_matrices_of_one_shape_go_together_and_do_not_mix() -> None:
    a, b = matrix(20, 30, 2, seed=1), matrix(20, 30, 2, seed=7)
    both = Bucket.of({"a": a, "x": torch.ones(5, dtype=torch.float64), "b": b})
    echoes = once(PowerSGD(2), [both, both])
    torch.testing.assert_close(echoes[0].mean, both.flat, rtol=1e-9, atol=1e-9)


# -- ranks of their own, a start, half precision -------------------------------------------------------------------------


def test_a_ratio_gives_every_matrix_the_largest_rank_with_which_it_shrinks_so_often() -> None:
    block = Bucket.of({"w": normal(256, 256, seed=1), "long": normal(1024, 64, seed=2), "v": normal(32, 32, seed=3)})
    states: list[State] = [{}]
    once(PowerSGD(ratio=16.0), [block], states)
    assert {name: q.shape[0] for name, q in states[0].items()} == {"q:w": 8, "q:long": 3, "q:v": 1}


def test_an_svd_start_sends_the_first_block_in_full_and_is_at_the_best_approximation_at_once() -> None:
    left, right = (torch.linalg.qr(normal(40, 30, seed=s))[0] for s in (5, 6))
    m = left @ torch.diag(0.7 ** torch.arange(30.0, dtype=torch.float64)) @ right.T
    blocks = [Bucket.of({"w": m + part}) for part in (matrix(40, 40, 2), -matrix(40, 40, 2))]
    states: list[State] = [{}, {}]
    first = once(PowerSGD(3, start="svd"), blocks, states)
    torch.testing.assert_close(first[0].mean, m.reshape(-1), rtol=0, atol=1e-12)
    assert torch.equal(sent(first[1], blocks[1]), blocks[1].flat)
    second = once(PowerSGD(3, start="svd"), blocks, states, 2)
    assert float((second[0].mean - m.reshape(-1)).norm()) / best(m, 3) == pytest.approx(1, abs=1e-5)
    cold: list[State] = [{}, {}]
    for step in (1, 2):
        drawn = once(PowerSGD(3), blocks, cold, step)
    assert float((drawn[0].mean - m.reshape(-1)).norm()) / best(m, 3) > 1.001


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_half_factors_are_half_as_long_and_nearly_as_good_however_large_gradients_are(scale: float) -> None:
    narrow, wide = (Crew(f"allreduce(powersgd(rank=2{f})) + error_feedback()", 3) for f in (", factors='fp16'", ""))
    for step in range(6):
        blocks = [Bucket.of({"w": scale * decaying(r, step).flat[: 24 * 18].view(24, 18)}) for r in range(3)]
        got, expected = narrow.step(blocks), wide.step(blocks)
        assert float((got - expected).norm()) < 3e-3 * float(expected.norm())
    handed = [[e.handed for e in crew.ledger if e.rank == 0] for crew in (narrow, wide)]
    assert handed[0][:2] == handed[1][:2]  # the first factors, whose size nobody knows yet
    assert [4 * h for h in handed[0][2:]] == handed[1][2:]  # 2 bytes for 8


EXTREME = [2.0**66, 2.0**90, 2.0**-75, 2.0**-90]  # 7e19, 1e27, 3e-23, 8e-28


def told(recipe: str, scale: float, ranks: tuple[int, ...] = (2, 2, 2, 2, 2)) -> list[Tensor]:
    """Means of single-precision blocks so many times as large, as parts of what they are large; a rank for each step."""
    crew, out = Crew(recipe.format(rank=ranks[0]), 3), list[Tensor]()
    for step, rank in enumerate(ranks):
        exchange = Recipe.of(recipe.format(rank=rank)).exchange
        assert isinstance(exchange, Exchange)
        crew.exchange = exchange  # as a controller changes it
        blocks = [Bucket.of({"w": (scale * decaying(r, step).flat[: 24 * 18].view(24, 18)).float()}) for r in range(3)]
        out.append(crew.step(blocks).double() / scale)
    return out


@pytest.mark.parametrize("scale", EXTREME)
@pytest.mark.parametrize("factors", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [(2, 2, 2, 2, 2), (1, 1, 2, 2, 1)])
def test_gradients_of_any_size_are_written_alike(scale: float, factors: str, ranks: tuple[int, ...]) -> None:
    """A power of two larger or smaller, and so are the means: to the bit, while their rank is what it was."""
    recipe = f"allreduce(powersgd(rank={{rank}}, factors='{factors}')) + error_feedback()"
    found, usual = told(recipe, scale, ranks), told(recipe, 1.0, ranks)
    for step, (one, other) in enumerate(zip(found, usual, strict=True)):
        if len({*ranks[: step + 1]}) == 1:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2 * float(other.abs().max()))


@pytest.mark.parametrize("scale", EXTREME)
def test_an_svd_start_finds_it_at_any_size(scale: float) -> None:
    recipe = "allreduce(powersgd(rank={rank}, start='svd')) + error_feedback()"
    for one, other in zip(told(recipe, scale), told(recipe, 1.0), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))


def test_a_gradient_that_outgrows_half_precision_is_sent_in_parts() -> None:
    crew, given, got = Crew("allreduce(powersgd(rank=1, factors='fp16')) + error_feedback()", 2), 0.0, 0.0
    for step in range(12):
        scale = 1e-6 if step < 2 else 1e6
        blocks = [b.like(b.flat * scale) for b in (Bucket.of({"w": normal(30, 20, seed=9 + r)}) for r in range(2))]
        mean_now = crew.step(blocks)
        assert mean_now.isfinite().all()
        got, given = got + mean_now, given + mean(blocks)
    torch.testing.assert_close(got + crew.mean_of("residual"), given, rtol=0, atol=1e-3 * float(given.norm()))


def model(*shape: int):
    return lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape))])


@pytest.mark.parametrize(
    ("codec", "shape", "words"),
    [
        ("powersgd(rank=64)", (20, 30), r"no matrix of the model has a rank above 20.*rank=10 or less"),
        ("powersgd()", (50,), r"the model has no matrix.*allreduce\(fp32\(\)\)"),
    ],
)
def test_what_would_all_travel_as_it_is_is_refused(codec: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(AttachError, match=words):
        make(f"allreduce({codec}) + error_feedback()", 2, model(*shape))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("powersgd(rank=0)", "at least 1"),
        ("powersgd(ratio=1.5)", "ratio must be at least min_ratio"),
        ("powersgd(rank=2, ratio=8.0)", "pass rank or ratio, not both"),
        ("powersgd(start='pca')", "svd"),
        ("powersgd(factors='fp8')", "fp16"),
    ],
)
def test_values_without_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        parse(text)


@pytest.mark.parametrize("factors", ["fp32", "fp16"])
def test_what_is_drained_at_once_is_what_would_have_been_taken_out_later(factors: Any) -> None:
    codec, values = PowerSGD(2, min_ratio=1.0, factors=factors), {"w": matrix(24, 30, 9).float(), "b": torch.ones(5)}
    states: list[State] = [{}, {}]
    for step in range(3):
        block = Bucket.of(values)
        later, once_more = block.flat.clone(), block.with_older(block.flat.clone(), drains=True)
        result, drained = once(codec, [block, once_more], states, step)
        result.add_sent(later, -1.0)
        if not drained.drained:
            drained.add_sent(once_more.flat, -1.0)
        assert drained.drained or factors == "fp16"
        assert torch.equal(once_more.flat, later)
        assert torch.equal(block.flat, Bucket.of(values).flat)  # nobody asked that it be
