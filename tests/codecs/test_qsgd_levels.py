"""QSGD in its variable-length code, and with any number of levels."""

from typing import Any

import pytest
import torch
from tests.laws.blocks import context, roundtrip, vector
from torch import Tensor

from gossamer import kernels
from gossamer.codecs import QSGD
from gossamer.core.bucket import Layout
from gossamer.core.errors import RecipeError, WireError
from gossamer.core.parts import parse
from gossamer.kernels.layout import CorruptWire
from gossamer.kernels.reference.quantise import codes as rounded

NORMAL = torch.randn(512 * 64, generator=torch.Generator().manual_seed(9))
EVERY = pytest.mark.parametrize("levels", [1, 2, 3, 5, 7, 22, 127])
KEY = 12, 34


def length(codec: QSGD, x: Tensor) -> float:
    """Bits an element, without the norms."""
    return 8 * (codec.encode(vector(x), {}, context()).numel() - 4 * -(-x.numel() // codec.bucket)) / x.numel()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_it_says_to_the_bit_what_the_fixed_width_says(bits: int, norm: Any) -> None:
    for x in (NORMAL, NORMAL[:1], NORMAL[:777], torch.zeros(5)):
        fixed, coded = QSGD(bits, norm=norm), QSGD(bits, norm=norm, code="rice")
        assert torch.equal(roundtrip(fixed, vector(x)), roundtrip(coded, vector(x)))


@EVERY
@pytest.mark.parametrize("norm", ["max", "l2"])
def test_any_number_of_levels_has_the_variance_of_the_formula(levels: int, norm: Any) -> None:
    codec, x = QSGD(bucket=64, norm=norm, code="rice", levels=levels), NORMAL[:1024]
    parts = x.double().view(-1, 64)
    top = parts.abs().amax(1, keepdim=True) if norm == "max" else parts.norm(dim=1, keepdim=True)
    f = (levels * parts.abs() / top).frac()
    wanted = float(((top / levels).square() * f * (1 - f)).sum())
    errors = [roundtrip(codec, vector(x), context(step=k)).double() - x.double() for k in range(300)]
    assert float(torch.stack(errors).square().sum(1).mean()) == pytest.approx(wanted, rel=0.03)
    # the mean of 300: no element is further off than 6 of its own deviations
    spread = (top / levels).square() * f * (1 - f) / 300
    assert bool((torch.stack(errors).mean(0).view(-1, 64).abs() <= 6 * spread.sqrt() + 1e-6 * top).all())


@EVERY
def test_the_code_is_shorter_than_the_paper_s_and_nearly_the_entropy(levels: int) -> None:
    codes = rounded(NORMAL, levels, 512, kernels.bucket_norms(NORMAL, 512, "max"), KEY)
    counts = torch.bincount(codes.long()).double()
    p = counts[counts > 0] / counts.sum()
    entropy = float(-(p * p.log2()).sum())
    coded = 8 * written(NORMAL, levels, 512)[1].numel() / codes.numel()
    magnitude = (codes.int() - levels).abs()
    elias = float((omega(2 * levels)[magnitude + 1] + (magnitude > 0)).double().mean())
    assert entropy <= coded <= entropy + 0.4
    assert coded < elias
    if levels in (3, 7, 127):
        assert coded < (2 * levels).bit_length()


def written(x: Tensor, levels: int, bucket: int) -> tuple[Tensor, Tensor]:
    """Norms by magnitude, and the code."""
    norms = torch.empty(-(-x.numel() // bucket))
    out = torch.empty(kernels.levels_most(x.numel(), levels), dtype=torch.uint8)
    return norms, out[: kernels.levels_encode(x, levels, bucket, norms, KEY, out, measure=True)]


def omega(most: int) -> Tensor:
    """Bits of the recursive Elias code: 1, 3, 3, 6, 6, 6, 6, 7, ..."""
    out = [0]
    for n in range(1, most + 2):
        bits = 1
        while n > 1:
            bits += n.bit_length()
            n = n.bit_length() - 1
        out.append(bits)
    return torch.tensor(out)


def test_omega_is_the_paper_s() -> None:
    assert omega(4).tolist()[1:] == [1, 3, 3, 6, 6]  # 0, 100, 110, 101000, 101010


def test_zeros_take_next_to_nothing() -> None:
    assert length(QSGD(code="rice"), torch.zeros(51200)) < 0.04


CPU = [b for b in kernels.backends() if b != "triton"]


@EVERY
@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 300, 4097, 9000])
def test_backends_agree_in_every_bit(levels: int, numel: int) -> None:
    x = torch.cat([NORMAL[: max(numel - 2, 0)] ** 3, torch.tensor([float("nan"), float("inf")])])[:numel]
    x[300:900] = 0.0
    found = list[tuple[Tensor, ...]]()
    for backend in CPU:
        with kernels.using(backend):
            norms, wire = written(x, levels, 100)
            out, more = torch.full_like(x, 7.0), torch.ones_like(x)
            kernels.levels_decode(wire, levels, 100, norms, out)
            kernels.levels_decode(wire, levels, 100, norms, more, 0.3)
            found.append(
                (norms.view(torch.int32), wire, *(t.nan_to_num(nan=5.0).view(torch.int32) for t in (out, more)))
            )
    assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


@EVERY
def test_levels_come_back_as_they_were(levels: int) -> None:
    """Every level, in every place of a word; the norm of a bucket is the largest, so that each is one."""
    every = (torch.arange(2 * levels + 1, dtype=torch.float32) - levels).repeat(300)[: 300 * 67]
    bucket, out = 2 * levels + 1, torch.empty_like(every)
    norms, wire = written(every, levels, bucket)
    kernels.levels_decode(wire, levels, bucket, norms, out)
    torch.testing.assert_close(out, every, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_damaged_codes_are_read_alike_by_all_backends(levels: int) -> None:
    norms, wire = written(NORMAL[:4500], levels, 512)
    rng = torch.Generator().manual_seed(levels)
    for case in range(60):
        damaged = wire.clone()
        damaged[int(torch.randint(wire.numel() if case % 2 else 30, (), generator=rng))] ^= 1 << case % 8
        damaged = damaged[: wire.numel() - (case % 7 == 0)]
        found = list[list[float] | None]()
        for backend in CPU:
            with kernels.using(backend):
                out = torch.zeros(4500)
                try:
                    kernels.levels_decode(damaged, levels, 512, norms, out)
                    found.append(out.tolist())
                except CorruptWire:
                    found.append(None)
        assert all(one == found[0] for one in found)


def test_damaged_wires_are_told_or_read_as_levels() -> None:
    codec, given = QSGD(code="rice", levels=5), vector(NORMAL[:600])
    wire = codec.encode(given, {}, context())
    top = float(NORMAL[:600].abs().max())
    for cut in (wire[:-1], wire[:4], wire[:0], torch.cat([wire, wire[:9]])):
        with pytest.raises(WireError):
            codec.decode(cut, given)
    for i in range(8, wire.numel()):  # behind the norms
        damaged = wire.clone()
        damaged[i] ^= 0x55
        try:
            assert float(codec.decode(damaged, given).abs().max()) <= top * 1.0001
        except WireError:
            continue


def test_a_level_beyond_the_last_is_refused() -> None:
    norms, wire = written(torch.full((1,), 7.0), 6, 1)  # 12 in a word of its own: 8 and 4 are its bits
    with pytest.raises(CorruptWire):
        kernels.levels_decode(wire, 4, 1, norms, torch.empty(1))


def test_bits_are_those_on_the_wire_the_sign_included() -> None:
    layout = Layout.of({"w": (1024, 1024)})
    for bits in range(1, 9):
        assert QSGD(bits).wire_bytes(layout) == bits * 2**20 // 8 + 4 * 2**11
        assert bits == 1 or QSGD(bits).steps == 2 ** (bits - 1) - 1


REFUSED = {
    "qsgd(levels=5)": "need code='rice', got 5 with code='fixed'",
    "qsgd(code='rice', levels=0)": "levels must be between 1 and 127",
    "qsgd(code='rice', levels=128)": "levels must be between 1 and 127",
    "qsgd(bits=3, code='rice', levels=5)": "pass bits or levels",
    "qsgd(bits=1, code='rice')": "one bit has no level at zero",
    "qsgd(bits=9)": "bits must be between 1 and 8",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_written_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=REFUSED[text]):
        parse(text)
