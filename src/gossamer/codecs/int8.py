"""Whole numbers of eight bits, with a scale for each block."""

from typing import Annotated, Literal, final

from gossamer.codecs.scaled import Rounding, Scaled, ScaledCodec, require_rounding
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.kernels.forms import INT8


@final
@part("int8")
class Int8(ScaledCodec):
    """Whole numbers between -127 and 127, in units of 1/127 of the largest of their block.

    Unbiased with `rounding="stochastic"`, to 2^-17 of a unit: one of the two next to x, at random such that it is right on
    average. "nearest" errs half as much, and always the same way; that is too little to need error feedback.

    Use: for 3.9 times fewer bytes than dense at the same loss, without a memory: of eight bits these err least where elements are
    of like sizes, on Gaussian numbers a sixteenth of `fp8`'s squared error. Smaller blocks err less, and are longer.

    Not for: fewer bytes than that: see `qsgd`; nor blocks in which a few elements are far larger than all others, of which little
    is left but these: see `fp8`.

    Wire: d + 4 ceil(d / block) bytes; 2 for each block with `scale="bf16"`, which is rounded up, so that nothing is cut off.

    >>> import torch
    >>> from gossamer.core.bucket import Bucket
    >>> from gossamer.core.contracts import Context
    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([127.0, -3.0, 0.0, 1.0])})
    >>> wire = Int8().encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), Int8().decode(wire, block)
    (8, tensor([127.,  -3.,   0.,   1.]))

    Paper: none; what teams write into hooks of their own.
    """

    block: Annotated[int, Choice(32, 64, 128, 256, 512, 1024)] = 128
    scale: Annotated[Literal["fp32", "bf16"], Choice("fp32", "bf16")] = "fp32"
    rounding: Annotated[Rounding, Choice("stochastic", "nearest")] = "stochastic"

    def __post_init__(self) -> None:
        self.writes.require_block()
        require_rounding("int8", self.rounding)
        require(
            self.scale in ("fp32", "bf16"),
            f"int8: scale must be 'fp32' or 'bf16', got {self.scale!r}; powers of two are scales of fp8",
        )

    @property
    def writes(self) -> Scaled:
        return Scaled("int8", INT8, self.block, self.scale)

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def needs_feedback(self) -> bool:
        return False  # at most half of 1/127 of a block's largest element is lost, far below a gradient's own noise
