"""What is counted without training is what training sends."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import pytest
import torch
from tests.laws import samples
from torch import nn

from gossamer.codecs import FP32, QSGD, PowerSGD, Ternary, TopK
from gossamer.controllers import Fixed
from gossamer.core.bucket import Bucket
from gossamer.core.errors import GossamerError, RecipeError
from gossamer.core.loop import Loop
from gossamer.core.parts import registry
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import AllReduce, OptimizerStep, Program, all_reduce
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.mixers import PushSum
from gossamer.planning import DryRun, bytes_per_step, span
from gossamer.planning.events import AverageRequest
from gossamer.recipe import BucketSize, Recipe, Rule
from gossamer.recipes import presets
from gossamer.runtime.optimizer_state import kept_by
from gossamer.schedules import Gossip, LocalSGD, SlowMo
from gossamer.simulate import replicas, train
from gossamer.topologies import Exponential

SHAPES = {"w": (9, 7), "b": (5,), "v": (4, 6)}
MORE = [
    Recipe(Gather(TopK()), ErrorFeedback(), bucket=BucketSize(1e-4)),
    Recipe(Scatter(QSGD()), rules=(Rule("ndim < 2", AllReduced(FP32())),)),
    Recipe(AllReduced(PowerSGD(rank=1)), ErrorFeedback(), LocalSGD(3)),
    Recipe(AllReduced(FP32()), schedule=SlowMo(4, inner=PushSum(Exponential(2)))),
    Recipe.of("zero_one_adam(2, kappa=1, scaler=2, clipper=4)"),
]
EVERY = [*samples.recipes(), *MORE]
OTHERWISE = (
    "rice",
    "adacomp",
    "strom",
    "bernoulli",
    "independent",
    "warmup=8",
    "svd",
    "factors",
    "columns=20",
    "gradiveq",
    "zero_one(2)",
)  # as long as data or dice say, longer at first, or longer than these few parameters


WAYS = ("allreduce(fp32())", "scatter(qsgd())", "gather(topk(ratio=0.3)) + own_gradient()")


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def noise(model: nn.Module, rank: int, step: int) -> float:
    rng = torch.Generator().manual_seed(1000 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng)
    return 0.0


def trained(recipe: Recipe, size: int) -> float:
    """Bytes a rank and step of a whole simulation, with real codecs, optimizers and everybody there."""
    first, last = span(recipe)
    ranks = replicas(replace(recipe, controller=Fixed()), Bare, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), size)
    entries = [e for e in train(ranks, noise, last).ledger if first <= e.step <= last]
    return sum(e.sent for e in entries) / size / (last - first + 1)


def pooling() -> list[str]:
    """Every preset and every schedule that can average the optimizer's state, told to."""
    told = list[str]()
    for name, preset in presets().items():
        if "buffers" in signature(preset).parameters:
            told.append(f"{name}(buffers='average')")
    for schedule in registry.of("schedule").values():
        for kind in {f.name for f in fields(schedule)} & {"buffers"}:
            whole = schedule.sample.removesuffix(")") + f", {kind}='average')"
            told += [f"{way} + {whole}" for way in WAYS if legal(f"{way} + {whole}")][:2]
    return told


def legal(text: str) -> bool:
    try:
        Recipe.of(text)
    except RecipeError:
        return False
    return True


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.planning.dry_run.LEAST", 4)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "recipe",
    samples.quick(
        r for r in EVERY if not (r.controller.counts or r.controller.hears_loss or any(w in repr(r) for w in OTHERWISE))
    ),
)
def test_the_bytes_are_those_of_a_whole_simulation(recipe: Recipe) -> None:
    assert bytes_per_step(recipe, SHAPES, 3, momenta=0) == trained(recipe, 3)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("exchange", [Gather(TopK(0.3, index="rice")), Scatter(TopK(0.3, index="rice"))], ids=repr)
def test_wires_whose_length_depends_on_the_data_are_written(exchange: Gather | Scatter) -> None:
    recipe = Recipe(exchange, ErrorFeedback())
    assert bytes_per_step(recipe, SHAPES, 3) == pytest.approx(trained(recipe, 3), rel=0.1)


OPTIMIZERS: list[tuple[int, Callable[[nn.Module], torch.optim.Optimizer]]] = [
    (0, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)),
    (1, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
    (2, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)),
]


@pytest.mark.parametrize("recipe", pooling())
def test_the_optimizers_state_is_counted_where_it_is_averaged(recipe: str) -> None:
    steps = span(Recipe.of(recipe))[1]
    for momenta, optimizer in OPTIMIZERS:
        ledger = train(replicas(recipe, Bare, optimizer, 3), noise, steps).ledger
        assert bytes_per_step(recipe, SHAPES, 3, momenta=momenta) * 3 * steps == pytest.approx(ledger.sent, abs=3)
        assert kept_by(optimizer(Bare())) == momenta


def test_the_optimizers_state_of_a_model_in_double_precision_costs_double() -> None:
    recipe, wide = "allreduce + slowmo(4, buffers='average')", dict(Bare().double().named_parameters())
    narrow = [bytes_per_step(recipe, SHAPES, 2, momenta=n) for n in (0, 1)]
    assert bytes_per_step(recipe, wide, 2) == narrow[0] + 92 + 2 * (narrow[1] - narrow[0])


@pytest.mark.parametrize("size", [2, 5, 16])
def test_any_number_of_ranks(size: int) -> None:
    assert bytes_per_step("allreduce", SHAPES, size) == 2 * (size - 1) * 4 * 92 // size
    assert bytes_per_step("topk", SHAPES, size) == (size - 1) * 8
    assert bytes_per_step("topk(scope='tensor')", SHAPES, size) == (size - 1) * 8 * (1 + 1 + 1)
    assert bytes_per_step("sgp", SHAPES, size) == 4 * 92 + 4


def test_parameters_may_be_given_themselves_and_double_precision_costs_double() -> None:
    narrow, wide = Bare(), Bare().double()
    assert bytes_per_step("allreduce", dict(narrow.named_parameters()), 4) == bytes_per_step("allreduce", SHAPES, 4)
    assert bytes_per_step("allreduce", dict(wide.named_parameters()), 4) == 2 * bytes_per_step("allreduce", SHAPES, 4)


def test_only_whole_rounds_after_the_warm_up_count() -> None:
    assert span(Recipe.of("allreduce(fp32()) + local_sgd(8, warmup=20)")) == (25, 88)
    assert span(Recipe.of("slowmo_sgp")) == (1, 96)
    plain = bytes_per_step("local_sgd(8)", SHAPES, 4)
    assert bytes_per_step("allreduce(fp32()) + local_sgd(8, warmup=20)", SHAPES, 4) == plain
    assert 8 * plain == bytes_per_step("allreduce", SHAPES, 4)


def test_steps_that_learn_directions_are_not_counted() -> None:
    recipe = Recipe.of("allreduce(gradiveq(length=8, ratio=3, learn=2)) + error_feedback()")
    ranks = replicas(recipe, Bare, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 3)
    sent = Counter[int]()
    for entry in train(ranks, noise, 4).ledger:
        sent[entry.step] += entry.sent
    learned = bytes_per_step(recipe, SHAPES, 3)
    full = bytes_per_step("allreduce", SHAPES, 3)
    assert [sent[step] / 3 for step in range(1, 5)] == pytest.approx([full, full, learned, learned], abs=4)
    assert learned < full


def test_rounds_with_fewer_peers_send_less() -> None:
    """With six ranks and two peers the second round's second hop would lead home."""
    mixer = PushSum(Exponential(2))
    peers = [len(mixer.topology.peers(0, 6, round).to) for round in range(2)]
    assert peers == [2, 1]
    assert bytes_per_step(Recipe(AllReduced(FP32()), schedule=Gossip(mixer)), SHAPES, 6) == 1.5 * (4 * 92 + 4)


def test_a_round_is_done_once_however_long_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed, push = [], PushSum.push

    def counted(self: PushSum, block: Bucket, *args: Any, **at: Any) -> object:
        pushed.append(block.numel)
        return push(self, block, *args, **at)

    monkeypatch.setattr(PushSum, "push", counted)
    bytes_per_step("slowmo_sgp(48)", SHAPES, 4)
    assert len([numel for numel in pushed if numel > 1]) == 4  # one of each kind of round; small ones are free


def test_no_wire_of_known_length_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("encoded")

    monkeypatch.setattr(QSGD, "encode", never)
    monkeypatch.setattr(QSGD, "accumulate", never)
    assert bytes_per_step("qsgd", SHAPES, 4) > 0
    assert bytes_per_step("diana", SHAPES, 4) > 0


def test_no_sum_of_known_length_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ternary, "average", lambda *args: pytest.fail("it was"))
    scales, lanes = 4 * 2, 4 * 286  # seven levels to a lane
    assert bytes_per_step("allreduce(ternary())", {"a": (100, 10), "b": (100, 10)}, 4) == 1.5 * (scales + lanes)


@dataclass(frozen=True, repr=False)
class Chatty(Schedule):
    """Talks to the network past its loop."""

    def step(self, loop: Loop) -> Program[None]:
        yield OptimizerStep()
        yield from all_reduce(torch.zeros(1))


def test_a_schedule_that_talks_past_its_loop_cannot_be_counted() -> None:
    recipe = replace(Recipe.of("allreduce"), schedule=Chatty())
    with pytest.raises(GossamerError, match=r"makes the request AllReduce itself.*use loop.averages"):
        bytes_per_step(recipe, SHAPES, 4)


def test_a_rehearsal_notes_what_is_asked() -> None:
    loop = DryRun(Recipe.of("slowmo_sgp(3)"))
    for _ in range(6):
        loop.take_step()
    assert loop.averages == 2 * [AverageRequest((0,))]
    assert [mail.which for mail in loop.mail] == 6 * [(0,)]
    local = DryRun(Recipe.of("overlap_local_sgd(2)"))
    for _ in range(5):
        local.take_step()
    assert (len(local.averages), [*local.in_flight.launched]) == (2, [0])
    late = DryRun(Recipe.of("backup"), size=3)
    for _ in range(2):
        late.take_step()
    assert (late.averages, late.step) == (2 * [AverageRequest((0,))], 3)
    assert [verb.tensor.numel() for verb in late.besides if isinstance(verb, AllReduce)] == [1, 1]  # the rates
