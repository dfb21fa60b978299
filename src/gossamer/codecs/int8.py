"""8-bit integers, with one scale per block of elements."""

from typing import Annotated, Literal, final

from gossamer.codecs.scaled import Rounding, Scaled, ScaledCodec
from gossamer.core.parts import part
from gossamer.core.ranges import Choice
from gossamer.kernels.forms import INT8


@final
@part("int8")
class Int8(ScaledCodec):
    """8-bit integers from -127 to 127, in units of 1/127 of the largest element of their block.

    Unbiased with `rounding="stochastic"`, to 2^-17 of a unit: x is rounded to one of its two neighbours at random. "nearest" has
    half the error, always the same way; that is too small to need error feedback.

    Use: for 3.9 times fewer bytes than dense at the same loss, without a memory: of all 8-bit codecs it has the least error where
    elements have similar sizes, on Gaussian numbers a sixteenth of `fp8`'s squared error. Smaller blocks have less error and need
    more bytes.

    Not for: fewer bytes than that: see `qsgd`; nor blocks with a few elements far larger than all others, which then become zero:
    see `fp8`.

    Wire: d + 4 ceil(d / block) bytes; 2 for each block with `scale="bf16"`, which is rounded up, so that nothing is clipped.

    >>> import torch
    >>> from gossamer.core.bucket import Bucket
    >>> from gossamer.core.contracts import Context
    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([127.0, -3.0, 0.0, 1.0])})
    >>> wire = Int8().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), Int8().decode(wire, block)
    (8, tensor([127.,  -3.,   0.,   1.]))

    Paper: none; common in teams' own communication hooks.
    """

    block: Annotated[int, Choice(32, 64, 128, 256, 512, 1024)] = 128
    scale: Annotated[Literal["fp32", "bf16"], Choice("fp32", "bf16")] = "fp32"
    rounding: Annotated[Rounding, Choice("stochastic", "nearest")] = "stochastic"

    def __post_init__(self) -> None:
        self.writes.check()

    @property
    def writes(self) -> Scaled:
        return Scaled("int8", INT8, self.block, self.scale, self.rounding)

    @property
    def needs_feedback(self) -> bool:
        return False  # at most half of 1/127 of a block's largest element is lost, far below a gradient's own noise
