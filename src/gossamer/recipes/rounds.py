"""Local steps, and an average at the end of a round.

Losses below are held-out ones of `digits` on four simulated ranks after 144 steps in rounds of 12, each at the best of three
learning rates, over two seeds. Dense has .116, and .125 where each rank has labels of its own; there seeds differ by up to .2.
"""

from gossamer.codecs import QSGD, TileTopK
from gossamer.exchanges import Gather, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import (
    BMUF,
    EASGD,
    CoCoD,
    Eager,
    Hierarchical,
    LocalSGD,
    Lookahead,
    OverlapLocalSGD,
    PostLocal,
    QuorumRounds,
    SlowMo,
    Streaming,
)


@preset
def local_sgd(every: int = 8) -> Recipe:
    """Local steps, and an average of the models every now and then.

    Use: on links of high latency, and where even compressed gradients are too much at every step: both costs shrink
    `every` times.

    Not for: links on which dense hides behind backward, as an average of models cannot. Models drift apart between
    averages, the further the more the ranks' data differ: then take fewer steps. On `digits` .136, and .425 by label.

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """
    return Recipe(DENSE, schedule=LocalSGD(every))


@preset
def slowmo(every: int = 12, beta: float = 0.7, alpha: float = 1.0, sharded: bool = False) -> Recipe:
    """Local steps, an average, and slow momentum over the rounds.

    Use: across sites and on slow links: messages are rare, and momentum wins back what local steps lose. It takes a
    codec as well: `slowmo + scatter(qsgd())`. Most where ranks' data differ: on `digits` by label local steps lost .425,
    and with a beta of 0.3, 0.5 and 0.7 .342, .286 and .324.

    Not for: links on which dense hides behind backward, as an average of models cannot, nor machines short of
    memory: it keeps two more copies of the model. Nor a dozen rounds of data that is alike: there it lost .137, .149
    and .199, plain local steps .136.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(DENSE, schedule=SlowMo(every, beta, alpha, sharded=sharded))


@preset
def overlap_local_sgd(every: int = 8, alpha: float = 0.6, beta: float = 0.7) -> Recipe:
    """Local steps while the last average is still travelling.

    Use: where an average takes as long as a few local steps, as over one slow link: it travels while they are
    computed, and nobody waits.

    Not for: networks slower than a round, nor a learning rate left as it was: the model moves (1 - alpha) / (1 -
    alpha beta) times as fast, 0.69 by default. The average is a round old.

    Paper: Wang, Liang, Joshi, Overlap Local-SGD, ICASSP 2020.
    """
    return Recipe(DENSE, schedule=OverlapLocalSGD(every, alpha, beta))


@preset
def bmuf(
    every: int = 16, momentum: float | None = None, rate: float = 1.0, nesterov: bool = False, sharded: bool = False
) -> Recipe:
    """Local steps, an average, and block momentum that knows no learning rate.

    Use: on slow links with a learning rate that is left as it is, or cut seldom. It takes a codec as well:
    `bmuf + scatter(qsgd())`.

    Not for: rates that a schedule moves down fast: use `slowmo`, which follows them. On `digits`, momentum 0.5, it lost
    .147, and .336 by label, where local steps lost .136 and .425.

    Paper: Chen, Huo, Blockwise Model-Update Filtering, ICASSP 2016.
    """
    return Recipe(DENSE, schedule=BMUF(every, momentum, rate, nesterov, sharded=sharded))


@preset
def diloco(every: int = 100, rate: float = 0.7, momentum: float = 0.9, sharded: bool = False) -> Recipe:
    """Very long rounds of local steps, and an outer step of Nesterov momentum.

    The outer step is `slowmo(every, momentum, rate, by_lr=False, nesterov=True)`. Its authors take AdamW inside, whose state
    each rank keeps, and rounds of 500 steps; in the long run a round counts rate / (1 - momentum) times, 7 as they have it.

    Use: across sites, for training so long that rounds of hundreds of steps are short.

    Not for: runs of a few rounds: until the momentum has grown the model hardly follows, and afterwards it swings.

    Paper: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.
    """
    return Recipe(DENSE, schedule=SlowMo(every, momentum, rate, by_lr=False, nesterov=True, sharded=sharded))


@preset
def streaming_diloco(
    every: int = 100,
    delay: int | None = None,
    mixing: float = 0.5,
    rate: float = 0.4,
    momentum: float = 0.9,
    bits: int = 4,
) -> Recipe:
    """DiLoCo a fragment of the model at a time, in 4 bits, while the next steps are computed.

    Fragments are dealt out layer by layer; `streaming(...)` takes their number, or patterns of names. The outer step is
    diloco's, whose anchor the model is pulled towards when a fragment lands: a twentieth of a round later, unless `delay` says
    how many steps.

    Use: across sites, as `diloco`, where the wire is to be busy all the time and never much: a step sends a fragment at most,
    and `delay` steps hide it.

    Not for: runs of a few rounds, as `diloco`. On `digits`, with rate=0.7 and momentum=0.5,
    it lost .140, `diloco` with these .126.

    Paper: Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch, 2025.
    """
    late = max(1, every // 20) if delay is None else delay
    return Recipe(
        Scatter(QSGD(bits=bits)), schedule=Streaming(every, delay=late, mixing=mixing, rate=rate, momentum=momentum)
    )


@preset
def eager_diloco(every: int = 30, rate: float = 0.4, momentum: float = 0.9) -> Recipe:
    """DiLoCo that waits for nobody: a rank's own way counts at once, that of the others a round later.

    Use: across sites where an average takes as long as a round.

    Not for: machines short of memory, nor a few rounds. Evaluate under `comm.consensus()`, which is the model that all agreed on.

    Paper: Kale, Douillard, Donchev, Eager Updates for Overlapped Communication and Computation in DiLoCo, 2025.
    """
    return Recipe(DENSE, schedule=Eager(every, rate, momentum))


@preset
def decoupled_diloco(every: int = 100, quorum: int = 1, rate: float = 0.7, momentum: float = 0.9) -> Recipe:
    """DiLoCo whose rounds close with the first learners: late ones stop nobody, and are merged later.

    A round is agreed on by `quorum` of the ranks at least, and by all who come while there is slack; it lands a step later.
    `quorum_rounds(...)` takes the rest: fragments, radial averages, what late learners keep. Ranks count their own steps.

    Use: across sites, on machines that are slow now and then or of unlike speed, and on links that an average crosses in
    a step or two.

    Not for: runs that must repeat themselves to the bit, nor a few rounds, as `diloco`. A process that dies is an error, but with `gossamer.members()`.

    Paper: Douillard et al., Decoupled DiLoCo, arXiv 2604.21428, 2026.
    """
    return Recipe(DENSE, schedule=QuorumRounds(every, quorum, rate=rate, momentum=momentum))


@preset
def sparse_loco(every: int = 30, keep: int = 64, rate: float = 1.0, decay: float = 0.95) -> Recipe:
    """Rounds of local steps; of the way a rank went the largest elements travel, in 2 bits.

    e_i = decay e_i + D_i; send the largest `keep` of every 64 x 64 of it; e_i -= what was sent;  a -= rate mean(sent). There is
    no outer momentum: what is held back is one. The mean is that of all ranks; the authors' code divides each element by the
    number of ranks that sent it, and cuts ranks' values to their median length.

    Use: across sites among a few ranks, where `diloco` is still too much: a message is 146 times shorter than the model.

    Not for: many ranks: bytes grow with their number. Nor a few rounds: most of what was learned waits.

    Paper: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    """
    return Recipe(
        Gather(TileTopK(keep)),
        ErrorFeedback(decay=decay),
        SlowMo(every, beta=0.0, alpha=rate, by_lr=False),
    )


@preset
def lookahead(every: int = 5, alpha: float = 0.5) -> Recipe:
    """Steps forward, then a part of the way back, on one rank as well.

    Use: around an optimizer whose steps are large or noisy, on one rank or many.

    Not for: saving time: of every step a share of `alpha` is kept, so raise the learning rate. On `digits` it gained
    nothing over `local_sgd` at its own best rate: .146, and .514 by label.

    Paper: Zhang, Lucas, Hinton, Ba, Lookahead Optimizer, NeurIPS 2019.
    """
    return Recipe(DENSE, schedule=Lookahead(every, alpha))


@preset
def post_local(steps: int, every: int = 8) -> Recipe:
    """Synchronous training at first, and local steps after.

    Use: where `local_sgd` from the start costs quality: models part the most while gradients change fast. `steps` are
    those up to the first cut of the learning rate, usually. On `digits` by label a quarter of the steps brought the loss
    from .425 down to .278.

    Not for: links on which even the first steps cannot wait for every average.

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """
    return Recipe(DENSE, schedule=PostLocal(steps, LocalSGD(every)))


@preset
def hierarchical(near: int = 2, ranks: int = 8, every: int = 16) -> Recipe:
    """Neighbours average often, and all ranks now and then.

    Use: nodes of `ranks` ranks behind one slow link each: inside, averages cost little, and rounds between can be long.
    On `digits` in pairs, every third step, .114 (`local_sgd` .136), and .299 by label (.425).

    Not for: ranks whose links are all alike: a shorter round of all of them does more for as many bytes.

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """
    return Recipe(DENSE, schedule=Hierarchical(near, ranks, LocalSGD(every)))


@preset
def cocod(every: int = 8) -> Recipe:
    """Local steps while the last average is still travelling, at the learning rate as it is.

    Use: where an average takes as long as a few local steps: it travels while they are computed, and nobody waits.

    Not for: ranks whose data differ much, unless rounds are short: only the average itself holds them together, and
    it is a round old. On `digits` .206, and .859 by label; `overlap_local_sgd` .136 and .550.

    Paper: Shen, Xu, Liu, Cheng, CoCoD-SGD, IJCAI 2019.
    """
    return Recipe(DENSE, schedule=CoCoD(every))


@preset
def easgd(every: int = 10, alpha: float | None = None) -> Recipe:
    """Ranks that explore, tied to a centre by a spring.

    Use: on slow links, with an optimizer of much momentum (EAMSGD: SGD with Nesterov momentum of 0.99). The sum
    travels while the next round is computed.

    Not for: short runs, nor ranks whose data differ: ranks stay apart, and the centre follows slowly. After a dozen
    rounds on `digits` it lost .177, and 1.04 by label. Evaluate under `comm.consensus()`, which is
    the centre.

    Paper: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015.
    """
    return Recipe(DENSE, schedule=EASGD(every, alpha))
