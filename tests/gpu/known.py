"""What is known to fail, and by which finding of "On GPUs". An entry whose test passes is an error: take it out.

Empty is what this table wants to be.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from tests.gpu.subjects import one_of_a_kind


class Known(NamedTuple):
    finding: int
    why: str
    test: str
    names: tuple[str, ...]  # of what it fails for


TOPK = (
    "topk",
    "gather(topk(ratio=0.3, index='rice')) + error_feedback()",
    "gather(topk(ratio=0.3, scope='global')) + error_feedback()",
    "scatter(topk(ratio=0.3), answer=bf16()) + error_feedback()",
)
WATCHFUL = ("accordion", "accordion_qsgd", "accordion_batch", "accordion(2, interval=1)")
GOSSIP = ("slowmo_sgp", "sgp", "osgp", "push_sum(topology=ring()) + gossip(every=2, overlap=True)")
GOSSIP += ("push_sum(topology=complete()) + gossip()",)
BACKUP = ("backup", "first(over=scatter(qsgd()))")
NAMED_OTHERWISE = ("3 ranks, eager, undefined", "3 ranks, lazy, cpu:gloo,cuda:nccl")
SCATTERED = ("bf16()", "fp16()", "terngrad()", "qsgd()", "accordion_qsgd(epoch=2, interval=1)")
ALL = (
    *(
        "allreduce",
        "bf16",
        "fp16",
        "terngrad",
        "qsgd",
        "topk",
        "powersgd",
        "diana",
        "local_sgd",
        "slowmo",
        "slowmo_sgp",
    ),
    *("overlap_local_sgd", "sgp", "osgp", "backup", "accordion", "accordion_qsgd", "accordion_batch"),
)


def on(recipes: Iterable[str], groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{recipe} on {group}" for recipe in recipes for group in groups)


KNOWN: tuple[Known, ...] = (
    Known(1, "a generator's type is subscripted", "test_runs_start_where_cuda_is_initialised", ("",)),
    Known(2, "a weight on the CPU, then sends before receives", "test_it_trains", GOSSIP),
    Known(
        2,
        "a weight on the CPU, then sends before receives",
        "test_it_trains_under_nccls_rules",
        on(("slowmo_sgp(every=2)", "sgp()", "osgp(every=2)"), (*NAMED_OTHERWISE, "2 ranks, eager, undefined")),
    ),
    Known(3, "rates on the CPU", "test_it_trains", BACKUP),
    Known(
        3,
        "rates on the CPU",
        "test_it_trains_under_nccls_rules",
        on(("backup()",), NAMED_OTHERWISE),
    ),
    Known(3, "rates on the CPU", "test_whoever_makes_a_tensor_says_where", ("exchanges/first.py",)),
    Known(4, "the path follows the group's name", "test_it_trains_under_nccls_rules", on(SCATTERED, NAMED_OTHERWISE)),
    Known(
        5,
        "a block is let go while the lane reads it",
        "test_it_trains_under_nccls_rules",
        on(("overlap_local_sgd(every=2)",), NAMED_OTHERWISE),
    ),
    Known(
        5,
        "a block is let go while a stream reads it",
        "test_memory_is_kept_until_streams_have_met",
        ("overlap_local_sgd", "accordion", "accordion(2, interval=1)"),
    ),
    Known(
        7,
        "the current device is asked for",
        "test_nobody_need_set_a_device",
        ("allreduce", "qsgd", "overlap_local_sgd", "osgp", "backup"),
    ),
    Known(
        7,
        "the current device is asked for",
        "test_nobody_asks_for_the_current_device",
        ("fabrics/stream.py", "fabrics/torch.py"),
    ),
    Known(
        8,
        "communicators are left behind",
        "test_no_communicator_is_left",
        tuple(name for name in ALL if name not in (*GOSSIP, *BACKUP)),
    ),
    Known(10, "gloo takes no CUDA tensors", "test_it_trains_over_staged_gloo", one_of_a_kind()),
    Known(11, "numbers asked one by one", "test_the_host_waits_once_a_step", WATCHFUL),
    Known(11, "numbers asked in the lane", "test_no_lane_waits", (*TOPK, "allreduce(ternary())")),
    Known(11, "tables made anew", "test_no_lane_waits_where_there_is_no_triton", ("terngrad", "allreduce(ternary())")),
    Known(12, "a handful of launches a tensor", "test_launches_do_not_grow", ("topk",)),
    Known(13, "kept for nothing", "test_what_is_kept", ("diana", "local_sgd", "slowmo", "overlap_local_sgd")),
    Known(
        13,
        "whole blocks for a while",
        "test_what_is_needed_for_a_while",
        ("diana", "accordion", "accordion_qsgd", "accordion_batch"),
    ),
)


def cases(test: str, names: Iterable[str]) -> list[Any]:
    """The names as a test's parameters; those that are known to fail are marked."""
    return [pytest.param(name, marks=marks(test, name)) for name in names]


def marks(test: str, name: str = "") -> list[Any]:
    found = [k for k in KNOWN if k.test == test and name in k.names]
    return [pytest.mark.xfail(strict=True, reason=f"finding {k.finding}: {k.why}") for k in found]
