"""Global sparse gradients with local ones: the three ways of adding them, what is invariant, and the exact flush."""

import pytest
import torch
from tests.laws.crew import Crew, mean
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, pull, sgd, spoiled, train
from torch import Tensor, nn

from gossamer.checkpoints import state as checkpoint
from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError, CheckpointError, RecipeError
from gossamer.integrations.ddp import check
from gossamer.memories import OwnGradient
from gossamer.recipe import Recipe
from gossamer.simulate import Replica

plain = sgd(lr=0.05, momentum=0.0)
SPARSE = "gather(topk(ratio=0.2))"


def gradients(size: int, step: int) -> list[Bucket]:
    return [Bucket.of({"w": noise(r, step, numel=40, dtype=torch.float64)}) for r in range(size)]


def crews(mode: str, **options: bool) -> tuple[Crew, Crew]:
    """One that combines in this way, and plain error feedback: its residuals are those of all modes but "errors"."""
    return Crew(SPARSE + " + error_feedback()", 3, OwnGradient(mode, **options)), Crew(
        SPARSE + " + error_feedback()", 3
    )  # pyright: ignore


def test_partial_counts_own_numbers_once_and_sum_the_sent_ones_twice() -> None:
    """C = G + (L - S) and C = G + L, by the books of error feedback: S = L + E_old - E."""
    (partial, plain), (doubled, _) = crews("partial"), crews("sum")
    before = [torch.zeros(40)] * 3
    for step in range(5):
        blocks = gradients(3, step)
        shared = plain.step(blocks)
        partial.step(blocks)
        doubled.step(blocks)
        after = [s["residual"] for s in plain.kept]
        for r in range(3):
            unsent = after[r] - before[r]
            torch.testing.assert_close(partial.results[r], shared + unsent / 3, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(doubled.results[r], shared + blocks[r].flat / 3, rtol=1e-6, atol=1e-7)
            assert torch.equal(partial.kept[r]["residual"], after[r])
        before = after


def test_errors_use_the_unsent_at_home_and_forget_it() -> None:
    errors, plain = crews("errors")
    for step in range(3):
        plain.kept = [{} for _ in range(3)]  # nothing is ever owed
        blocks = gradients(3, step)
        shared = plain.step(blocks)
        errors.step(blocks)
        for r in range(3):
            torch.testing.assert_close(errors.results[r], shared + plain.kept[r]["residual"] / 3)
            assert not errors.kept[r]["residual"].any()


def test_errors_that_are_kept_are_partial_and_the_error_of_before() -> None:
    kept, partial = crews("errors", reset_error=False, allow_repeats=True)[0], crews("partial")[0]
    before = [torch.zeros(40)] * 3
    for step in range(4):
        blocks = gradients(3, step)
        kept.step(blocks)
        partial.step(blocks)
        for r in range(3):
            torch.testing.assert_close(kept.results[r], partial.results[r] + before[r] / 3)
        before = [s["residual"] for s in partial.kept]


def test_none_is_error_feedback_bit_for_bit() -> None:
    own, feedback = make(f"{SPARSE} + own_gradient('none')", 3), make(f"{SPARSE} + error_feedback()", 3)
    train(own, pull, 6)
    train(feedback, pull, 6)
    assert bit_equal([*parameters(own), *parameters(feedback)])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("mode", ["partial", "errors"])
def test_where_all_is_sent_it_is_synchronous_sgd_bit_for_bit(mode: str, size: int) -> None:
    own = make(f"gather(topk(ratio=1.0)) + own_gradient('{mode}') + resync(100)", size)
    dense = make("gather(fp32())", size)
    train(own, pull, 6)
    train(dense, pull, 6)
    assert bit_equal([*parameters(own), *parameters(dense)])
    doubled = make("gather(topk(ratio=1.0)) + own_gradient('sum') + resync(100)", size)
    train(doubled, pull, 6)
    assert size == 1 or not bit_equal([parameters(doubled)[0], parameters(dense)[0]])


def test_what_is_sent_and_what_is_kept_is_what_was_given() -> None:
    """Per coordinate: sum of all S + E = sum of all L, here of their means over ranks."""
    crew, plain = crews("partial")
    given, sent = torch.zeros(40, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    for step in range(30):
        blocks = gradients(3, step)
        given += mean(blocks)
        crew.step(blocks)
        sent += plain.step(blocks)
    torch.testing.assert_close(sent + crew.mean_of("residual"), given, rtol=0, atol=30 * 1e-13)


def whole(ranks: list[Replica]) -> list[Tensor]:
    """x_i + 1/N of what rank i owes, as the steps that plain SGD would take with it."""
    loops = [r.worker.loop for r in ranks]
    sums = [[x + o / len(ranks) for x, o in zip(lp.parameters(), lp.averages.residuals(), strict=True)] for lp in loops]
    return [torch.cat(s) for s in sums]


def apart(tensors: list[Tensor]) -> float:
    return max(float((t - tensors[0]).abs().max()) for t in tensors)


def wide() -> Flat:
    return Flat(200, torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_models_differ_by_what_is_owed_and_by_no_more(size: int) -> None:
    """x_i + (lr / N) E_i is common, here under a rate that changes at every step."""
    ranks = make(f"{SPARSE} + own_gradient(units='update') + resync(1000)", size, wide, plain)
    for step in range(1, 30):
        for r in ranks:
            r.optimizer.param_groups[0]["lr"] = 0.1 / step**0.5
        train(ranks, pull, 1)
        assert apart(whole(ranks)) < 1e-14
    assert size == 1 or apart(parameters(ranks)) > 1e-4


def test_with_a_constant_rate_gradients_may_be_kept_as_gradients() -> None:
    ranks = make(f"{SPARSE} + own_gradient() + resync(1000)", 4, wide, plain)
    for _ in range(20):
        train(ranks, pull, 1)
        kept = [torch.cat([c.states["memory"]["residual"] for c in r.worker.buckets]) for r in ranks]
        assert apart([x + 0.05 / 4 * e for x, e in zip(parameters(ranks), kept, strict=True)]) < 1e-14


def moved(old: int, new: int) -> tuple[list[Replica], list[Replica]]:
    recipe = f"{SPARSE} + own_gradient() + resync(1000)"
    before, after = make(recipe, old, wide, plain), make(recipe, new, wide, plain)
    train(before, pull, 5)
    for rank in after:
        checkpoint.load(rank.worker, [checkpoint.save(each.worker) for each in before])
    return before, after


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 8)])
def test_among_another_number_of_ranks_as_much_is_still_owed(old: int, new: int) -> None:
    """Of each residual 1 / N is in its rank's model already, so that (N - 1) / N of their mean is owed to the mean model."""
    owed = list[Tensor]()
    for ranks in moved(old, new):
        kept = [torch.cat([c.states["memory"]["residual"] for c in r.worker.buckets]) for r in ranks]
        owed.append(torch.stack(kept).mean(0) * (1 - 1 / len(ranks)))
    assert owed[0].any()
    torch.testing.assert_close(owed[0], owed[1], rtol=0, atol=1e-14)


def test_what_several_ranks_owe_one_another_is_not_dropped_where_one_is_left() -> None:
    with pytest.raises(
        CheckpointError, match=r"what the checkpoint's 4 ranks had not sent .* would be lost, since one rank alone"
    ):
        moved(4, 1)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_flush_loses_nothing_and_counts_nothing_twice(size: int) -> None:
    """x_i - (F - E_i) / N, F the sum of all E in steps; and what plain SGD of all gradients in full would have."""
    recipe = f"{SPARSE} + own_gradient(units='update')"
    flushed = make(f"{recipe} + resync(7, sync='flush')", size, wide, plain)
    never = make(f"{recipe} + resync(1000, sync='flush')", size, wide, plain)
    train(flushed, pull, 7)
    train(never, pull, 7)
    owed = [torch.cat(r.worker.loop.averages.residuals()) for r in never]
    expected = parameters(never)[0] - (sum(owed) - owed[0]) / size
    torch.testing.assert_close(parameters(flushed)[0], expected, rtol=0, atol=1e-14)
    assert bit_equal(parameters(flushed))
    assert all(not d.any() for r in flushed for d in r.worker.loop.averages.residuals())


def push(model: nn.Module, rank: int, step: int) -> float:
    """Gradients that do not depend on the model: what it comes to is known in advance."""
    p = next(model.parameters())
    p.grad = noise(rank, step, numel=p.numel(), dtype=p.dtype).view(p.shape)
    return 0.0


def test_after_a_flush_all_gradients_have_been_applied_in_full() -> None:
    ranks = make("local_gradients(ratio=0.05, every=5, sync='flush')", 3, wide, plain)
    dense = make("gather(fp32())", 3, wide, plain)
    for steps in (5, 10):
        train(ranks, push, steps)
        train(dense, push, steps)
        torch.testing.assert_close(parameters(ranks)[0], parameters(dense)[0], rtol=0, atol=1e-13)
    train(ranks, push, 1)
    train(dense, push, 1)
    assert apart([parameters(ranks)[0], parameters(dense)[0]]) > 1e-3


def test_ranks_that_swap_their_data_swap_their_models() -> None:
    def swapped(model: nn.Module, rank: int, step: int) -> float:
        return pull(model, 1 - rank, step)

    one, other = make("local_gradients(ratio=0.1, every=50)", 2), make("local_gradients(ratio=0.1, every=50)", 2)
    train(one, pull, 8)
    train(other, swapped, 8)
    assert bit_equal([parameters(one)[0], parameters(other)[1]])
    assert bit_equal([parameters(one)[1], parameters(other)[0]])


def test_an_average_takes_models_and_leaves_debts() -> None:
    ranks, never = (make(f"local_gradients(ratio=0.1, every={n})", 3, wide, plain) for n in (6, 1000))
    train(ranks, pull, 6)
    train(never, pull, 6)
    torch.testing.assert_close(parameters(ranks)[0], torch.stack(parameters(never)).mean(0))
    assert bit_equal(parameters(ranks))
    assert all(
        bit_equal([*a.worker.loop.averages.residuals(), *b.worker.loop.averages.residuals()])
        for a, b in zip(ranks, never, strict=True)
    )


def test_momenta_are_averaged_where_asked() -> None:
    def momenta(buffers: str) -> list[Tensor]:
        ranks = make(f"{SPARSE} + own_gradient() + resync(3, buffers='{buffers}')", 3)
        train(ranks, pull, 3)
        return [torch.cat([s["momentum_buffer"].reshape(-1) for s in r.optimizer.state.values()]) for r in ranks]

    assert bit_equal(momenta("average"))
    assert not bit_equal(momenta("maintain"))


def test_a_flush_that_falls_on_a_spoilt_step_flushes_what_was_owed_before() -> None:
    ranks = make("local_gradients(ratio=0.1, every=4, sync='flush')", 3, optimizer=plain)
    train(ranks, spoiled([(1, 4)], float("nan")), 4)
    assert bit_equal(parameters(ranks))
    assert parameters(ranks)[0].isfinite().all()
    assert all(not d.any() for r in ranks for d in r.worker.loop.averages.residuals())


@pytest.mark.parametrize("mode", ["partial", "sum", "errors"])
def test_narrow_models_train_too(mode: str) -> None:
    def narrow(model: nn.Module, rank: int, step: int) -> float:
        p = next(model.parameters())
        p.grad = (p.detach().float() - noise(rank, step, numel=p.numel())).to(p.dtype)
        return 0.0

    ranks = make(f"local_gradients(ratio=0.2, mode='{mode}', every=3)", 3, lambda: Flat(50, torch.bfloat16), plain)
    train(ranks, narrow, 9)
    assert bit_equal(parameters(ranks))
    assert parameters(ranks)[0].isfinite().all()


REFUSED = {
    "gather(topk()) + own_gradient()": ("models differ", "resync(500)"),
    "gather(topk()) + own_gradient() + local_sgd(8)": ("never averages them", "resync(500)"),
    "topk + own_gradient('errors', reset_error=False)": ("applied again at every step", "allow_repeats=True"),
    "topk + own_gradient(reset_error=False)": ("is only for mode='errors'", "leave it out"),
    "topk + own_gradient() + resync(sync='flush')": (
        "does not keep them in such units",
        "own_gradient(units='update')",
    ),
    "topk + own_gradient('sum', units='update') + resync(sync='flush')": ("does not keep them", "sync='average'"),
    "topk + resync(sync='flush')": ("applies residuals", "sync='average'"),
    "gather(ternary()) + own_gradient() + resync()": ("can diverge", "gather(topk())"),
    "topk + own_gradient() + resync() + accordion(gather(topk()), gather(topk(ratio=0.1)), 9)": (
        "each rank has its own",
        "error_feedback()",
    ),
    "topk + own_gradient() + resync() + signs()": ("same gradient on all ranks", "error_feedback()"),
    "topk + resync(0)": ("at least 1 step", "500"),
    "gather(dropping(ratio=0.0)) + error_feedback()": ("must lie in (0, 1]", "one percent"),
    "gather(dropping(warmup=-1)) + error_feedback()": ("0 steps or more", "1000"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason_and_the_fix(text: str) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.of(text)
    assert all(words in str(error.value) for words in REFUSED[text])


def test_a_ddp_hook_cannot_bring_models_together() -> None:
    with pytest.raises(AttachError, match=r"resync\(every=50\) acts on the optimizer.*use gossamer.attach"):
        check(Recipe.of("local_gradients"))


@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(momentum=0.9),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1),
        lambda m: torch.optim.Adam(m.parameters()),
    ],
)
def test_a_flush_takes_plain_sgd(optimizer) -> None:
    with pytest.raises(AttachError, match=r"without momentum and weight decay; use that, or sync='average'"):
        make("local_gradients(sync='flush')", 2, optimizer=optimizer)
