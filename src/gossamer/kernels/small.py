"""Eight-bit numbers: one byte per element, relative to the largest of its bucket; see `forms.py`."""

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.backends import twin
from gossamer.kernels.forms import Form, Steps
from gossamer.kernels.layout import require_count, require_length, require_vector

LONGEST = 4096  # elements of one bucket: a GPU's program holds it whole


def small_encode(x: Tensor, form: Form, steps: Steps, bucket: int, key: Key | None, tops: Tensor, out: Tensor) -> None:
    """Write each bucket's top to `tops`, and the code of each element, relative to the top, to `out`.

    With a key, an element becomes one of its two neighbours, at random and unbiased; without, the nearest one, and the even
    one of a tie. The bytes of one element are its code; a bucket whose top is not finite has any codes. Tops below 2^-100
    count as zero. Tops of one byte are those of `forms.squeezed`, for steps that are powers of two. Reads 4 bytes and writes 1
    per element.
    """
    require_vector("x", x)
    _require(x.numel(), bucket, tops)
    require_length("small numbers", out, x.numel())
    twin("small", "encode", x.device)(x, form, steps, bucket, key, tops, out)


def small_decode(wire: Tensor, form: Form, bucket: int, tops: Tensor, out: Tensor, weight: float | None = None) -> None:
    """out = top / form.top * meaning(code); with a weight out += weight times that. A bucket with a top that is not finite
    becomes NaN.

    Without a weight it is to the bit what is added to zeros. Reads 1, with a weight 5, and writes 4 bytes per element.
    """
    require_vector("out", out)
    _require(out.numel(), bucket, tops)
    require_length("small numbers", wire, out.numel())
    factor = 1.0 if weight is None else weight
    twin("small", "read", out.device)(wire, form, bucket, tops, factor, out, weight is None)


def _require(n: int, bucket: int, tops: Tensor) -> None:
    if not 1 <= bucket <= LONGEST:
        raise ValueError(f"bucket must be between 1 and {LONGEST}, got {bucket}")
    require_vector("tops", tops, torch.uint8 if tops.dtype == torch.uint8 else torch.float32)
    require_count("tops", tops, -(-n // bucket))
