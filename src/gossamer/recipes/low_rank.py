"""Gradients of matrices as a few of their atoms."""

from gossamer.codecs import QSGD, SVD, Atomo, Basis, GradiVeQ, PowerSGD
from gossamer.exchanges import AllReduced, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset


@preset
def powersgd(rank: int = 4) -> Recipe:
    """Low-rank gradients by warm-started power iteration, with error feedback.

    Use: below about 1 Gbit/s, on models of large matrices: bytes do not grow with the number of ranks, and from 8 on no
    preset sends fewer.

    Not for: models of vectors and small matrices, which travel as they are, nor busy processors: it multiplies
    matrices at every step. It keeps a residual as large as the model. Ranks below 4 send less but learned so much
    slower at first, on a small Transformer, that it did not pay. Where quality suffers, take a higher one, or
    `accordion`.

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019.
    """
    return Recipe(AllReduced(PowerSGD(rank)), ErrorFeedback())


@preset
def gradiveq(ratio: int = 8, learn: int = 10, every: int = 200) -> Recipe:
    """Slices of matrices in the principal directions of those before, with error feedback for what lies across.

    Use: on rings whose sums are fast, for models of long rows: messages add up on their way, and their lengths never change
    between two learnings, which are counted apart: with 10 dense steps of 210 the whole run sends 6 times less, not 8.

    Not for: short runs, and the start of long ones, while directions turn: `powersgd` follows them at every step.

    Paper: Yu et al., GradiVeQ, NeurIPS 2018; error feedback is ours.
    """
    return Recipe(AllReduced(GradiVeQ(ratio=ratio, learn=learn, every=every)), ErrorFeedback())


@preset
def atomo(basis: Basis = SVD(), share: float = 0.05) -> Recipe:  # noqa: B008
    """A few directions of each matrix, kept at random, and their mean in four bits.

    Use: below about 1 Gbit/s, on models of matrices, where nothing may be biased nor kept: there is no residual, as
    `powersgd` has one. Bytes stay what they are while a rank's chunk holds some rows of a matrix.

    Not for: models of vectors, which travel as they are, nor busy processors: it multiplies matrices at every step; nor
    many ranks for a small model: a chunk of less than eight rows is no matrix, and bytes grow with their number. Where a
    residual is no trouble, `powersgd` sends less and learns as fast.

    The second phase encodes the mean again, with `qsgd` of four bits, for its noise shrinks in no mean. `fashion` on four
    simulated ranks, one seed, 120 steps: loss .65 with 100 kB a step from each rank, as `qsgd` had with 158 and dense .61
    with 1,242; with directions in the answer as well, `scatter(atomo(svd(), share=0.05))`, 1.01 with 43. Among few ranks
    `gather(atomo(svd(), atoms=3))` is shorter: .65 with 75; `powersgd`: .64 with 50. In entries, `atomo(entry())`, chunks
    of a small model have room for more: .58 with 110 kB after 80 steps against .73 with 100; `lm` had the same loss in
    both after 14, 5.92 and 5.94.

    Paper: Wang et al., ATOMO, NeurIPS 2018.
    """
    return Recipe(Scatter(Atomo(basis, share=share), answer=QSGD()))
