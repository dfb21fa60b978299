"""What the planner says of published set-ups: the steps of ResNet-50 on nodes of GPUs, and the rates that keep machines busy."""

from dataclasses import replace
from typing import NamedTuple

from gossamer.bench.claims.clocks import BAND, EXACT
from gossamer.bench.claims.evidence import Evidence, Rows
from gossamer.bench.claims.verdict import Judgement, banded, within
from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.model_cost import ModelCost, guessed_shares
from gossamer.planning.model_shapes import known_model
from gossamer.planning.plan import prepare
from gossamer.planning.rates import BUSY, busy_at
from gossamer.planning.work import NoWork


def gossip_on_gpus(seed: int, name: str) -> Rows:
    """Seconds of a step of ResNet-50 on 32 nodes of eight GPUs at 10 Gbit/s, for each of the `BAND`; nodes gossip as one."""
    model, found = known_model("resnet50", 0.271), list[float]()
    for stretch in BAND:
        cluster = from_flags(nodes=32, gpus=8, rate=1.25e9 / stretch, latency=30e-6 * stretch, inside=20e9 / stretch)
        if name == "ddp":
            found.append(ddp(model, cluster.size).seconds(cluster).step)
        else:
            found.append(prepare(f"{name} + per_node(8)", model, cluster, NoWork()).seconds(cluster).step)
    return {"step": found}


def hours(evidence: Evidence) -> Judgement:
    """How many times as long DDP's step is as overlapped gossip's: within 25 % of the paper's 5 hours over 1.6."""
    ddp, gossip = (evidence.rows("hours", name, "step")[30] for name in ("ddp", "osgp"))
    least, most = 0.75 * 5 / 1.6, 1.25 * 5 / 1.6
    return banded(*(within({30: ddp[a] / gossip[b]}, least, most, "times") for a, b in ((1, 1), (0, 2), (2, 0))))


class TwoSites(NamedTuple):
    """A model of Streaming DiLoCo's Table 4: layers, parameters, seconds of a step, fragments of three layers, steps of a round."""

    layers: int
    numel: float
    step: float
    fragments: int
    every: int  # near the paper's 100, and a multiple of the fragments


SCALES = {
    "1B": TwoSites(24, 1e9, 0.1, 8, 96),
    "10B": TwoSites(48, 1e10, 0.8, 16, 96),
    "100B": TwoSites(108, 1e11, 4.9, 36, 108),
}
STREAMED = "{exchange} + streaming({every}, fragments={fragments}, delay={delay}, mixing={mixing})"
METHODS = {
    "DiLoCo": "allreduce(bf16()) + local_sgd(100)",  # an outer step adds nothing to what travels
    "streaming": STREAMED.replace("{exchange}", "allreduce(bf16())").replace("{delay}", "0").replace("{mixing}", "0.0"),
    "overlapped": STREAMED.replace("{exchange}", "allreduce(bf16())")
    .replace("{delay}", "1")
    .replace("{mixing}", "0.5"),
    "4 bits": STREAMED.replace("{exchange}", "scatter(qsgd(bits=4))")
    .replace("{delay}", "1")
    .replace("{mixing}", "0.5"),
}


def busy_rates(seed: int, scale: str, method: str) -> Rows:
    """The rates in Gbit/s at which two replicas compute for so much of the time, where links and processors cost nothing but
    the bytes: what the paper's simulation assumes.
    """
    asked, cluster = SCALES[scale], _two_sites()
    model = _of_layers(asked)
    if method == "data-parallel":
        baseline = ddp(model, 2, bf16=True)
        found = busy_at(lambda rate: baseline.seconds(cluster.at_rate(rate)).utilisation)
    else:
        prepared = prepare(METHODS[method].format(**asked._asdict()), model, cluster, NoWork())
        found = busy_at(lambda rate: prepared.seconds(cluster.at_rate(rate)).utilisation)
    return {"busy": [*BUSY], "rate": [8e-9 * found[share] if share in found else float("nan") for share in BUSY]}


def _two_sites() -> Cluster:
    made = from_flags(nodes=2, gpus=1, rate=1e9, latency=0.0)
    free = (replace(made.hosts[0], memory_rate=1e18),)
    return replace(made, hosts=free, payload=1.0, efficiency=EXACT, program_seconds=0.0)


def _of_layers(scale: TwoSites) -> ModelCost:
    shapes = {f"layers.{i}.w": (1000, int(scale.numel / scale.layers / 1000)) for i in range(scale.layers)}
    return ModelCost(
        shapes=shapes,
        forward=scale.step / 3,
        backward=scale.step * 2 / 3,
        optimizer=0.0,
        shares=guessed_shares(shapes),
        on_cores=False,
    )
