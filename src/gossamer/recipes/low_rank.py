"""Low-rank gradients of matrices."""

from gossamer.codecs import QSGD, SVD, Atomo, Basis, GradiVeQ, PowerSGD
from gossamer.exchanges import AllReduced, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.updates import DionUpdate


@preset
def powersgd(rank: int = 4) -> Recipe:
    """Low-rank factors of each matrix (rank 4) by warm-started power iteration, with error feedback.

    Use: below about 1 Gbit/s, on models of large matrices: bytes do not grow with the number of workers, and from 8 workers on
    no preset sends fewer.

    Not for: models of vectors and small matrices, which are sent in full, nor busy processors: it multiplies matrices at every
    step. It keeps a residual as large as the model. A `rank` below 4 sends less, but on a small Transformer it learned so much
    slower at first that it did not pay. Where quality suffers, take a higher rank, or `accordion`.

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019.
    """
    return Recipe(AllReduced(PowerSGD(rank)), ErrorFeedback())


@preset
def dion(rank: int = 4, momentum: float = 0.95) -> Recipe:
    """Orthonormal low-rank steps along the momentum of each matrix, of which only the factors travel.

    Use: in place of Muon on models of large matrices, with SGD without momentum for the matrices and any optimizer for vectors:
    bytes as of `powersgd`, whatever the number of ranks.

    Not for: optimizers with momentum for matrices, which it refuses, nor SGD's learning rates: a step's length is that of `rank`
    unit vectors, whatever the gradient's. Nor busy processors: it multiplies each matrix by its factors four times a step. Nor
    small models: on `digits` it had held-out losses of .253 and .238 at two seeds, `powersgd` with as many bytes .113 and .172.

    Paper: Ahn et al., Dion: Distributed Orthonormalized Updates, 2025.
    """
    return Recipe(AllReduced(PowerSGD(rank, min_ratio=1.0)), ErrorFeedback(), update=DionUpdate(rank, momentum))


@preset
def gradiveq(ratio: int = 8, learn: int = 10, every: int = 200) -> Recipe:
    """Projections of matrix slices on principal directions of earlier gradients, with error feedback.

    Use: where all-reduce is fast, for models of long rows: messages are summed by it, and their length is fixed. The dense
    steps that learn the directions are counted separately: with 10 of 210 the whole run sends 6 times less, not 8.

    Not for: short runs, and the start of long ones, while the directions change fast: `powersgd` follows them at every step.

    Paper: Yu et al., GradiVeQ, NeurIPS 2018; error feedback is ours.
    """
    return Recipe(AllReduced(GradiVeQ(ratio=ratio, learn=learn, every=every)), ErrorFeedback())


@preset
def atomo(basis: Basis = SVD(), share: float = 0.05) -> Recipe:  # noqa: B008
    """A random few singular directions of each matrix, unbiased, then their mean in 4 bits.

    Use: below about 1 Gbit/s, on models of matrices, where the mean must be unbiased and no state may be kept: unlike
    `powersgd` it has no residual. Bytes do not grow with the number of ranks while a rank's chunk holds some rows of a matrix.

    Not for: models of vectors, which are sent in full, nor busy processors: it multiplies matrices at every step. Nor many
    ranks for a small model: a chunk of less than eight rows is sent in full, and bytes grow with the number of ranks. Where a
    residual is acceptable, `powersgd` sends less and learns as fast.

    The second phase encodes the mean again, with `qsgd` of four bits: no later mean reduces that noise. `fashion` on four
    simulated ranks, one seed, 120 steps: loss .65 with 100 kB a step from each rank, as `qsgd` had with 158 and dense .61
    with 1,242; with directions in the second phase as well, `scatter(atomo(svd(), share=0.05))`, 1.01 with 43. Among few ranks
    `gather(atomo(svd(), atoms=3))` is shorter: .65 with 75; `powersgd`: .64 with 50. In entries, `atomo(entry())`, chunks
    of a small model have room for more: .58 with 110 kB after 80 steps against .73 with 100; `lm` had the same loss in
    both after 14, 5.92 and 5.94.

    Paper: Wang et al., ATOMO, NeurIPS 2018.
    """
    return Recipe(Scatter(Atomo(basis, share=share), answer=QSGD()))
