"""Plans: every preset gives a row or a reason, and the numbers agree with what they must agree with."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
import torch
from tests.planning.models import SHAPES, SMALL

import gossamer
from gossamer import CostError
from gossamer.bench import catalogue
from gossamer.controllers.auto_table import ALLOWED
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Context
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program, Verb
from gossamer.costs import Cluster, Hosts, from_flags
from gossamer.costs.laws import ShiftedExponential, SlowRank
from gossamer.planning import bytes_per_step
from gossamer.planning.baselines import between_shards, compute, ddp, fsdp, hsdp, sharded
from gossamer.planning.measured_model import measure, untrained, with_step
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import MODELS, from_shapes, known_model
from gossamer.planning.plan import LINE_UP, TrainingPlan, line_up, plan, prepare
from gossamer.planning.rates import Interval, busy_at, pays_between
from gossamer.planning.replay import StartProgram
from gossamer.planning.scaling import scaling
from gossamer.planning.verdict import sentences
from gossamer.planning.work import MeasuredWork, MemoryPasses, NoWork, Planned, States, Work, on_a_line
from gossamer.recipes import presets

FOUR = from_flags(nodes=4, rate=1e6, latency=1e-4)
FREE = Cluster(hosts=(Hosts(count=4),), byte_seconds=0.0, program_seconds=0.0)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_plans_or_says_why_not(name: str) -> None:
    """And sends the bytes that are counted, `auto` those of its choice. Chunks of this small model differ in length by some per cent."""
    recipe = catalogue.example(name)
    found = plan(SMALL, FOUR, [recipe], work=NoWork(), curves=False).recipes[0]
    assert found.seconds is not None, found.error
    assert (found.simulated > 0) == recipe.schedule.shape.is_async
    assert found.seconds.step >= SMALL.computing - 1e-9
    if not found.estimated and not found.simulated:
        counted = bytes_per_step(found.choice or recipe, SHAPES, 4, momenta=SMALL.momenta)
        counted /= recipe.schedule.shape.micro_batches
        assert found.seconds.sent == pytest.approx(counted, rel=0.06, abs=64)


@pytest.mark.parametrize("name", ["allreduce", "bf16", "qsgd", "powersgd", "local_sgd(8)", "sgp", "diana"])
def test_bytes_are_those_that_are_counted(name: str) -> None:
    sent = prepare(name, SMALL, FOUR, NoWork()).seconds(FOUR).sent
    assert sent == pytest.approx(bytes_per_step(name, SHAPES, 4), rel=5e-3)


@pytest.mark.parametrize(
    "name", ["allreduce", "qsgd", "topk", "local_sgd(8)", "osgp", "backup", "overlap_local_sgd(8)"]
)
def test_a_free_network_and_free_work_leave_computing(name: str) -> None:
    seconds = prepare(name, replace(SMALL, momenta=1), FREE, NoWork()).seconds(FREE)
    copies = 8 * SMALL.numel / FREE.memory_rate  # gathering gradients is work of the training loop itself
    assert SMALL.computing - 1e-9 <= seconds.step <= SMALL.computing + 2 * copies + 5e-5


@pytest.mark.parametrize("name", LINE_UP)
def test_more_rate_and_less_latency_never_make_a_step_longer(name: str) -> None:
    prepared = prepare(name, SMALL, FOUR, NoWork())
    steps = [prepared.seconds(FOUR.at_rate(rate)).step for rate in (1e5, 1e6, 1e7, 1e8)]
    assert all(a >= b - 1e-9 for a, b in pairwise(steps)), steps
    late = replace(FOUR, hosts=(replace(FOUR.hosts[0], latency=1e-2),))
    assert prepared.seconds(late).step >= prepared.seconds(FOUR).step - 1e-9


def test_an_average_that_nothing_hides_takes_its_formula() -> None:
    """One bucket, ready at the end of backward: computing, then the ring."""
    exact = replace(FOUR, payload=1.0, efficiency={"ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
    one = replace(SMALL, shapes={"w": (100_000,)}, shares={"w": 1.0})
    seconds = prepare("allreduce", one, exact, NoWork()).seconds(exact)
    ring = 6 * 1e-4 + 2 * 3 / 4 * 400_000 / 1e6
    copies = 8 * 100_000 / exact.memory_rate
    assert seconds.step == pytest.approx(one.computing + copies + ring, rel=1e-6)
    assert seconds.network == pytest.approx(ring, rel=1e-6)
    rounds = prepare("local_sgd(8)", one, exact, NoWork()).seconds(exact)
    assert rounds.step - one.computing == pytest.approx(ring / 8, rel=0.01)


@pytest.mark.parametrize("every", [8, 24, 40, 100])
def test_an_average_that_takes_longer_than_a_round_is_waited_for_however_long_the_round(every: int) -> None:
    """In the first round none is in flight; of rounds of over 15 steps that one was replayed too, and of over 59 it alone."""
    exact = replace(FOUR, payload=1.0, efficiency={"ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
    one = replace(SMALL, shapes={"w": (100_000,)}, shares={"w": 1.0})
    slow = exact.at_rate(2 * 3 / 4 * 400_000 / (4 * every * one.computing))
    prepared = prepare(f"overlap_local_sgd({every})", one, slow, NoWork())
    assert prepared.overlaps
    assert prepared.seconds(slow).step == pytest.approx(4 * one.computing, rel=0.01)
    assert prepared.keeps == pytest.approx(2 * one.bytes)


def test_ranks_that_share_a_core_take_turns() -> None:
    """R ranks on C cores take R / C times as long, and a program's work is added where no core is free."""
    two = replace(FREE, hosts=(Hosts(count=1, ranks=4, cores=2.0),))
    seconds = compute(SMALL).seconds(two)
    assert seconds.step == pytest.approx(2 * SMALL.computing)
    assert seconds.utilisation == pytest.approx(1)  # others compute meanwhile
    assert seconds.work == pytest.approx(0, abs=1e-9)


def test_transfers_at_once_share_a_card() -> None:
    """DDP's two rings on gloo take no less than their bytes over the rate."""
    model = known_model("gpt2", 0.35, memory_rate=1e15)
    here = from_flags(nodes=2, rate=125e6)
    step = ddp(model, 2).seconds(replace(here, byte_seconds=0.0)).step
    assert step > model.bytes / 125e6 / 0.956


@pytest.mark.parametrize(("nodes", "per_node"), [(4, 1), (4, 2)])
def test_messages_to_two_neighbours_and_from_both_cross_at_once(nodes: int, per_node: int) -> None:
    """Links carry both ways at the same time: two models out and two in take as long as two."""
    here = from_flags(nodes=nodes, ranks=per_node, rate=1e6, latency=1e-4)
    exact = replace(here, payload=1.0, efficiency={"one": 1.0, "ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
    one = replace(SMALL, shapes={"w": (100_000,)}, shares={"w": 1.0})
    recipe = "d_psgd(overlap=False)" + f" + per_node({per_node})" * (per_node > 1)
    seconds = prepare(recipe, one, exact, NoWork()).seconds(exact)
    assert seconds.card == pytest.approx(2 * 400_000)
    if per_node == 1:
        assert seconds.sent == pytest.approx(seconds.card)
        assert seconds.network == pytest.approx(1e-4 + 0.8, rel=1e-3)


def test_accumulation_averages_less_often() -> None:
    one, four = (ddp(SMALL, 4, accumulate=k).seconds(FOUR) for k in (1, 4))
    assert four.sent == pytest.approx(one.sent / 4)
    assert four.network < one.network / 2
    free = ddp(SMALL, 4, accumulate=4).seconds(FREE)
    assert free.optimizer == pytest.approx(SMALL.optimizer / 4)
    assert free.work == pytest.approx(16 * SMALL.numel / FREE.memory_rate / 4, rel=1e-3)  # copies to buckets and back


def test_a_recipe_of_micro_batches_is_planned_as_accumulating_ddp_is() -> None:
    """A step is one of them: with one bucket both compute, and then average once."""
    one = replace(SMALL, shapes={"w": (100_000,)}, shares={"w": 1.0})
    recipe = prepare("minibatch(4)", one, FOUR, NoWork()).seconds(FOUR)
    dense = ddp(one, 4, accumulate=4).seconds(FOUR)
    assert recipe.step == pytest.approx(dense.step, rel=0.01)
    assert recipe.sent == pytest.approx(dense.sent, rel=1e-3)
    assert recipe.optimizer == pytest.approx(one.optimizer / 4)


def test_two_levels_send_less_through_a_card() -> None:
    here = from_flags(nodes=4, gpus=8, rate=1e8)
    model = known_model("resnet50", 0.2)
    flat = prepare("bf16", model, here, NoWork()).seconds(here)
    cut = prepare("bf16 + per_node(8)", model, here, NoWork()).seconds(here)
    assert flat.card > 4 * cut.card
    assert flat.card > ddp(model, 32).seconds(here).card  # bf16 by scatter moves more than dense
    assert line_up(8)[0] == "bf16 + per_node(8)"


def test_recipes_on_one_host_alone_are_between_its_ranks() -> None:
    """In two levels they would average uncompressed inside it, and do nothing besides."""
    found = plan(SMALL, from_flags(nodes=1, gpus=4, inside=5e5), work=NoWork(), curves=False)
    rows = {row.name: row.seconds.step for row in found.possible if row.seconds is not None}
    assert {*rows} <= {*LINE_UP}
    assert found.dense.seconds is not None
    assert rows["terngrad"] < 0.9 * found.dense.seconds.step


def test_shards_average_their_part_among_nodes() -> None:
    found = plan(known_model("gpt2", 0.35), from_flags(nodes=4, gpus=8, rate=1e9), ["qsgd"], shards=8, curves=False)
    assert [row.name for row in found.baselines] == ["hsdp", "fsdp"]
    row = found.recipes[0]
    assert row.seconds is not None
    assert row.seconds.card == pytest.approx(8 * row.seconds.sent)
    assert row.of["hsdp"] < 1


def test_a_recipe_that_no_sharded_model_trains_with_is_a_row_that_says_so() -> None:
    """`attach` refuses it there; it was planned, and could be the one that the plan names."""
    here = from_flags(nodes=4, gpus=2, rate=1e8)
    asked = ["backup", "decoupled_diloco(8)", "onebit_lamb(8)", "qsgd"]
    found = plan(SMALL, here, asked, work=NoWork(), shards=2, curves=False)
    assert [row.name for row in found.possible] == ["qsgd"]
    assert [row.error.count("with a model that FSDP2 shards: ") for row in found.recipes[1:]] == [1, 1, 1]
    assert len(plan(SMALL, here, ["backup"], work=NoWork(), curves=False).possible) == 1


def test_ranks_that_wait_for_their_shards_do_not_compute() -> None:
    """On slow links inside a host the gathers of parameters last longer than the passes that they should hide behind."""
    slow = from_flags(nodes=2, gpus=8, rate=1e12, latency=0.0, inside=1e9)
    model = known_model("gpt2", 0.35)
    found = plan(model, slow, ["allreduce"], work=NoWork(), shards=8, curves=False)
    waits = 3 * 7 / 8 * model.bytes / 1e9 - model.forward - model.backward
    for row in (found.dense, *found.recipes):
        assert row.seconds is not None
        assert (row.seconds.forward, row.seconds.backward) == pytest.approx((model.forward, model.backward))
        assert row.seconds.network >= waits - 1e-9
        assert row.seconds.utilisation == pytest.approx(0.35 / row.seconds.step, rel=0.05)
    assert "hides behind computing" not in sentences(found)[0]


def test_between_replicas_on_gpus_recipes_go_through_gloo_and_hsdp_over_nccl() -> None:
    """As `attach` does; recipes were planned over NCCL, where bytes take no processor and trees meet sooner."""
    gpus, model = from_flags(nodes=32, gpus=2, rate=1e8), known_model("gpt2", 0.35)
    found = plan(model, gpus, ["allreduce"], work=NoWork(), shards=2, curves=False)
    (row,), dense = found.recipes, found.dense
    gloo = prepare("allreduce", sharded(model, gpus, 2), gpus, NoWork(), 2)
    assert row.seconds is not None
    assert dense.seconds is not None
    assert row.low <= row.seconds.step <= row.high
    pieces = [p for step in gloo.steps for a in step if isinstance(a, StartProgram) for p in a.pieces]
    assert {p.crossing.between for p in pieces if p.crossing is not None} == {2 * 31}
    assert gloo.seconds(gpus) == row.seconds
    assert between_shards(gpus, 1) == gpus
    assert between_shards(gpus, 2).reaches("pairs") == gpus.reaches("pairs")
    assert dense.seconds.step < row.seconds.step


def test_fsdp_gathers_layer_by_layer_and_each_gather_is_a_ring() -> None:
    """Of 13 parts, twice gathered and once scattered in 31 messages each, of which 3 leave a node; one ring was charged for all."""
    late = from_flags(nodes=4, gpus=8, rate=1e18, latency=1.0, inside=1e18)
    model = known_model("gpt2", 0.35)
    step = fsdp(model).seconds(late).step
    assert step == pytest.approx(3 * 13 * (3 * 1.0 + 28 * late.latency_inside), rel=1e-3)


def test_hsdp_averages_each_module_by_itself() -> None:
    """13 of them, one after the other, in four messages each; DDP's buckets were planned, of which a shard of GPT-2 fills four."""
    late = from_flags(nodes=4, gpus=8, rate=1e18, latency=1.0, inside=1e18)
    assert hsdp(known_model("gpt2", 0.35), 8).seconds(late).step == pytest.approx(13 * 4 * 1.0, rel=0.02)


@pytest.mark.parametrize("size", [64, 1024, 10_000])
def test_many_ranks_plan_quickly_enough_to_be_in_this_test(size: int) -> None:
    here = from_flags(nodes=size, gpus=1, rate=1e9)
    found = plan(known_model("gpt2", 0.35), here, ["allreduce", "qsgd", "local_sgd(8)"], curves=False)
    assert [row.error for row in found.recipes] == ["", "", ""]


def test_auto_is_planned_as_what_it_is_predicted_to_choose() -> None:
    """It was planned as dense, whatever the network."""
    asked = ["auto", "allreduce", *ALLOWED]
    rows = {row.name: row for row in plan(SMALL, FOUR, asked, work=NoWork(), curves=False).recipes}
    steps = {name: rows[name].seconds.step for name in ALLOWED}  # pyright: ignore[reportOptionalMemberAccess]
    assert rows["auto"].choice == min(steps, key=lambda name: steps[name])
    assert rows["auto"].seconds == rows[rows["auto"].choice].seconds
    assert {row.choice for name, row in rows.items() if name != "auto"} == {""}
    free = plan(SMALL, FREE, ["auto", "allreduce"], work=NoWork(), curves=False).recipes
    assert [row.choice for row in free if row.name == "auto"] == ["dense"]
    assert free[0].seconds == free[1].seconds
    (kept,) = plan(SMALL, FOUR, ["auto(gain=0.99)"], work=NoWork(), curves=False).recipes
    assert (kept.choice, kept.seconds) == ("dense", rows["allreduce"].seconds)


def test_auto_is_refused_where_a_recipe_that_it_may_choose_is() -> None:
    """As `attach` refuses it before the first step."""
    two = replace(FOUR, hosts=(replace(FOUR.hosts[0], count=2),))
    (row,) = plan(SMALL, two, ["auto(allow=('qsgd', 'allreduce + backup(1)'))"], work=NoWork(), curves=False).recipes
    assert row.error


# -- work -------------------------------------------------------------------------------------------------------------------


def test_work_is_measured_once_and_positive() -> None:
    """Whatever a program does, and however many ranks it decodes the wires of."""
    work = MeasuredWork()
    model = from_shapes({"w": (1000, 512)}, 0.1, name="w", memory_rate=10e9)

    def spent(nodes: int) -> float:
        here = from_flags(nodes=nodes, rate=inf)
        prepared = prepare("gather(qsgd())", model, here, work)
        return sum(p.work + p.inside for step in prepared.steps for a in step if hasattr(a, "pieces") for p in a.pieces)

    eight = spent(8)
    assert eight > 0
    assert spent(8) == eight
    assert work.seconds > 0


def test_work_grows_on_a_line_where_it_grows() -> None:
    """From 4 and 8 ranks to 64; a gather's decoding grows, and what falls or stays within 3 % does not."""
    assert on_a_line(Work(1.0, 2.0), Work(1.0, 4.0), 64) == Work(1.0, 4.0 + 2.0 / 4 * 56)
    assert on_a_line(Work(2.0, 1.0), Work(1.0, 1.02), 64) == Work(1.0, 1.02)


@pytest.mark.parametrize(("size", "measured"), [(48, {48}), (128, {32, 64})])
def test_work_of_two_levels_is_measured_among_nodes(size: int, measured: set[int]) -> None:
    """Eight ranks are one node of eight, which compresses nothing: codecs between nodes took no time at all."""
    seen = set[int]()

    def run(block: Bucket, context: Context, states: States, hollow: bool) -> Program[None]:
        seen.add(context.size)
        yield from ()

    MeasuredWork().of(Planned(Layout.of({"w": (8,)}), ("own",), run, per_node=8), size, [])
    assert seen == measured


@pytest.mark.parametrize("recipe", ["qsgd", "powersgd", "local_sgd(8)", "sgp"])
def test_programs_say_how_many_ranks_are_a_node(recipe: str) -> None:
    asked = list[int]()

    class Seen(NoWork):
        def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
            asked.append(program.per_node)
            return super().of(program, size, verbs)

    prepare(f"{recipe} + per_node(8)", SMALL, from_flags(nodes=16, ranks=8, rate=1e8), Seen())
    assert 8 in asked


def test_what_a_long_bucket_takes_is_scaled_from_its_first_part() -> None:
    work = MeasuredWork()
    short, long = (from_shapes({"w": (n,)}, 1.0, name="w", memory_rate=1e10) for n in (4_000_000, 16_000_000))
    here = from_flags(nodes=2, rate=inf)

    def spent(model: ModelCost) -> float:
        prepared = prepare("allreduce(bf16())", model, here, work)
        return sum(p.work + p.inside for s in prepared.steps for a in s if hasattr(a, "pieces") for p in a.pieces)

    assert spent(long) / spent(short) == pytest.approx(4, rel=1e-6)


def test_passes_over_memory_cost_nothing_on_an_infinite_memory() -> None:
    quick, slow = (
        prepare("topk", SMALL, FOUR, MemoryPasses(rate, launch=0.0)).seconds(FOUR).step for rate in (1e18, 1e6)
    )
    assert slow > quick


# -- rates ------------------------------------------------------------------------------------------------------------------


def test_intervals_are_found_to_two_per_cent() -> None:
    assert pays_between(lambda rate: 1.0) == []
    assert pays_between(lambda rate: 0.5) == [Interval(125e3, inf)]
    (below,) = pays_between(lambda rate: 0.5 if rate < 3e6 else 1.0)
    assert below.low == 125e3
    assert below.high == pytest.approx(3e6, rel=0.02)
    (middle,) = pays_between(lambda rate: 0.9 if 1e6 < rate < 1e9 else 1.0)
    assert middle == pytest.approx((1e6, 1e9), rel=0.02)
    assert pays_between(lambda rate: 0.96) == []  # a tie


def test_rates_that_keep_machines_busy() -> None:
    found = busy_at(lambda rate: rate / (rate + 1e6))
    assert found[0.5] == pytest.approx(1e6, rel=0.02)
    assert found[0.9] == pytest.approx(9e6, rel=0.02)
    assert busy_at(lambda rate: 0.4) == {}


def test_the_shortest_round_that_reaches_ninety_per_cent_does() -> None:
    found = plan(SMALL, FOUR, ["local_sgd(8)", "overlap_local_sgd(8)", "qsgd"], work=NoWork(), curves=False)
    every = {row.name: row.every for row in found.recipes}
    assert (every["qsgd"], every["overlap_local_sgd(8)"]) == (None, None)
    best = every["local_sgd(8)"]
    assert best is not None
    busy = [
        prepare(f"local_sgd({n})", SMALL, FOUR, NoWork()).seconds(FOUR).utilisation for n in (best, max(best // 2, 1))
    ]
    assert busy[0] >= 0.895
    assert best == 1 or busy[1] < 0.9


def test_no_round_is_said_to_keep_machines_busier_than_slow_ranks_let_them_be() -> None:
    """Steps of random length are waited for in rounds too, however short their averages are."""
    random = replace(FOUR, hosts=(replace(FOUR.hosts[0], up=1e9),), law=ShiftedExponential(0.3))
    row = plan(SMALL, random, ["local_sgd(2)"], work=NoWork(), curves=False).recipes[0]
    assert row.seconds is not None
    assert 0.8 < row.seconds.utilisation < 0.85
    assert [*row.rounds] == [0.5, 0.8]


def test_the_shortest_round_is_one_round_and_not_a_cycle_of_several() -> None:
    """Those of `des_loc` repeat after six; and where ranks also meet within a round, its length changes what it adds."""
    model = replace(SMALL, momenta=0)  # so that it averages models alone
    asked = ["local_sgd(8)", "des_loc(8)", "hierarchical(2, 2, local_sgd(8))", "slowmo(8, inner=push_sum())"]
    found = {row.name: row.rounds for row in plan(model, FOUR, asked, work=NoWork(), curves=False).recipes}
    assert found["des_loc(8)"][0.99] == pytest.approx(found["local_sgd(8)"][0.99], rel=0.1)
    assert found["hierarchical(2, 2, local_sgd(8))"] == found["slowmo(8, inner=push_sum())"] == {}


def test_ranks_that_meet_at_every_step_wait_for_the_slowest_of_each() -> None:
    """However long it takes until their requests repeat: with `resync` the slowest of 64 steps together was waited for."""
    random = replace(FREE, law=ShiftedExponential(0.3))
    asked = ["allreduce", "allreduce + resync(64)", "local_sgd(8)", "des_loc(8)"]
    found = {row.name: row.seconds for row in plan(SMALL, random, asked, work=NoWork(), curves=False).recipes}
    for one, other in (("allreduce", "allreduce + resync(64)"), ("local_sgd(8)", "des_loc(8)")):
        assert found[one] is not None
        assert found[other] is not None
        assert found[other].waiting == pytest.approx(found[one].waiting)  # pyright: ignore[reportOptionalMemberAccess]


# -- unlike hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["qsgd", "local_sgd(8)", "allreduce + delayed()"])
def test_a_step_waits_for_the_host_that_computes_at_half_speed(recipe: str) -> None:
    """On a network that costs nothing a step takes twice as long, for recipes and baselines alike."""
    quick = replace(FREE, hosts=(replace(FREE.hosts[0], memory_rate=1e15),))
    slow = replace(quick, hosts=(replace(quick.hosts[0], count=3), replace(quick.hosts[0], count=1, speed=0.5)))
    even, uneven = (plan(SMALL, c, [recipe], work=NoWork(), curves=False) for c in (quick, slow))
    for a, b in zip([*even.baselines, *even.recipes], [*uneven.baselines, *uneven.recipes], strict=True):
        assert a.seconds is not None
        assert b.seconds is not None
        assert b.seconds.step == pytest.approx(2 * a.seconds.step, rel=1e-6), a.name
        assert b.seconds.utilisation == pytest.approx(a.seconds.utilisation, rel=1e-6)
    assert any("computes at 0.5 of the fastest one's speed" in line for line in sentences(uneven))


def test_work_takes_longer_on_a_slow_host() -> None:
    cluster = replace(FREE, hosts=(replace(FREE.hosts[0], speed=0.25),))
    quick, slow = (prepare("qsgd", SMALL, c, MemoryPasses(1e9)).seconds(c) for c in (FREE, cluster))
    assert slow.work == pytest.approx(4 * quick.work, rel=1e-6)


def test_what_goes_on_without_the_slowest_keeps_its_pace_beside_unlike_hosts() -> None:
    cluster = replace(FREE, hosts=(replace(FREE.hosts[0], count=3), replace(FREE.hosts[0], count=1, speed=0.5)))
    found = plan(SMALL, cluster, ["backup", "allreduce"], work=NoWork(), curves=False).recipes
    assert [(row.name, row.simulated) for row in found] == [("backup", 4), ("allreduce", 0)]
    quick, slow = (row.seconds.step for row in found if row.seconds is not None)
    assert quick == pytest.approx(SMALL.computing, rel=0.02)
    assert slow == pytest.approx(2 * SMALL.computing, rel=0.02)
    assert plan(SMALL, FOUR, ["backup"], work=NoWork(), curves=False).recipes[0].simulated == 0


# -- memory -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "copies"), [("allreduce", 0), ("topk", 1), ("ef21", 2), ("local_sgd(8)", 1), ("slowmo(8)", 2)]
)
def test_memory_is_that_of_residuals_and_anchors(name: str, copies: int) -> None:
    model = known_model("resnet50", 0.2)
    assert prepare(name, model, FOUR, NoWork()).keeps == pytest.approx(copies * model.bytes, rel=0.02, abs=1e5)


def test_a_recipe_that_does_not_fit_is_a_row_that_says_so() -> None:
    model = from_shapes({"w": (1000, 512)}, 0.1, name="w", memory_rate=10e9)
    needed = 4 * 512_000 * (2 + model.momenta)
    cluster = replace(FOUR, hosts=(replace(FOUR.hosts[0], memory=1.6 * needed),))
    found = plan(model, cluster, ["bf16", "topk"], work=NoWork(), curves=False)
    assert [(row.name, row.error != "") for row in found.recipes] == [("bf16", False), ("topk", True)]
    assert "a rank may use 13.1 MB" in found.recipes[1].error
    small = replace(FOUR, hosts=(replace(FOUR.hosts[0], memory=0.9 * needed),))
    assert any(
        "Nothing here fits" in line for line in sentences(plan(model, small, ["bf16"], work=NoWork(), curves=False))
    )


def test_a_frozen_base_is_held_by_all_ranks_and_gathered_by_those_of_shards() -> None:
    """And not sent. A base of 4 MB under an adapter of 40 kB was left out."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000).requires_grad_(False), torch.nn.Linear(1000, 10))
    cost = untrained(model, 0.1, name="adapted", memory_rate=1e10)
    assert (cost.numel, cost.frozen) == (10_010, 4 * 1_001_000)
    assert untrained(model, 0.1, name="adapted", memory_rate=1e10, dtype="bf16").frozen == 2 * 1_001_000
    row = plan(cost, FOUR, ["topk"], work=NoWork(), curves=False).recipes[0]
    assert row.memory is not None
    assert row.memory.model == 4 * (1_001_000 + 10_010)
    assert row.seconds is not None
    assert row.seconds.sent < 4 * 10_010
    full = replace(FOUR, hosts=(replace(FOUR.hosts[0], memory=3e6),))
    found = plan(cost, full, ["topk"], work=NoWork(), curves=False)
    assert "it does not fit" in found.recipes[0].error
    assert any("Nothing here fits" in line for line in sentences(found))
    hosts = from_flags(nodes=2, gpus=2, rate=1e8)
    _, fsdp = plan(cost, hosts, ["topk"], work=NoWork(), shards=2, curves=False).baselines
    assert fsdp.seconds is not None
    assert fsdp.seconds.sent == pytest.approx(3 / 4 * (3 * cost.bytes + 2 * cost.frozen), rel=1e-3)


# -- models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("bert-base", 109_482_240),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-7b", 6_738_415_616),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name: str, numel: int) -> None:
    assert set(MODELS) >= {name}
    assert known_model(name, 1.0).numel == numel


def test_a_step_is_cut_into_its_parts() -> None:
    model = known_model("gpt2", 0.35)
    assert model.computing == pytest.approx(0.35)
    assert model.backward == pytest.approx(2 * model.forward)
    assert with_step(model, 0.7).computing == pytest.approx(0.7)


def test_gradients_arrive_in_backwards_order_where_they_are_measured() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    cost = measure(model, sgd, lambda step: model(torch.ones(64, 256)).sum())
    shares = [cost.shares[f"{i}.weight"] for i in range(6)]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] <= 1
    assert (cost.momenta, cost.numel) == (1, 6 * 256 * 257)


class OwnSgd(torch.optim.SGD):
    """Made as no other optimizer is."""

    def __init__(self, model: torch.nn.Module, pace: float) -> None:
        super().__init__(model.parameters(), lr=pace, momentum=0.9)


def test_an_optimizer_of_ones_own_is_measured_as_it_is() -> None:
    """A copy was made to count its buffers; of a script, 'never attached' was all that was said then."""
    model = torch.nn.Linear(8, 8)
    cost = measure(model, OwnSgd(model, 0.1), lambda step: model(torch.ones(2, 8)).sum())
    assert cost.momenta == 1
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert measure(model, plain, lambda step: model(torch.ones(2, 8)).sum()).momenta == 0


# -- refused ----------------------------------------------------------------------------------------------------------------


def test_nonsense_is_refused_with_the_way_out() -> None:
    with pytest.raises(CostError, match="one rank alone"):
        plan(SMALL, from_flags(nodes=1, rate=1e6), ["qsgd"])
    with pytest.raises(CostError, match="not cut into groups of 3"):
        plan(SMALL, from_flags(nodes=2, gpus=8, rate=1e6), ["qsgd"], shards=3)
    with pytest.raises(CostError, match=r"no model called 'gpt3'.*gpt2"):
        known_model("gpt3", 1.0)
    with pytest.raises(CostError, match="no parameters"):
        untrained(torch.nn.ReLU(), 1.0, name="relu", memory_rate=1e9)
    model = torch.nn.ReLU()
    with pytest.raises(CostError, match="no parameters"):
        measure(model, torch.optim.SGD([torch.zeros(1)], lr=1.0), lambda step: model(torch.ones(1)), name="relu")


def test_a_recipe_that_does_not_fit_is_a_row_with_its_reason() -> None:
    found = plan(SMALL, from_flags(nodes=2, rate=1e6), ["backup", "qsgd"], work=NoWork(), curves=False)
    assert [row.name for row in found.recipes] == ["qsgd", "backup"]
    assert "use at least 3 ranks" in found.recipes[1].error
    assert found.possible == [found.recipes[0]]


def test_very_many_ranks_are_refused_as_many_as_they_are() -> None:
    """They are checked in a smaller world, in which a quorum of theirs may be too large."""
    many = from_flags(nodes=2000, rate=1e9)
    with pytest.raises(AttachError, match="2000 ranks are not equally many"):
        prepare("sgp + per_node(3)", SMALL, many, NoWork())
    assert prepare("allreduce + backup_workers(backups=1500)", SMALL, many, NoWork()).programs.size == 2000


def test_a_plan_is_a_value_of_the_library() -> None:
    assert isinstance(plan(SMALL, FOUR, ["qsgd"], work=NoWork(), curves=False), TrainingPlan)
    assert issubclass(CostError, gossamer.GossamerError)


# -- more hosts -----------------------------------------------------------------------------------------------------------------


def test_more_hosts_are_planned_as_each_of_them_alone() -> None:
    def planned(there: Cluster) -> TrainingPlan:
        return plan(SMALL, there, ["qsgd", "topk", "backup", "scatter(topk())"], work=NoWork(), curves=False)

    found = scaling(FOUR, [2, 4], planned)
    for count in (2, 4):
        there = replace(FOUR, hosts=(replace(FOUR.hosts[0], count=count),))
        alone = plan(SMALL, there, ["qsgd", "topk"], work=NoWork(), curves=False)
        for row in (*alone.baselines, *alone.recipes):
            assert row.seconds is not None
            assert found.seconds[row.name][count] == pytest.approx(row.seconds.step)
    assert found.seconds["backup"].keys() == {4}  # it needs a rank to leave out
    assert found.refused.keys() == {"backup", "scatter(topk())"}
    with pytest.raises(CostError, match="one rank alone sends nothing"):
        scaling(FOUR, [1], planned)
    unlike = replace(FOUR, hosts=(FOUR.hosts[0], replace(FOUR.hosts[0], speed=0.5)))
    with pytest.raises(CostError, match="unlike groups of hosts"):
        scaling(unlike, [4], planned)


def test_fewer_hosts_have_a_slow_rank_still() -> None:
    slow = replace(FOUR, law=SlowRank(3.0, rank=3))
    found = scaling(slow, [2, 4], lambda there: plan(SMALL, there, ["qsgd"], work=NoWork(), curves=False))
    assert all(step > 3 * SMALL.computing for step in found.seconds["qsgd"].values())
    assert not found.refused
