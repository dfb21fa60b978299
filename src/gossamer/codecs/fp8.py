"""8-bit floats, with one scale per block of elements."""

from typing import Annotated, final

from gossamer.codecs.scaled import Rounding, Scale, Scaled, ScaledCodec
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.kernels.forms import E4M3, E5M2

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@final
@part("fp8")
class FP8(ScaledCodec):
    """8-bit floats: 4 bits of exponent and 3 of mantissa (`e4m3`, up to 448), or 5 and 2 (`e5m2`, up to 57344).

    The largest element of a block is scaled to the format's largest number. Unbiased with `rounding="stochastic"`, to 2^-17 of the
    distance of two neighbours; "nearest" has half the error, always the same way, which is too small to need error feedback.
    The bytes are those of torch's `float8_e4m3fn` and `float8_e5m2`, but need no support for these: any torch, CPU or GPU works.

    `scale="e8m0"` is a power of two, rounded up, as in MXFP8 with `block=32`. `scale="ocp"` is OCP's rule, which may clip the
    largest element by an eighth: it is biased, needs `rounding="nearest"` and error feedback, and is meant for comparison.

    Use: where elements of a block differ by orders of magnitude: each has the same relative precision. On a log-normal
    gradient it has half the error of `int8`, in blocks of 1024 a sixth.

    Not for: nearly Gaussian gradients, on which `int8` has a sixteenth of the error in as many bytes. `e5m2` has four times the
    error of `e4m3`: take it only where the format is required.

    Wire: d + 4 ceil(d / block) bytes; 2 for each block with `scale="bf16"`, 1 with "e8m0" and "ocp".

    >>> import torch
    >>> from gossamer.core.bucket import Bucket
    >>> from gossamer.core.contracts import Context
    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([448.0, -3.0, 0.0, 0.25])})
    >>> wire = FP8().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), FP8().decode(wire, block)
    (8, tensor([ 4.4800e+02, -3.0000e+00,  0.0000e+00,  2.5000e-01]))

    Paper: Micikevicius et al., FP8 Formats for Deep Learning, 2022; the power-of-two scales are OCP's Microscaling Formats, 2023.
    """

    format: Annotated[str, Choice("e4m3", "e5m2")] = "e4m3"
    block: Annotated[int, Choice(32, 64, 128, 256, 512, 1024)] = 128
    scale: Scale = "fp32"
    rounding: Annotated[Rounding, Choice("stochastic", "nearest")] = "stochastic"

    def __post_init__(self) -> None:
        require(
            self.format in _FORMATS,
            f"fp8: format must be 'e4m3' or 'e5m2', got {self.format!r}; others, such as torch's fnuz dtypes, are not supported. "
            "These two need no dtype of torch",
        )
        self.writes.check()

    @property
    def writes(self) -> Scaled:
        return Scaled("fp8", _FORMATS[self.format], self.block, self.scale, self.rounding)

    @property
    def needs_feedback(self) -> bool:
        # Rounding loses little, and cutting off the largest much, always of the same elements.
        return self.scale == "ocp"
