"""Signs: one bit for each element, and one number for each parameter."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.base import FewBytes, SingleCodec
from gossamer.codecs.noise import signs
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Biased, Context
from gossamer.core.parts import part
from gossamer.core.ranges import Choice
from gossamer.core.wire import expect, take


@final
@part("sign")
class Sign(Biased, FewBytes, SingleCodec):
    """Signs, with one scale s per parameter: every element becomes -s or +s.

    `scale="l1"`: s = |x|_1 / n, the scale of least error, 1 - |x|_1^2 / (n |x|_2^2) of |x|^2: .363 for a Gaussian.
    `scale="l2"`: s = |x|_2 / sqrt(n), with the norm of x; the squared error can be up to 2 |x|^2 where few elements are large, but
    error feedback stays bounded. With one element in a hundred not zero, the residual under "l2" was 18 times the gradient,
    from step 100 on; under "l1" 174 times, and growing. `scale="one"`: s = 1, for votes. An element of exactly 0 then gets a
    random sign, otherwise +s.

    Use: "l1" and "l2" with error_feedback(), for 32 times fewer bytes; "l2" for momenta, "one" with signs() and no memory.

    Not for: parameters with mostly zero elements: all of them become -s or +s, and the error fills the residual.

    Wire: ceil(d / 8) bytes, and 4 per parameter.

    >>> from gossamer.core.rng import CounterRng
    >>> block = Bucket.of({"w": torch.tensor([3.0, -1.0, 0.5, 1.5])})
    >>> codec = Sign()
    >>> wire = codec.encode(block, {}, Context(0, 1, 0, CounterRng(0, 0, 0)))
    >>> wire.numel(), codec.decode(wire, block)
    (5, tensor([ 1.5000, -1.5000,  1.5000,  1.5000]))

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018;
    Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD, ICML 2019.
    """

    scale: Annotated[Literal["l1", "l2", "one"], Choice("l1", "l2")] = "l1"

    @property
    def contracts(self) -> bool:
        return self.scale == "l1"

    @property
    def bounds_residual(self) -> bool:
        return self.scale == "l2"

    @property
    def any_size(self) -> bool:
        return self.scale != "one"

    @property
    def votes(self) -> bool:
        return self.scale == "one"

    @property
    def own_size(self) -> bool:
        return self.scale == "one"

    def wire_bytes(self, layout: Layout) -> int:
        return 4 * len(layout.segments) + kernels.sign_bytes(layout.numel)

    def encode(self, block: Bucket, state: State, context: Context) -> Tensor:
        flat, layout = block.flat.float(), block.layout
        wire = layout.buffers.of(self.wire_bytes(layout), flat.device)
        scales, payload = take(wire, torch.float32, len(layout.segments))
        if self.scale == "one":
            scales.copy_(_ones(kernels.absmax(flat, layout.bounds)))
            kernels.sign_encode(_tossed(flat, block.name, context), layout.bounds, 1, payload)
        else:
            scales.copy_(kernels.sign_encode(flat, layout.bounds, 1 if self.scale == "l1" else 2, payload))
        return wire

    def read(self, wire: Tensor, layout: Layout, out: Tensor, weight: float | None = None) -> None:
        scales, payload = self._open(wire, layout)
        kernels.sign_decode(payload, layout.bounds, scales, out, weight)

    def scales(self, wire: Tensor, layout: Layout) -> Tensor | None:
        return self._open(wire, layout)[0]

    def _open(self, wire: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        expect(wire, self.wire_bytes(layout), "sign")
        return take(wire, torch.float32, len(layout.segments))


def _ones(largest: Tensor) -> Tensor:
    """1 for a tensor that is not all zero; not finite if some element is not."""
    return (largest > 0).float() + (largest - largest)


def _tossed(flat: Tensor, name: str, context: Context) -> Tensor:
    """Random signs for zeros; with +1 for each zero all votes on zeros would agree."""
    coins = signs(1, flat.numel(), context.rng.key(f"{name}/sign"), flat.device)[0]
    return torch.where(flat == 0, coins, flat)
