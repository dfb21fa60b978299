"""Local steps, and an average at the end of a round."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import LocalSGD, OverlapLocalSGD, SlowMo


@preset
def local_sgd(every: int = 8) -> Recipe:
    """Local steps, and an average of the models every now and then.

    Use: on links of high latency, and where even compressed gradients are too much at every step: both costs shrink
    `every` times.

    Not for: links on which dense hides behind backward, as an average of models cannot. Models drift apart between
    averages, the further the more the ranks' data differ: then take fewer steps.

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """
    return Recipe(DENSE, schedule=LocalSGD(every))


@preset
def slowmo(every: int = 12, beta: float = 0.7, alpha: float = 1.0) -> Recipe:
    """Local steps, an average, and slow momentum over the rounds.

    Use: across sites and on slow links: messages are rare, and momentum wins back what local steps lose. It takes a
    codec as well: `slowmo + scatter(qsgd())`.

    Not for: links on which dense hides behind backward, as an average of models cannot, nor machines short of
    memory: it keeps two more copies of the model.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(DENSE, schedule=SlowMo(every, beta, alpha))


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
