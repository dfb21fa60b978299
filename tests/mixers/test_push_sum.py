"""Push-sum gossip: the self-tests T2.1 to T2.8 of the method notes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tests.mixers.story import NUMEL, disagreeing, scattered, spread, still, targets
from tests.runtime.gym import (
    Flat,
    Replica,
    bit_equal,
    held,
    land,
    make,
    noise,
    on_all,
    parameters,
    resumed,
    saved,
    sgd,
    train,
)
from tests.topologies.matrices import matrix
from torch import Tensor

from gossamer.codecs import FP32
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Peers, Topology
from gossamer.core.errors import WireError
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.core.wire import take
from gossamer.exchanges import AllReduced
from gossamer.fabrics.sim import Network, simulate
from gossamer.mixers import PushSum
from gossamer.recipe import Recipe
from gossamer.schedules import Gossip
from gossamer.topologies import Complete, Exponential, Ring

LAYOUT = Layout.of({"x": (NUMEL,)}, torch.float64)


@dataclass(frozen=True, repr=False)
class Digraph(Topology):
    """Not registered: any directed edges, others in every odd round; senders of different degree, so weights differ."""

    size: int
    even: tuple[tuple[int, int], ...]
    odd: tuple[tuple[int, int], ...] | None = None

    def peers(self, rank: int, size: int, round: int) -> Peers:
        edges = self.odd if round % 2 and self.odd is not None else self.even
        to = tuple(j for i, j in edges if i == rank)
        return Peers(to, tuple(i for i, j in edges if j == rank), 1 / (len(to) + 1))


CYCLE = tuple((i, (i + 1) % 8) for i in range(8))
UNBALANCED = Digraph(8, (*CYCLE, (0, 2), (0, 4), (0, 5), (3, 6), (6, 1)))
CHANGING = Digraph(8, UNBALANCED.even, (*CYCLE, (7, 3), (7, 4), (1, 5)))


@dataclass
class Story:
    """What every rank held after each round: model, numerator, weight; and everything there was, in flight included."""

    models: Tensor  # round, rank, element
    numerators: Tensor
    weights: Tensor
    mass: Tensor  # round, element
    weight: Tensor


def gossip(topology: Topology, start: Tensor, rounds: int, delay: int = 0) -> Story:
    """Mix without training; messages land `delay` rounds after they left."""
    size, mixer = start.shape[0], PushSum(topology)

    def program(rank: int) -> Program[list[tuple[Tensor, ...]]]:
        state: State = {}
        model, waiting, seen = start[rank].clone(), list[list[Tensor]](), list[tuple[Tensor, ...]]()
        for round in range(rounds):
            block = Bucket(model, LAYOUT)
            waiting.append(
                (yield from mixer.push(block, state, Context(rank, size, round, CounterRng(0, round, rank)), round))
            )
            if len(waiting) > delay:
                model = mixer.absorb(block, state, waiting.pop(0))
            flying = [_read(w) for wires in waiting for w in wires]
            x, w = state["x"], state["w"]
            mass = x + sum((f[0] for f in flying), torch.zeros_like(x))
            weight = w.double() + sum((f[1].double() for f in flying), torch.zeros(()))
            seen.append((model, x, w.double(), mass, weight))
        return seen

    told = simulate([program(r) for r in range(size)]).results
    columns = [
        torch.stack([torch.stack([told[i][k][c] for i in range(size)]) for k in range(rounds)]) for c in range(5)
    ]
    return Story(columns[0], columns[1], columns[2], columns[3].sum(1), columns[4].sum(1))


def _read(wire: Tensor) -> tuple[Tensor, Tensor]:
    x, rest = take(wire, torch.float64, NUMEL)
    return x, take(rest, torch.float64)[0]


GRAPHS = [Exponential(), Exponential(2), Ring(), Complete(), UNBALANCED, CHANGING]


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("topology", GRAPHS, ids=lambda t: t.name)
def test_mixing_conserves_mass_and_weight_in_flight_included(topology: Topology, delay: int) -> None:
    start = scattered(8)
    story = gossip(topology, start, 60, delay)
    torch.testing.assert_close(story.mass, start.sum(0).expand_as(story.mass), rtol=0, atol=1e-14)
    assert (story.weight - 8).abs().max() < 1e-13  # weights have the model's precision


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_an_unbalanced_graph_contracts_at_its_second_eigenvalue(delay: int) -> None:
    start = scattered(8)
    mean, rounds = start.mean(0), 60 * (1 + delay)
    story = gossip(UNBALANCED, start, rounds, delay)
    error = (story.models - mean).flatten(1).norm(dim=1)
    assert error[-1] < 1e-5 * error[0]
    biased = (story.numerators * 8 / story.weight[0] - mean).flatten(1).norm(dim=1)
    assert biased[-1] > 0.3 * biased[10]  # without the weights the graph's own preferences remain
    assert biased[-1] > 0.1
    if delay == 0:
        second = float(torch.linalg.eigvals(matrix(UNBALANCED, 8, 0)).abs().sort().values[-2])
        measured = float(error[35] / error[5]) ** (1 / 30)
        assert measured == pytest.approx(second, rel=0.02)


def test_unbalanced_weights_settle_at_the_perron_vector() -> None:
    story = gossip(UNBALANCED, scattered(8), 80)
    values, vectors = torch.linalg.eig(matrix(UNBALANCED, 8, 0))
    perron = vectors[:, values.abs().argmax()].real
    torch.testing.assert_close(story.weights[-1], 8 * perron / perron.sum(), rtol=0, atol=1e-5)
    assert story.weights[-1].max() > 1.5 * story.weights[-1].min()


@pytest.mark.parametrize("topology", [UNBALANCED, CHANGING], ids=["fixed", "changing"])
def test_every_round_is_the_explicit_matrix_product(topology: Topology) -> None:
    start, product = scattered(8), torch.eye(8, dtype=torch.float64)
    story = gossip(topology, start, 30)
    for round in range(30):
        product = matrix(topology, 8, round) @ product
        torch.testing.assert_close(story.numerators[round], product @ start, rtol=0, atol=1e-5)
        torch.testing.assert_close(story.weights[round], product.sum(1), rtol=0, atol=1e-5)
        torch.testing.assert_close(
            story.models[round], product @ start / product.sum(1, keepdim=True), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_rounds_are_an_exact_average_where_arithmetic_is_exact(size: int) -> None:
    start = (scattered(size) * 1024).round() / 1024
    rounds = int(math.log2(size))
    story = gossip(Exponential(), start, rounds)
    assert bit_equal([start.mean(0), *story.models[-1]])
    assert not bit_equal(list(story.models[rounds - 2])) or rounds == 1
    assert bool((story.weights == 1).all())


@pytest.mark.parametrize("late", [0.0, 0.3, 0.9])
def test_overlapping_gossip_agrees_to_rounding_whatever_the_delays(late: float) -> None:
    """Messages take up to 90 % of a step and more on slow links; they land by schedule."""
    ranks = disagreeing("osgp", 8)
    mean = torch.stack(parameters(ranks)).mean(0)
    network = Network(latency=late, rate=(1e3, 1e2, 1e4, 1e3, 2e2, 1e3, 1e3, 1e5))
    train(ranks, still, 40, network, lambda rank, step: 1.0 + ((rank * 5 + step * 3) % 7) / 7)
    on_all(ranks, land)
    assert spread(parameters(ranks)) <= 1e-15
    torch.testing.assert_close(parameters(ranks)[0], mean, rtol=0, atol=1e-14)


def test_without_weights_overlapping_gossip_on_an_unbalanced_graph_stays_apart() -> None:
    recipe = Recipe(AllReduced(FP32()), schedule=Gossip(PushSum(UNBALANCED), overlap=True))
    ranks = disagreeing(recipe, 8)
    mean = torch.stack(parameters(ranks)).mean(0)
    train(ranks, still, 120)
    on_all(ranks, land)
    assert spread(parameters(ranks)) < 1e-12
    torch.testing.assert_close(parameters(ranks)[0], mean, rtol=0, atol=1e-12)
    biased = [r.worker.buckets[0].states["mixer"]["x"] for r in ranks]
    assert spread(biased) > 0.1


def by_the_paper(size: int, steps: int, every: int, topology: Topology, overlap: bool) -> Iterator[Tensor]:
    """The model x / w of every rank after every step, written down as the paper has it."""
    x = [Flat(NUMEL).x.detach().clone() for _ in range(size)]
    w, flying = [1.0] * size, list[tuple[int, Tensor, float]]()
    best = [noise(8, i, numel=NUMEL, dtype=torch.float64) for i in range(size)]
    for step in range(1, steps + 1):
        x = [x[i] - 0.1 * (x[i] / w[i] - best[i]) for i in range(size)]
        if step % every == 0:
            round, landing = step // every - 1, flying
            if not overlap:
                landing = flying = letters(x, w, topology, round)
            for j, more, weight in landing:
                x[j], w[j] = x[j] + more, w[j] + weight
            if overlap:
                flying = letters(x, w, topology, round)
        yield torch.stack([a / b for a, b in zip(x, w)])


def letters(x: list[Tensor], w: list[float], topology: Topology, round: int) -> list[tuple[int, Tensor, float]]:
    """What everybody sends, and to whom; it leaves the senders."""
    sent = list[tuple[int, Tensor, float]]()
    for i in range(len(x)):
        peers = topology.peers(i, len(x), round)
        sent += [(j, share * x[i], share * w[i]) for j, share in zip(peers.to, peers.shares, strict=True)]
        x[i], w[i] = peers.keep * x[i], peers.keep * w[i]
    return sent


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("topology", [Exponential(), UNBALANCED], ids=["exponential", "unbalanced"])
def test_every_gradient_is_taken_at_x_over_w(topology: Topology, every: int, overlap: bool) -> None:
    """Between rounds, too, when half of x and of w is away: a step of x is then one of twice that length for x / w."""
    recipe = Recipe(AllReduced(FP32()), schedule=Gossip(PushSum(topology), every, overlap))
    ranks = make(recipe, 8, lambda: Flat(NUMEL), sgd(0.1, 0.0))
    for expected in by_the_paper(8, 20, every, topology, overlap):
        train(ranks, targets, 1)
        torch.testing.assert_close(torch.stack(parameters(ranks)), expected, rtol=0, atol=1e-12)


def numerators(ranks: list[Replica]) -> Tensor:
    """The sum over ranks of x, once everything in flight has landed."""
    on_all(ranks, land)
    return sum((held(r).double() for r in ranks), torch.zeros(()).double())


HALVES = [torch.bfloat16, torch.float16]
GOSSIPS = ["sgp", "sgp(topology=exponential(count=2))", "osgp", "osgp(every=3)", "sgp(topology=ring(), every=2)"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("recipe", GOSSIPS)
def test_models_in_half_precision_lose_no_mass(recipe: str, dtype: torch.dtype) -> None:
    ranks = make(recipe, 5, lambda: Flat(NUMEL, dtype), sgd(0.0, 0.0))
    for r, start in zip(ranks, scattered(5)):
        r.model.get_parameter("x").data.copy_(start)
    before = numerators(ranks)
    train(ranks, still, 60)
    torch.testing.assert_close(numerators(ranks), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("recipe", GOSSIPS)
def test_training_in_half_precision_moves_the_mass_by_what_the_optimizers_did(recipe: str, dtype: torch.dtype) -> None:
    moved = torch.zeros(NUMEL, dtype=torch.float64)

    def watched(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        x, before = model.get_parameter("x"), [torch.zeros(())]

        def keep(*_: object) -> None:
            before[0] = x.detach().clone()

        def add(*_: object) -> None:
            moved.add_(x.detach().double() - before[0].double())

        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(add)
        return optimizer

    ranks = make(recipe, 5, lambda: Flat(NUMEL, dtype), watched)
    before = numerators(ranks)
    train(ranks, targets, 100)
    assert moved.abs().max() > 1
    torch.testing.assert_close(numerators(ranks), before + moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stop", [3, 4])
@pytest.mark.parametrize("recipe", ["sgp(topology=exponential(count=2))", "osgp(every=2)"])
def test_a_model_in_half_precision_resumes_with_its_numerators(recipe: str, stop: int) -> None:
    def half() -> Flat:
        return Flat(NUMEL, torch.bfloat16)

    whole, ranks = make(recipe, 4, half), make(recipe, 4, half)
    train(whole, targets, 9)
    train(ranks, targets, stop)
    again = resumed(recipe, saved(ranks), model=half)
    train(again, targets, 9 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))
    assert torch.equal(numerators(whole), numerators(again))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_ranks_are_an_all_reduce_to_rounding(momentum: float) -> None:
    gossiping = make("sgp", 2, lambda: Flat(NUMEL), sgd(0.1, momentum))
    reducing = make("allreduce", 2, lambda: Flat(NUMEL), sgd(0.1, momentum))
    for _ in range(30):
        train(gossiping, targets, 1)
        train(reducing, targets, 1)
        for a, b in zip(parameters(gossiping), parameters(reducing), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_complete_graph_is_large_batch_training(size: int, momentum: float) -> None:
    gossiping = make("sgp(topology=complete())", size, lambda: Flat(NUMEL), sgd(0.1, momentum))
    reducing = make("allreduce", size, lambda: Flat(NUMEL), sgd(0.1, momentum))
    train(gossiping, targets, 20)
    train(reducing, targets, 20)
    for a, b in zip(parameters(gossiping), parameters(reducing), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("recipe", ["sgp", "sgp(topology=ring())"])
def test_on_quadratics_the_mean_is_exact_and_the_spread_follows_the_rate(recipe: str) -> None:
    best = torch.stack([noise(8, rank, numel=NUMEL, dtype=torch.float64) for rank in range(8)]).mean(0)
    spreads = list[float]()
    for rate, steps in ((0.1, 300), (0.01, 60)):
        ranks = make(recipe, 8, lambda: Flat(NUMEL), sgd(rate, 0.0))
        if rate < 0.1:  # too slow to come from afar: start at the best
            for r in ranks:
                r.model.get_parameter("x").data.copy_(best)
        train(ranks, targets, steps)
        torch.testing.assert_close(torch.stack(parameters(ranks)).mean(0), best, rtol=0, atol=1e-12)
        spreads.append(spread(parameters(ranks)))
    assert 0.01 < spreads[0] < 1.0
    assert 5 < spreads[0] / spreads[1] < 20


def test_momentum_stays_at_home_and_is_never_sent() -> None:
    ranks = make("sgp", 4, lambda: Flat(NUMEL), sgd(0.1, 0.9))
    run = train(ranks, targets, 5)
    wires = [e.handed for e in run.ledger if e.verb == "Send"]
    assert wires == [NUMEL * 8 + 8] * 20
    momenta = [r.optimizer.state[r.model.get_parameter("x")]["momentum_buffer"] for r in ranks]
    assert not bit_equal(momenta)


@pytest.mark.parametrize(("recipe", "rounds"), [("sgp(every=3)", 4), ("osgp(every=3)", 4), ("sgp", 12), ("osgp", 12)])
def test_bytes_are_one_message_a_peer_and_round(recipe: str, rounds: int) -> None:
    ranks = make(recipe, 5, lambda: Flat(NUMEL, torch.float32))
    run = train(ranks, targets, 12)
    assert run.ledger.by_verb()["Send"] == (5 * rounds, 5 * rounds * (4 * NUMEL + 4))


def test_gossip_every_third_step_mixes_after_the_third() -> None:
    ranks = disagreeing("sgp(every=3)", 4)
    before = parameters(ranks)
    train(ranks, still, 2)
    assert all(bit_equal(pair) for pair in zip(before, parameters(ranks)))
    train(ranks, still, 1)
    assert not any(bit_equal(pair) for pair in zip(before, parameters(ranks)))
    train(ranks, still, 3)
    assert spread(parameters(ranks)) < 1e-15


def test_a_straggler_delays_its_neighbours_only_until_a_message_passes() -> None:
    ranks = make("osgp", 4, lambda: Flat(NUMEL))
    train(ranks, still, 4, Network(latency=0.5), lambda rank, step: 1.0)
    assert [r.clock for r in ranks] == pytest.approx([4.0] * 4)  # half a step of latency is hidden
    ranks = make("sgp", 4, lambda: Flat(NUMEL))
    train(ranks, still, 4, Network(latency=0.5), lambda rank, step: 1.0)
    assert [r.clock for r in ranks] == pytest.approx([6.0] * 4)


def test_a_message_of_another_length_is_refused() -> None:
    state: State = {"x": torch.zeros(NUMEL, dtype=torch.float64), "w": torch.tensor(0.5)}
    with pytest.raises(WireError, match="push_sum: expected 56 bytes, got 51"):
        PushSum().absorb(Bucket(state["x"], LAYOUT), state, [torch.zeros(51, dtype=torch.uint8)])


@pytest.mark.parametrize("weights", [[], [0.25], [0.5]], ids=str)
@pytest.mark.parametrize("cut", [1, 5, NUMEL])
@pytest.mark.parametrize("pushed", [True, False], ids=["pushed", "followed"])
def test_to_follow_the_parameters_piece_by_piece_is_to_absorb(weights: list[float], cut: int, pushed: bool) -> None:
    mixer, half, parts = PushSum(), torch.tensor(0.5, dtype=torch.float64), scattered(3)
    kept, model, came = parts[0], 2 * parts[0] + parts[1], parts[2]
    wires = [torch.cat([came, came.new_full((1,), w)]).view(torch.uint8) for w in weights]
    whole, followed = State(x=kept.clone(), w=half, z=2 * kept), State(x=kept.clone(), w=half)
    if pushed:
        followed["z"] = 2 * kept
    block = Bucket(model.clone(), LAYOUT)
    expected = mixer.absorb(block, whole, wires)
    mixer.wrote(block.like(expected), whole)
    told = mixer.follow(lambda: model.split(cut), LAYOUT, followed, wires)
    assert told is not None
    assert len(told) == (sum(weights) == 0.5)
    assert bit_equal([model, expected, *told])
    assert followed.keys() == (set() if sum(weights) == 0.5 else {"x", "w"})
    assert all(bit_equal([whole[key], value]) for key, value in followed.items())
    touched = Bucket(model + 1, LAYOUT)
    assert bit_equal([mixer.numerator(touched, whole)[0], mixer.numerator(touched, followed)[0]])


@pytest.mark.parametrize("came", [0, 2])
def test_who_has_pushed_nothing_or_hears_of_several_does_not_follow(came: int) -> None:
    kept = State(x=scattered(1)[0], w=torch.tensor(0.5), z=scattered(1)[0]) if came else State()
    state = kept.copy()
    wires = [torch.zeros(56, dtype=torch.uint8)] * came
    assert PushSum().follow(lambda: [torch.zeros(NUMEL)], LAYOUT, state, wires) is None
    assert state.keys() == kept.keys()
    assert all(state[key] is kept[key] for key in kept)
