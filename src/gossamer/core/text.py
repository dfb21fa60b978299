"""Parses texts from users within limits of size and depth, so that any bad input gives a quick, clear error; and says values."""

import ast
import re
import tomllib
import warnings
from collections.abc import Sequence
from typing import Any

LONGEST = 1_000_000  # characters: room for a route that names every parameter of a large model
MOST_TERMS = 500
DEEPEST = 20  # calls in calls; a recipe has five or so
LARGEST = 10**100
_STRINGS = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)' r"|'''.*?(?:'''|\Z)" r'|"(?:\\.|[^"\\\n])*"?' r"|'[^'\n]*'?" r"|#[^\n]*", re.S
)


def cut(text: str, most: int = 200) -> str:
    """Shorten a text to at most `most` characters, keeping its beginning and its end.

    >>> cut("abcdefghijklmnopqrstuvwxyz", 12)
    'abcdef...xyz'
    """
    if len(text) <= most:
        return text
    tail = (most - 3) // 3
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"


def shown(value: Any) -> str:
    """A value as shown in an error message."""
    return cut(repr(value))


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: a, b and c.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def terms(text: str) -> list[ast.expr]:
    """Parse the terms of a sum; raises ValueError with the reason otherwise.

    >>> [ast.unparse(term) for term in terms("a + b(c + 1)")]
    ['a', 'b(c + 1)']
    """
    waiting, found = [_expression(text)], list[ast.expr]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            waiting += [node.right, node.left]
        else:
            found.append(node)
    if len(found) > MOST_TERMS:
        raise ValueError(f"it has {len(found)} parts; at most {MOST_TERMS} are allowed")
    for node in found:
        _check(node)
    return found


def term(text: str) -> ast.expr:
    """Parse one expression, which may be a sum; raises ValueError with the reason otherwise."""
    node = _expression(text)
    _check(node)
    return node


def _expression(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters; at most {LONGEST} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python's syntax warnings, such as for '\d', are errors here
            return ast.parse(text.strip(), mode="eval").body
    except (RecursionError, MemoryError, Warning) as error:
        raise ValueError(str(error) if isinstance(error, Warning) else "it is nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)  # without file and line, which a text has not
        raise ValueError("a number in it has too many digits" if "Exceeds the limit" in why else why) from None


def _check(node: ast.expr) -> None:
    """Raise ValueError for nesting that is too deep, so that later code may use recursion."""
    level, depth = [node], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        for each in level:
            if isinstance(each, ast.Constant) and isinstance(each.value, int) and abs(each.value) >= LARGEST:
                raise ValueError("a number in it has too many digits")
        level = [child for each in level for child in ast.iter_child_nodes(each) if isinstance(child, _DEEP)]


_DEEP = ast.expr | ast.keyword


def table(text: str) -> dict[str, Any]:
    """Parse a TOML table; raises ValueError otherwise.

    >>> table("recipe = 'bf16'")
    {'recipe': 'bf16'}
    """
    plain = _STRINGS.sub("", text)
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", plain):
        depth += 1 if bracket in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    if re.search(r"\d{20}", plain):
        raise ValueError("a number in it has too many digits")
    if any(line.count(".") > DEEPEST for line in plain.splitlines()):
        raise ValueError(f"a name in it has more than {DEEPEST} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
