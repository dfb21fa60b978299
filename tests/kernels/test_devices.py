"""Plain torch operations, which run on a GPU where Triton does not, never make the host wait.

A tensor on the meta device has no content: whoever asks for some fails. And what is copied to a device, which waits as
well, is copied once.
"""

from collections.abc import Callable

import pytest
import torch
from tests.laws.blocks import context
from torch import Tensor

from gossamer import kernels
from gossamer.codecs import QSGD, Ternary, TopK
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec
from gossamer.kernels.reference.select import spoil_outside

KEY = (0x9E3779B9, 0xDEADBEEF)
LAYOUT = Layout.of({"a": (30, 20), "b": (7,), "c": (400,)})
CODECS = [QSGD(), QSGD(bits=3, bucket=100), Ternary(), Ternary(levels=5), Ternary(deviation="centred"), TopK()]


def far(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(n, dtype=dtype, device="meta")


def there_and_back(codec: Codec, dtype: torch.dtype) -> Callable[[], None]:
    layout = Layout(LAYOUT.segments, dtype)

    def go() -> None:
        wire = codec.encode(Bucket(far(layout.numel, dtype), layout), {}, context())
        codec.accumulate(wire, layout, far(layout.numel, dtype), 0.5)

    return go


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_codec_asks_nothing_of_the_device_and_copies_its_tables_once(
    codec: Codec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = there_and_back(codec, dtype)
    with kernels.using("torch"):
        go()
        monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("copied a table again"))
        go()


def test_an_index_outside_spoils_what_it_was_added_to() -> None:
    indices, values = torch.tensor([1, 5, -1], dtype=torch.int32), torch.ones(3)
    inside, spoilt = spoil_outside(indices, values, 5)
    assert inside.tolist() == [1, 0, 0]
    assert spoilt.isnan().tolist() == [False, True, True]
    with kernels.using("torch"):
        kernels.scatter_add(far(5), far(3, torch.int32), far(3))  # and nobody waits to be told
        with pytest.raises(kernels.CorruptWire, match="outside"):
            kernels.scatter_add(far(0), far(3, torch.int32), far(3))


def test_on_a_cpu_an_index_outside_is_an_error_whatever_the_precision() -> None:
    codec, layout = TopK(ratio=0.5), Layout.of({"w": (4,)}, torch.float64)
    wire = codec.encode(Bucket(torch.ones(4, dtype=torch.float64), layout), {}, context())
    wire[8:].view(torch.int32)[1] = 4
    into = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(kernels.CorruptWire, match="outside"):
        codec.accumulate(wire, layout, into, 1.0)
    assert not into.any()
