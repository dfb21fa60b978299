"""DeepSpeed's judges of its 1-bit optimizers, put to what the presets send: one message, and a momentum that must stay at zero.

python benchmarks/judges/deepspeed_onebit.py [--ranks 2] [--elements 1048576]

The message is that of `TestCompressedAllReduceBasic` in tests/unit/runtime/half_precision/onebit/test_onebit.py and of
tests/onebit/test_server_error.py (deepspeedai/DeepSpeed at 58211148, microsoft/DeepSpeed at 003981a4): every rank has numbers
drawn evenly from [-.5, .5), plus .01 times its rank, of which it sends the signs and the root of their mean square; owners do the
same to the means of their chunks. Written here from that description, in double precision. Every element must be within 1e-6 of
it, but those whose mean plus what owners keep is below 1e-6 in size, of which the sign is chance; and what owners sent plus what
they kept must be the mean, to 1e-6 of the length of what was sent. There a tensor has 314,572,800 elements, here as many as asked.
Their ranks send one scale for the whole tensor, ours one for each chunk. So that both are the same number, a rank's numbers are
drawn for the first chunk here, and shuffled for the others; a line says how far from the mean both are where they are not.

The momentum is that of `TestOneBitAdamExpAvgMask` and `TestOneBitLampExpAvgMask` (microsoft/DeepSpeed at 0703d795): a layer of ten by
ten whose rows but the first must keep a momentum of zero, within 1e-7, through 25 batches of two, one a rank, that end with
signs: rate 1.5e-4, freeze after 2 steps, decay .01, ratios of LAMB in [.01, .3]. There a mask given by the user does it; here nothing
but that those rows have no gradient. Half precision and a loss scale, which these have as well, need a GPU and are left out;
their other judges look at their own options and checkpoints.
"""

import argparse
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.recipe import Recipe
from gossamer.simulate import Replica, replicas, train

THRESHOLD, LEAST, ZERO = 1e-6, 1e-6, 1e-7
HIDDEN, BATCHES, RATE, DECAY, FREEZE = 10, 25, 1.5e-4, 0.01, 2
MUST_PASS = (
    "scatter(sign(scale='l2'), own='encoded')"  # what the presets onebit_adam and onebit_lamb send after their warm-up
)
OTHERS = ("scatter(sign(scale='l2'))", "scatter(sign())")  # an owner's own share unrounded; the scale of least error
MOMENTA = {
    "onebit_adam": f"onebit_adam({FREEZE})",
    "onebit_lamb": f"onebit_lamb({FREEZE}, weight_decay={DECAY}, max_coeff=0.3, min_coeff=0.01)",
}


# -- one message --------------------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    mean: Tensor
    kept: Tensor  # by owners, of what they wanted to send


def given(ranks: int, elements: int, shuffled: bool) -> list[Tensor]:
    """Every rank's numbers: drawn for its first chunk and shuffled for the others, or all of them drawn."""
    draw, tensors = torch.Generator().manual_seed(0), list[Tensor]()
    for rank in range(ranks):
        drawn = torch.rand(elements // ranks if shuffled else elements, generator=draw) - 0.5 + 0.01 * rank
        orders = [torch.randperm(drawn.numel(), generator=draw) for _ in range(ranks)]
        tensors.append(torch.cat([drawn[order] for order in orders]) if shuffled else drawn)
    return tensors


def error(sent: Tensor, tensors: list[Tensor]) -> float:
    """Squared, over the squared mean."""
    mean = torch.stack(tensors).double().mean(0)
    return float((sent - mean).square().sum() / mean.square().sum())


def known(tensors: list[Tensor]) -> Message:
    """By DeepSpeed's description, in double precision."""
    sums = sum(_one_bit(tensor.double()) for tensor in tensors)
    wanted = torch.as_tensor(sums) / len(tensors)
    sent = torch.cat([_one_bit(chunk) for chunk in wanted.chunk(len(tensors))])
    return Message(sent, wanted - sent)


def _one_bit(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype) * values.square().mean().sqrt()


def ours(exchange: Exchange, tensors: list[Tensor]) -> Message:
    """By the exchange, as it runs under error feedback."""
    layout = Layout.of({"momentum": tuple(tensors[0].shape)}, torch.float32)
    states: list[State] = [{} for _ in tensors]

    def program(rank: int) -> Program[Tensor]:
        context = Context(rank, len(tensors), 1, CounterRng(0, 1, rank), feedback=1.0)
        return (yield from exchange.average(Bucket(tensors[rank].clone(), layout), states[rank], context)).mean

    mean = simulate([program(rank) for rank in range(len(tensors))]).results[0]
    kept = torch.stack([state["owed"].double() for state in states]).sum(0)
    return Message(mean.double(), kept)


def exchange_of(recipe: str) -> Exchange:
    return Recipe.of(f"{recipe} + error_feedback()").exchange


class Verdict(NamedTuple):
    apart: int  # elements further from theirs than allowed
    lost: float  # of the mean, in lengths of what was sent
    passes: bool


def judge(recipe: str, tensors: list[Tensor]) -> Verdict:
    theirs, found = known(tensors), ours(exchange_of(recipe), tensors)
    is_apart = ((found.mean - theirs.mean).abs() > THRESHOLD) & ((found.mean + found.kept).abs() > LEAST)
    wanted = theirs.mean + theirs.kept
    lost = float((found.mean + found.kept - wanted).norm() / found.mean.norm())
    apart = int(is_apart.sum())
    return Verdict(apart, lost, apart == 0 and lost < THRESHOLD)


# -- a momentum that must stay at zero ----------------------------------------------------------------------------------------


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(HIDDEN, HIDDEN)


def backward(model: nn.Module, rank: int, step: int) -> float:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    inputs, label = torch.randn(1, HIDDEN, generator=draw), torch.randint(HIDDEN, (1,), generator=draw)
    layer = model.get_submodule("layer")
    loss = nn.functional.cross_entropy(layer(inputs), label)
    loss.backward()
    weight = layer.get_parameter("weight")
    assert weight.grad is not None
    weight.grad[1:] = 0.0
    return loss.item()


def largest_momentum(name: str, ranks: int) -> tuple[float, float]:
    """After all batches: of the rows that must stay at zero, and of the first one, which shows that there was something to send."""
    crew: list[Replica] = replicas(
        MOMENTA[name],
        OneLayer,
        lambda m: torch.optim.AdamW(m.parameters(), lr=RATE, weight_decay=DECAY if name == "onebit_adam" else 0.0),
        size=ranks,
    )
    train(crew, backward, BATCHES)
    worker = crew[0].worker
    momentum = next(
        tensor
        for bucket in worker.buckets
        for name, tensor in Bucket(bucket.states["update"]["m"], bucket.layout).tensors()
        if name == "layer.weight"
    )
    return float(momentum[1:].abs().max()), float(momentum[0].abs().max())


# -- all of it ----------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=2**20)
    args = parser.parse_args()
    tensors, failed = given(args.ranks, args.elements, shuffled=True), False
    for recipe in (MUST_PASS, *OTHERS):
        found = judge(recipe, tensors)
        must = recipe == MUST_PASS
        failed |= must and not found.passes
        verdict = "passes" if found.passes else "FAILS" if must else "is another message"
        print(
            f"{recipe:40} {verdict}: {found.apart} of {tensors[0].numel()} elements apart (theirs 0), {found.lost:.1e} of the mean "
            f"lost (theirs below {THRESHOLD:.0e})"
        )
    drawn = given(args.ranks, args.elements, shuffled=False)
    sent = ours(exchange_of(MUST_PASS), drawn).mean
    print(
        f"with a scale for each chunk the squared error of the mean is {error(sent, drawn):.6f} of it, with theirs "
        f"{error(known(drawn).mean, drawn):.6f}"
    )
    for name, recipe in MOMENTA.items():
        still, moving = largest_momentum(name, args.ranks)
        failed |= still > ZERO or moving <= ZERO
        verdict = "FAILS" if still > ZERO or moving <= ZERO else "passes"
        print(
            f"{recipe}: {verdict}, momentum of still rows at most {still:.1e} (theirs {ZERO:.0e}), of the first {moving:.1e}"
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
