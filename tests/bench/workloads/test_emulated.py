"""An emulated accelerator: its gradients are the real model's in name, shape and order, and its waits end as told."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gossamer.bench import workloads
from gossamer.bench.workloads import Workload, WorkloadError, emulated
from gossamer.bench.workloads.computing import ComputeTime
from gossamer.bench.workloads.emulated import EmulatedWorkload, measure_order

SECONDS = 0.3


class Clock:
    """A clock that sleeping moves, and nothing else."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, 0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 10

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now, self.naps = self.now + seconds, self.naps + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("gossamer.bench.workloads.emulated.time", made)
    return made


@pytest.fixture(scope="module")
def lm() -> EmulatedWorkload:
    made = emulated.emulated(workloads.get("lm-bytes"), f"{1000 * SECONDS:.0f}ms")
    assert isinstance(made, EmulatedWorkload)
    return made


def hooked(model: nn.Module, hook: Callable[[str], object]) -> None:
    """Call with a parameter's name when its gradient is there."""

    def call(name: str, _: Tensor) -> None:
        hook(name)

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(call, name))


def gradients(workload: Workload, step: int, rank: int) -> dict[str, Tensor]:
    model = workload.model()
    workload.loss(model, workload.batch(step, rank, 2)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_come_in_the_real_backwards_order(clock: Clock, lm: EmulatedWorkload) -> None:
    came = dict[bool, list[str]]()
    for is_real, workload in ((True, lm.real), (False, lm)):
        names, model = list[str](), workload.model()
        hooked(model, names.append)
        workload.loss(model, workload.batch(0, 0, 1)).backward()
        came[is_real] = names
    assert came[True] == came[False]
    assert len(came[True]) == len(list(lm.model().parameters()))


def test_a_pass_takes_the_told_time_and_each_gradient_its_share(clock: Clock, lm: EmulatedWorkload) -> None:
    model, times = lm.model(), dict[str, float]()
    hooked(model, lambda name: times.setdefault(name, clock.now))
    began = clock.now
    loss = lm.loss(model, lm.batch(0, 0, 1))
    forward = clock.now - began
    assert forward == pytest.approx(SECONDS / 3, rel=0.01)
    loss.backward()
    assert clock.now - began == pytest.approx(SECONDS)
    for arrival in lm.order.arrivals:
        assert times[arrival.name] - began == pytest.approx(forward + (SECONDS - forward) * arrival.share)
    assert list(times.values()) == sorted(times.values())
    assert len(set(times.values())) > 10  # and not all at the end


def test_what_was_used_while_passes_waited_is_summed_up(clock: Clock, lm: EmulatedWorkload) -> None:
    model, before = lm.model(), (lm.totals.used, lm.totals.late)
    for step in range(2):
        lm.loss(model, lm.batch(step, 0, 1)).backward()
    assert lm.totals.used - before[0] == pytest.approx(2 * SECONDS / 10)  # a tenth of the time, by this clock
    assert lm.totals.late == pytest.approx(before[1])


def test_what_is_late_does_not_make_the_rest_late(clock: Clock, lm: EmulatedWorkload) -> None:
    model = lm.model()

    def work(_: str) -> None:
        clock.now += 0.001  # of a hook that copies a gradient

    hooked(model, work)
    began = clock.now
    lm.loss(model, lm.batch(0, 0, 1)).backward()
    last = [a.name for a in lm.order.arrivals if a.share == 1.0]
    assert clock.now - began == pytest.approx(SECONDS + 0.001 * len(last))  # for which nothing is left to wait


def test_gradients_are_like_the_models_and_nobody_elses_memory(clock: Clock, lm: EmulatedWorkload) -> None:
    model = lm.model().to(torch.float64)
    model.requires_grad_(True)
    lm.loss(model, lm.batch(0, 0, 1)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float64)
    first = gradients(lm, 3, 0)
    kept = {name: g.clone() for name, g in first.items()}
    again = gradients(lm, 3, 0)
    for name in first:
        assert torch.equal(kept[name], again[name])  # they follow from seed, rank, step and parameter
        again[name].zero_()  # as DDP writes into what it was given
        assert torch.equal(kept[name], first[name])
    assert all(torch.equal(kept[name], g) for name, g in gradients(lm, 3, 0).items())
    stored = [g.untyped_storage().data_ptr() for g in [*first.values(), *again.values()]]
    assert len(set(stored)) == len(stored)


@pytest.mark.parametrize("other", [(4, 0), (3, 1)])
def test_ranks_and_steps_have_values_of_their_own(clock: Clock, lm: EmulatedWorkload, other: tuple[int, int]) -> None:
    one, two = gradients(lm, 3, 0), gradients(lm, *other)
    a, b = (torch.cat([g.flatten() / g.std() for g in each.values() if g.numel() > 1]) for each in (one, two))
    assert abs(float((a * b).mean())) < 0.02  # 870,000 pairs: with heavy tails, some ten standard errors


def test_values_have_heavy_tails_and_each_layer_its_scale(clock: Clock, lm: EmulatedWorkload) -> None:
    found = gradients(lm, 0, 0)
    scales = {a.name: a.rms for a in lm.order.arrivals}
    large = [name for name, g in found.items() if g.numel() >= 10_000]
    assert len({round(scales[name], 9) for name in large}) > 5
    for name in large:
        values = found[name] / scales[name]
        assert float(values.square().mean().sqrt()) == pytest.approx(1, rel=0.5)
        # Student's t with 3 degrees of freedom: .0032 beyond four deviations; of a normal one, .00006 are.
        assert 0.001 < float((values.abs() > 4).float().mean()) < 0.01


def test_gradients_add_up_and_frozen_parameters_have_none(clock: Clock, lm: EmulatedWorkload) -> None:
    model = lm.model()
    for step in (0, 1):
        lm.loss(model, lm.batch(step, 0, 1)).backward()
    (lm.loss(model, lm.batch(2, 0, 1)) / 4).backward()
    steps = [gradients(lm, step, 0) for step in range(3)]
    sums = {name: steps[0][name] + steps[1][name] + steps[2][name] / 4 for name in steps[0]}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, sums[name])
    model.zero_grad()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    lm.loss(model, lm.batch(0, 0, 1)).backward()
    assert frozen.grad is None


@pytest.mark.parametrize("name", ["ridge", "lm-lstm"])
def test_shares_grow_to_one_where_little_is_counted(name: str) -> None:
    forward, arrivals = measure_order(workloads.get(name))
    shares = [a.share for a in arrivals]
    assert 0 < forward < 1
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert all(a.rms > 0 for a in arrivals)


def test_a_loss_is_not_a_number_and_nothing_is_emulated_unasked(clock: Clock, lm: EmulatedWorkload) -> None:
    model = lm.model()
    assert torch.isnan(lm.loss(model, lm.batch(0, 0, 1)))
    assert lm.evaluate(model) != lm.evaluate(model)
    assert model.state_dict().keys() == lm.real.model().state_dict().keys()
    assert emulated.emulated(lm.real, "") is lm.real


def test_a_wait_sleeps_until_its_end(clock: Clock) -> None:
    emulated.sleep_until(clock.now + 2.0)
    emulated.sleep_until(clock.now - 1.0)
    assert (clock.now, clock.naps) == (102.0, 1)


def test_times_have_a_law_and_a_draw_for_each_rank_and_step() -> None:
    assert ComputeTime.of("150ms") == ComputeTime(0.15) == ComputeTime.of(" 0.15s ")
    for text, least in (("100ms lognormal 0.2", 0.0), ("70ms exponential 30ms", 0.07)):
        law = ComputeTime.of(text)
        times = [law.at(rank, step) for rank in range(4) for step in range(500)]
        assert times == [law.at(rank, step) for rank in range(4) for step in range(500)]
        assert times != [law.at(rank, step, seed=1) for rank in range(4) for step in range(500)]
        assert len(set(times)) == len(times)
        assert min(times) > least
        assert sum(times) / len(times) == pytest.approx(law.mean, rel=0.03)  # 2000 draws: 5 standard errors and more
        assert law.mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "takes a time such as '150ms'"),
        ("150", "takes a time such as '150ms'"),
        ("-1ms", "takes a time such as '150ms'"),
        ("fast", "takes a time such as '150ms'"),
        ("150ms lognormal", "'150ms lognormal 0.2'"),
        ("150ms exponential 0.2", "'150ms exponential 30ms'"),
        ("0ms", "between 1ms and 60s, not 0ms"),
        ("2000s", "between 1ms and 60s, not 2000s"),
        ("150ms lognormal 0", "a sigma above 0 and up to 2, not 0"),
        ("150ms lognormal 9", "a sigma above 0 and up to 2, not 9"),
        ("150ms exponential 0s", "a mean above 0 and up to 60s, not 0s"),
    ],
)
def test_what_is_no_time_is_refused(text: str, says: str) -> None:
    with pytest.raises(WorkloadError, match="--compute") as refused:
        ComputeTime.of(text)
    assert says in str(refused.value)
