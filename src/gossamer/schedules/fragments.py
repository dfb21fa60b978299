"""Fragments: parts of a model that are averaged one after the other, so that no step sends the whole model."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from gossamer.core.errors import AttachError
from gossamer.core.parts import require

MOST = 8  # fragments, by default

Shapes = Mapping[str, tuple[int, ...]]
NUMBERED = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")


def layer(name: str) -> str:
    """Return a parameter's layer: its name up to the first number, or without its last component.

    >>> layer("blocks.3.attention.query.weight"), layer("embedding.weight"), layer("scale")
    ('blocks.3', 'embedding', 'scale')
    """
    numbered = NUMBERED.match(name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def layers(shapes: Shapes) -> list[str]:
    """Return the layers that have elements, in the model's order."""
    return [*dict.fromkeys(layer(name) for name, shape in shapes.items() if prod(shape))]


def balanced(shapes: Shapes, count: int) -> dict[str, int]:
    """Assign tensors greedily: the largest tensor first, each to the smallest fragment so far.

    >>> balanced({"a": (2,), "b": (3,), "c": (4,)}, 2)
    {'c': 0, 'b': 1, 'a': 1}
    """
    fullness, out = [(0, 0, p) for p in range(count)], dict[str, int]()
    for name in sorted(shapes, key=lambda n: (-prod(shapes[n]), n)):
        numel, tensors, p = min(fullness)
        out[name] = p
        fullness[fullness.index((numel, tensors, p))] = (numel + prod(shapes[name]), tensors + 1, p)
    return out


def strided(shapes: Shapes, count: int) -> dict[str, int]:
    """Assign layers in turn, in their order, so that each fragment has early and late layers.

    >>> strided({"0.w": (2,), "0.b": (1,), "1.w": (2,), "2.w": (2,)}, 2)
    {'0.w': 0, '0.b': 0, '1.w': 1, '2.w': 0}
    """
    places = {one: i for i, one in enumerate(layers(shapes))}
    return {name: places.get(layer(name), 0) % count for name in shapes}


def matched(shapes: Shapes, patterns: Sequence[str]) -> dict[str, int]:
    """Assign each parameter to the fragment of the first pattern that matches its name.

    >>> matched({"0.w": (2,), "1.w": (2,), "head": (2,)}, ("0.*", "*"))
    {'0.w': 0, '1.w': 1, 'head': 1}
    """
    out = dict[str, int]()
    for name in shapes:
        found = [p for p, pattern in enumerate(patterns) if fnmatchcase(name, pattern)]
        if not found:
            raise AttachError(
                f"parameter {name!r} matches no pattern in fragments={tuple(patterns)}, and would never be averaged; add '*' at the "
                "end, which matches all others"
            )
        out[name] = found[0]
    return out


def usual(shapes: Shapes, every: int) -> int:
    """Return the default number of fragments: one per layer, at most 8, and a divisor of `every`.

    >>> usual({"0.w": (2,), "1.w": (2,), "2.w": (2,)}, 100)
    2
    """
    most = max(1, min(len(layers(shapes)), MOST))
    return max(count for count in range(1, most + 1) if every % count == 0)


def refuse_empty(part: object, shapes: Shapes, of: Mapping[str, int], called: Sequence[str]) -> None:
    """Raise if a fragment has no elements."""
    full = {p for name, p in of.items() if prod(shapes[name])}
    empty = [name for p, name in enumerate(called) if p not in full]
    if empty:
        raise AttachError(
            f"{part}: {', '.join(empty)} of {len(called)} fragments would be without parameters; the model has "
            f"{len(shapes)} tensors in {len(layers(shapes))} layers; use fewer fragments, or leave fragments out"
        )


def refuse_slots(name: str, fragments: object, count: int, every: int) -> None:
    """Raise unless `count` fragments get slots of equal length in a round of `every` steps."""
    require(count >= 1, f"{name}: fragments must be at least 1, got fragments={fragments}")
    require(
        every % count == 0,
        f"{name}: {count} fragments in a round of {every} steps: the number of steps must be a multiple of the number of fragments; "
        f"use every={count * -(-every // count)}",
    )
