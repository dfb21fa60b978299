"""Two levels: what crosses a node's card, what its ranks hold in common, and what is refused."""

import re

import pytest
import torch
from tests.laws.blocks import bits, block
from tests.laws.crew import Crew, mean
from tests.runtime.gym import bit_equal, make, parameters, pull
from tests.runtime.gym import train as run

from gossamer.bench.catalogue import example
from gossamer.core.bucket import Bucket
from gossamer.core.errors import GossamerError, RecipeError
from gossamer.core.memory_pool import MemoryPool
from gossamer.core.verbs import Program, join, receive, receive_first, send, start, take_ticket
from gossamer.exchanges.as_one import Node, as_one
from gossamer.fabrics.sim import Network, simulate
from gossamer.planning import bytes_between, bytes_per_step
from gossamer.recipe import Recipe, known_presets
from gossamer.simulate import Trained, replicas, train

SHAPES = {"w": (96, 64), "v": (1000,)}
D = 96 * 64 + 1000


def gradients(size: int, step: int = 0) -> list[Bucket]:
    return [block("matrices", torch.float32, seed=r + 31 * step) for r in range(size)]


# -- the mean ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("exchange", ["nodes(scatter(fp32()), 2)", "nodes(nodes(allreduce(fp32()), 2), 2)"])
def test_it_is_the_mean_of_all_also_where_the_last_node_is_smaller(exchange: str, size: int) -> None:
    blocks = gradients(size)
    torch.testing.assert_close(Crew(exchange, size).step(blocks).double(), mean(blocks), rtol=1e-5, atol=1e-6)


def test_what_a_node_loses_each_of_its_ranks_keeps() -> None:
    crew = Crew("nodes(gather(topk(ratio=0.1)), 2) + error_feedback()", 6)
    for step in range(3):
        crew.step(gradients(6, step))
    kept = [bits(s["residual"]) for s in crew.kept]
    assert kept[0] != kept[2] != kept[4]
    for a, b in ((0, 1), (2, 3), (4, 5)):  # up to what their own gradients round
        torch.testing.assert_close(crew.kept[a]["residual"], crew.kept[b]["residual"], rtol=1e-5, atol=1e-5)
        assert crew.kept[a]["residual"].any()


def test_what_was_sent_inside_of_nodes_is_taken_out_once() -> None:
    """Low rank may take what it sends out of the bucket at once; the memory takes out what both levels have sent."""
    crew = Crew("nodes(gather(topk(ratio=0.5)), 2, inside=allreduce(powersgd(rank=1))) + error_feedback()", 4)
    given = told = torch.zeros(gradients(1)[0].numel, dtype=torch.float64)
    for step in range(3):
        blocks = gradients(4, step)
        given = given + mean(blocks)
        told = told + crew.step([Bucket(b.flat, b.layout, b.flat) for b in blocks]).double()
    torch.testing.assert_close(told + crew.mean_of("residual"), given, rtol=1e-4, atol=1e-4)


def test_nodes_have_dice_of_their_own() -> None:
    """Equal blocks are rounded otherwise on each node, and alike on all ranks of one."""
    same = block("long", seed=1)
    crew = Crew("nodes(gather(qsgd(bits=2)), 2)", 4)
    crew.step([same.like(same.flat.clone()) for _ in range(4)])
    got = [torch.zeros_like(same.flat) for _ in range(4)]
    for result, into in zip(crew.echoes, got, strict=True):
        result.add_sent(into, 1.0)
    said = {bits(g) for g in got}
    assert len(said) == 2


# -- bytes and time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["ternary()", "qsgd(bits=4)", "fp32()"])
def test_a_card_carries_one_message_where_a_flat_scatter_sends_one_for_every_rank(codec: str) -> None:
    """n = 2 nodes of g = 4: 2 (n - 1) / n of a message, against about g + 1 of them."""
    message = bytes_per_step(f"gather({codec})", SHAPES, 2)
    two_levels = bytes_between(f"nodes(scatter({codec}), 4)", SHAPES, 8, per_node=4)
    flat = bytes_between(f"scatter({codec})", SHAPES, 8, per_node=4)
    assert two_levels == pytest.approx(message, rel=0.05)
    assert flat == pytest.approx((4 * 4 / 8 + 7 / 8) * message, rel=0.1)  # g (N - g) / N, and a ring of answers


def trained(recipe: str, size: int, network: Network) -> Trained:
    """Three steps."""

    def model() -> torch.nn.Module:
        out = torch.nn.Module()
        for name, shape in SHAPES.items():
            out.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        return out

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + rank))
        return 0.0

    ranks = replicas(recipe, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), size)
    return train(ranks, backward, 3, network)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize(
    "recipe",
    ["nodes(scatter(ternary()), 2)", "nodes(allreduce(powersgd()), 2) + error_feedback()", "nodes(scatter(fp32()), 4)"],
)
def test_bytes_between_nodes_are_counted_as_they_are_sent(recipe: str, size: int) -> None:
    per_node = Recipe.of(recipe).ranks_per_node
    ledger = trained(recipe, size, Network(per_node=per_node)).ledger
    assert bytes_between(recipe, SHAPES, size, per_node) * -(-size // per_node) * 3 == pytest.approx(ledger.between)
    assert bytes_per_step(recipe, SHAPES, size) * size * 3 == pytest.approx(ledger.sent)
    speakers = {e.rank for e in ledger if e.sent > e.inside}
    assert speakers == (set(range(0, size, per_node)) if size > per_node else set())


def test_where_cards_are_slow_two_levels_are_faster_than_one() -> None:
    network = Network(rate=1e6, per_node=4, inside=1e9)
    recipes = ("nodes(scatter(qsgd(bits=4)), 4)", "scatter(qsgd(bits=4))", "allreduce")
    two_levels, flat, dense = (trained(recipe, 8, network).seconds for recipe in recipes)
    assert two_levels < 0.45 * flat < dense


# -- as one ------------------------------------------------------------------------------------------------------------


def test_letters_between_nodes_reach_all_ranks_of_a_node() -> None:
    """Also of a program that was started, on a lane."""

    def swap(node: Node) -> Program[list[int]]:
        yield from send(1 - node.number, torch.full((3,), node.number, dtype=torch.uint8))
        return (yield from receive(1 - node.number, 3)).tolist()

    def program(node: Node) -> Program[list[int]]:
        return (yield from join((yield from start(swap(node)))))

    nodes = [Node.of(r, 4, 2) for r in range(4)]
    got = simulate([as_one(program(n), n, torch.device("cpu"), MemoryPool()) for n in nodes]).results
    assert got == [[1] * 3, [1] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize("ask", [lambda: receive_first(3), lambda: take_ticket("k")])
def test_a_node_is_never_first(ask) -> None:
    nodes = [Node.of(r, 4, 2) for r in range(4)]
    with pytest.raises(GossamerError, match="cannot be split over its ranks"):
        simulate([as_one(ask(), n, torch.device("cpu"), MemoryPool()) for n in nodes])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nodes(scatter(qsgd()), 0)", "per_node must be the number of ranks per node, 1 or more, got 0"),
        ("nodes(push_sum(), 2)", "between must be an? exchange"),
        ("nodes(scatter(qsgd()), 2, inside=fp32())", "inside must be an? exchange"),
        ("nodes(scatter(qsgd(), feedback=0.5), 2)", "leave feedback out"),
        ("nodes(scatter(topk()), 2)", "error_feedback"),
        ("nodes(scatter(ternary()), 2) + error_feedback()", "diverge"),
        ("nodes(scatter(topk()), 2) + diana()", "unbiased"),
        ("nodes(gather(fp32(), mean=median()), 2) + error_feedback()", "leaves values out that no memory keeps"),
        ("nodes(gather(fp32(), mean=median()), 2) + backup_workers()", "late ranks send zeros"),
        ("nodes(scatter(fp32()), 2, inside=gather(fp32(), mean=trimmed(1))) + ef21()", "leaves values out"),
        ("nodes(fetch_sgd(columns=10), 2) + signs(momentum=0.9)", "would add a second one"),
        ("nodes(fetch_sgd(columns=10), 2) + switch_exchange(9, nodes(scatter(qsgd()), 2))", "a momentum or a debt"),
        (
            "nodes(allreduce(fp32()), 2) + gossip()",
            "sends models from rank to rank, not by nodes.* leave the nodes out; or use",
        ),
        ("ad_psgd + per_node(2)", "sends models from rank to rank"),
        ("qsgd + per_node(0)", "ranks must be at least 1, got 0"),
        ("qsgd + per_node(2) + per_node(4)", "two parts set the ranks per node"),
        ("nodes(scatter(qsgd()), 2) + per_node(4)", "is for nodes of 2 ranks, and here nodes have 4"),
        ("per_node(4)", "a recipe needs an exchange"),
    ],
)
def test_what_cannot_be_right_is_refused(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.of(text)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("topk + per_node(4)", "nodes(gather(topk(scope='block')), 4) + error_feedback()"),
        ("terngrad + local_sgd(4) + per_node(4)", "nodes(scatter(ternary(), answer=qsgd(bits=3)), 4) + local_sgd(4)"),
        ("backup + per_node(2)", "nodes(allreduce(fp32()), 2) + backup_workers()"),
        ("powersgd + per_node(1)", "allreduce(powersgd()) + error_feedback()"),
        ("nodes(scatter(qsgd()), 4) + per_node(4)", "nodes(scatter(qsgd()), 4)"),
    ],
)
def test_any_recipe_goes_between_nodes_by_one_more_term(text: str, read: str) -> None:
    assert repr(Recipe.of(text)) == read


def test_its_text_is_read_as_it_is_printed() -> None:
    text = "nodes(scatter(ternary()), 4, inside=allreduce(bf16()))"
    assert repr(Recipe.of(text)) == text
    assert Recipe.of("nodes(scatter(topk()), 4) + error_feedback()").groups(8) == ((0, 1, 2, 3), (4, 5, 6, 7), (0, 4))


@pytest.mark.parametrize("codec", ["powersgd()", "bf16()"])
def test_messages_that_add_up_do_so_inside_and_nothing_dense_is_sent(codec: str) -> None:
    """Bytes inside are a few messages' each, and the mean is that of the flat form up to the order of summing."""
    recipe, flat = f"nodes(allreduce({codec}), 2) + error_feedback()", f"allreduce({codec}) + error_feedback()"
    message = bytes_per_step(flat, SHAPES, 2)  # 2 (N-1)/N of it, which is one of it
    assert bytes_between(recipe, SHAPES, 4, per_node=2) == pytest.approx(message)
    assert bytes_per_step(recipe, SHAPES, 4) * 4 == pytest.approx((4 + 2 + 2) * message)  # inside, between, told
    two, one = Crew(recipe, 4), Crew(flat, 4)
    for step in range(3):
        blocks = gradients(4, step)
        torch.testing.assert_close(two.step(blocks), one.step(blocks), rtol=1e-2, atol=1e-2)


def refusal_of(text: str) -> str:
    """Why it is no recipe; nothing if it is one."""
    try:
        Recipe.of(text)
    except RecipeError as refusal:
        return str(refusal)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("name", known_presets())
def test_every_preset_trains_in_two_levels_or_is_refused_with_the_reason(name: str) -> None:
    text = f"{example(name)!r} + per_node(2)"
    if why := refusal_of(text):
        assert re.search(r"rank to rank|talks to the server|the memory keeps the residual|is for nodes of", why)
        return
    recipe = Recipe.of(text)
    gossips = recipe.schedule.shape.mixer is not None  # between nodes of one size
    ranks = make(repr(recipe), 4 if gossips else 5)
    run(ranks, pull, 9)
    models = parameters(ranks)
    assert all(torch.isfinite(model).all() for model in models)
    assert bit_equal(models) or not recipe.is_synced(9)
