"""Streaming DiLoCo: fragments, their delay, and what mixing makes of the outer step."""

from functools import partial

import pytest
import torch
from tests.runtime.gym import Flat, anchors, bit_equal, make, parameters, pull, train
from tests.schedules.rates import NUMEL, constant, gradient, known_sgd, scheduled
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe
from gossamer.schedules import Streaming

DENSE = "allreduce(fp32()) + "


class Two(nn.Module):
    """Two vectors, each a fragment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.linspace(-1, 1, NUMEL, dtype=torch.float64)) for _ in range(2))


def walk(m: nn.Module, rank: int, step: int) -> float:
    for i, p in enumerate(m.parameters()):
        p.grad = gradient(p.detach(), rank, step) * (1 + i)
    return 0.0


@pytest.mark.parametrize("carrier", ["allreduce(fp32())", "gather(topk(ratio=0.3)) + error_feedback()"])
def test_one_fragment_without_delay_and_mixing_is_diloco_to_the_bit(carrier: str) -> None:
    results = list[Tensor]()
    for schedule in (
        "slowmo(3, 0.9, 0.7, by_lr=False, nesterov=True)",
        "streaming(3, fragments=1, delay=0, mixing=0.0, rate=0.7)",
    ):
        ranks = make(f"{carrier} + {schedule} + bucket(0.00002)", 4)
        train(ranks, pull, 9)
        results.append(torch.stack(parameters(ranks)))
    assert bit_equal(results)


@pytest.mark.parametrize(("delay", "mixing"), [(0, 0.0), (1, 0.5), (3, 0.25), (4, 0.5)])
def test_it_is_its_formula_fragment_by_fragment(delay: int, mixing: float) -> None:
    ranks = make(DENSE + f"streaming(4, 2, {delay}, {mixing}, 0.5, 0.6)", 3, Two, known_sgd())
    start = torch.linspace(-1, 1, NUMEL, dtype=torch.float64)
    models = [[start] * 2 for _ in range(3)]
    anchor, flying = [start] * 2, [None, None]
    outer = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    steppers = [torch.optim.SGD([p], lr=0.5, momentum=0.6, nesterov=True) for p in outer]

    def land(p: int) -> None:
        outer[p].grad, flying[p] = flying[p], None
        steppers[p].step()
        anchor[p] = outer[p].detach().clone()
        for m in models:
            m[p] = mixing * m[p] + (1 - mixing) * anchor[p]

    for step in range(1, 18):
        models = [[x - 0.1 * (1 + p) * gradient(x, i, step) for p, x in enumerate(m)] for i, m in enumerate(models)]
        for p, offset in enumerate((2, 0)):
            if delay and flying[p] is not None and (step - offset) % 4 == delay % 4:
                land(p)
        for p, offset in enumerate((2, 0)):
            if step % 4 == offset:
                flying[p] = anchor[p] - torch.stack([m[p] for m in models]).mean(0)
                if delay == 0:
                    land(p)
        train(ranks, walk, 1)
        for r, m in zip(ranks, models, strict=True):
            torch.testing.assert_close(r.flat(), torch.cat(m), rtol=0, atol=1e-13)


def test_no_step_sends_more_than_a_fragment() -> None:
    ranks = make(DENSE + "streaming(6, 3, 2, cut='balanced')", 4)
    sent = dict.fromkeys(range(1, 13), 0)
    for entry in train(ranks, pull, 12).ledger:
        sent[entry.step] += entry.sent
    assert [step for step in sent if sent[step]] == [2, 4, 6, 8, 10, 12]
    whole = sum(sent[step] for step in (2, 4, 6))
    assert max(sent.values()) < 0.7 * whole


@pytest.mark.parametrize(
    ("every", "delay", "mixing", "rate", "momentum"), [(10, 3, 0.5, 0.7, 0.9), (10, 0, 0.25, 0.7, 0.0)]
)
def test_under_a_gradient_that_stays_the_model_moves_as_its_gain_says(every, delay, mixing, rate, momentum) -> None:
    def downhill(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.ones_like(x)

    schedule = Streaming(every, 1, delay, mixing, rate, momentum)
    ranks = make(DENSE + repr(schedule), 2, lambda: Flat(1), known_sgd())
    train(ranks, scheduled(constant, downhill), 40 * every)
    before = anchors(ranks[0])
    train(ranks, scheduled(constant, downhill), every)
    moved = float(before - anchors(ranks[0]))
    assert moved == pytest.approx(0.1 * every * schedule.gain, rel=1e-6)


def test_a_fragment_that_is_spoilt_goes_back_alone() -> None:
    def lose(m: nn.Module, rank: int, step: int) -> float:
        loss = pull(m, rank, step)
        if (rank, step) == (1, 5):
            m.get_parameter("matrix").data.fill_(float("inf"))
        return loss

    ranks = make(DENSE + "streaming(4, ('matrix', '*'), 1)", 3)
    train(ranks, pull, 4)
    before = {c.fragment: c.states["schedule"]["anchor"] for c in ranks[0].worker.buckets}
    train(ranks, lose, 5)
    after = {c.fragment: c.states["schedule"]["anchor"] for c in ranks[0].worker.buckets}
    assert [bit_equal([before[p], after[p]]) for p in (0, 1)] == [True, False]
    assert all(p.isfinite().all() for p in parameters(ranks))
    assert bit_equal([anchors(r) for r in ranks])
    assert {r.worker.record.dropped_rounds for r in ranks} == {1}


def test_in_four_bits_anchors_are_equal_and_the_model_learns() -> None:
    ranks = make("scatter(qsgd(bits=4, bucket=16)) + streaming(4, rate=0.7, momentum=0.5)", 3)
    train(ranks, pull, 40)
    assert bit_equal([anchors(r) for r in ranks])
    assert sum(r.losses[-1] for r in ranks) < 0.7 * sum(r.losses[0] for r in ranks)


REFUSED = [
    (partial(Streaming, 0), "at least 1 step"),
    (partial(Streaming, 8, delay=9), "use 0 to 8 steps"),
    (partial(Streaming, 8, delay=-1), "use 0 to 8 steps"),
    (partial(Streaming, 8, mixing=1.0), "never synchronises"),
    (partial(Streaming, 8, mixing=-0.1), r"\[0, 1\)"),
    (partial(Streaming, 8, mixing=0.0), "discards the 1 local steps"),
    (partial(Streaming, 8, rate=2.1, mixing=0.5, momentum=0.9), "below 2.04"),
    (partial(Streaming, 8, rate=0.0), "freeze"),
    (partial(Streaming, 8, momentum=1.0), r"\[0, 1\)"),
    (partial(Streaming, 8, fragments=3), "use every=9"),
    (partial(Streaming, 2, fragments=4), "use every=4"),
    (partial(Streaming, 8, fragments=0), "fragments must be at least 1"),
    (partial(Streaming, 8, fragments=()), "fragments must be at least 1"),
    (partial(Recipe.of, "accordion_qsgd(epoch=3) + streaming(8)"), "one fragment is averaged at a time"),
]


@pytest.mark.parametrize(("made", "reason"), REFUSED)
def test_what_cannot_be_right_is_refused_with_the_fix(made, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        made()


@pytest.mark.parametrize(
    ("fragments", "reason"),
    [
        ("8", r"the 6\., the 7\., the 8\. of 8 fragments would be without parameters.*5 layers"),
        ("('matrix', 'nothing*', '*', 'bias')", r"'nothing\*', 'bias' of 4"),
        ("('matrix', 'b*')", r"'turned'.*add '\*' at the end"),
    ],
)
def test_fragments_that_the_model_does_not_have_are_refused_when_it_is_known(fragments: str, reason: str) -> None:
    with pytest.raises(AttachError, match=reason):
        make(DENSE + f"streaming(8, {fragments})", 2)


def test_just_below_the_refused_rate_it_settles_and_above_it_would_not() -> None:
    """x <- mixing x + (1 - mixing) a after a -= rate (D + momentum v), with no gradient: the powers of its matrix."""
    below, above = (0.99, 1.01)
    for mixing, momentum in ((0.5, 0.0), (0.5, 0.9), (0.25, 0.9), (0.75, 0.5)):
        bound = Streaming(8, mixing=mixing, momentum=momentum, rate=0.1).stable
        for times in (below, above):
            rate = times * bound
            step = torch.tensor(
                [[mixing * (1 - rate - rate * momentum), -mixing * rate * momentum**2], [1.0, momentum]],
                dtype=torch.float64,
            )
            assert (torch.linalg.eigvals(step).abs().max() < 1) == (times == below)
