"""How a few numbers are said to a person."""

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

MOST, OCTETS = 24, 16  # numbers, and bytes, that one look takes in
PLAIN = (1e-12, 1e12)  # what a float of a message is, if it is one


def number(value: float) -> str:
    """Three digits.

    >>> number(0.30000001), number(-2.0), number(1e-9), number(0.0)
    ('0.3', '-2', '1e-09', '0')
    """
    return f"{value:.3g}" if value else "0"


def numbers(values: Tensor) -> str:
    """
    >>> numbers(torch.tensor([0.5, -0.25]))
    '0.5 -0.25'
    """
    flat = _clear(values)
    more = f" ... {len(flat)} numbers" if len(flat) > MOST else ""
    return " ".join(map(number, flat[:MOST])) + more


def decoded(values: Tensor) -> str:
    """What a codec's message says: signs of one size, a few elements, or numbers.

    >>> decoded(torch.tensor([0.5, -0.5, 0.0, 0.5]))
    'signs + - 0 + of 0.5'
    >>> decoded(torch.tensor([0.0, 0.0, 0.0, 0.25, 0.0, -0.5]))
    'element 3: 0.25, element 5: -0.5; all others 0'
    >>> decoded(torch.tensor([0.1, 0.2]))
    '0.1 0.2'
    """
    said = _clear(values)
    some = {i: v for i, v in enumerate(said) if v}
    if not some:
        return "nothing but 0"
    if len(some) * 2 <= len(said) and len(said) > 2:
        return ", ".join(f"element {i}: {number(v)}" for i, v in some.items()) + "; all others 0"
    sizes = {abs(v) for v in some.values()}
    if len(sizes) == 1 and len(some) > 1:
        signs = " ".join("+" if v > 0 else "-" if v < 0 else "0" for v in said)
        return f"signs {signs} of {number(*sizes)}"
    return numbers(values)


def raw(wire: Tensor) -> str:
    """What bytes say of which no codec has told: words of four bytes as numbers, or the bytes themselves."""
    wire = wire.detach().reshape(-1).clone()
    if wire.numel() == 0:
        return "nothing"
    if wire.numel() == 8 and 0 <= (whole := int(wire.view(torch.int64))) < 2**20:
        return f"the whole number {whole}"
    if wire.numel() % 4 == 0 and (words := _words(wire)):
        return " ".join(words[:MOST])
    return "bytes " + octets(wire)


def octets(wire: Tensor) -> str:
    """
    >>> octets(torch.tensor([1, 255], dtype=torch.uint8))
    '01 ff'
    """
    shown = wire[:OCTETS].tolist()
    return " ".join(f"{byte:02x}" for byte in shown) + (" ..." if wire.numel() > OCTETS else "")


def _clear(values: Tensor) -> list[float]:
    """The numbers, without what rounding leaves of a zero."""
    flat = [float(v) for v in values.detach().reshape(-1).tolist()]
    least = 1e-6 * max((abs(v) for v in flat if isfinite(v)), default=0.0)
    return [0.0 if abs(v) < least else v for v in flat]


def _words(wire: Tensor) -> Sequence[str]:
    """Floats, and whole numbers where the bytes are none; nothing if neither would make sense."""
    out = list[str]()
    for as_float, as_whole in zip(wire.view(torch.float32).tolist(), wire.view(torch.int32).tolist()):
        if as_float == 0 or PLAIN[0] < abs(as_float) < PLAIN[1]:
            out.append(number(as_float))
        elif 0 <= as_whole < 2**20:
            out.append(str(as_whole))
        else:
            return []
    return out
