"""Gossip between nodes of several ranks: the setting of SGP's paper."""

import io
from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, flat, loss_of, same, simulated, small_step, usual
from torch import Tensor, nn

from gossamer.core.errors import AttachError, PeerError, RecipeError
from gossamer.fabrics.sim import Network
from gossamer.planning import bytes_between, bytes_per_step
from gossamer.recipe import Recipe
from gossamer.simulate import replicas, train

RECIPES = [
    "sgp",
    "osgp(every=2)",
    "sgp(topology=ring())",
    "d_psgd",
    "d_psgd(overlap=False)",
    "gossip_pga(every=3)",
    "choco_sgd(codec=topk(ratio=0.2), gamma=0.3)",  # which draws nothing: a node has the dice of its first rank
    "slowmo_sgp(every=4)",
    "allreduce(fp32()) + slowmo(4, inner=gossip(overlap=True))",
    "allreduce(fp32()) + slowmo(4, inner=push_sum(), average=False, beta=0.2)",
    "allreduce(fp32()) + gossip(warmup=2)",
]
SHAPES = {n: tuple(p.shape) for n, p in Awkward().named_parameters()}


def of_rank(model: nn.Module, rank: int, step: int) -> float:
    loss = loss_of(model, rank, step)
    loss.backward()
    return float(loss.detach())


def of_node(k: int) -> Callable[[nn.Module, int, int], float]:
    """The gradient that the ranks of a node have on average."""

    def backward(model: nn.Module, node: int, step: int) -> float:
        losses = [loss_of(model, rank, step) for rank in range(k * node, k * node + k)]
        (sum(losses, torch.zeros(())) / k).backward()
        return 0.0

    return backward


def trained(recipe: str, size: int, backward: Callable[[nn.Module, int, int], float], steps: int) -> list[Tensor]:
    ranks = replicas(recipe, lambda: Awkward(torch.float64), usual(recipe), size, seed=3)
    train(ranks, backward, steps)
    return [r.flat() for r in ranks]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_node_is_one_rank_whose_gradient_is_the_mean_of_the_node(recipe: str) -> None:
    """To 1e-12 in double precision; and all ranks of a node hold the same bits."""
    k, nodes, steps = 2, 4, 9
    got = trained(f"{recipe} + per_node({k})", k * nodes, of_rank, steps)
    one = trained(recipe, nodes, of_node(k), steps)
    for rank, model in enumerate(got):
        assert same(model, got[k * (rank // k)])
        torch.testing.assert_close(model, one[rank // k], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "recipe", ["sgp(every=2)", "osgp", "d_psgd", "gossip_pga(every=3)", "choco_sgd", "slowmo_sgp(every=4)"]
)
def test_bytes_are_counted_as_they_are_sent_and_a_card_carries_those_of_one_rank(recipe: str) -> None:
    text, steps = f"{recipe} + per_node(2)", 12
    ranks = replicas(text, Awkward, usual(recipe), 8)
    train(ranks, of_rank, 2, Network(per_node=2))  # how compressed gossip begins is not counted
    ledger = train(ranks, of_rank, steps, Network(per_node=2)).ledger
    assert bytes_per_step(text, SHAPES, 8) * 8 * steps == pytest.approx(ledger.sent)
    assert bytes_between(text, SHAPES, 8, 2) * 4 * steps == pytest.approx(ledger.between)
    assert {e.rank for e in ledger if e.sent > e.inside} == {0, 2, 4, 6}
    if "every" not in recipe:
        assert bytes_between(text, SHAPES, 8, 2) == bytes_per_step(recipe, SHAPES, 4)


def test_on_one_node_it_is_the_average_inside() -> None:
    """Nobody is there to gossip with; as `nodes(...)` of one node is what it is inside."""
    got, dense = trained("sgp + per_node(4)", 4, of_rank, 5), trained("allreduce", 4, of_rank, 5)
    for model in got:
        torch.testing.assert_close(model, dense[0], rtol=0, atol=1e-12)


def on_gloo(rank: int, size: int, recipe: str) -> tuple[list[Tensor], int, int]:
    out = list[Tensor]()
    with attached(recipe, nodes=2) as (model, optimizer, comm):
        sent, inside = comm.ledger.sent, comm.ledger.inside
        for _ in range(6):
            small_step(model, optimizer, comm, rank)
            out.append(flat(model))
        comm.quiet()
        sent, inside = comm.ledger.sent - sent, comm.ledger.inside - inside
        comm.check_sync()
        with comm.consensus():
            out.append(flat(model))
    return out, sent, inside


@pytest.mark.gang
@pytest.mark.parametrize(
    "recipe", ["sgp" + SMALL, "d_psgd" + SMALL, "choco_sgd" + SMALL, "slowmo_sgp(every=3)" + SMALL]
)
def test_real_processes_do_as_the_simulator_and_count_their_bytes(gang4: Gang, recipe: str) -> None:
    """Sums of two have no order, so no bit differs."""
    real, virtual = gang4.run(on_gloo, recipe), simulated(recipe + " + per_node(2)", 4, 6)
    for (models, _, _), seen in zip(real, virtual, strict=True):
        assert all(same(a, b) for a, b in zip(models, seen))
    for a, b in ((0, 1), (2, 3)):
        assert all(same(x, y) for x, y in zip(real[a][0], real[b][0], strict=True))
    assert all(same(models[-1], real[0][0][-1]) for models, _, _ in real)  # the consensus
    if "choco" not in recipe and "slowmo" not in recipe:
        sent, inside = sum(s for _, s, _ in real), sum(i for _, _, i in real)
        assert sent == 6 * 4 * bytes_per_step(recipe + " + per_node(2)", SHAPES, 4)
        assert sent - inside == 6 * 2 * bytes_between(recipe + " + per_node(2)", SHAPES, 4, 2)


def astray(rank: int, size: int) -> str:
    with attached("sgp + per_node(2)") as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        if rank == 3:
            with torch.no_grad():
                model.get_parameter("bias").add_(1.0)
        with pytest.raises(PeerError) as caught:
            comm.check_sync()
        return str(caught.value)


@pytest.mark.gang
def test_a_rank_that_strays_from_its_node_is_found(gang4: Gang) -> None:
    assert all("bias differs between ranks [2] and [3]" in text for text in gang4.run(astray))


def poisoned(rank: int, size: int) -> tuple[dict[int, int], int, bool]:
    """Rank 2's third gradient is not finite; the loop leaves such steps out, as a loss scaler does."""
    with attached("sgp + per_node(2)") as (model, optimizer, comm):
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (float("nan") if (rank, step) == (2, 2) else 1.0)
            loss.backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                optimizer.step()
            else:
                comm.skip()
        comm.check_sync()
        comm.finish()
        return comm.spoilt, comm.worker.record.skipped, bool(flat(model).isfinite().all())


@pytest.mark.gang
def test_a_node_leaves_out_a_step_by_itself_and_names_who_spoilt_it(gang4: Gang) -> None:
    assert gang4.run(poisoned) == [({}, 0, True)] * 2 + [({2: 1}, 1, True)] * 2


def resumed(rank: int, size: int, recipe: str, at: int) -> tuple[Tensor, Tensor]:
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(at):
            small_step(model, optimizer, comm, rank)
        kept = comm.state_dict(), {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()
        kept = torch.load(_copy(kept), weights_only=False)
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        through = flat(model)
    with attached(recipe) as (model, optimizer, comm):
        model.load_state_dict(kept[1])
        optimizer.load_state_dict(kept[2])
        comm.load_state_dict(kept[0])
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        return through, flat(model)


def _copy(kept: object) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(kept, out)
    out.seek(0)
    return out


@pytest.mark.gang
@pytest.mark.parametrize("recipe", ["osgp", "choco_sgd", "slowmo_sgp(every=4)"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(gang4: Gang, recipe: str) -> None:
    for through, again in gang4.run(resumed, recipe + " + per_node(2)" + SMALL, 3):
        assert same(through, again)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("sgp + per_node(8)", "nodes(allreduce(fp32()), 8) + gossip(per_node=8)"),
        ("slowmo_sgp + per_node(8)", "nodes(allreduce(fp32()), 8) + slowmo(48, inner=gossip(per_node=8))"),
        ("d_psgd + per_node(2)", "nodes(allreduce(fp32()), 2) + gossip(mixer=symmetric(), overlap=True, per_node=2)"),
    ],
)
def test_it_prints_as_what_it_is(text: str, read: str) -> None:
    assert repr(Recipe.of(text)) == read
    assert repr(Recipe.of(read)) == read


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ad_psgd + per_node(2)", r"pairwise\(\): the schedule sends models from rank to rank"),
        (
            "nodes(allreduce(fp32()), 2) + gossip()",
            r"Apply per_node to the whole gossip recipe, 'sgp \+ per_node\(4\)'",
        ),
        ("nodes(allreduce(fp32()), 2) + slowmo(4, inner=push_sum())", "sends models from rank to rank, not by nodes"),
        ("allreduce + gossip(per_node=0)", "1 or more, got 0"),
    ],
)
def test_what_would_stay_flat_is_refused(text: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Recipe.of(text)


def test_nodes_of_unlike_size_are_refused() -> None:
    with pytest.raises(AttachError, match="6 ranks are not equally many on each node"):
        replicas("sgp + per_node(4)", Awkward, usual("sgp"), 6)
