"""What ties ranks without assigning: CoCoD, EASGD, and the delay of an average. The self-tests T4.7, T4.8 and their like."""

import pytest
import torch
from tests.runtime.gym import Flat, Network, anchors, bit_equal, make, parameters, pull, train
from tests.schedules.rates import NUMEL, constant, gradient, known_sgd, model, scheduled
from torch import Tensor

from gossamer.core.errors import AttachError, RecipeError
from gossamer.schedules import EASGD, CoCoD, OverlapLocalSGD

DENSE = "allreduce(fp32()) + "


def crew(schedule: str, size: int = 4):
    return make(DENSE + schedule, size, lambda: Flat(NUMEL), known_sgd())


def start() -> Tensor:
    return Flat(NUMEL).x.detach().clone()


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_cocod_is_its_formula_whatever_the_delay(delay: int) -> None:
    ranks = crew(f"cocod(3, delay={delay})", 3)
    models, starts, flying = [start()] * 3, [start()] * 3, None
    for step in range(1, 13):
        models = [x - 0.1 * gradient(x, i, step) for i, x in enumerate(models)]
        if delay and flying is not None and step % 3 == delay % 3:
            models, flying = [flying + (x - s) for x, s in zip(models, starts, strict=True)], None
        if step % 3 == 0:
            starts, flying = models, torch.stack(models).mean(0)
            if delay == 0:
                models, flying = [flying + (x - s) for x, s in zip(models, starts, strict=True)], None
        train(ranks, scheduled(constant), 1)
        for r, x in zip(ranks, models, strict=True):
            torch.testing.assert_close(model(r), x, rtol=0, atol=1e-14)


def test_cocod_moves_the_mean_by_all_that_was_learned() -> None:
    gradients = list[Tensor]()

    def watched(x: Tensor, rank: int, step: int) -> Tensor:
        gradients.append(gradient(x, rank, step))
        return gradients[-1]

    ranks = crew("cocod(3)")
    for _ in range(5):
        before = torch.stack(parameters(ranks)).mean(0)
        gradients.clear()
        train(ranks, scheduled(constant, watched), 3)
        moved = before - torch.stack(parameters(ranks)).mean(0)
        torch.testing.assert_close(moved, 0.1 * torch.stack(gradients).sum(0) / 4, rtol=0, atol=1e-14)


def test_without_gradients_cocod_agrees_within_a_round() -> None:
    def once(x: Tensor, rank: int, step: int) -> Tensor:
        return gradient(x, rank, step) if step <= 2 else torch.zeros_like(x)

    ranks = crew("cocod(2)")
    train(ranks, scheduled(constant, once), 4)
    assert bit_equal(parameters(ranks))


def test_easgd_is_its_formula_and_springs_conserve_the_sum() -> None:
    ranks, alpha = crew("easgd(2, alpha=0.2)"), 0.2
    models, centre, due = [start()] * 4, start(), None
    for round in range(6):
        for step in (2 * round + 1, 2 * round + 2):
            models = [x - 0.1 * gradient(x, i, step) for i, x in enumerate(models)]
        centre = centre if due is None else centre + due
        before = sum(models) + centre
        due = alpha * sum((x - centre for x in models), torch.zeros_like(centre))
        models = [x - alpha * (x - centre) for x in models]
        torch.testing.assert_close(sum(models) + centre + due, before, rtol=0, atol=1e-13)
        train(ranks, scheduled(constant), 2)
        torch.testing.assert_close(anchors(ranks[0]), centre, rtol=0, atol=1e-14)
        for r, x in zip(ranks, models, strict=True):
            torch.testing.assert_close(model(r), x, rtol=0, atol=1e-14)


def test_easgds_centre_moves_n_of_n_plus_one_as_far() -> None:
    def downhill(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.ones(NUMEL, dtype=torch.float64)

    ranks = crew("easgd(2)")
    train(ranks, scheduled(constant, downhill), 200)
    before = anchors(ranks[0])
    train(ranks, scheduled(constant, downhill), 20)
    moved = before - anchors(ranks[0])
    torch.testing.assert_close(moved, torch.full_like(moved, 20 * 0.1 * 4 / 5), rtol=1e-9, atol=0)


SAME = [
    ("overlap_local_sgd(3, alpha=1.0, beta=0.0, delay=0)", "local_sgd(3)"),
    ("cocod(3, delay=0)", "local_sgd(3)"),
    ("overlap_local_sgd(3, delay=3)", "overlap_local_sgd(3)"),
    ("cocod(3, delay=3)", "cocod(3)"),
]


@pytest.mark.parametrize("way", ["allreduce(fp32())", "gather(topk(ratio=0.3)) + error_feedback()"])
@pytest.mark.parametrize(("one", "other"), SAME)
def test_where_methods_meet_no_bit_differs(one: str, other: str, way: str) -> None:
    results = list[Tensor]()
    for schedule in (one, other):
        ranks = make(f"{way} + {schedule}", 4)
        train(ranks, pull, 9)
        results.append(torch.stack(parameters(ranks)))
    assert bit_equal(results)


@pytest.mark.parametrize("schedule", ["cocod(2)", "easgd(2)", "cocod(3, delay=1)", "overlap_local_sgd(3, delay=2)"])
def test_landing_is_by_schedule_so_a_slow_network_changes_no_bit(schedule: str) -> None:
    def run(network: Network | None) -> list[Tensor]:
        ranks = make(f"topk(ratio=0.2) + {schedule}", 4)
        train(ranks, pull, 12, network, lambda rank, step: 0.1 + 0.01 * ((rank * 3 + step) % 4))
        return parameters(ranks)

    assert all(bit_equal(pair) for pair in zip(run(None), run(Network(latency=0.4, rate=(1e3, 2e4, 1e6, 5e3)))))


@pytest.mark.parametrize("schedule", ["cocod(2)", "easgd(2)"])
def test_a_lost_round_returns_everybody_to_the_anchor(schedule: str) -> None:
    ranks = make(f"topk(ratio=0.2) + {schedule}", 3)

    def overflow(m: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(m, rank, step)
        if (rank, step) == (1, 3):
            m.get_parameter("bias").data.fill_(float("inf"))
        return loss

    train(ranks, overflow, 4)
    assert not parameters(ranks)[1].isfinite().all()
    train(ranks, pull, 2)  # what was launched after step 4 lands
    assert all(p.isfinite().all() for p in parameters(ranks))
    train(ranks, pull, 6)
    assert bit_equal([anchors(r) for r in ranks])
    assert sum(r.losses[-1] for r in ranks) < sum(r.losses[0] for r in ranks)


REFUSED = [
    (lambda: CoCoD(4, delay=5), "only one may be in flight; use 0 to 4"),
    (lambda: OverlapLocalSGD(4, delay=-1), "use 0 to 4"),
    (lambda: OverlapLocalSGD(4, alpha=1.0, delay=2), "freezes the model"),
    (lambda: EASGD(4, alpha=0.0), "never synchronises"),
    (lambda: EASGD(4, alpha=1.0), "discards all local progress"),
    (lambda: EASGD(0), "at least 1"),
]


@pytest.mark.parametrize(("made", "reason"), REFUSED)
def test_what_cannot_be_right_is_refused_with_the_fix(made, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        made()


def test_springs_too_stiff_for_so_many_ranks_are_refused() -> None:
    crew("easgd(4, alpha=0.25)", 4)
    with pytest.raises(AttachError, match=r"N alpha is 1\.25.*use alpha=0\.18"):
        crew("easgd(4, alpha=0.25)", 5)
