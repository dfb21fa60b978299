"""The hash of element indices, and stochastic rounding with it."""

# Triton's language is not typed Python.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from gossamer.core.rng import Key


@triton.jit
def codes(x, gain, top, base, counter, k1):
    """(clamp(int32(x * gain), -top, top) + base + fraction) >> 23; NaN ends at the top."""
    limit = top.to(tl.float32)
    fixed = x * gain
    fixed = tl.where(fixed < limit, fixed, limit)
    fixed = tl.where(fixed > -limit, fixed, -limit)
    return (fixed.to(tl.int32) + base + fraction(counter, k1)) >> 23


@triton.jit
def fraction(x, k1):
    """The top 23 bits of a word."""
    return (word(x, k1) >> 9).to(tl.int32)


@triton.jit
def word(x, k1):
    """mix3; the first key word has already been added to the counter x (uint32)."""
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ (x >> 11)
    x = x + k1.to(tl.uint32)
    x = x * 0xAC4C1B51
    x = x ^ (x >> 15)
    x = x * 0x31848BAB
    return x ^ (x >> 14)


def words(key: Key) -> tuple[int, int]:
    """The first counter and the second key word as signed 32-bit integers, the type that launches take."""

    def signed(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    return signed(key[0]), signed(key[1])
