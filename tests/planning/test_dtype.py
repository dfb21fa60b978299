"""A model in bf16: baselines send and gather half, recipes average in fp32, and the sentences compare with what is there."""

from dataclasses import replace

import pytest
import torch
from tests.planning.models import SMALL
from torch import nn

from gossamer.core.errors import CostError
from gossamer.costs import from_flags
from gossamer.planning.baselines import baselines
from gossamer.planning.measured_model import measure, untrained, with_step
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.model_shapes import known_model
from gossamer.planning.plan import TrainingPlan, plan
from gossamer.planning.verdict import sentences
from gossamer.planning.work import NoWork
from gossamer.simulate import bytes_per_step

FAST = from_flags(nodes=2, gpus=1, rate=25e9 / 8)
SLOW = from_flags(nodes=2, gpus=1, rate=1e9 / 8)


def planned(dtype: str, recipe: str = "allreduce", rate_of: str = "slow") -> TrainingPlan:
    cluster = SLOW if rate_of == "slow" else FAST
    return plan(known_model("gpt2", 0.35, dtype=dtype), cluster, [recipe], curves=False)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_ddp_sends_numbers_of_the_models_own_width(dtype: str) -> None:
    wide, narrow = planned("fp32"), planned(dtype)
    first, second = (found.dense.seconds for found in (wide, narrow))
    assert first is not None
    assert second is not None
    assert second.sent == pytest.approx(first.sent / 2, rel=1e-6)
    assert [row.name for row in narrow.baselines] == ["ddp", "ddp, 4 micro-batches", "compute"]
    bf16 = wide.baselines[1].seconds
    assert bf16 is not None
    assert second.sent == bf16.sent
    assert second.step == pytest.approx(bf16.step, rel=0.02)  # which also casts, and cuts other buckets


@pytest.mark.parametrize("recipe", ["allreduce", "qsgd", "topk", "local_sgd(8)"])
def test_recipes_send_what_they_send_of_a_model_in_fp32(recipe: str) -> None:
    """As on real ranks, where buckets are in fp32 whatever the parameters are."""
    wide, narrow = (planned(dtype, recipe).recipes[0] for dtype in ("fp32", "bf16"))
    assert wide.seconds is not None
    assert narrow.seconds is not None
    assert narrow.seconds.sent == wide.seconds.sent
    assert narrow.memory is not None
    assert wide.memory is not None
    assert narrow.memory.keeps == wide.memory.keeps
    model = known_model("gpt2", 0.35)
    if recipe == "allreduce":
        assert narrow.seconds.sent == pytest.approx(bytes_per_step(recipe, dict(model.shapes), 2), rel=1e-3)


def test_means_are_copied_into_gradients_of_fewer_bits() -> None:
    free = replace(from_flags(nodes=2, gpus=1, rate=1e15, latency=0.0), program_seconds=0.0)
    model = known_model("gpt2", 0.35, memory_rate=1e10)
    fast = replace(free, hosts=tuple(replace(host, memory_rate=1e10) for host in free.hosts))
    steps = dict[str, float]()
    for dtype in ("fp32", "bf16"):
        there = replace(model.of_dtype(dtype), forward=0.1, backward=0.2, optimizer=0.05)
        row = plan(there, fast, ["allreduce"], work=NoWork(), curves=False).recipes[0]
        assert row.seconds is not None
        steps[dtype] = row.seconds.step
    gathered, copied = (2 - 4) * model.numel / 1e10, (4 + 2) * model.numel / 1e10
    assert steps["bf16"] - steps["fp32"] == pytest.approx(gathered + copied, rel=0.05)


def test_sharded_yardsticks_gather_and_scatter_half() -> None:
    cluster = from_flags(nodes=2, gpus=8, rate=25e9 / 8)
    for wide, narrow in zip(
        *(baselines(known_model("gpt2-xl", 2.0, dtype=dtype), cluster, 4, 8) for dtype in ("fp32", "bf16")), strict=True
    ):
        assert narrow.seconds(cluster).sent == pytest.approx(wide.seconds(cluster).sent / 2, rel=1e-3), wide.name
        assert narrow.seconds(cluster).step < wide.seconds(cluster).step


def test_memory_is_that_of_two_bytes_a_number() -> None:
    wide, narrow = (known_model("gpt2", 0.35, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert (narrow.bytes, narrow.training_bytes) == (wide.bytes // 2, wide.training_bytes // 2)
    assert narrow.optimizer == pytest.approx(wide.optimizer / 2)
    assert narrow.computing == pytest.approx(wide.computing)


def test_who_has_turned_on_bf16_is_not_told_to() -> None:
    wide, narrow = (planned(dtype, "powersgd", "fast") for dtype in ("fp32", "bf16"))
    assert "turn on bf16" in sentences(wide)[0]
    assert sentences(narrow)[0].startswith("Leave DDP alone")
    assert "bf16" not in sentences(narrow)[0]
    assert sentences(planned("bf16", "powersgd"))[0].startswith("powersgd: ")


def test_a_model_that_is_built_or_measured_is_planned_in_its_own_dtype() -> None:
    half = nn.Linear(8, 8).to(torch.bfloat16)
    assert untrained(half, 0.1, name="half", memory_rate=1e10).dtype == "bf16"
    assert untrained(half, 0.1, name="half", memory_rate=1e10, dtype="fp32").dtype == "fp32"
    sgd = torch.optim.SGD(half.parameters(), lr=0.1)
    found = measure(half, sgd, lambda step: half(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
    assert (found.dtype, with_step(found, 1.0).dtype) == ("bf16", "bf16")


def test_an_unknown_dtype_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(CostError, match=r"no dtype called 'bf61' for parameters here\. Did you mean 'bf16'?"):
        SMALL.of_dtype("bf61")
    with pytest.raises(CostError, match=r"no dtype called 'int4'.*bf16, fp16, fp32"):
        known_model("gpt2", 0.35, dtype="int4")
    assert isinstance(SMALL.of_dtype("fp16"), ModelCost)


def test_a_model_in_bf16_with_norms_in_fp32_is_one_in_bf16() -> None:
    """It was planned in fp32, so that DDP sent and all ranks held twice of what they do."""
    model = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100)).to(torch.bfloat16)
    model[1].float()
    cost = untrained(model, 1.0, name="mixed", memory_rate=1e10)
    assert (cost.dtype, cost.bytes) == ("bf16", 2 * (100 * 101 + 200))
    assert untrained(model.float(), 1.0, name="wide", memory_rate=1e10).dtype == "fp32"
