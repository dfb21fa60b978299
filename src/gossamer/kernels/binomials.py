"""A table of binomial coefficients in words of 32 bits: with it a set of places is one number, and the number is the set.

The number of high parts d_0 <= d_1 <= ... is the sum of C(d_j + j, j + 1) over j: all sets of so many that may be the same have
numbers from 0 on, without a gap. The last part is the largest one whose coefficient is no larger than the number; what is left
is the number of the others.

Paper: Cover, Enumerative Source Encoding, IEEE Transactions on Information Theory, 1973.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.layout import Places


def binomials(form: Places, device: torch.device) -> Tensor:
    """C(d + j, j + 1) of place j and high part d (three dimensions, int64): words of 32 bits, the lowest first.

    >>> binomials(Places(3, 9), torch.device("cpu"))[:, :, 0].tolist()
    [[0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 6, 10, 15, 21], [0, 1, 4, 10, 20, 35, 56]]
    """
    return _table(form, device)


@lru_cache(maxsize=64)
def _table(form: Places, device: torch.device) -> Tensor:
    row, written = [1] * (form.most + 1), bytearray()
    for _ in range(form.keep):
        sums = [0]  # C(d + j, j + 1) is the sum of C(e + j - 1, j) for e from 1 to d
        for before in row[1:]:
            sums.append(sums[-1] + before)
        row = sums
        for number in row:
            written += number.to_bytes(4 * form.words, "little")
    words = np.frombuffer(bytes(written), dtype="<u4").reshape(form.keep, form.most + 1, form.words)
    return torch.from_numpy(words.astype(np.int64)).to(device)
