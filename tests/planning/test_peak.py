"""What a rank holds at its peak: recipes whose bytes one can add up by hand, and all presets."""

from dataclasses import replace

import pytest
import torch

from gossamer.bench import catalogue
from gossamer.core.errors import WireError
from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import sharded
from gossamer.planning.live_bytes import LiveBytes
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import from_shapes, known_model
from gossamer.planning.one_rank import OneRank
from gossamer.planning.peak import PeakMemory
from gossamer.planning.plan import plan, prepare
from gossamer.planning.work import NoWork
from gossamer.recipes import presets

LAYERS = from_shapes(
    {f"w{i}": (512, 512) for i in range(4)}, 0.1, name="layers", memory_rate=1e10, momenta=1
)  # of the length that is rehearsed, so that nothing is cut down
SMALL = from_shapes({"a": (128, 100), "b": (128,), "c": (64, 128)}, 0.1, name="small", memory_rate=1e10)
PROCESSORS = from_flags(nodes=2, rate=1e9)
DEVICES = from_flags(nodes=2, gpus=1, rate=1e9)


def held(recipe: str, model: ModelCost = LAYERS, cluster: Cluster = PROCESSORS) -> PeakMemory:
    return prepare(recipe, model, cluster, NoWork()).memory


def test_memory_is_counted_once_however_many_tensors_share_it_and_until_it_is_freed() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        views = [kept.view(10, 100), kept[5:]]
        assert (live.now, live.most) == (4000, 4000)
        more = kept + views[0].view(-1)
        assert live.now == 8000
        del more
    assert (live.now, live.most) == (4000, 8000)


def test_dense_averages_hold_gradients_a_second_time_in_their_buckets() -> None:
    found = held("allreduce")
    assert (found.model, found.gradients, found.optimizer, found.keeps) == (4 * 2**20,) * 3 + (0,)
    assert found.step == pytest.approx(found.model, rel=0.01)
    assert found.peak == pytest.approx(4 * found.model, rel=0.01)


def test_a_device_frees_gradients_once_they_are_in_their_bucket() -> None:
    """So it holds besides only those of the bucket that fills."""
    found = held("allreduce", cluster=DEVICES)
    assert found.step <= 0.3 * found.model


def test_a_residual_lies_in_memory_twice_until_the_optimizer_has_stepped() -> None:
    """Buckets, the residuals that are kept, those that are pending, and a wire of one part in a hundred."""
    found = held("topk")
    assert found.keeps == pytest.approx(found.model, rel=0.01)
    assert found.keeps + found.step == pytest.approx(3 * found.model, rel=0.05)


def test_rounds_hold_the_anchor_and_what_they_send_beside_the_gradients() -> None:
    found = held("local_sgd(2)")
    assert found.keeps == found.model
    assert found.keeps + found.step == pytest.approx(3 * found.model, rel=0.02)


def test_dense_averages_of_many_ranks_take_what_those_of_two_do() -> None:
    many = held("allreduce", cluster=from_flags(nodes=64, rate=1e9))
    assert many.peak == pytest.approx(held("allreduce").peak, rel=0.01)


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_rank_holds_at_least_what_it_keeps(name: str) -> None:
    """And each preset can be rehearsed, but where ranks wait for what others alone can answer."""
    recipe = catalogue.example(name)
    prepared = prepare(recipe, SMALL, from_flags(nodes=4, rate=1e9), NoWork())
    found = prepared.memory
    assert found.keeps == prepared.keeps
    assert found.peak >= found.training + found.keeps
    assert not found.is_least or recipe.schedule.shape.is_async


def test_what_cannot_be_rehearsed_is_an_at_least_and_a_defect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = from_shapes({"other": (16, 9)}, 0.1, name="other", memory_rate=1e10)  # of which nothing is cached

    def fails(error: Exception) -> None:
        def take_step(rank: OneRank) -> None:
            raise error

        monkeypatch.setattr(OneRank, "take_step", take_step)

    fails(WireError("the wire of another rank is unknown"))
    assert held("allreduce", model).is_least
    for defect in (RuntimeError, IndexError, TypeError, ValueError):
        fails(defect("a defect"))
        with pytest.raises(defect, match="a defect"):
            held("allreduce", model)


def test_a_large_model_is_cut_down_and_its_buckets_follow_from_two_cuts() -> None:
    """7 billion parameters, whose hundreds of buckets hold no more each than a bucket holds."""
    found = held("topk", known_model("llama-7b", 2.0))
    assert found.keeps == pytest.approx(found.model, rel=0.02)
    assert found.step == pytest.approx(2 * found.model, rel=0.1)


def test_what_fits_between_steps_but_not_at_the_peak_is_refused() -> None:
    needed = LAYERS.training_bytes + 1.5 * LAYERS.bytes  # between what topk keeps and what it holds
    small = replace(PROCESSORS, hosts=tuple(replace(h, memory=needed) for h in PROCESSORS.hosts))
    dense, sparse = (
        plan(LAYERS, small, [name], work=NoWork(), curves=False).recipes[0] for name in ("allreduce", "topk")
    )
    assert dense.error == ""
    assert sparse.error.startswith("it does not fit: at its peak a rank holds ")
    assert sparse.memory is not None
    assert sparse.memory.training + sparse.memory.keeps < needed < sparse.memory.peak


@pytest.mark.parametrize(
    "recipe",
    [
        "local_sgd({})",
        "diloco({})",
        "streaming_diloco({})",
        "allreduce + streaming({}, delay={})",
        "overlap_local_sgd({})",
        "allreduce + eager({})",
        "allreduce + hierarchical(2, 2, slowmo({}))",
    ],
)
def test_a_long_round_holds_what_a_short_one_does(recipe: str) -> None:
    """Of rounds of more than 32 steps one end was rehearsed, at which there was no momentum yet."""
    four = from_flags(nodes=4, rate=1e9)
    short, middle, long = (held(recipe.replace("{}", f"{every}"), cluster=four) for every in (8, 40, 200))
    assert middle.peak == pytest.approx(short.peak, rel=0.01)
    assert long.peak == pytest.approx(short.peak, rel=0.01)


def test_a_shard_of_a_model_comes_with_whole_layers_in_backward() -> None:
    """Parameters and gradients of the root and of a layer, the next layer's parameters, and the last one's gradients."""
    here = from_flags(nodes=2, ranks=2, rate=1e9)
    layers = {f"{i}.weight": (512, 512) for i in range(4)}
    model = from_shapes(layers | {"head": (256, 512)}, 0.1, name="layers", memory_rate=1e10, momenta=1)
    mine = sharded(model, here, 2)
    assert mine.gathered == 4 * (4 * 512 * 512 + 2 * 256 * 512)

    def peak(recipe: str, gathered: int) -> float:
        found = prepare(recipe, replace(mine, gathered=gathered), here, NoWork(), 2).memory
        assert not found.is_least
        return found.peak

    for recipe in ("allreduce", "topk"):
        assert peak(recipe, mine.gathered) - peak(recipe, 0) == pytest.approx(mine.gathered, rel=0.01)
    assert sharded(model.of_dtype("bf16"), here, 2).gathered == mine.gathered / 2
