"""Local steps, and an average of the models at the end of each round.

Losses below are held-out losses of `digits` on four simulated ranks after 144 steps in rounds of 12, each at the best of three
learning rates, over two seeds. "By label" means that each rank has its own labels. Dense has .116, and .125 by label; there
seeds differ by up to .2.
"""

from typing import Literal

from gossamer.codecs import QSGD, TileTopK
from gossamer.exchanges import Gather, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import (
    BMUF,
    DESLOC,
    EASGD,
    SPARTA,
    CoCoD,
    Eager,
    EDiTGuard,
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
    """Model averages after every `every` local steps.

    Use: on links of high latency, and where even compressed gradients are too much at every step: both costs shrink
    `every` times.

    Not for: links on which dense hides behind backward: an average of models cannot. Models drift apart between averages,
    the more so the more the ranks' data differ: then take fewer steps. On `digits` it lost .136, and .425 by label.

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """
    return Recipe(DENSE, schedule=LocalSGD(every))


@preset
def slowmo(every: int = 12, beta: float = 0.7, alpha: float = 1.0, sharded: bool = False) -> Recipe:
    """Model averages after local steps, then an outer step with slow momentum.

    Use: across sites and on slow links: messages are rare, and the slow momentum recovers quality that local steps lose. It
    takes a codec as well: `slowmo + scatter(qsgd())`. It helps most where ranks' data differ: on `digits` by label local steps
    lost .425, and with a beta of 0.3, 0.5 and 0.7 .342, .286 and .324.

    Not for: links on which dense hides behind backward: an average of models cannot. Nor machines with little memory: it
    keeps two more copies of the model. Nor a dozen rounds where ranks' data are similar: there it lost .137, .149 and .199,
    plain local steps .136.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(DENSE, schedule=SlowMo(every, beta, alpha, sharded=sharded))


@preset
def overlap_local_sgd(every: int = 8, alpha: float = 0.6, beta: float = 0.7) -> Recipe:
    """Model averages after local steps, sent during the next round's local steps.

    Use: where an average takes as long as a few local steps, as over one slow link: it is sent while they are computed, and
    no rank waits.

    Not for: networks slower than a round, nor an unchanged learning rate: the model moves (1 - alpha) / (1 - alpha beta)
    times as fast, 0.69 by default. The average is a round old.

    Paper: Wang, Liang, Joshi, Overlap Local-SGD, ICASSP 2020.
    """
    return Recipe(DENSE, schedule=OverlapLocalSGD(every, alpha, beta))


@preset
def bmuf(
    every: int = 16, momentum: float | None = None, rate: float = 1.0, nesterov: bool = False, sharded: bool = False
) -> Recipe:
    """Model averages after local steps, then an outer step with block momentum (independent of the learning rate).

    Use: on slow links with a constant or rarely cut learning rate. It takes a codec as well: `bmuf + scatter(qsgd())`.

    Not for: learning rates that a schedule lowers fast: use `slowmo`, which follows them. On `digits`, momentum 0.5, it lost
    .147, and .336 by label; local steps lost .136 and .425.

    Paper: Chen, Huo, Blockwise Model-Update Filtering, ICASSP 2016.
    """
    return Recipe(DENSE, schedule=BMUF(every, momentum, rate, nesterov, sharded=sharded))


@preset
def diloco(every: int = 100, rate: float = 0.7, momentum: float = 0.9, sharded: bool = False) -> Recipe:
    """Model differences after 100 local steps, averaged, then an outer step with Nesterov momentum.

    The outer step is `slowmo(every, momentum, rate, by_lr=False, nesterov=True)`. The authors use AdamW as the inner optimizer
    (each rank keeps its state) and rounds of 500 steps; in the long run a round counts rate / (1 - momentum) times, 7 in the
    paper.

    Use: across sites, for training so long that rounds of hundreds of steps are short.

    Not for: runs of a few rounds, in which the model hardly moves; nor models that are trained on other data later: one of language
    ended .005 nats below dense, and .062 above after dense training on source code. Half of dense's learning rate suits it better.

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
    """DiLoCo's model differences in 4 bits, one fragment of the model at a time, sent during the next local steps.

    Layers are dealt to the fragments in turn; `streaming(...)` takes the number of fragments, or patterns of names. The outer
    step is diloco's; when a fragment's average arrives, the model is mixed with its result. It arrives a twentieth of a round
    later, or `delay` steps later.

    Use: across sites, as `diloco`, where traffic should be steady and low: a step sends one fragment at most, and the next
    `delay` steps hide it.

    Not for: runs of a few rounds, as `diloco`. On `digits`, with rate=0.7 and momentum=0.5, it lost .140, `diloco` with the
    same numbers .126.

    Paper: Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch, 2025.
    """
    late = max(1, every // 20) if delay is None else delay
    return Recipe(
        Scatter(QSGD(bits=bits)), schedule=Streaming(every, delay=late, mixing=mixing, rate=rate, momentum=momentum)
    )


@preset
def eager_diloco(every: int = 30, rate: float = 0.4, momentum: float = 0.9) -> Recipe:
    """DiLoCo without waiting: a rank's own model difference is applied at once, the other ranks' a round later.

    Use: across sites where an average takes as long as a round.

    Not for: machines with little memory, nor runs of a few rounds. Evaluate under `comm.consensus()`: the model on which all
    ranks agree.

    Paper: Kale, Douillard, Donchev, Eager Updates for Overlapped Communication and Computation in DiLoCo, 2025.
    """
    return Recipe(DENSE, schedule=Eager(every, rate, momentum))


@preset
def decoupled_diloco(every: int = 100, quorum: int = 1, rate: float = 0.7, momentum: float = 0.9) -> Recipe:
    """DiLoCo whose rounds close once a quorum of ranks has sent its model difference; late ranks are merged later.

    A round needs at least `quorum` of the ranks, and takes all that arrive within the slack; its result is applied a step
    later. `quorum_rounds(...)` sets the rest: fragments, radial averages, what late ranks keep. Ranks count their own steps.

    Use: across sites, on machines of different or varying speed, and on links that an average crosses in a step or two.

    Not for: runs that must be reproducible to the bit, nor runs of a few rounds, as `diloco`. A process that dies is an error,
    except with `gossamer.members()`.

    Paper: Douillard et al., Decoupled DiLoCo, arXiv 2604.21428, 2026.
    """
    return Recipe(DENSE, schedule=QuorumRounds(every, quorum, rate=rate, momentum=momentum))


@preset
def async_diloco(every: int = 100, rate: float = 0.7, momentum: float = 0.9, share: float = 0.0) -> Recipe:
    """DiLoCo that applies each rank's model difference when it arrives; every N-th of N ranks moves the outer momentum.

    A rank arrives after `every` steps of its own, however fast the others are, and its difference counts 1 / N. Between two
    moves of the momentum each arrival takes the part `share` of it, at most 1 / N. Ranks of equal speed arrive together, and
    then it is `diloco`, a step later. See `quorum_rounds(delayed=...)`.

    Use: across sites, on machines of different or varying speed, where each rank's difference should be of as many steps.

    Not for: runs that must be reproducible to the bit; many ranks of different speed on slow links, where each arrival is a round
    of its own, in which all ranks send: use `decoupled_diloco`. Ranks of equal speed arrive together, a step late: on `digits`,
    judged before the last round had landed, it had .130 and .156 at seeds 1 and 2, `diloco` .214 and .291.

    Paper: Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024.
    """
    rounds = QuorumRounds(every, rate=rate, momentum=momentum, weigh="equal", delayed=share)
    return Recipe(DENSE, schedule=rounds)


@preset
def sparse_loco(
    every: int = 30, keep: int = 64, rate: float = 1.0, decay: float = 0.95, places: Literal["fixed", "rice"] = "fixed"
) -> Recipe:
    """Top-k of the model difference after 30 local steps, in 2 bits, with error feedback.

    e_i = decay e_i + D_i; send the largest `keep` of every 64 x 64 of it; e_i -= what was sent;  a -= rate mean(sent). There is
    no outer momentum: the residual acts as one. The mean is over all ranks; the authors' code divides each element by the
    number of ranks that sent it, and clips ranks' values to their median norm.

    Use: across sites among a few ranks, where `diloco` still sends too much: a message is 206 times shorter than the model
    (of 5.8 million parameters).

    Not for: many ranks: bytes grow with their number. Nor runs of a few rounds: most of the updates wait in the residual.

    Paper: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025.
    """
    return Recipe(
        Gather(TileTopK(keep, places=places)),
        ErrorFeedback(decay=decay),
        SlowMo(every, beta=0.0, alpha=rate, by_lr=False),
    )


@preset
def lookahead(every: int = 5, alpha: float = 0.5) -> Recipe:
    """Model averages after local steps, then an interpolation between old and new weights; works on one rank as well.

    Use: around an optimizer with large or noisy steps, on one rank or many.

    Not for: saving time: a share `alpha` of every step is kept, so raise the learning rate. On `digits` it gained nothing
    over `local_sgd` at its own best rate: .146, and .514 by label.

    Paper: Zhang, Lucas, Hinton, Ba, Lookahead Optimizer, NeurIPS 2019.
    """
    return Recipe(DENSE, schedule=Lookahead(every, alpha))


@preset
def post_local(steps: int, every: int = 8) -> Recipe:
    """Full gradients for the first `steps` steps, then model averages after local steps.

    Use: where `local_sgd` from the start costs quality: models drift apart most while gradients change fast. Usually `steps`
    ends at the first cut of the learning rate. On `digits` by label a quarter of the steps lowered the loss from .425 to .278.

    Not for: links so slow that even the first steps cannot send full gradients.

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """
    return Recipe(DENSE, schedule=PostLocal(steps, LocalSGD(every)))


@preset
def hierarchical(near: int = 2, ranks: int = 8, every: int = 16) -> Recipe:
    """Model averages among the ranks of a node often, among all ranks rarely.

    Use: on nodes of `ranks` ranks with one slow link each: averages inside a node are cheap, and rounds between nodes can be
    long. On `digits` in pairs, every third step, it lost .114 (`local_sgd` .136), and .299 by label (.425).

    Not for: ranks with equal links: shorter rounds of all ranks learn more for as many bytes.

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """
    return Recipe(DENSE, schedule=Hierarchical(near, ranks, LocalSGD(every)))


@preset
def cocod(every: int = 8) -> Recipe:
    """Model averages sent during the next local steps, whose progress is then added (CoCoD-SGD).

    Use: where an average takes as long as a few local steps: it is sent while they are computed, and no rank waits. The
    learning rate stays as it is.

    Not for: ranks whose data differ much, unless rounds are short: only the average keeps the models close, and it is a
    round old. On `digits` it lost .206, and .859 by label; `overlap_local_sgd` .136 and .550.

    Paper: Shen, Xu, Liu, Cheng, CoCoD-SGD, IJCAI 2019.
    """
    return Recipe(DENSE, schedule=CoCoD(every))


@preset
def easgd(every: int = 10, alpha: float | None = None) -> Recipe:
    """Elastic averaging: each rank's model is pulled towards a centre model, and the centre towards the ranks' mean.

    Use: on slow links, with an optimizer of high momentum (EAMSGD: SGD with Nesterov momentum of 0.99). The sum is sent
    while the next round is computed.

    Not for: short runs, nor ranks whose data differ: the ranks' models stay different, and the centre follows slowly. After a
    dozen rounds on `digits` it lost .177, and 1.04 by label. Evaluate under `comm.consensus()`, which is the centre.

    Paper: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015.
    """
    return Recipe(DENSE, schedule=EASGD(every, alpha))


@preset
def des_loc(every: int = 8, first: int = 3, second: int = 6) -> Recipe:
    """Model averages after local steps of Adam; its first moments are averaged every third round, the second every sixth.

    Use: local steps of Adam on slow links, if each rank's own moments drift apart: 1.5 models a round, where Local Adam
    (`slowmo(8, beta=0.0, buffers="average")`) sends three.

    Not for: plain SGD, which has no moments, so that it is `local_sgd`; SGD with momentum gained nothing: on `lm`, four
    simulated ranks and 60 steps at seed 0, `des_loc(4)` had a held-out loss of 4.967, `local_sgd(4)` 4.969 with a quarter less bytes.

    Paper: Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models,
    arXiv 2505.22549, 2025.
    """
    return Recipe(DENSE, schedule=DESLOC(every, first, second))


@preset
def edit(every: int = 100, rate: float = 0.7, momentum: float = 0.9, z: float = 3.0, clip: float = 10.0) -> Recipe:
    """DiLoCo with a guard: ranks of a round count by the length of their difference, and unusual ones are left out.

    Use: as `diloco`, where now and then a rank goes astray, by bad data or a spike of its loss.

    Not for: ranks whose data differ in kind, since the one with most to learn counts least; nor ranks that deceive. Nor a dozen
    rounds, of which ten are its warm-up: on `digits` it had .192 and .425 at seeds 1 and 2, `diloco` .214 and .291, and with a
    rank that sent -4 times its gradient both diverged.

    Paper: Cheng et al., EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models, ICLR 2025.
    """
    guard = EDiTGuard(z, clip)
    return Recipe(DENSE, schedule=SlowMo(every, momentum, rate, by_lr=False, nesterov=True, guard=guard))


@preset
def sparta(share: float = 0.005) -> Recipe:
    """At every step the average of a half percent of the parameters, other elements at each step.

    Use: between ranks that train on their own, where a few bytes at every step can be borne; it keeps their models close.

    Not for: links on which latency counts, since it sends at every step; training that needs equal models on all ranks. On
    `digits` `sparta(0.125)` had .118 and .157 at seeds 1 and 2, `local_sgd(8)` with as many bytes .122 and .144. Evaluate
    under `comm.consensus()`.

    Paper: none was read; the method is SPARTA (sparse parameter averaging) of exogym, 2025.
    """
    return Recipe(DENSE, schedule=SPARTA(share))
