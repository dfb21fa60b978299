"""The law of traits: whoever claims one keeps its promise, and there is no trait without a law."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.laws.blocks import agree, bits, block, context, sent, vector
from tests.laws.crew import Crew
from tests.laws.samples import controlled, controllers, exchanges, memories, schedules, unpaced, updates
from tests.runtime.fleet import SMALL
from tests.runtime.gym import (
    Odd,
    anchors,
    bit_equal,
    held,
    make,
    on_all,
    parameters,
    pull,
    sgd,
    train,
    weighted_optimum,
)
from torch import Tensor

from gossamer.combinations import ConstrainedRules
from gossamer.controllers import Fixed
from gossamer.core.bucket import Bucket
from gossamer.core.constraints import TRAITS, requires
from gossamer.core.contracts import Controller, Exchange, Memory, ReduceResult, Update
from gossamer.core.errors import RecipeError
from gossamer.core.loop import Loop
from gossamer.core.schedule import Schedule
from gossamer.memories import NoMemory
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.simulate import Replica

DRAWS = 300
LAWS: dict[str, Callable[[Any], None]] = {}


def law(trait: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def keep(judge: Callable[[Any], None]) -> Callable[[Any], None]:
        LAWS[trait] = judge
        return judge

    return keep


def once(
    exchange: Exchange, blocks: list[Bucket], step: int = 1, **at: Any
) -> tuple[list[ReduceResult], list[dict[str, Any]]]:
    """One exchange among as many ranks as there are blocks: what they get, and what they keep."""
    kept: list[dict[str, Any]] = [{} for _ in blocks]
    contexts = [context(r, len(blocks), step)._replace(**at) for r in range(len(blocks))]
    echoes, _ = agree([exchange.average(b, s, at) for b, s, at in zip(blocks, kept, contexts, strict=True)])
    return echoes, kept


# -- of what is sent ---------------------------------------------------------------------------------------------------


@law("unbiased")
def right_on_average(exchange: Exchange) -> None:
    """Fixed draws; with others a right exchange would fail at one coordinate of one sample with a chance of 6e-7 (z < 5)."""
    blocks = [block("several", seed=r) for r in range(2)]
    through = [once(exchange, blocks, step)[0] for step in range(DRAWS)]
    errors = torch.stack([sent(e[0], blocks[0]) - blocks[0].flat for e in through]).double()
    spread = errors.std(0)
    floor = (spread.square().mean().sqrt() / 2).clamp(min=1e-6)  # who rarely moves shows little of its spread
    assert float((errors.mean(0) / (spread.clamp(min=floor) / DRAWS**0.5)).abs().max()) < 5


@law("contracts")
def loses_less_than_there_is(exchange: Exchange) -> None:
    spike = torch.full((300,), 0.05)
    spike[11] = 1.0
    noise = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for values in (torch.ones(300), spike, noise, noise**5, torch.linspace(-1, 1, 300)):
        blocks = [vector(values), vector(values.flip(0))]
        given = sum(float(b.flat.square().sum()) for b in blocks)
        lost = [lost_at(exchange, blocks, step) for step in (0, 1, 29)]
        if not bit_equal(lost):  # what draws no numbers loses the same at every step
            lost += [lost_at(exchange, blocks, step) for step in range(2, 29)]
        squares = torch.stack(lost).double().square().sum(1)
        assert float(squares.mean()) < given * (1 if exchange.needs_feedback else 1.05)


def lost_at(exchange: Exchange, blocks: list[Bucket], step: int) -> Tensor:
    """What all ranks did not get through at a step, one behind the other."""
    echoes, _ = once(exchange, blocks, step)
    return torch.cat([sent(e, b) - b.flat for e, b in zip(echoes, blocks, strict=True)])


@law("bounds residual")
def holds_back_no_more_than_it_did(exchange: Exchange) -> None:
    """Of a spike that stays, and of gradients that come and go, all of it beyond half of what there was."""
    spike = torch.full((300,), 1e-6)
    spike[11] = 1.0
    for values in (spike, torch.randn(300, generator=torch.Generator().manual_seed(5))):
        crew, held = Crew(f"{exchange} + error_feedback()", 2), list[float]()
        for step in range(80):
            crew.step([vector(values), vector(values.roll(step))])
            held.append(float(crew.mean_of("residual").norm()))
        assert max(held[40:]) < 1.3 * max(held[:40])
        assert max(held) < 30 * float(values.norm())


@law("whole")
def sees_all_parameters_in_one_block(party: Any) -> None:
    recipe = party if party.kind == "exchange" else f"allreduce(fp32()) + {party}"
    memory = " + none(allow_biased=True)" if party.kind == "exchange" and party.needs_feedback else ""
    assert len(make(f"{recipe}{memory}{SMALL}", 3)[0].worker.buckets) == 1


@law("exact")
def loses_nothing(exchange: Exchange) -> None:
    """Whole numbers, whose sums are exact."""
    blocks = [vector(torch.arange(300.0) - 100 * r) for r in range(2)]
    for result, given in zip(once(exchange, blocks)[0], blocks, strict=True):
        assert torch.equal(result.mean, (blocks[0].flat + blocks[1].flat) / 2)
        assert torch.equal(sent(result, given), given.flat)


@law("own size")
def sends_of_small_gradients_what_it_says(exchange: Exchange) -> None:
    blocks = [block("long", seed=r) for r in range(2)]
    small = [b.like(b.flat * 1e-6) for b in blocks]
    usual, tiny = (sent(once(exchange, given)[0][0], given[0]) for given in (blocks, small))
    assert not torch.allclose(tiny * 1e6, usual, rtol=0.5, atol=0.1)


@law("sparse")
def sends_some_elements_as_they_are(exchange: Exchange) -> None:
    blocks = [block("long", seed=r) for r in range(2)]
    for result, given in zip(once(exchange, blocks)[0], blocks, strict=True):
        through = sent(result, given)
        assert bool(((through == 0) | (through == given.flat)).all())
        assert 0 < int((through != 0).sum()) < given.numel


@law("votes")
def counts_no_rank_more_than_another(exchange: Exchange) -> None:
    """But where a rank's own values pass no codec: in the chunk that it averages itself."""
    given, louder = told_thrice(exchange)
    assert torch.equal(*(vector(mean).chunks(2)[1].flat for mean in (given, louder)))


def told_thrice(exchange: Exchange) -> tuple[Tensor, Tensor]:
    """What is agreed on by two ranks; and where the first gives three times what it gave."""
    blocks = [vector(block("long", seed=r).flat) for r in range(2)]
    louder = [blocks[0].like(3 * blocks[0].flat), blocks[1]]
    return once(exchange, blocks)[0][0].mean, once(exchange, louder)[0][0].mean


def test_who_has_no_vote_counts_as_much_as_he_gives() -> None:
    """So that a weighted mean is one: whoever cannot weight must claim the trait."""
    for exchange in {alike(e): e for e in exchanges()}.values():
        if not exchange.votes:
            given, louder = (vector(mean).chunks(2)[1].flat for mean in told_thrice(exchange))
            assert not torch.equal(given, louder), exchange


@law("mixes")
def pulls_together_and_keeps_the_sum(schedule: Schedule) -> None:
    def apart(model: torch.nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.full_like(p, float(rank)) if step == 1 else torch.zeros_like(p)
        return 0.0

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    ranks = make(f"allreduce(fp32()) + {schedule}", 4, optimizer=plain)
    start = parameters(ranks)[0]
    train(ranks, apart, 12)
    on_all(ranks, Worker.quiesce)
    torch.testing.assert_close(sum(held(r) for r in ranks) / 4, start - 0.1 * 1.5, rtol=1e-5, atol=1e-5)
    weights = torch.stack([s.weight for r in ranks for s in schedule.consensus_share(r.worker.loop) or []])
    assert float(weights.sum()) == 4 * len(ranks[0].worker.buckets)
    models = torch.stack(parameters(ranks))
    assert float((models - models.mean(0)).abs().max()) < 0.1  # 0.15 as they were before the first round


@law("is async")
def waits_for_nobody_and_loses_no_step(schedule: Schedule) -> None:
    def steady(model: torch.nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.full_like(p, float(rank))
        return 0.0

    ranks = make(f"allreduce(fp32()) + {schedule}", 4, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    start = parameters(ranks)[0]
    train(ranks, steady, 12, seconds=lambda rank, step: 6.0 if rank == 0 else 1.0)
    assert [r.clock for r in ranks] == [72.0, 12.0, 12.0, 12.0]
    assert [r.worker.step for r in ranks] == [13] * 4
    on_all(ranks, Worker.quiesce)
    if all("anchor" in c.states["schedule"] for c in ranks[0].worker.buckets):
        assert bit_equal([anchors(r) for r in ranks])  # how steps are merged is the schedule's to say
        return
    shares = [(schedule.consensus_share(r.worker.loop) or [])[0] for r in ranks]
    weight = float(sum(s.weight for s in shares))  # 1 where a server has the model, else each rank's own
    torch.testing.assert_close(sum(held(r) for r in ranks), weight * start - 0.1 * 12 * 6, rtol=1e-5, atol=1e-4)


@law("rank to rank")
def whoever_it_is_talks_to_other_nodes(schedule: Schedule) -> None:
    """Not the first ranks of nodes of two alone: the second ones send letters of their own."""
    ledger = train(make(f"allreduce(fp32()) + {schedule}", 4), pull, 12).ledger
    assert {e.rank for e in ledger if e.verb == "Send"} & {1, 3}


@law("counts alike")
def ends_elsewhere_than_where_weights_say(schedule: Schedule) -> None:
    """f_i = (x - i)^2 / 2, of which the first counts three times as much as the second."""
    assert weighted_optimum(schedule) > 0.33


@law("resyncs")
def makes_models_equal_that_have_parted(schedule: Schedule) -> None:
    ranks = make(f"gather(topk(ratio=0.1)) + own_gradient() + {schedule}", 3)
    equal = list[bool]()
    for step in range(1, 10):
        train(ranks, pull, 1)
        equal.append(bit_equal(parameters(ranks)))
        assert equal[-1] == (step % schedule.shape.period == 0) == ranks[0].worker.recipe.is_synced(step)
    assert set(equal) == {True, False}


@law("own feedback")
def does_what_was_said_whatever_the_memory_says(exchange: Exchange) -> None:
    owed = []
    for said in (None, 0.5, 1.0):
        _, kept = once(exchange, [block("long", seed=r) for r in range(2)], feedback=said)
        owed.append([bits(s["owed"]) if "owed" in s else b"" for s in kept])
    assert owed[0] == owed[1] == owed[2]


@law("part feedback")
def leaves_something_out_of_its_books(exchange: Exchange) -> None:
    blocks = [block("long", seed=r) for r in range(2)]
    echoes, kept = once(exchange, blocks, feedback=1.0)
    through = sum(sent(e, b) for e, b in zip(echoes, blocks, strict=True)) / 2
    owed = sum(s["owed"] for s in kept if "owed" in s)
    assert not torch.allclose(echoes[0].mean + owed, through, rtol=1e-5, atol=1e-5)


@law("two levels")
def averages_within_nodes_first(exchange: Exchange) -> None:
    assert {len(group) for group in exchange.groups(4)} & {2, 3}


# -- of what is kept ---------------------------------------------------------------------------------------------------


def loops(ranks: list[Replica]) -> list[Loop]:
    return [r.worker.loop for r in ranks]


def around(memory: Memory) -> Crew:
    """The memory around a coarse exchange that it bears."""
    coarse = (
        "gather(ternary(clip=0.0))"
        if "wants unbiased" in memory.traits
        else "gather(topk(ratio=0.1)) + error_feedback()"
    )
    return Crew(coarse, 2, memory)


@law("memory")
def keeps_something(memory: Memory) -> None:
    crew = around(memory)
    crew.step([block("long", seed=r) for r in range(2)])
    assert all(state for state in crew.kept)


@law("mends bias")
def what_was_left_out_gets_through_later(memory: Memory) -> None:
    blocks = [block("long", seed=r) for r in range(2)]
    crew, plain = around(memory), Crew("gather(topk(ratio=0.1)) + error_feedback()", 2, NoMemory(allow_biased=True))
    got, lost = (sum(c.step(blocks) for _ in range(60)) for c in (crew, plain))
    assert isinstance(got, torch.Tensor)
    assert isinstance(lost, torch.Tensor)
    assert float((got != 0).float().mean()) > 0.5
    assert float((lost != 0).float().mean()) < 0.25


@law("fades")
def forgets_some_of_what_it_held_back(memory: Memory) -> None:
    crew, blocks = around(memory), [block("long", seed=r) for r in range(2)]
    crew.step(blocks)
    before = crew.mean_of("residual")
    got = crew.step([b.like(torch.zeros_like(b.flat)) for b in blocks])
    assert float((got + crew.mean_of("residual")).norm()) < 0.999 * float(before.norm())


@law("adds momentum")
def gives_more_than_it_was_given(party: Any) -> None:
    """Of a gradient that stays, what is owed apart."""
    blocks = [block("long", seed=7)] * 2
    crew = Crew(f"{party}", 2) if party.kind == "exchange" else around(party)
    total = sum(crew.step(blocks) for _ in range(60))
    assert isinstance(total, torch.Tensor)
    assert float(total.norm()) > 1.5 * 60 * float(blocks[0].flat.norm())


@law("bias allowed")
def lets_bias_through(memory: Memory) -> None:
    Recipe.of(f"gather(topk()) + {memory}")


@law("wants unbiased")
def follows_what_is_right_on_average(memory: Memory) -> None:
    assert all(0 < memory.follow(omega) <= 1 for omega in (0.0, 1.0, 100.0))


@law("remembers all")
def keeps_a_copy_of_the_mean_of_what_was_sent(memory: Memory) -> None:
    crew = around(memory)
    for step in range(3):
        crew.step([block("long", seed=10 * step + r) for r in range(2)])
    own = torch.stack([kept["own"] for kept in crew.kept])
    torch.testing.assert_close(crew.kept[0]["common"], own.mean(0), rtol=1e-5, atol=1e-5)


@law("parts models")
def gives_each_rank_what_is_its_own(memory: Memory) -> None:
    crew = around(memory)
    for step in range(2):
        crew.step([block("long", seed=10 * step + r) for r in range(2)])
    assert not torch.equal(*crew.results)


@law("owes steps")
def what_it_owes_makes_models_equal(memory: Memory) -> None:
    """Under plain SGD whose rate falls."""

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    ranks = make(f"gather(topk(ratio=0.1)) + {memory} + resync(1000){SMALL}", 3, optimizer=plain)
    for step in range(6):
        for r in ranks:
            r.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        train(ranks, pull, 1)
        whole = [
            torch.cat([x + o / 3 for x, o in zip(lp.parameters(), lp.averages.residuals(), strict=True)])
            for lp in loops(ranks)
        ]
        apart = torch.stack([torch.cat(lp.parameters()) for lp in loops(ranks)])
        assert float((torch.stack(whole) - whole[0]).abs().max()) < 2e-6 < float((apart - apart[0]).abs().max())


# -- of when -----------------------------------------------------------------------------------------------------------


@law("averages gradients")
def averages_at_every_step(schedule: Schedule) -> None:
    ranks = make(Recipe.of(f"allreduce(fp32()) + {schedule}"), 3)
    for step in range(1, 5):
        run = train(ranks, pull, 1)
        assert {e.step for e in run.ledger if e.step} == {step}
        assert bit_equal(parameters(ranks))


@law("meets")
def agrees_on_what_an_update_made_of_own_gradients(schedule: Schedule) -> None:
    ranks = make(f"allreduce(fp32()) + {schedule} + zero_one_adam_update()", 3, optimizer=sgd(0.05, 0.0))
    equal = list[bool]()
    for step in range(1, 13):
        train(ranks, pull, 1)
        equal.append(bit_equal(parameters(ranks)))
        assert equal[-1] == schedule.is_synced(step)
    assert set(equal) == {True, False}


@law("lags")
def takes_the_mean_of_the_step_before(schedule: Schedule) -> None:
    late, plain = (make(f"allreduce(fp32()) + {s}", 2, optimizer=sgd(momentum=0.0)) for s in (schedule, "every_step()"))
    before = parameters(late)
    train(late, pull, 1)
    assert bit_equal([*before, *parameters(late)])
    train(late, pull, 1)
    train(plain, pull, 1)
    assert bit_equal([*parameters(plain), *parameters(late)])


@law("waits for few")
def goes_on_without_the_latest(schedule: Schedule) -> None:
    ranks = make(f"allreduce(fp32()) + {schedule}", 3)
    train(ranks, pull, 6, seconds=lambda rank, step: 100.0 if rank == 2 else 1.0)
    late = "backups=0" not in repr(schedule)
    assert [r.clock for r in ranks] == ([6.0, 6.0, 100.0] if late else [600.0] * 3)
    assert [r.worker.record.dropped_steps for r in ranks] == [[], [], [1] if late else []]
    assert bit_equal(parameters(ranks))


@law("batch")
def can_grow(schedule: Schedule) -> None:
    grown = replace(schedule, micro_batches=3, rate=2.0)  # pyright: ignore
    assert (grown.shape.micro_batches, grown.shape.lr_factor) == (3, 2.0)


@law("accumulates")
def makes_one_step_of_several_batches(schedule: Schedule) -> None:
    ranks = make(f"allreduce(fp32()) + {schedule}", 2)
    passes = list[int]()
    train(ranks, lambda model, rank, step: (passes.append(rank), pull(model, rank, step))[1], 3)
    assert len(passes) == 2 * 3 * schedule.shape.micro_batches > 6


@law("own step")
def moves_otherwise_than_the_optimizer(schedule: Schedule) -> None:
    own = make(Recipe.of(f"allreduce(fp32()) + {schedule}"), 2)
    plain = make(f"allreduce(fp32()) + every_step(micro_batches={schedule.shape.micro_batches})", 2)
    train(own, pull, 3)
    train(plain, pull, 3)
    assert not bit_equal([parameters(own)[0], parameters(plain)[0]])


# -- of how much, and for whom -----------------------------------------------------------------------------------------


@law("directs")
def is_no_mean_any_more(update: Update) -> None:
    ranks, plain = make(f"allreduce(fp32()) + {update}", 2), make("allreduce", 2)
    for each in (ranks, plain):
        train(each, pull, 2)
    gradients = [
        torch.cat([p.grad.reshape(-1) for p in e[0].model.parameters() if p.grad is not None]) for e in (ranks, plain)
    ]
    assert not torch.allclose(*gradients)


@law("sends momentum")
def what_travels_is_no_gradient(update: Update) -> None:
    ranks = make(f"allreduce(fp32()) + {update}", 2)
    train(ranks, pull, 4)
    bucket = ranks[0].worker.buckets[0]
    for scale in (1.0, 1024.0):
        state = {k: v.clone() for k, v in bucket.states["update"].items()}
        given = Bucket(torch.randn(bucket.layout.numel) * scale, bucket.layout)
        travels = update.sent(given.like(given.flat.clone()), state, scale)
        assert not torch.allclose(travels, given.flat)
        assert 0.05 < float(travels.norm() / given.flat.norm()) < 2


@law("control")
def may_put_something_else_in_force(controller: Controller) -> None:
    recipes = [replace(r, controller=Fixed()) for r in controlled(controller)]
    assert [r for recipe in recipes for r in controller.reach(recipe) if r != recipe]


@law("moves schedule")
def may_put_another_schedule_in_force(controller: Controller) -> None:
    recipe = replace(next(controlled(controller)), controller=Fixed())
    assert any(r.schedule != recipe.schedule for r in controller.reach(recipe))


@law("hears rate")
def decides_otherwise_where_rates_fall(controller: Controller) -> None:
    """One of its kind does: not all settings decide within some steps."""
    alike = [c for c in controllers() if type(c) is type(controller)]
    assert any(decided(c, cut=1.0) != decided(c, cut=0.01) for c in alike)


def test_who_does_not_hear_the_rate_decides_alike_whatever_it_is() -> None:
    deaf = [c for c in controllers() if not c.hears_rate]
    assert deaf
    for controller in deaf:
        assert decided(controller, cut=1.0) == decided(controller, cut=0.01)


@cache
def decided(controller: Controller, cut: float) -> list[str]:
    """What it puts in force, in a training whose rate falls by this. The model hardly moves, so that only the rates differ."""
    ranks, out = make(next(controlled(controller)), 2, optimizer=sgd(0.0001, 0.0)), list[str]()
    for step in range(12):
        for r in ranks:
            r.optimizer.param_groups[0]["lr"] *= cut if step == 7 else 1.0
            r.worker.loss = 1.0
        train(ranks, pull, 1)
        out.append(repr(ranks[0].worker.recipe))
    return out


@law("rounds")
def has_as_many_steps_as_it_is_told(schedule: Schedule) -> None:
    for every in (2, 5):
        told = replace(schedule, every=every)  # pyright: ignore
        assert told.shape.period == every
        assert [step for step in range(11, 21) if told.is_synced(step)] == [s for s in range(11, 21) if s % every == 0]


@law("follows rate")
def has_blocks_of_one_rate(part: Any) -> None:
    def two_rates(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())]
        return torch.optim.SGD(groups, lr=0.1)

    exchange = "gather(topk(ratio=0.5))" if part.kind == "memory" else "allreduce(fp32())"
    together = " + resync(2)" if "parts models" in part.traits else ""
    worker = make(f"{exchange} + {part}{together}", 2, optimizer=two_rates)[0].worker
    assert len(worker.buckets) == len(list(Odd().parameters()))


@law("singles out")
def is_refused_where_all_go_one_way(singled: ConstrainedRules) -> None:
    for schedule in schedules():
        if schedule.shape.mixes:
            with pytest.raises(RecipeError, match="cannot single out"):
                Recipe.of(f"allreduce(fp32()) + {schedule} + rule('ndim < 2', allreduce(fp32()))")


PARTIES = [*exchanges(), *memories(), *schedules(), *unpaced(), *controllers(), *updates(), ConstrainedRules("rules")]
PROMISES = [(party, party.traits) for party in PARTIES]
CLAIMS = [(trait, party) for trait in TRAITS for party, traits in PROMISES if trait in traits]


def alike(party: Any) -> Any:
    """An exchange sees of a codec what its traits say: around its other settings, which keep laws of codecs, it is slow."""
    if not isinstance(party, Exchange):
        return party
    given = [(f.name, type(v)) for f in fields(party) if (v := getattr(party, f.name)) != f.default]  # pyright: ignore
    return type(party), party.traits, *given


def cases() -> Iterator[Any]:
    seen = set[Any]()
    for trait, party in CLAIMS:
        claim = trait, alike(party)
        marks = [pytest.mark.slow] if claim in seen else []
        yield pytest.param(trait, party, id=f"{trait}-{party}", marks=marks)
        seen.add(claim)


@pytest.mark.parametrize(("trait", "party"), [*cases()])
def test_who_claims_a_trait_keeps_its_promise(trait: str, party: Any) -> None:
    LAWS[trait](party)


def test_every_trait_has_a_law_and_somebody_who_claims_it() -> None:
    assert LAWS.keys() == TRAITS.keys() == {trait for trait, _ in CLAIMS}


def test_a_trait_that_is_not_known_is_a_typing_error() -> None:
    with pytest.raises(ValueError, match=r"no trait 'unbiassed'.*Add it to TRAITS, and a law"):
        requires("unbiassed", because="")
