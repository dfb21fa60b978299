"""PowerSGD's own tests: what it converges to, what stays bounded, what it must not disturb."""

import pytest
import torch
from tests.laws.blocks import agree, seat, sent
from tests.laws.crew import Crew, mean
from torch import Tensor

from gossamer.codecs import PowerSGD
from gossamer.core.block import Block, State
from gossamer.core.contracts import Memory, Seat, Send
from gossamer.core.verbs import Program

Shape = tuple[int, int]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(rows: int, columns: int, rank: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def once(codec: PowerSGD, blocks: list[Block], states: list[State] | None = None, step: int = 1):
    size = len(blocks)
    states = states or [{} for _ in blocks]
    return agree(
        [codec.average(b, s, seat(rank=r, size=size, step=step)) for r, (b, s) in enumerate(zip(blocks, states))]
    )[0]


def best(m: Tensor, rank: int) -> float:
    return float(torch.linalg.svdvals(m)[rank:].square().sum()) ** 0.5


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(24, 30), (30, 24), (24, 24)])
def test_a_matrix_of_its_rank_or_less_is_exact_in_one_step(rank: int, shape: Shape) -> None:
    for true in range(1, rank + 1):
        blocks = [Block.of({"w": matrix(*shape, true, seed=3)}) for _ in range(3)]
        echoes = once(PowerSGD(rank, min_ratio=1.0), blocks)
        torch.testing.assert_close(echoes[0].mean, blocks[0].flat, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sent(echoes[1], blocks[1]), blocks[1].flat, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_warm_start_on_a_fixed_matrix_converges_to_the_best_approximation(rank: int) -> None:
    left, right = (torch.linalg.qr(normal(40, 30, seed=s))[0] for s in (5, 6))
    m = left @ torch.diag(0.8 ** torch.arange(30.0, dtype=torch.float64)) @ right.T
    states: list[State] = [{}]
    for step in range(120):
        echoes = once(PowerSGD(rank), [Block.of({"w": m})], states, step)
    error = float((echoes[0].mean - m.reshape(-1)).norm())
    assert error / best(m, rank) == pytest.approx(1, abs=1e-6)


def test_without_its_warm_start_it_does_not() -> None:
    m = torch.diag(0.8 ** torch.arange(30.0, dtype=torch.float64))
    errors = [float((once(PowerSGD(2), [Block.of({"w": m})], None, k)[0].mean - m.view(-1)).norm()) for k in range(20)]
    assert min(errors) > 1.01 * best(m, 2)


MODEL: dict[str, tuple[int, ...]] = {
    "w": (24, 18),
    "v": (18, 24),
    "bias": (24,),
    "twin": (24, 18),
    "conv": (12, 4, 3, 2),
}


def gradient(rank: int, step: int) -> Block:
    tensors = {n: normal(*s, seed=int(n) + 17 * rank + 1009 * step) for n, s in named_shapes()}
    return Block.of(tensors)


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


def decaying(rank: int, step: int) -> Block:
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

    def around(self, block: Block, state: State, send: Send, seat: Seat) -> Program[Tensor]:
        pending = block.flat + state.get("residual", torch.zeros_like(block.flat))
        echo = yield from send(block.like(pending), seat)
        state["residual"] = pending - echo.mean
        return echo.mean


def unequal(rank: int, step: int) -> Block:
    """Data that differ between ranks: a constant of each rank's own, and noise."""
    return Block.of({"w": normal(16, 12, seed=rank) + 0.3 * normal(16, 12, seed=1000 + 4 * step + rank)})


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
    zero = Block.of({"w": torch.zeros(20, 20), "v": torch.zeros(30, 10), "b": torch.zeros(3)})
    states: list[State] = [{}, {}]
    for step in range(3):
        echoes = once(PowerSGD(2), [zero, zero], states, step)
        assert (echoes[0].mean == 0).all()
        assert all(t.isfinite().all() for s in states for t in s.values())


def test_what_was_always_zero_is_sent_as_soon_as_it_lives() -> None:
    crew = Crew("powersgd(rank=2)", 2)
    for _ in range(5):
        crew.step([Block.of({"w": torch.zeros(20, 20, dtype=torch.float64)})] * 2)
    alive = Block.of({"w": matrix(20, 20, 2)})
    torch.testing.assert_close(crew.step([alive] * 2), alive.flat, rtol=1e-9, atol=1e-9)


def test_one_step_of_zeros_does_not_erase_the_direction_found_before() -> None:
    m = Block.of({"w": matrix(20, 20, 6)})
    states: list[State] = [{}]
    for step in range(60):
        once(PowerSGD(2), [m], states, step)
    before = states[0]["q:w"].clone()
    once(PowerSGD(2), [m.like(torch.zeros_like(m.flat))], states, 61)
    assert torch.equal(states[0]["q:w"], before)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (1, 3), (3, 3)])
def test_another_rank_keeps_the_leading_rows_and_their_meaning(old: int, new: int) -> None:
    m = Block.of({"w": torch.diag(0.5 ** torch.arange(24.0, dtype=torch.float64))})
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
    blocks = [Block.of({n: t.float() for n, t in gradient(r, 0).tensors()}) for r in range(size)]
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
    blocks = [Block.of({"w": normal(*shape, seed=r), "b": normal(3, seed=9 + r)}) for r in range(2)]
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
    echoes = once(PowerSGD(2), [Block.of({"w": m * size})] * 2)
    torch.testing.assert_close(echoes[0].mean / size, m.view(-1), rtol=1e-3, atol=1e-3)


def test_matrices_of_one_shape_go_together_and_do_not_mix() -> None:
    a, b = matrix(20, 30, 2, seed=1), matrix(20, 30, 2, seed=7)
    both = Block.of({"a": a, "x": torch.ones(5, dtype=torch.float64), "b": b})
    echoes = once(PowerSGD(2), [both, both])
    torch.testing.assert_close(echoes[0].mean, both.flat, rtol=1e-9, atol=1e-9)
