"""Law 2: real processes compute what the simulator computes; law 1: replicas are equal, and a changed one is found."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, same, simulated, small_step, trained
from tests.laws.samples import preset_recipes
from torch import Tensor

from gossamer.core.errors import PeerError
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.schedules import EveryStep

pytestmark = pytest.mark.gang

OURS = [  # every sum is made by us, in rank order: no bit may differ
    "bf16",
    "fp16",
    "terngrad" + SMALL,
    "allreduce(ternary())" + SMALL,
    "qsgd" + SMALL,
    "topk(ratio=0.1)" + SMALL,
    "topk(ratio=0.1, scope='global')",
    "gather(topk(ratio=0.2, index='rice')) + error_feedback()" + SMALL,
    "gather(dropping(ratio=0.1, warmup=4)) + error_feedback()" + SMALL,
    "gtopk(ratio=0.1)" + SMALL,
    "onebit_sgd + delayed()" + SMALL,
    "gather(topk(ratio=0.2)) + ef21(eta=1.0)" + SMALL,
    "gather(adacomp(16)) + error_feedback() + rule('ndim < 2', gather(strom(0.1)), error_feedback())",
    "gather(atomo(svd(head=2), atoms=1))" + SMALL,
    "scatter(atomo(svd(), share=0.3, draws='independent'))" + SMALL,
    "diana(bits=4, bucket=16)" + SMALL,
    "gather(bernoulli(bucket=16)) + diana()" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana(momentum=0.5)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + slowmo(3)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + overlap_local_sgd(3)" + SMALL,
    "scatter(topk(ratio=0.2)) + error_feedback() + easgd(2)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + post_local(3, cocod(2))" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + streaming(4, delay=1)" + SMALL,
    "gather(tile_topk(4, 8)) + error_feedback(decay=0.95) + eager(2)" + SMALL,
    "allreduce + noloco(3)" + SMALL,
    "gather(qsgd(bits=4, bucket=16)) + slowmo(3, guard=edit_guard(warmup=1))" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + hierarchical(1, 2, bmuf(3, nesterov=True))" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + slowmo(3, inner=gossip(overlap=True))" + SMALL,
    "accordion_qsgd(epoch=2, interval=1, threshold=0.1)" + SMALL,
    "sgp" + SMALL,
    "sgp(topology=ring(), every=2)",
    "osgp(every=2)" + SMALL,
    "d_psgd" + SMALL,
    "choco_sgd(codec=topk(ratio=0.2))" + SMALL,
    "sgp(topology=switch(complete(), 3, bipartite()))",
    "gather(topk(ratio=0.2)) + error_feedback() + rule('ndim < 2', scatter(qsgd(bits=8)))" + SMALL,
    "scatter(qsgd()) + backup_workers(backups=0)",
    "scatter(qsgd()) + signs()" + SMALL,
    "distributed_lion" + SMALL,
    "scatter(fp4('e3m0', block=8)) + slowmo(3)" + SMALL,
    "demo(keep=4, side=8)" + SMALL,
    "nodes(scatter(qsgd(bits=4, bucket=16)), 2)" + SMALL,  # a sum of two has no order
    "nodes(scatter(topk(ratio=0.2)), 2) + error_feedback()" + SMALL,
    "nodes(gather(topk(ratio=0.2, index='rice')), 2) + error_feedback() + slowmo(3)",
]
THEIRS = [  # the backend sums, in its own order
    "allreduce" + SMALL,
    "powersgd" + SMALL,
    "powersgd + rule('ndim < 2', scatter(bf16()))" + SMALL,
    "allreduce(powersgd(rank=1, start='svd')) + error_feedback()" + SMALL,
    "local_gradients(ratio=0.1, every=7)" + SMALL,
    "dqgd(bits=4, start='first')" + SMALL,
    "dgc(ratio=0.1)",
    "randk(ratio=0.1)" + SMALL,
    "sketched_sgd(ratio=0.02, candidates=2)",
    "fetchsgd(ratio=0.02)",
    "local_sgd(3)" + SMALL,
    "slowmo(3)" + SMALL,
    "allreduce + slowmo(3, buffers='average')",
    "des_loc(2, first=1, second=2)" + SMALL,
    "sparta(0.25)" + SMALL,
    "slowmo_sgp(3)" + SMALL,
    "overlap_local_sgd(3)" + SMALL,
    "gossip_pga(3)" + SMALL,
    "backup(backups=0)",
    "accordion(epoch=2, mild=3, harsh=1, interval=1, threshold=0.1)" + SMALL,
    "accordion_batch(epoch=2, factor=4, interval=1, threshold=10.0)" + SMALL,
    "nodes(allreduce(powersgd()), 2) + error_feedback()" + SMALL,
]
STEPS = 7


def seen(recipes: list[str]) -> Iterator[tuple[str, int]]:
    """Every recipe once: on four ranks what forms groups of ranks or has a schedule of its own, and half of all else.

    Who sends to whom differs most on two, where a rank gets from the one that it sends to: there gossip is tried, too.
    """
    for i, recipe in enumerate(recipes):
        schedule = Recipe.of(recipe).schedule
        four = i % 2 == 0 or schedule != EveryStep() or "nodes" in recipe
        if four:
            yield recipe, 4
        if not four or schedule.shape.mixer is not None:
            yield recipe, 2


def both(gang: Gang, recipe: str) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    return gang.run(trained, recipe, STEPS), simulated(recipe, gang.size, STEPS)


@pytest.mark.parametrize(("recipe", "size"), [*seen(OURS)])
def test_gloo_is_the_simulator_bit_for_bit(gang_of: Callable[[int], Gang], recipe: str, size: int) -> None:
    real, virtual = both(gang_of(size), recipe)
    for rank in range(size):
        for step in range(STEPS):
            assert same(real[rank][step], virtual[rank][step]), f"rank {rank}, step {step + 1}"
    assert not same(real[0][0], real[0][-1])


@pytest.mark.parametrize(("recipe", "size"), [*seen(THEIRS)])
def test_gloo_is_the_simulator_up_to_rounding(gang_of: Callable[[int], Gang], recipe: str, size: int) -> None:
    real, virtual = both(gang_of(size), recipe)
    for rank in range(size):
        torch.testing.assert_close(real[rank][-1], virtual[rank][-1], rtol=1e-5, atol=1e-6)
        assert not same(real[rank][0], real[rank][-1])
    if Recipe.of(recipe).schedule.shape.averages_gradients:
        assert all(same(mine, real[0][-1]) for mine in (r[-1] for r in real))


COMPRESSED = "quantised", "sparse", "low_rank", "one_bit", "adaptive"  # families of presets that say less
PRESETS = [name for name, make in presets().items() if make.__module__.rsplit(".", 1)[1] in COMPRESSED]


@pytest.mark.parametrize("name", PRESETS)
def test_three_ranks_of_gloo_are_those_of_the_simulator(gang3: Gang, name: str) -> None:
    """Chunks that differ in length, thirds that no float holds, and no power of two."""
    recipe = preset_recipes()[name]
    real, virtual = gang3.run(trained, recipe, 5), simulated(recipe, 3, 5)
    for mine, twin in zip(real, virtual, strict=True):
        torch.testing.assert_close(mine[-1], twin[-1], rtol=1e-5, atol=1e-6)
        assert not same(mine[0], mine[-1])
    if recipe.is_synced(5):
        assert same(real[0][-1], real[1][-1])
        assert same(real[0][-1], real[2][-1])


def test_no_backups_is_allreduce_bit_for_bit(gang2: Gang) -> None:
    backup, plain = gang2.run(trained, "backup(backups=0)", 5), gang2.run(trained, "allreduce", 5)
    assert all(same(a, b) for mine, other in zip(backup, plain) for a, b in zip(mine, other))


def tampered(rank: int, size: int, recipe: str, victim: int) -> str:
    """What check_sync says after somebody moved one bit on one rank."""
    with attached(recipe) as (model, optimizer, comm):
        small_step(model, optimizer, comm, rank)
        comm.check_sync()
        if rank == victim:
            touched = comm.worker.buckets[0].states["schedule"].get("anchor", model.get_parameter("bias"))
            with torch.no_grad():
                touched.view(-1)[3:4] += 0.25
        with pytest.raises(PeerError) as caught:
            comm.check_sync()
        return str(caught.value)


@pytest.mark.parametrize(("recipe", "named"), [("qsgd", "bias differs"), ("slowmo(3)", "the anchor of bias differs")])
def test_a_changed_replica_is_found_and_named(gang4: Gang, recipe: str, named: str) -> None:
    texts = gang4.run(tampered, recipe, 2)
    assert len(set(texts)) == 1
    assert named in texts[0]
    assert "on rank(s) [2]" in texts[0]


def test_of_two_replicas_nobody_knows_which_was_changed(gang2: Gang) -> None:
    texts = gang2.run(tampered, "qsgd", 1)
    assert texts[0] == texts[1]
    assert "bias differs between ranks [0] and [1]" in texts[0]
