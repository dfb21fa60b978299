"""Models that pass through few neighbours."""

from gossamer.codecs import QSGD
from gossamer.core.contracts import Codec, Topology
from gossamer.mixers import Choco, PushSum, Symmetric
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import Gossip, Pairwise, SlowMo
from gossamer.topologies import Bipartite, Exponential, Ring, TwoWay


@preset
def slowmo_sgp(every: int = 48, beta: float = 0.7, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """Stochastic gradient push, with an exact average and slow momentum over the rounds.

    Use: among many ranks that should not wait for all others at every step, but agree exactly now and then.

    Not for: saving bytes: a whole model still travels to a neighbour at every step. With two ranks gossip is an
    average of everybody, and gains nothing.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(DENSE, schedule=SlowMo(every, beta, inner=PushSum(topology)))


@preset
def sgp(topology: Topology = Exponential(), every: int = 1, overlap: bool = False) -> Recipe:  # noqa: B008
    """Stochastic gradient push: mix parameters with one neighbour a step.

    Use: among many ranks, where waiting for all at every step hurts: one message to one neighbour, one hop of
    latency, no barrier.

    Not for: a network that is slow everywhere: it still sends at least half of dense's bytes, and four hosts at 200
    Mbit/s took four fifths of dense's time to the same loss, where local steps or top-k took a quarter. The ranks'
    models differ: evaluate under `comm.consensus()`. With two ranks gossip is an average of everybody, and gains
    nothing.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return Recipe(DENSE, schedule=Gossip(PushSum(topology), every, overlap))


@preset
def osgp(topology: Topology = Exponential(), every: int = 1) -> Recipe:  # noqa: B008
    """Stochastic gradient push whose messages travel while the next steps are computed.

    Use: in place of `sgp` where a link is slow or moody: messages travel while the next steps are computed.

    Not for: saving bytes: it sends what `sgp` does, at least half of dense. What arrives is a round old, and the
    ranks' models differ: evaluate under `comm.consensus()`. Eight simulated ranks whose data differed by label had .43
    for a loss after 60 steps, `sgp` .36 and an all-reduce .34; `every=4` had .86. Where data was alike, all had the same.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return sgp(topology, every, overlap=True)


@preset
def gossip_pga(every: int = 16, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """Stochastic gradient push, with an exact average in its place every now and then.

    Use: on graphs that mix slowly, such as a ring, and where all models shall be equal now and then, to be saved or judged.

    Not for: few ranks on `exponential()`, which is an exact average in log2 N rounds anyway: eight simulated ranks gained
    nothing on `sgp`. An exact average waits for all.

    Paper: Chen et al., Accelerating Gossip SGD with Periodic Global Averaging, ICML 2021.
    """
    return Recipe(DENSE, schedule=Gossip(PushSum(topology), exact=every))


@preset
def d_psgd(topology: Topology = TwoWay(Ring()), overlap: bool = True) -> Recipe:  # noqa: B008
    """Decentralised parallel SGD: models are mixed with those of the neighbours while the next gradient is computed.

    Use: where computing takes as long as the models of the neighbours travel: nobody waits for them then. In pairs,
    `topology=bipartite()`, one model travels a step, on a ring two.

    Not for: few bytes: on a ring it sends more than an all-reduce does. Nor for ranks whose data differ much, if steps
    count: eight simulated ranks that had a label or so each were at .50 after 60 steps, an all-reduce at .34, and in pairs
    at .43, or with `overlap=False` at .36. The ranks' models differ: evaluate under `comm.consensus()`.

    Paper: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NIPS 2017.
    """
    return Recipe(DENSE, schedule=Gossip(Symmetric(topology), overlap=overlap))


@preset
def ad_psgd(topology: Topology = Bipartite(), every: int = 1) -> Recipe:  # noqa: B008
    """Asynchronous decentralised parallel SGD: ranks average with one neighbour at a time, and nobody waits for anybody.

    Use: among ranks of unlike or moody speed that shall not wait for the slowest, and an even number of them.

    Not for: ranks of one speed, where `d_psgd(topology=bipartite())` does the same in order, and the same again each time; nor
    few bytes: a whole model travels for each step. The ranks' models differ, and their steps do: evaluate under
    `comm.consensus()`, which all ranks enter together.

    Paper: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
    """
    return Recipe(DENSE, schedule=Pairwise(topology, every))


@preset
def choco_sgd(codec: Codec = QSGD(), topology: Topology = TwoWay(Ring()), gamma: float | None = None) -> Recipe:  # noqa: B008
    """Decentralised SGD whose neighbours exchange a few bits an element, or a few elements.

    Use: on slow links among many ranks that should not wait for all others: with four bits a neighbour costs an eighth
    of a model, and eight simulated ranks learned on a ring as fast as with whole models, with a quarter of the bytes.

    Not for: few ranks, among whom `qsgd` and `topk` send as little and keep models equal; nor few elements where data
    differ: with 5 % of them eight simulated ranks were at .87 after 60 steps, and with four bits at .43.

    Paper: Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication, ICML 2019.
    """
    return Recipe(DENSE, schedule=Gossip(Choco(codec, topology, gamma)))
