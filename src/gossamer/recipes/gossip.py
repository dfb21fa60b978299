"""Gossip: ranks average their models with a few neighbours."""

from gossamer.codecs import QSGD
from gossamer.core.contracts import Codec, Topology
from gossamer.mixers import Choco, PushSum, Symmetric
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import Gossip, NoLoCo, Pairwise, SlowMo
from gossamer.topologies import Bipartite, Exponential, Ring, TwoWay


@preset
def slowmo_sgp(every: int = 48, beta: float = 0.7, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """The model to one neighbour per step; every 48 steps an exact average and slow momentum.

    Use: among many ranks that should not wait for all others at every step, but have equal models from time to time.

    Not for: saving bytes: every step still sends a whole model to a neighbour. With two ranks gossip is an average of all
    ranks, and gains nothing.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(DENSE, schedule=SlowMo(every, beta, inner=PushSum(topology)))


@preset
def sgp(topology: Topology = Exponential(), every: int = 1, overlap: bool = False) -> Recipe:  # noqa: B008
    """The model to one neighbour per step, averaged by push-sum (stochastic gradient push).

    Use: among many ranks, where waiting for all at every step costs time: one message to one neighbour, one hop of
    latency, no barrier.

    Not for: a network that is slow everywhere: it still sends at least half of dense's bytes, and four hosts at 200
    Mbit/s took four fifths of dense's time to the same loss, where local steps or top-k took a quarter. The ranks'
    models differ: evaluate under `comm.consensus()`. With two ranks gossip is an average of all ranks, and gains nothing.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return Recipe(DENSE, schedule=Gossip(PushSum(topology), every, overlap))


@preset
def osgp(topology: Topology = Exponential(), every: int = 1) -> Recipe:  # noqa: B008
    """The model to one neighbour per step, as `sgp`, sent while the next step is computed.

    Use: in place of `sgp` where a link is slow or of varying speed: computation hides the messages.

    Not for: saving bytes: it sends as many as `sgp`, at least half of dense's. What arrives is a round old, and the
    ranks' models differ: evaluate under `comm.consensus()`. Eight simulated ranks whose data differed by label had a loss of
    .43 after 60 steps, `sgp` .36 and an all-reduce .34; `every=4` had .86. Where ranks' data were similar, all had the same.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return sgp(topology, every, overlap=True)


@preset
def gossip_pga(every: int = 16, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """The model to one neighbour per step; every 16 steps an exact average of all ranks.

    Use: on topologies that mix slowly, such as a ring, and where all models must be equal from time to time, to save or
    evaluate them.

    Not for: few ranks on `exponential()`, which is an exact average in log2 N rounds anyway: eight simulated ranks gained
    nothing over `sgp`. An exact average waits for all ranks.

    Paper: Chen et al., Accelerating Gossip SGD with Periodic Global Averaging, ICML 2021.
    """
    return Recipe(DENSE, schedule=Gossip(PushSum(topology), exact=every))


@preset
def d_psgd(topology: Topology = TwoWay(Ring()), overlap: bool = True) -> Recipe:  # noqa: B008
    """The model to two neighbours per step, sent while the next gradient is computed (decentralised parallel SGD).

    Use: where a step's computation takes as long as its messages: then no rank waits for them. In pairs,
    `topology=bipartite()`, each step sends one model, on a ring two.

    Not for: saving bytes: on a ring it sends more than an all-reduce does. Nor for ranks whose data differ much, if steps
    count: eight simulated ranks with about one label each were at a loss of .50 after 60 steps, an all-reduce at .34, and in
    pairs at .43, or with `overlap=False` at .36. The ranks' models differ: evaluate under `comm.consensus()`.

    Paper: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS 2017.
    """
    return Recipe(DENSE, schedule=Gossip(Symmetric(topology), overlap=overlap))


@preset
def ad_psgd(topology: Topology = Bipartite(), every: int = 1) -> Recipe:  # noqa: B008
    """The model to one neighbour at a time, averaged asynchronously: no rank waits for another (AD-PSGD).

    Use: among an even number of ranks of different or varying speed that should not wait for the slowest.

    Not for: ranks of equal speed: there `d_psgd(topology=bipartite())` does the same in a fixed order, reproducibly. Nor saving
    bytes: each step sends a whole model. The ranks' models and step counts differ: evaluate under `comm.consensus()`, which all
    ranks enter together.

    Paper: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
    """
    return Recipe(DENSE, schedule=Pairwise(topology, every))


@preset
def choco_sgd(codec: Codec = QSGD(), topology: Topology = TwoWay(Ring()), gamma: float | None = None) -> Recipe:  # noqa: B008
    """Compressed model differences (4 bits per element) to two neighbours per step (CHOCO-SGD).

    Use: on slow links among many ranks that should not wait for all others: with four bits a neighbour costs an eighth
    of a model, and eight simulated ranks learned on a ring as fast as with whole models, with a quarter of the bytes.

    Not for: few ranks: there `qsgd` and `topk` send as little and keep models equal. Nor top-k where ranks' data differ: with
    5 % of the elements eight simulated ranks were at a loss of .87 after 60 steps, with four bits at .43.

    Paper: Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication, ICML 2019.
    """
    return Recipe(DENSE, schedule=Gossip(Choco(codec, topology, gamma)))


@preset
def noloco(every: int = 50, rate: float = 0.7, momentum: float = 0.9) -> Recipe:
    """After 50 local steps the model to one random rank, averaged with its model, then an outer momentum step of the rank's own.

    Use: among many ranks across sites, where a round of `diloco` would wait for the slowest of all.

    Not for: few ranks, where an average of all costs little more; runs of a few rounds, as `diloco`. On `fashion`, four
    simulated ranks and 60 steps, `noloco(4, momentum=0.5)` had held-out accuracies of .70 and .59 at seeds 0 and 1, and an average
    of all every 6 steps, for as many bytes, .74 and .66. The ranks' models differ: evaluate under `comm.consensus()`.

    Paper: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, NoLoCo: No-all-reduce Low Communication Training Method for Large
    Models, 2025.
    """
    return Recipe(DENSE, schedule=NoLoCo(every, rate, momentum))
