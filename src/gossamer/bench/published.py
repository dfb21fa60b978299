"""Others' published times beside our plans: the speeds of TernGrad (Wen et al., NeurIPS 2017), and DiLoCo's own arithmetic.

Images a second of 4 to 512 GPUs, four on a node, on two clusters and three networks, read from the vector graphics of the
authors' slides. With K images a GPU and i nodes the bars follow N K / t, where t is the time at one node and

    t + M(i) v / C + 2 (i - 1) l            on Ethernet, M = 0, 1, 1.92 and 1.98 for 1, 2, 4, and 8 nodes or more
    t + v / S + 2 (i - 1) / i v / C         on InfiniBand, for two nodes or more

with v bytes of gradients: 4 a parameter in fp32; ternary, the last layer stays fp32 and the rest is 16 times shorter.

DiLoCo's calculators count a round's average of N parameters among R replicas as 2 N / W (1 - 1 / R) + e seconds, with a link of
W parameters a second and e of latency, and hide nothing.
"""

from dataclasses import dataclass, replace
from typing import Literal

from gossamer.costs import Cluster, from_flags
from gossamer.planning.baselines import ddp
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import prepare
from gossamer.planning.work import MemoryPasses, NoWork

SIZES = (4, 8, 32, 128, 512)
LATENCY = 2e-4  # of Ethernet, a message
ETHERNET, INFINIBAND, STAGING = 0.9e9 / 8, 3.0e9, 3.5e9  # bytes a second
EXACT = {"ring": 1.0, "pairs": 1.0, "one": 1.0, "shared": 1.0}
Fabric = Literal["ethernet", "infiniband"]


@dataclass(frozen=True)
class PaperNetwork:
    """A network of the paper: its parameters, those of its last layer, and images of a GPU in a step."""

    name: str
    numel: float
    last: float
    images: int

    def sent(self, ternary: bool) -> float:
        """Bytes of a gradient."""
        return 4 * self.last + (self.numel - self.last) / 4 if ternary else 4 * self.numel


@dataclass(frozen=True)
class PaperBars:
    """Images a second for each of `SIZES`; `alone` is the speed of one GPU at one node."""

    network: PaperNetwork
    fabric: Fabric
    alone: float
    dense: tuple[int, ...]
    ternary: tuple[int, ...]

    def speed(self, size: int, ternary: bool) -> float:
        """Images a second by the formula."""
        step, nodes = self.network.images / self.alone, size // 4
        sent = self.network.sent(ternary)
        if nodes > 1 and self.fabric == "ethernet":
            step += {2: 1.0, 4: 1.92}.get(nodes, 1.98) * sent / ETHERNET + 2 * (nodes - 1) * LATENCY
        elif nodes > 1:
            step += sent / STAGING + 2 * (nodes - 1) / nodes * sent / INFINIBAND
        return size * self.network.images / step

    def planned(self, size: int, ternary: bool) -> float:
        """Images a second that our own program would have there, in two levels: the paper's form, without overlap."""
        if size == 4:
            return size * self.alone
        cluster, model = self._cluster(size), self._model()
        if not ternary:
            return size * self.network.images / ddp(model, size).seconds(cluster).step
        recipe = "scatter(ternary()) + rule('name == \"last\"', allreduce(fp32())) + per_node(4)"
        prepared = prepare(recipe, model, cluster, MemoryPasses(cluster.memory_rate))
        return size * self.network.images / prepared.seconds(cluster).step

    def _cluster(self, size: int) -> Cluster:
        fast = self.fabric == "infiniband"
        made = from_flags(
            nodes=size // 4,
            gpus=4,
            rate=INFINIBAND if fast else ETHERNET,
            latency=5e-6 if fast else LATENCY,
            inside=40e9 if fast else 8e9,
        )
        return replace(made, payload=1.0, efficiency=EXACT)

    def _model(self) -> ModelCost:
        """All gradients are there at the end of the step, since the paper's do not overlap."""
        step = self.network.images / self.alone
        rest = int(self.network.numel - self.network.last)
        return ModelCost(
            shapes={"rest": (1000, rest // 1000), "last": (1000, int(self.network.last) // 1000)},
            forward=step / 3,
            backward=step * 2 / 3,
            optimizer=0.0,
            shares={"rest": 1.0, "last": 1.0},
            name=self.network.name,
        )


ALEXNET = PaperNetwork("AlexNet", 61.0e6, 4.1e6, 256)
GOOGLENET = PaperNetwork("GoogLeNet", 6.6e6, 1.025e6, 64)
VGG = PaperNetwork("VGG-A", 132.9e6, 4.1e6, 32)

PAPER = (
    PaperBars(ALEXNET, "ethernet", 384, (1502, 718, 1664, 6540, 25707), (1535, 2187, 6831, 26957, 99417)),
    PaperBars(GOOGLENET, "ethernet", 174, (692, 849, 2498, 9706, 36540), (695, 1230, 4456, 17165, 62541)),
    PaperBars(VGG, "ethernet", 88, (318, 49, 123, 414, 1664), (351, 321, 873, 3248, 12581)),
    PaperBars(ALEXNET, "infiniband", 433, (1734, 2787, 10350, 40703, 161522), (1713, 3348, 13208, 52922, 211190)),
    PaperBars(GOOGLENET, "infiniband", 194, (777, 1501, 5915, 23555, 93918), (772, 1540, 6112, 24541, 97959)),
    PaperBars(VGG, "infiniband", 102, (410, 405, 1284, 5127, 20303), (388, 716, 2762, 11138, 44250)),
)


# -- DiLoCo ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """Replicas that meet once in `every` steps: the assumptions of DiLoCo's calculators."""

    numel: int
    replicas: int
    rate: float  # bytes a second
    latency: float  # seconds of a message
    computing: float  # seconds of a step
    every: int
    width: int = 2  # bytes of a parameter on the wire

    def formula(self) -> float:
        """Seconds of a mean step; the latency of an average is that of its ring's messages."""
        average = 2 * self.numel / (self.rate / self.width) * (1 - 1 / self.replicas)
        return self.computing + (average + 2 * (self.replicas - 1) * self.latency) / self.every

    def planned(self, recipe: str) -> float:
        """Seconds of a mean step of our own program, where links and processors cost what the formula counts."""
        cluster = from_flags(nodes=self.replicas, gpus=1, rate=self.rate, latency=self.latency)
        free = (replace(cluster.hosts[0], memory_rate=1e18),)
        cluster = replace(cluster, payload=1.0, efficiency=EXACT, hosts=free, program_seconds=0.0)
        model = ModelCost(
            shapes={"w": (1000, self.numel // 1000)},
            forward=self.computing / 3,
            backward=self.computing * 2 / 3,
            optimizer=0.0,
            shares={"w": 1.0},
            momenta=0,
        )
        return prepare(recipe, model, cluster, NoWork()).seconds(cluster).step
