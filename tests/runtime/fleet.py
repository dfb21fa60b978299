"""The recipes that stand before every law of training: some by hand, and every schedule and controller there is."""

from collections.abc import Iterable
from typing import Any

import pytest
from tests.laws.samples import carried, controlled, controllers, plainest, schedules, updated, updates

from gossamer.core.parts import Part
from gossamer.recipe import Recipe


def few(part: Part, recipes: Iterable[Recipe]) -> list[str]:
    found = [*map(repr, recipes)]
    return found if part == plainest(type(part)) else found[-1:]


def joined(lists: Iterable[list[str]]) -> list[str]:
    return [text for texts in lists for text in texts]


SMALL = " + bucket(0.00002)"  # four channels even on a small model

SYNCHRONOUS = [  # replicas are equal after every step
    "allreduce",
    "bf16",
    "fp16",
    "allreduce(bf16())",
    "gather(fp32())",
    "terngrad",
    "terngrad(levels=7)" + SMALL,
    "allreduce(ternary())",
    "qsgd",
    "qsgd(bits=1, bucket=8)" + SMALL,
    "gather(qsgd(bits=2, bucket=16, norm='l2'))",
    "scatter(qsgd(bits=8, bucket=16)) + error_feedback(units='update')",
    "topk(ratio=0.1)" + SMALL,
    "topk(ratio=0.1, scope='global')",
    "gather(topk(ratio=0.2, index='rice')) + error_feedback(decay=0.9)",
    "scatter(topk(ratio=0.2)) + error_feedback()",
    "scatter(topk(ratio=0.2, index='rice')) + error_feedback()" + SMALL,
    "powersgd",
    "powersgd(rank=1)" + SMALL,
    "gather(atomo(svd(head=2), atoms=1, draws='independent'))" + SMALL,
    "scatter(atomo(entry(), share=0.25))",
    "dgc(ratio=0.1, momentum=0.5)" + SMALL,
    "sketched_sgd(ratio=0.02, candidates=2, momentum=0.5)",
    "allreduce(count_sketch(ratio=0.05, candidates=2, columns=10)) + error_feedback()" + SMALL,
    "fetchsgd(ratio=0.02, momentum=0.5)",
    "gtopk(ratio=0.1)" + SMALL,
    "gather(topk(ratio=0.3)) + ef21(eta=0.3)" + SMALL,
    "scatter(adacomp(16)) + error_feedback() + rule('ndim < 2', gather(strom(0.1)), error_feedback())",
    "gather(dropping(ratio=0.05, warmup=4, fall='quarters')) + momentum_correction(momentum=0.5, clip=3.0)",
    "diana(bits=4, bucket=16)",
    "diana(momentum=0.5, l1=0.01)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + diana()" + SMALL,
    "powersgd + rule('ndim < 2', allreduce(fp32())) + rule('name == \"turned\"', gather(topk(ratio=0.5)), "
    "error_feedback())",
    "gather(topk(ratio=0.3)) + error_feedback() + rule('ndim < 1', gather(qsgd(bits=8)), error_feedback())",
    "accordion(epoch=2, mild=3, harsh=1, interval=1, threshold=0.1)" + SMALL,
    "accordion_qsgd(epoch=2, interval=1, threshold=0.1)",
    "gather(topk(ratio=0.9)) + error_feedback()"
    " + accordion(gather(topk(ratio=0.9)), gather(topk(ratio=0.1)), 2, interval=1, threshold=0.1)",
    "scatter(qsgd(bits=8, bucket=16)) + diana()"
    " + accordion(scatter(qsgd(bits=8, bucket=16)), scatter(qsgd(bits=4, bucket=16)), 2, interval=1, threshold=0.1)",
    "accordion_batch(epoch=2, factor=4, interval=1, threshold=10.0)",
    "nodes(scatter(topk(ratio=0.2)), 2) + error_feedback()" + SMALL,
    "nodes(allreduce(powersgd()), 2) + error_feedback()",
    "nodes(scatter(qsgd(bits=4, bucket=16)), 2) + diana()",
    "nodes(gather(topk(ratio=0.9)), 2) + error_feedback() + accordion(nodes(gather(topk(ratio=0.9)), 2), "
    "nodes(scatter(topk(ratio=0.1)), 2), 2, interval=1, threshold=0.1)",
]

QUORUM = ["backup", "scatter(qsgd()) + backup_workers()", "scatter(ternary(), feedback=1.0) + backup_workers()"]

OWN = [  # each rank steps with its own gradient besides; replicas are equal after every third step
    "local_gradients(ratio=0.1, every=3)",
    "gather(dropping(ratio=0.1, warmup=4)) + own_gradient('errors') + resync(3, buffers='average')" + SMALL,
    "allreduce(powersgd(rank=1)) + own_gradient('sum', units='update') + resync(3)",
]

LOCAL = [  # replicas are equal after every third step; anchors always are
    "local_sgd(3)",
    "slowmo(3)",
    "slowmo(3)" + SMALL,
    "scatter(qsgd(bits=4, bucket=16)) + slowmo(3, beta=0.5, buffers='reset')",
    "powersgd + slowmo(3, buffers='average')",
    "topk(ratio=0.1) + slowmo(3, by_lr=False)",
    "diana(bits=4, bucket=16) + local_sgd(3)",
    "slowmo_sgp(3)",
    "allreduce + slowmo(3, inner=push_sum(ring()))" + SMALL,
    "accordion_qsgd(epoch=3, interval=1, threshold=0.1) + local_sgd(3)",
    "nodes(scatter(qsgd(bits=4, bucket=16)), 2) + slowmo(3)",
]

OVERLAP = [  # replicas differ; anchors are equal
    "overlap_local_sgd(3)",
    "scatter(qsgd(bits=4, bucket=16)) + overlap_local_sgd(3)" + SMALL,
    "topk(ratio=0.1) + overlap_local_sgd(3, beta=0.0)",
    "accordion_qsgd(epoch=3, interval=1, threshold=0.1) + overlap_local_sgd(3)",
]

GOSSIP = [  # replicas differ; only sums are kept
    "sgp",
    "sgp(every=3)",
    "sgp(topology=ring())" + SMALL,
    "sgp(topology=exponential(count=2))",
    "sgp(topology=complete())",
    "osgp",
    "osgp(every=3)",
    "d_psgd" + SMALL,
    "choco_sgd(codec=topk(ratio=0.2), topology=complete())",
]

# Whatever is registered, without anyone remembering; round about it the laws above ask for rounds of three steps.
# Whatever goes with all is shown by the plainest of each; of its other settings one recipe is enough, a compressed one.
WITH_SCHEDULE = [few(schedule, carried(schedule)) for schedule in schedules()]
WITH_CONTROLLER = [few(controller, controlled(controller)) for controller in controllers()]
WITH_UPDATE = [[*map(repr, updated(update))] for update in updates()]
EVERY_SCHEDULE, EVERY_CONTROLLER, EVERY_UPDATE = map(joined, (WITH_SCHEDULE, WITH_CONTROLLER, WITH_UPDATE))

ALL = list(
    dict.fromkeys(
        [*SYNCHRONOUS, *QUORUM, *OWN, *LOCAL, *OVERLAP, *GOSSIP, *EVERY_SCHEDULE, *EVERY_CONTROLLER, *EVERY_UPDATE]
    )
)
# What `make test` leaves to `make test-all`: a schedule or an update goes the way of the last it is seen with, which compresses
# where it may; of what goes with a controller the first and the last are tried, a plain one and one that remembers.
SHOWN = {texts[-1] for texts in (*WITH_SCHEDULE, *WITH_CONTROLLER, *WITH_UPDATE)} | {
    texts[0] for texts in WITH_CONTROLLER
}
BY_HAND = {*SYNCHRONOUS, *QUORUM, *OWN, *LOCAL, *OVERLAP, *GOSSIP}


def each(recipes: Iterable[str]) -> list[Any]:
    """The recipes as a test's parameters."""
    return [
        pytest.param(r, marks=[] if r in SHOWN | BY_HAND or r not in ALL else pytest.mark.slow, id=r) for r in recipes
    ]


SETTLING = [
    r
    for r in ALL
    if r not in OWN and "waits for few" not in (s := Recipe.of(r).schedule).traits and s.shape.averages_gradients
]  # equal after every step
PROMPT = [r for r in SETTLING if "lags" not in Recipe.of(r).schedule.traits]  # and each takes its own gradients


def smallest(recipe: str) -> int:
    """The fewest ranks a recipe can run on."""
    backups = getattr(Recipe.of(recipe).schedule, "backups", 0)
    return backups + 2 if backups else 1
