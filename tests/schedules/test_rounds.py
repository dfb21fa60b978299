"""The family of the outer step: BMUF, DiLoCo, Lookahead, SlowMo over any base, hierarchical and post-local SGD."""

from functools import partial

import pytest
import torch
from tests.runtime.gym import Flat, anchors, bit_equal, make, parameters, pull, spoiled, train
from tests.schedules.rates import NUMEL, constant, cosine, gradient, known_sgd, model, scheduled, trained
from torch import Tensor

from gossamer.codecs import TopK
from gossamer.core.errors import AttachError, RecipeError
from gossamer.integrations.attach import check
from gossamer.mixers import Choco
from gossamer.recipe import Recipe
from gossamer.schedules import BMUF, EveryStep, Gossip, Hierarchical, LocalSGD, Lookahead, PostLocal, SlowMo

DENSE = "allreduce(fp32()) + "


def start() -> Tensor:
    return Flat(NUMEL).x.detach().clone()


def local_round(anchor: Tensor, size: int, round: int, every: int) -> Tensor:
    """The mean of what ranks make of an anchor in a round of plain SGD."""
    models = [anchor.clone() for _ in range(size)]
    for step in range(round * every + 1, (round + 1) * every + 1):
        models = [x - 0.1 * gradient(x, i, step) for i, x in enumerate(models)]
    return torch.stack(models).mean(0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_is_its_formula_and_judges_the_model_behind_the_look_ahead(nesterov: bool) -> None:
    ranks = trained(DENSE + f"bmuf(3, momentum=0.6, rate=1.2, nesterov={nesterov})", 4, 0)
    at, kept, velocity = start(), start(), torch.zeros(NUMEL, dtype=torch.float64)
    for round in range(5):
        train(ranks, scheduled(constant), 3)
        velocity = 0.6 * velocity + 1.2 * (local_round(at, 4, round, 3) - at)
        kept = kept + velocity
        at = kept + 0.6 * velocity if nesterov else kept
        torch.testing.assert_close(model(ranks[0]), at, rtol=0, atol=1e-14)
        worker = ranks[0].worker
        (share,) = worker.recipe.schedule.consensus_share(worker.loop) or []
        torch.testing.assert_close(share.value, kept, rtol=0, atol=1e-14)


def test_dilocos_outer_step_is_torchs_nesterov_over_adamw() -> None:
    def adamw(m: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        object.__setattr__(m, "optimizer", optimizer)
        return optimizer

    ranks = make("diloco(4)", 3, lambda: Flat(NUMEL), adamw)
    anchor = torch.nn.Parameter(start())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    inner = [torch.nn.Parameter(start()) for _ in range(3)]
    steppers = [torch.optim.AdamW([p], lr=0.1) for p in inner]
    for round in range(4):
        train(ranks, scheduled(constant), 4)
        for step in range(4 * round + 1, 4 * round + 5):
            for i, (p, stepper) in enumerate(zip(inner, steppers, strict=True)):
                p.grad = gradient(p.detach(), i, step)
                stepper.step()
        anchor.grad = anchor.detach() - torch.stack([p.detach() for p in inner]).mean(0)
        outer.step()
        for p in inner:
            p.data.copy_(anchor.detach())
        torch.testing.assert_close(model(ranks[0]), anchor.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [1, 3])
def test_lookahead_is_its_formula_on_one_rank_and_on_equal_ones(size: int) -> None:
    ranks = make(DENSE + "lookahead(5, alpha=0.5)", size, lambda: Flat(NUMEL), known_sgd(0.9))
    train(ranks, scheduled(constant, lambda x, rank, step: gradient(x, 0, step)), 20)
    slow, fast, buffer = start(), start(), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(1, 21):
        buffer = 0.9 * buffer + gradient(fast, 0, step)
        fast = fast - 0.1 * buffer
        if step % 5 == 0:
            slow = slow + 0.5 * (fast - slow)
            fast = slow.clone()
    torch.testing.assert_close(model(ranks[0]), slow, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("nesterov", "rate", "gain"), [(True, 1.0, 1.6), (True, 1.2, 1.92), (False, 1.2, 1.2)])
def test_block_momentum_begins_with_its_rate_and_comes_to_rest_at_its_look_ahead(
    nesterov: bool, rate: float, gain: float
) -> None:
    """The first step is rate (1 + momentum) long with Nesterov's momentum, rate without; where nothing moves any more, the model
    that is kept is the point that ranks start from.
    """

    def hill(x: Tensor, rank: int, step: int) -> Tensor:
        return x - rank  # the mean of two ranks' optima is 1/2

    ranks = make(
        DENSE + f"bmuf(2, momentum=0.6, rate={rate}, nesterov={nesterov})", 2, lambda: Flat(NUMEL), known_sgd()
    )
    worker = ranks[0].worker
    train(ranks, scheduled(constant, hill), 2)
    plain = (1 - 0.9**2) * (0.5 - start())
    torch.testing.assert_close(model(ranks[0]) - start(), gain * plain, rtol=1e-12, atol=1e-14)
    apart = list[float]()
    for _ in range(2):
        (share,) = worker.recipe.schedule.consensus_share(worker.loop) or []
        apart.append(float((share.value - model(ranks[0])).abs().max()))
        train(ranks, scheduled(constant, hill), 400)
    assert (apart[0] > 0.01) == nesterov
    assert apart[1] < 1e-12
    torch.testing.assert_close(model(ranks[0]), torch.full_like(start(), 0.5), rtol=0, atol=1e-12)


SAME = [
    ("bmuf(3, momentum=0.6, buffers='maintain')", "slowmo(3, beta=0.6)"),  # under a rate that stays
    ("bmuf(3, momentum=0.0, buffers='maintain')", "local_sgd(3)"),
    ("slowmo(3, beta=0.0, nesterov=True)", "local_sgd(3)"),
    ("lookahead(3, alpha=1.0)", "local_sgd(3)"),
    ("lookahead(3, alpha=0.5)", "slowmo(3, beta=0.0, alpha=0.5)"),
    ("slowmo(3, inner=gossip())", "slowmo(3, inner=push_sum())"),
    ("hierarchical(3, 2, local_sgd(3))", "local_sgd(3)"),
    ("hierarchical(2, 1, slowmo(4))", "slowmo(4)"),
    ("hierarchical(1, 9, slowmo(3, beta=0.5))", "hierarchical(1, 4, slowmo(3, beta=0.5))"),
    ("post_local(0, local_sgd(3))", "local_sgd(3)"),
    ("post_local(99, local_sgd(3))", "every_step()"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_where_methods_meet_no_bit_differs(one: str, other: str) -> None:
    results = list[Tensor]()
    for text in (one, other):
        ranks = make(DENSE + text, 4)
        train(ranks, pull, 9)
        results.append(torch.stack(parameters(ranks)))
    assert bit_equal(results)


def test_block_momentum_parts_from_slowmo_where_the_rate_changes() -> None:
    slow, block = (trained(DENSE + s, 2, 18, cosine) for s in ("slowmo(3, beta=0.6)", "bmuf(3, momentum=0.6)"))
    assert (model(slow[0]) - model(block[0])).abs().max() > 1e-4


def test_by_default_a_block_of_n_ranks_counts_n_times() -> None:
    def downhill(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.ones(NUMEL, dtype=torch.float64)

    ranks = make(DENSE + "bmuf(2)", 4, lambda: Flat(NUMEL), known_sgd())
    train(ranks, scheduled(constant, downhill), 300)
    before = model(ranks[0])
    train(ranks, scheduled(constant, downhill), 2)
    moved = before - model(ranks[0])
    torch.testing.assert_close(moved, torch.full_like(moved, 4 * 2 * 0.1), rtol=1e-9, atol=0)


# -- SlowMo over any base --------------------------------------------------------------------------------------------------


def blind(x: Tensor, rank: int, step: int) -> Tensor:
    return gradient(torch.zeros_like(x), rank, step)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [5, 8])
def test_over_gossip_a_round_loses_no_step_and_leaves_no_message(overlap: bool, size: int) -> None:
    """With gradients that do not look at the model, what gossip sums is what local steps sum."""
    results = list[Tensor]()
    for inner in (f"gossip(every=2, overlap={overlap})", "None"):
        ranks = make(DENSE + f"slowmo(4, beta=0.5, inner={inner})", size, lambda: Flat(NUMEL), known_sgd(0.9))
        train(ranks, scheduled(cosine, blind), 12)
        assert bit_equal(parameters(ranks))
        assert not any(r.worker.is_sending() or c.states["mixer"] for r in ranks for c in r.worker.buckets)
        results.append(model(ranks[0]))
    if overlap:  # there a step at z = x / w moves z by 1 / w as much, and the sums stay what they are
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-13)
    else:
        torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def test_over_all_reduce_ranks_are_equal_at_every_step_and_the_average_costs_nothing() -> None:
    slow, plain = make(DENSE + "slowmo(3, beta=0.5, inner=every_step())", 4), make("allreduce", 4)
    runs = [train(r, pull, 8) for r in (slow, plain)]
    assert bit_equal(parameters(slow))
    assert runs[0].ledger.sent == runs[1].ledger.sent
    one, single = make(DENSE + "slowmo(3, beta=0.5)", 4), make("allreduce", 4)
    for ranks in (one, single):
        train(ranks, lambda m, rank, step: pull(m, 0, step), 3)  # equal ranks: local steps are synchronous ones
    both = make(DENSE + "slowmo(3, beta=0.5, inner=every_step())", 4)
    train(both, lambda m, rank, step: pull(m, 0, step), 3)
    torch.testing.assert_close(parameters(one)[0], parameters(both)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
@pytest.mark.parametrize("inner", ["None", "push_sum()", "gossip(overlap=True)", "every_step()"])
def test_adam_under_every_base_and_buffer_strategy(inner: str, buffers: str) -> None:
    recipe = DENSE + f"slowmo(3, beta=0.3, inner={inner}, buffers='{buffers}')"
    ranks = make(recipe, 3, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.02))
    train(ranks, pull, 30)
    assert bit_equal(parameters(ranks))
    assert sum(r.losses[-1] for r in ranks) < 0.9 * sum(r.losses[0] for r in ranks)


def test_without_an_average_nobody_waits_for_all_and_ranks_stay_together() -> None:
    recipe = DENSE + "slowmo(4, beta=0.5, inner=push_sum(), average=False)"
    ranks, averaged = make(recipe, 4), make(DENSE + "slowmo(4, beta=0.5, inner=push_sum())", 4)
    run = train(ranks, pull, 40)
    train(averaged, pull, 40)
    assert run.ledger.by_verb().keys() == {"Send", "Receive"}
    models = torch.stack(parameters(ranks))
    assert 0 < (models - models.mean(0)).abs().max() < 1
    assert not bit_equal([anchors(r) for r in ranks])
    mean = torch.stack([anchors(r) for r in averaged]).mean(0)
    torch.testing.assert_close(torch.stack([anchors(r) for r in ranks]).mean(0), mean, rtol=1e-4, atol=1e-4)


def test_a_momentum_that_would_drive_ranks_apart_is_refused_when_their_number_is_known() -> None:
    """One hop of a ring a round: some difference is multiplied by (1 + i) / 2, whose roots are 1.105 at beta 0.5."""
    make(DENSE + "slowmo(8, beta=0.5, inner=push_sum(ring()), average=False)", 4)
    with pytest.raises(AttachError, match=r"1\.1 times with every round.*more steps a round"):
        make(DENSE + "slowmo(1, beta=0.5, inner=push_sum(ring()), average=False)", 4)
    later = "switch(complete(), 100, ring())"  # what comes after a hundred rounds
    with pytest.raises(AttachError, match=r"1\.1 times with every round"):
        make(DENSE + f"slowmo(1, beta=0.5, inner=push_sum({later}), average=False)", 4)


# -- hierarchical and post-local -------------------------------------------------------------------------------------------


def test_groups_are_equal_inside_in_between_and_the_mean_is_that_of_all_ranks() -> None:
    ranks = make(DENSE + "hierarchical(2, 2, local_sgd(6))", 5, lambda: Flat(NUMEL), known_sgd())
    flat = make(DENSE + "local_sgd(6)", 5, lambda: Flat(NUMEL), known_sgd())
    for step in range(1, 13):
        for r in (ranks, flat):
            train(r, scheduled(constant, blind), 1)
        a, b, c, d, e = parameters(ranks)
        together = step % 2 == 0
        assert bit_equal([a, b]) == bit_equal([c, d]) == together
        assert bit_equal([a, e]) == (step % 6 == 0)
        means = [torch.stack(parameters(r)).mean(0) for r in (ranks, flat)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weights", [(2.0, 1.0, 0.5, 0.5, 1.0), (0.0, 0.0, 1.5, 0.5, 3.0), (0.5, 0.5, 1.5, 1.5, 1.0)])
def test_groups_weigh_as_their_data_do_and_so_do_all(weights: tuple[float, ...]) -> None:
    ranks = make(DENSE + "hierarchical(2, 2, local_sgd(6))", 5, lambda: Flat(NUMEL), known_sgd())
    for r in ranks:
        r.worker.ranks.weights = weights
    models = [start() for _ in range(5)]
    for step in range(1, 13):
        train(ranks, scheduled(constant), 1)
        models = [x - 0.1 * gradient(x, i, step) for i, x in enumerate(models)]
        groups = [[0, 1, 2, 3, 4]] if step % 6 == 0 else [[0, 1], [2, 3], [4]] if step % 2 == 0 else []
        for group in groups:
            if whole := sum(weights[i] for i in group):  # nobody knows what a mean of nothing is
                mean = torch.stack([weights[i] / whole * models[i] for i in group]).sum(0)
                models = [mean if i in group else x for i, x in enumerate(models)]
        torch.testing.assert_close(torch.stack(parameters(ranks)), torch.stack(models), rtol=0, atol=1e-14)


def test_three_levels_average_once_where_rounds_end_together() -> None:
    ranks = make(DENSE + "hierarchical(1, 2, hierarchical(2, 4, local_sgd(4)))", 8, lambda: Flat(NUMEL), known_sgd())
    run = train(ranks, scheduled(constant), 4)
    whose = [e.step for e in run.ledger if e.rank == 0 and e.verb == "AllReduce"]
    assert whose == [1, 2, 3, 4]
    assert bit_equal(parameters(ranks))


def test_a_group_that_is_spoilt_comes_back_with_the_round_and_the_others_hear_nothing() -> None:
    ranks = make(DENSE + "hierarchical(1, 2, local_sgd(4))", 4)

    def overflow(m: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(m, rank, step)
        if (rank, step) == (0, 2):
            m.get_parameter("bias").data.fill_(float("inf"))
        return loss

    train(ranks, overflow, 3)
    assert [bool(p.isfinite().all()) for p in parameters(ranks)] == [False, False, True, True]
    train(ranks, pull, 2)
    assert bit_equal([anchors(r) for r in ranks])
    assert all(p.isfinite().all() for p in parameters(ranks))


def test_post_local_is_synchronous_and_then_local() -> None:
    recipe = "scatter(qsgd()) + post_local(5, slowmo(4, beta=0.5))"
    ranks, synchronous = make(recipe, 3), make("scatter(qsgd())", 3)
    for step in range(1, 13):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == (step <= 5 or step % 4 == 0)
        if step == 5:
            train(synchronous, pull, 5)
            assert bit_equal([parameters(ranks)[0], parameters(synchronous)[0]])
    spoilt = make(recipe, 3)
    train(spoilt, spoiled([(1, 3), (2, 7)], float("nan")), 12)
    assert bit_equal(parameters(spoilt))
    assert all(p.isfinite().all() for p in parameters(spoilt))


@pytest.mark.parametrize(
    "outer", ["hierarchical(1, 2, post_local(4, local_sgd(4)))", "post_local(1, post_local(4, local_sgd(4)))"]
)
def test_gradients_that_the_schedule_inside_averages_are_averaged(outer: str) -> None:
    crews = [make(DENSE + schedule, 4) for schedule in ("every_step()", outer)]
    for ranks in crews:
        train(ranks, pull, 4)
    assert bit_equal([model for ranks in crews for model in parameters(ranks)])


@pytest.mark.parametrize(
    "schedule", ["bmuf(4)", "cocod(4)", "post_local(4, local_sgd(2))", "hierarchical(2, 2, easgd(4))"]
)
def test_what_becomes_of_batch_norm_must_be_said(schedule: str) -> None:
    recipe = Recipe.of(DENSE + schedule)
    with pytest.raises(AttachError, match="pass buffers='average'"):
        check(torch.nn.BatchNorm1d(2), recipe)
    check(torch.nn.BatchNorm1d(2), recipe, buffers="average")


Q = "scatter(qsgd())"
REFUSED = [
    (lambda: BMUF(4, momentum=1.0), r"\[0, 1\).*1 - 1/N"),
    (lambda: BMUF(4, rate=0.0), "freeze"),
    (lambda: Lookahead(alpha=0.0), r"\(0, 1\]"),
    (lambda: SlowMo(10, inner=Gossip(every=4)), "use every=12"),
    (lambda: SlowMo(8, inner=LocalSGD(2)), r"hierarchical\(2, N, slowmo\(8\)\)"),
    (lambda: SlowMo(8, average=False), "never meet"),
    (lambda: SlowMo(8, inner=Choco(TopK()), average=False), "slower than its graph"),
    (lambda: SlowMo(8, inner=EveryStep(), average=False), "never meet"),
    (lambda: Hierarchical(2, 2, EveryStep()), "local steps"),
    (lambda: Hierarchical(2, 2, SlowMo(8, inner=Gossip())), "would break"),
    (lambda: Hierarchical(0, 2, LocalSGD(4)), "at least 1"),
    (lambda: PostLocal(-1, LocalSGD(4)), "0 or more"),
    (lambda: PostLocal(4, EveryStep()), "no schedule of local steps"),
    (partial(Recipe.of, "topk + post_local(4, local_sgd(2))"), "drop the memory"),
    (partial(Recipe.of, f"{Q} + slowmo(8, inner=push_sum(), average=False)"), "would send nothing"),
]


@pytest.mark.parametrize(("made", "reason"), REFUSED)
def test_what_cannot_be_right_is_refused_with_the_fix(made, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        made()
