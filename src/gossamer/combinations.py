"""Which parts go together. What cannot be right is refused, with the reason and the fix."""

from collections.abc import Mapping
from typing import Any, Protocol

from gossamer import codecs
from gossamer.controllers import AccordionBatch, Fixed
from gossamer.core.contracts import Codec, Controller, Exchange, LinearCodec, Memory, Mixer, Quorum, Schedule
from gossamer.core.errors import RecipeError
from gossamer.core.parts import require
from gossamer.exchanges import Scatter
from gossamer.memories import DIANA, ErrorFeedback, NoMemory
from gossamer.schedules import EveryStep


class Combination(Protocol):
    """What a recipe is made of."""

    @property
    def exchange(self) -> Exchange | Mixer | Quorum: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def controller(self) -> Controller: ...
    @property
    def rules(self) -> tuple[Any, ...]: ...
    @property
    def routes(self) -> Mapping[str, Exchange]: ...


def check(recipe: Combination) -> None:
    """Refuse what cannot be right, with the reason and the fix."""
    exchange, schedule = recipe.exchange, recipe.schedule
    for value, kind in (recipe.memory, Memory), (schedule, Schedule), (recipe.controller, Controller):
        require(isinstance(value, kind), f"{value!r} is no {kind.kind}")  # pyright: ignore[reportUnnecessaryIsInstance]
    if isinstance(exchange, Mixer):
        return _check_mixer(recipe, exchange)
    require(
        isinstance(exchange, Exchange | Quorum),  # pyright: ignore[reportUnnecessaryIsInstance]
        f"{exchange!r} is no exchange; "
        + (f"put it in one: {composed(exchange)}" if isinstance(exchange, Codec | LinearCodec) else "name one first"),
    )
    require(not schedule.mixes, f"{schedule} needs an exchange that mixes: 'push_sum() + {schedule}'")
    if isinstance(exchange, Quorum):
        return _check_quorum(recipe, exchange)
    return _check_exchange(recipe, exchange)


def _check_mixer(recipe: Combination, exchange: Mixer) -> None:
    schedule, memory = recipe.schedule, recipe.memory
    require(
        schedule.mixes,
        f"{exchange} mixes parameters and never agrees exactly, so it cannot carry {schedule}; "
        f"use '{exchange} + gossip()', or 'allreduce(fp32()) + slowmo(48, inner={exchange})'",
    )
    require(
        memory == NoMemory(),
        f"{memory} around {exchange}: with changing neighbours the error does not vanish, and push-sum conserves mass "
        "per coordinate; drop the memory",
    )
    singled = _singles_out(recipe)
    require(
        not singled,
        f"{singled} cannot single out parameters under {exchange}: x and w travel as one",
    )
    require(isinstance(recipe.controller, Fixed), f"{recipe.controller} has no knob to turn on {exchange}")


def _singles_out(recipe: Combination) -> str:
    """What sends some parameters another way, if anything does."""
    return "rules" if recipe.rules else "routes" if recipe.routes else ""


def _check_quorum(recipe: Combination, exchange: Quorum) -> None:
    schedule, memory = recipe.schedule, recipe.memory
    require(
        schedule.averages_gradients,
        f"{exchange} drops late gradients; dropping a model average under {schedule} is something else: use every_step()",
    )
    require(
        schedule.lr_factor == 1 and not getattr(schedule, "l1", 0.0),
        f"{schedule} under {exchange}: a late rank applies missed updates without it; use every_step() as it is",
    )
    require(
        memory == NoMemory(),
        f"{memory} around {exchange}: a dropped gradient's residual would be lost; drop the memory",
    )
    singled = _singles_out(recipe)
    require(
        not singled,
        f"{singled} under {exchange}: one ticket closes the whole step; drop the {singled}",
    )
    require(isinstance(recipe.controller, Fixed), f"{recipe.controller} under {exchange}: late ranks decide late")


def _check_exchange(recipe: Combination, exchange: Exchange) -> None:
    schedule, memory, controller = recipe.schedule, recipe.memory, recipe.controller
    check_pair(exchange, memory)
    require(
        schedule.averages_gradients or getattr(memory, "units", "gradient") == "gradient",
        f"{memory} under {schedule}: differences of parameters already come in units of the update, whatever the learning "
        f"rate; leave units out: {memory.name}()",
    )
    for other in recipe.routes.values():
        check_pair(other, memory)
    require(
        not isinstance(controller, AccordionBatch) or isinstance(schedule, EveryStep),
        f"{controller} grows the batch of a step that averages gradients, and {schedule} has none; use every_step()",
    )
    mild = getattr(controller, "mild", exchange)
    require(
        exchange == mild,
        f"{controller} starts with its mild exchange; write '{mild} + ...' instead of '{exchange} + ...'",
    )
    for level in (getattr(controller, n, None) for n in ("mild", "harsh")):
        if isinstance(level, Exchange):
            check_pair(level, memory)


def check_pair(exchange: Exchange | Mixer | Quorum, memory: Memory) -> None:
    """Refuse a memory around an exchange with which it loses something, or diverges."""
    require(
        isinstance(exchange, Exchange),
        f"{exchange} acts on the whole step; it can be a recipe's exchange, not a rule's or a level's",
    )
    assert isinstance(exchange, Exchange)
    if exchange.needs_feedback and not memory.mends_bias:
        if memory.needs_unbiased:
            raise RecipeError(
                f"{memory} needs an unbiased exchange, and {exchange} is biased; "
                "use error_feedback(), or an unbiased codec such as qsgd() or ternary(clip=0.0)"
            )
        if not exchange.contracts:
            raise RecipeError(
                f"{exchange} is biased, so that training need not converge, and error feedback around it can diverge; "
                "use another codec, such as ternary() or qsgd(), or '+ none(allow_biased=True)' to insist"
            )
        raise RecipeError(
            f"{exchange} is biased, and without error feedback training need not converge; "
            f"use '{exchange} + error_feedback()', or none(allow_biased=True) to insist"
        )
    if memory.needs_unbiased and not exchange.unbiased:
        fix = "ternary(clip=0.0)" if "ternary" in repr(exchange) else "qsgd() or fp32()"
        raise RecipeError(f"{memory} needs an unbiased exchange, and {exchange} is biased; use {fix}")
    if memory.mends_bias and not isinstance(memory, NoMemory) and not exchange.contracts:
        raise RecipeError(
            f"{memory} around {exchange} can diverge: the codec adds more than it leaves out; "
            "it needs no memory, so drop it, or use diana() (with ternary(clip=0.0)), more bits or smaller buckets"
        )
    if isinstance(exchange, Scatter) and isinstance(memory, DIANA | ErrorFeedback):
        known = (None, 1.0) if isinstance(memory, ErrorFeedback) else (None,)
        require(
            exchange.feedback in known,
            f"{memory} over {exchange}: the second encoding's error follows the memory's own rate, or their books would not "
            "balance; leave feedback out",
        )


def composed(codec: Codec | LinearCodec) -> str:
    """The recipe that is normally meant by a codec.

    >>> composed(codecs.Ternary()), composed(codecs.FP32())
    ('scatter(ternary())', 'allreduce(fp32())')
    >>> composed(codecs.PowerSGD())
    'allreduce(powersgd()) + error_feedback()'
    """
    if codec.needs_feedback and not codec.contracts:
        return f"scatter({codec}) + none(allow_biased=True)"
    feedback = " + error_feedback()" if codec.needs_feedback else ""
    if not isinstance(codec, Codec) or isinstance(codec, codecs.FP32):
        return f"allreduce({codec}){feedback}"
    return f"{'gather' if feedback or codec.whole else 'scatter'}({codec}){feedback}"
