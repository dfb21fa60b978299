"""4-bit floats, with one scale per block of elements."""

from typing import Annotated, final

from gossamer.codecs.scaled import Rounding, Scale, Scaled, ScaledCodec
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.kernels.forms import E2M1, E3M0

_FORMATS = {"e2m1": E2M1, "e3m0": E3M0}


@final
@part("fp4")
class FP4(ScaledCodec):
    """4-bit floats with one scale per block of elements.

    `e2m1`, 2 bits of exponent and 1 of mantissa: 0, .5, 1, 1.5, 2, 3, 4, 6. `e3m0`, 3 bits of exponent: 0, 1/4, 1/2, ..., 16.

    The largest element of a block is scaled to the format's largest number, and each element becomes one of its two neighbours
    at random: unbiased, to 2^-17 of their distance. `rounding="nearest"` has half the error, always the same way, and needs
    error feedback: what is below a twenty-fourth of the largest (in `e3m0` a hundred-and-twenty-eighth) is lost at every step.

    `scale="e8m0"` is a power of two, rounded up: with `block=32` the elements and scales of MXFP4. `scale="ocp"` is OCP's rule,
    which may clip the largest element by a quarter; it needs `rounding="nearest"`.

    Use: where the format is required, such as differences of models in `e3m0`, as Streaming DiLoCo sends them.

    Not for: anything else. On Gaussian numbers `eden(4)`, in 4.03 bits an element, has less than half the squared error of
    `e2m1` at random in 5 (.0095 and .0205), and a seventh of that of `e3m0` (.067).

    Wire: ceil(d / 2) + 4 ceil(d / block) bytes; 2 for each block with `scale="bf16"`, 1 with "e8m0" and "ocp".

    >>> import torch
    >>> from gossamer.core.bucket import Bucket
    >>> from gossamer.core.contracts import Context
    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([6.0, -3.0, 0.0, 0.5])})
    >>> wire = FP4().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), FP4().decode(wire, block)
    (6, tensor([ 6.0000, -3.0000,  0.0000,  0.5000]))

    Paper: the format is that of OCP's Microscaling Formats, 2023; differences in `e3m0` are those of Douillard et al., Streaming
    DiLoCo with overlapping communication, 2025.
    """

    format: Annotated[str, Choice("e2m1", "e3m0")] = "e2m1"
    block: Annotated[int, Choice(16, 32, 64, 128)] = 32
    scale: Scale = "fp32"
    rounding: Annotated[Rounding, Choice("stochastic", "nearest")] = "stochastic"

    def __post_init__(self) -> None:
        require(
            self.format in _FORMATS, f"fp4: format must be 'e2m1' or 'e3m0', got {self.format!r}; for 8 bits use fp8"
        )
        self.writes.check()

    @property
    def writes(self) -> Scaled:
        return Scaled("fp4", _FORMATS[self.format], self.block, self.scale, self.rounding, bits=4)
