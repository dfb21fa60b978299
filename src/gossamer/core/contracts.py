"""What each kind of part promises. Every contract ends with its law; `tests/laws` is those laws."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.core.block import Block, Layout, State
from gossamer.core.dice import Dice
from gossamer.core.parts import Part
from gossamer.core.terms import Term, bars, needs, those
from gossamer.core.topology import Peers as Peers  # noqa: PLC0414  (users find contracts here)
from gossamer.core.topology import Topology as Topology  # noqa: PLC0414
from gossamer.core.verbs import Program

Policy = Literal["equal", "mean", "owner", "shard", "drop"]
"""What becomes of a state entry when the world changes its size. It is equal on all ranks; every new rank gets the mean
of the old ranks' entries; each element lives with the owner of its chunk, in an entry as long as the block ("owner") or as
the chunk ("shard"); or it starts anew."""


Unit = Literal["gradient", "none"]
"""What a state entry is measured in: as gradients are, which a loss scaler multiplies; or otherwise. Whoever drives a part
multiplies the former when the loss scale changes, so that no part knows of it."""


class Context(NamedTuple):
    """Where I sit: my rank, the size of the world, the step, and my dice; and what a memory and an exchange tell each other."""

    rank: int
    size: int
    step: int
    dice: Dice
    rescale: float = 1.0  # what an exchange keeps counts so many times now: the memory's own units have changed
    lr: float = 1.0  # the learning rate the block's parameters will be stepped with
    shift: float = 0.0  # the rate at which a memory around the exchange follows what was sent; 0: there is none
    feedback: float | None = None  # how much of what it leaves out an exchange shall add later; None: no memory says
    scale: float = 1.0  # what gradients come multiplied by, for who compares them with a number: a loss scaler's factor
    coarse: bool = (
        False  # this step's mean was written coarsely, and others are not: nobody learns a gradient's size of it
    )
    own: bool = False  # what comes is this rank's own gradient: no mean was agreed on at this step


@dataclass(frozen=True, eq=False)
class Echo:
    """The outcome of an exchange: what all ranks agreed on, and, on demand, what got through of mine.

    The mean belongs to whoever gets it, who may write to it. `largest`, where an exchange has found it on its way, is one
    number that no element of the mean exceeds in magnitude, and that is finite if and only if they all are. `drained` says that
    what got through of mine is taken out of the block already, which had asked for that.
    """

    mean: Tensor
    add_sent: Callable[[Tensor, float], None]  # into += weight * (what got through of mine)
    largest: Tensor | None = None
    drained: bool = False


class _Lossy(Part):
    """What codecs and exchanges promise alike: how much gets through, and of what."""

    @property
    @abstractmethod
    def unbiased(self) -> bool: ...

    @property
    def exact(self) -> bool:
        """True if everything gets through."""
        return False

    @property
    def any_size(self) -> bool:
        """True if small and large gradients are written alike; else there are some too small, or too large, for it."""
        return True

    @property
    def votes(self) -> bool:
        """True if a rank has one vote on each element, whatever the size of what it gives: no rank can count more than others."""
        return False

    @property
    def own_size(self) -> bool:
        """True if what travels is as large as its own number says, so that of small gradients nothing does, or too much."""
        return False

    @property
    def sparse(self) -> bool:
        """True if some elements get through as they are, and nothing of the others."""
        return False

    @property
    def whole(self) -> bool:
        """True if it must see all parameters in one block (a global top-k)."""
        return False


class _Encoding(_Lossy):
    """What codecs promise, whether they write alone or together."""

    kind: ClassVar[str] = "codec"

    @abstractmethod
    def omega(self, layout: Layout) -> float:
        """E|decode - x|^2 <= omega |x|^2 for an unbiased codec; inf for a biased one."""

    @property
    def needs_feedback(self) -> bool:
        """True if training need not converge without error feedback around this codec."""
        return not self.unbiased

    @property
    def contracts(self) -> bool:
        """True if E|x - decode|^2 < |x|^2, so that error feedback around it is stable."""
        return True

    @property
    def bounds_residual(self) -> bool:
        """True if what error feedback around it holds back stays bounded, although it does not contract."""
        return False

    @property
    @abstractmethod
    def bucket_mb(self) -> float:
        """How many megabytes of gradient to put in one block, unless the recipe says otherwise; measured."""


class Codec(_Encoding):
    """I write alone, anyone can read.

    `encode` turns a block into one wire; `accumulate` adds `weight` times what a wire says to a flat tensor.
    `wire_bytes` is the wire's length, known without the data, or None where it depends on the data; `wire_limit`
    bounds it then.

    Law: decoding never reads past a wire nor trusts it; a non-finite element in makes a non-finite element out;
    zero in makes exactly zero out; if `unbiased`, the expected decoding is the block, else the codec contracts.
    """

    @property
    def bucket_mb(self) -> float:
        return 6.0

    @abstractmethod
    def wire_bytes(self, layout: Layout) -> int | None: ...

    def wire_limit(self, layout: Layout) -> int:
        """The longest wire possible, for codecs whose wires depend on the data."""
        fixed = self.wire_bytes(layout)
        return 16 * layout.numel + 1024 if fixed is None else fixed

    @abstractmethod
    def encode(self, block: Block, state: State, context: Context) -> Tensor: ...

    @abstractmethod
    def accumulate(self, wire: Tensor, layout: Layout, into: Tensor, weight: float) -> None: ...

    def overwrite(self, wire: Tensor, layout: Layout, out: Tensor) -> None:
        """Write what a wire says over a flat tensor."""
        self.accumulate(wire, layout, out.zero_(), 1.0)

    def mean(self, wires: Sequence[Tensor], layout: Layout, out: Tensor) -> Tensor | None:
        """Write the mean of what some wires say, added in their order, over a flat tensor.

        Returns its largest magnitude, if it came across it.
        """
        out.zero_()
        for wire in wires:
            self.accumulate(wire, layout, out, 1.0)
        out.div_(len(wires))
        return None

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        """A wire's own numbers (float32) of which the largest is what no element exceeds in magnitude, and finite if and
        only if all elements are; None where that takes a look at all of them.
        """
        return None

    def decode(self, wire: Tensor, like: Block) -> Tensor:
        """What a wire says, as a new flat tensor."""
        out = torch.empty_like(like.flat)
        self.overwrite(wire, like.layout, out)
        return out


class Levelled(Codec):
    """Rounds each element at random to one of evenly spaced levels of a norm; of how many may change from step to step.

    Law: unbiased, and E|decode - x|^2 <= sum(spread(x)) / (4 s^2) at s levels on each side of zero; in one norm more levels
    cost more bytes.
    """

    @property
    @abstractmethod
    def steps(self) -> int:
        """Levels on each side of zero."""

    @property
    @abstractmethod
    def widths(self) -> tuple[float, ...]:
        """All the bits an element may take on the wire, its sign included, ascending; norms are counted apart."""

    @abstractmethod
    def of_width(self, bits: float) -> "Levelled":
        """The same codec at one of its `widths`."""

    @abstractmethod
    def spread(self, block: Block) -> Tensor:
        """For each parameter of a block the sum over its elements of the squared norm that they are rounded against, in
        double precision; not finite where the block is not.
        """


class LinearCodec(_Encoding):
    """What we write adds up: the exchange is a sum of messages, perhaps in several rounds.

    Law: the mean is bit-equal on all ranks; permuting the ranks changes it by rounding only; what got through of mine,
    averaged over ranks, is the mean.
    """

    @property
    def bucket_mb(self) -> float:
        return 25.0

    @property
    def sum_rounding(self) -> float:
        """How much of a number each addition may round off on its way, for nobody to keep."""
        return 0.0

    @property
    def draws_alike(self) -> bool:
        """True if all ranks draw the same, so that what is lost by chance is not averaged over them."""
        return False

    def policy(self, key: str) -> Policy:
        return "mean"

    def sum_bytes(self, layout: Layout, size: int) -> list[int] | None:
        """The length of each message that `average` sums over so many ranks, where it can be told without the work."""
        return None

    @abstractmethod
    def average(self, block: Block, state: State, context: Context) -> Program[Echo]: ...


class AsItsCodec:
    """Promises what the codec inside does."""

    codec: Any

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    @property
    def needs_feedback(self) -> bool:
        return self.codec.needs_feedback

    @property
    def contracts(self) -> bool:
        return self.codec.contracts

    @property
    def bounds_residual(self) -> bool:
        return self.codec.bounds_residual

    @property
    def exact(self) -> bool:
        return self.codec.exact

    @property
    def any_size(self) -> bool:
        return self.codec.any_size

    @property
    def votes(self) -> bool:
        return self.codec.votes

    @property
    def own_size(self) -> bool:
        return self.codec.own_size

    @property
    def whole(self) -> bool:
        return self.codec.whole

    @property
    def bucket_mb(self) -> float:
        return self.codec.bucket_mb


class Exchange(_Lossy):
    """Who talks to whom, to agree on an average.

    Law: all ranks get bit-equal means; the bytes in the ledger are the bytes handed to the backend.
    """

    kind: ClassVar[str] = "exchange"

    @property
    def traits(self) -> frozenset[str]:
        said = {"unbiased": self.unbiased, "contracts": self.contracts, "sparse": self.sparse, "votes": self.votes}
        said |= {"bounds_residual": self.bounds_residual, "own_size": self.own_size}
        return those(whole=self.whole, exact=self.exact, **said)

    @property
    def terms(self) -> tuple[Term, ...]:
        if not self.needs_feedback:
            return ()
        if self.contracts or self.bounds_residual:
            because = (
                "{exchange} is biased, and without error feedback training need not converge; "
                "use '{exchange} + error_feedback()', or none(allow_biased=True) to insist"
            )
        else:
            because = (
                "{exchange} is biased, so that training need not converge, and error feedback around it can diverge; "
                "use another codec, such as ternary() or qsgd(), or '+ none(allow_biased=True)' to insist"
            )
        return (needs("mends bias", "bias allowed", because=because),)

    @property
    @abstractmethod
    def needs_feedback(self) -> bool: ...

    @property
    @abstractmethod
    def contracts(self) -> bool: ...

    @property
    def bounds_residual(self) -> bool:
        """True if what error feedback around it holds back stays bounded, although it does not contract."""
        return False

    @property
    def sum_rounding(self) -> float:
        """How much of a number each addition may round off on its way, for nobody to keep."""
        return 0.0

    @property
    def encodes_mean(self) -> bool:
        """True if the mean is written by the codec too, on its way to everybody."""
        return False

    @property
    def adds_up(self) -> bool:
        """True if what it sends are sums on their way, all-reduces that is: they may be formed group by group."""
        return False

    @property
    def bucket_mb(self) -> float:
        """How many megabytes of gradient to put in one block, unless the recipe says otherwise; measured."""
        return 25.0

    def least_blocks(self, size: int) -> int:
        """Into how many blocks at least to cut a model among `size` ranks, if they are of some megabytes and the recipe does
        not say otherwise: the first of them travel while backward computes the last.
        """
        return 1

    @abstractmethod
    def omega(self, layout: Layout, size: int) -> float:
        """The relative variance among `size` ranks: sum of E|what got through - x|^2 <= omega * sum of |x|^2, both over
        ranks; inf where it is biased.
        """

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "none"

    @abstractmethod
    def average(self, block: Block, state: State, context: Context) -> Program[Echo]: ...


class CodecExchange(AsItsCodec, Exchange):
    """An exchange of what one codec writes."""

    def omega(self, layout: Layout, size: int) -> float:
        return self.codec.omega(layout)  # a bound for each rank is one for their sum


class Sender(Protocol):
    """The rest of the way: what a memory hands its block to."""

    def __call__(self, block: Block, context: Context) -> Program[Echo]: ...


UNBALANCED = (
    "{memory} over {exchange}: the second encoding's error follows the memory's own rate, or their books would not balance; "
    "leave feedback out"
)
"""Why a memory bars an exchange that was told what to do with the error of a second encoding."""


class Memory(Part):
    """Middleware around an exchange; it keeps what did not get through. Stacks like an onion.

    Law: with error feedback, the sum of all means plus the mean residual equals the sum of all mean inputs. State is
    assigned, never written into, so that a skipped step leaves no trace.
    """

    kind: ClassVar[str] = "memory"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(memory=True, parts_models=self.parts_models)

    @property
    def hands_on(self) -> bool:
        """True if `around` returns the mean as the exchange gave it."""
        return False

    @property
    def begins(self) -> bool:
        """True if what it sends first is of another kind than all that comes after."""
        return False

    @property
    def parts_models(self) -> bool:
        """True if `around` returns what only this rank steps with, so that models part."""
        return False

    @property
    def gain(self) -> float:
        """How many times a mean that stays comes out in the end: more than once, if the memory has momentum."""
        return 1.0

    def policy(self, key: str) -> Policy:
        return "mean"

    def unit(self, key: str) -> Unit:
        return "gradient"

    def follow(self, omega: float) -> float:
        """The rate at which this memory follows what was sent, given the exchange's relative variance; 0: it does not."""
        return 0.0

    def debt(self, state: State) -> tuple[Tensor, float] | None:
        """What did not get through of this rank's own, and the units it is in; None if that is not kept."""
        return None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        """Take over so many times what is owed to this rank's blocks, in the units of the state; False if nothing is kept."""
        return False

    @abstractmethod
    def around(self, block: Block, state: State, send: Sender, context: Context) -> Program[Tensor]: ...


class Mixer(Part):
    """Who talks to whom, to pull parameters together without ever agreeing exactly; what a schedule that mixes is made of.

    `push` takes the model a rank holds and returns a program that sends and receives; `absorb` takes the wires that came
    (none, perhaps, after a local step: a rank then holds less than its share) and gives the model that the rank holds.
    `wrote` is then told the model as the parameters took it: the very tensor, but where they have fewer bits than the block.
    What was pushed is absorbed before the next push. `follow` does as `absorb` and `wrote` do, and writes the model, piece by
    piece where the parameters lie: a mixer that passes over a model often saves most of the way to memory by it.

    Law: the sum of all numerators, those in flight included, and the sum of all weights, never change but by what the
    optimizers do, whatever the parameters' precision.
    """

    kind: ClassVar[str] = "mixer"

    @property
    def begins(self) -> bool:
        """True if what it sends first is of another kind than all that comes after."""
        return False

    @property
    def prelude(self) -> int:
        """How many rounds come before its peers repeat themselves."""
        return 0

    def policy(self, key: str) -> Policy:
        return "drop"

    @abstractmethod
    def numerator(self, block: Block, state: State) -> Tensor:
        """What sums to the same total over all ranks whatever is mixed; `block` is the model."""

    @abstractmethod
    def push(self, block: Block, state: State, context: Context, round: int) -> Program[list[Tensor]]: ...

    @abstractmethod
    def absorb(self, block: Block, state: State, arrived: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def wrote(self, block: Block, state: State) -> None: ...

    def follow(
        self, pieces: Callable[[], Sequence[Tensor]], layout: Layout, state: State, arrived: Sequence[Tensor]
    ) -> Tensor | None:
        """`pieces` gives the parameters themselves, one after the other. Returns the model; None, and all is as it was, where
        they cannot be followed in pieces.
        """
        return None


_ONE_MOMENTUM = (
    bars(
        "adds momentum",
        because="{update} sends a momentum, and {memory} over {exchange} would make another one of it: leave that one out, with "
        "momentum=0.0 or error_feedback()",
    ),
    bars(
        "follows rate",
        because="{update} sends a momentum, whose length does not follow the learning rate, and {memory} under {schedule} does; use "
        "error_feedback() and every_step()",
    ),
    bars(
        "waits for few",
        because="{update} sends a momentum that all ranks share, and under {schedule} late ranks do not have it; use every_step()",
    ),
)
"""What an update that sends a momentum bars."""


class Update(Part):
    """What is made of an agreed gradient, before the optimizer takes it: after unscaling, and after the user's clipping.

    It may also say what travels in place of each rank's own gradient, as its momentum: the mean of that is what comes back.

    Law: equal means, models and states give equal directions, bit for bit; a gradient of zeros gives zeros. What is sent of
    one is as long as the loss scale says. State is assigned, never written into.
    """

    kind: ClassVar[str] = "update"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(directs=True, sends_momentum=self.sends_momentum)

    @property
    def terms(self) -> tuple[Term, ...]:
        made = "{update} makes a direction of an agreed gradient, and under {schedule} there is none: use every_step()"
        terms = (needs("averages gradients", because=made),)
        return (*terms, *_ONE_MOMENTUM) if self.sends_momentum else terms

    @property
    def sends_momentum(self) -> bool:
        """True if a momentum travels in place of the gradient; then nobody else may have one."""
        return False

    @property
    def is_step(self) -> bool:
        """True if its directions are whole steps of an adaptive optimizer: one of Adam's family then takes them as they are,
        times its rate, and with its weight decay, decoupled.
        """
        return False

    def policy(self, key: str) -> Policy:
        return "equal"

    def sent(self, gradient: Block, state: State, scale: float) -> Tensor:
        """What travels in place of a gradient of this rank's, which is given away, and which a loss scaler has multiplied by
        `scale`, as it must what is returned.
        """
        return gradient.flat

    @abstractmethod
    def direction(self, mean: Block, model: Block, state: State, context: Context) -> Tensor:
        """What the optimizer is given in place of the mean; `model` is a copy, and nobody else's."""


class StepsApart(Update):
    """An update that makes steps of a rank's own gradients too (`context.own`), under a schedule on which ranks meet now and
    then: what their steps came to is averaged, and all go on from one model.

    Law: after a meeting all ranks hold bit-equal models and momenta.
    """

    @property
    def terms(self) -> tuple[Term, ...]:
        because = "{update} makes steps of agreed gradients, or of own ones where ranks meet; under {schedule} they do not: use "
        twice = "{update} has a momentum, and {memory} over {exchange} adds another one: leave that one out, with momentum=0.0 or "
        return (
            needs("averages gradients", "meets", because=because + "every_step() or zero_one(1000)"),
            bars("adds momentum", because=twice + "error_feedback()"),
        )

    @abstractmethod
    def gone(self, state: State) -> Tensor | None:
        """What this rank's own steps came to since ranks last met, given away and kept no more; None where it took none."""

    @abstractmethod
    def meet(self, start: Tensor, mean: Tensor, rate: float, state: State) -> Tensor:
        """The model that all go on from: `start`, which is given away, moved by the mean of what ranks' steps came to, at
        learning rates that add up to `rate`.
        """

    @abstractmethod
    def forget(self, state: State) -> None:
        """What ranks did since they last met is lost, and was given away: they go on from where they were."""


class Facts(NamedTuple):
    """What a controller may look at: numbers that are bit-equal on every rank."""

    step: int
    lr: float
    blocks: Sequence[Block]  # this step's agreed mean gradients
    sums: Sequence[Tensor] = ()  # of each block, what `local` told of it, summed over all ranks; in double precision
    loss: float | None = None  # of this step's batches, the mean over the ranks that told it, for who `hears_loss`


class Controller(Part):
    """How much, as training goes: a pure function from facts and state to another recipe.

    Law: equal facts give equal recipes on all ranks; with equal levels it changes nothing, bit for bit.
    """

    kind: ClassVar[str] = "controller"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(control=True, moves_schedule=self.moves_schedule)

    @property
    def terms(self) -> tuple[Term, ...]:
        if not self.counts:
            return ()
        because = "{controller} counts what ranks' own gradients tell as they leave, and under {schedule} none do; use every_step()"
        return (needs("averages gradients", because=because),)

    @property
    def moves_schedule(self) -> bool:
        """True if it may change the schedule, and so what the optimizer does; else only what is sent."""
        return False

    @property
    def hears_loss(self) -> bool:
        """True if it goes by the loss that the training loop tells, where averages of models land."""
        return False

    @property
    def cuts(self) -> bool:
        """True if parameters that it sends another way travel apart from the rest. Else they stay in their block, whose codec
        is told which of its parameters are written otherwise (`Layout.knobs`): other choices then cost nothing.
        """
        return True

    @property
    def counts(self) -> int:
        """How many numbers `local` tells of a block; with 0 nothing is computed, and nothing sent."""
        return 0

    @property
    def counts_each(self) -> bool:
        """True if so many numbers are told of each parameter of a block."""
        return False

    def local(self, block: Block, exchange: Exchange) -> Tensor:
        """What this rank tells of its own gradient, free of the loss scale, as it leaves over this exchange: so many numbers
        (for each parameter, in their order). All ranks' are summed, in one small all-reduce a step, and come as `Facts.sums`.
        """
        raise NotImplementedError(f"{self} counts {self.counts} number(s) of a block, and does not say which")

    def reach(self, recipe: Any) -> Iterable[Any]:
        """What it may put in force under this recipe, without itself; all of it is checked when the recipe is made."""
        return ()

    @abstractmethod
    def decide(self, facts: Facts, recipe: Any, state: State) -> Any: ...
