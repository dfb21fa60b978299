"""Reads TOML files whose errors name the file, the line and the field."""

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gossamer.core.errors import CostError
from gossamer.core.parts import nearest


def whole(value: Any) -> int:
    if type(value) is not int:
        raise CostError(f"must be a whole number, not {value!r}")
    return value


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CostError(f"must be a number, not {value!r}")
    return float(value)


def truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise CostError(f"must be true or false, not {value!r}")
    return value


def text_as(read: Callable[[str], Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            raise CostError(f"must be a text with a unit, not {value!r}")
        return read(value)

    return parse


def one_of(*known: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in known:
            raise CostError(f"must be {' or '.join(map(repr, known))}, not {value!r}")
        return value

    return parse


class TomlReader:
    """The table of a file, and its lines for errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
            self.table = tomllib.loads(text)
        except OSError as error:
            raise CostError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # its bytes, its text, its numbers or its depth
            raise CostError(f"{path} is not TOML: {error}") from None
        self.lines = text.splitlines()

    def fields(self, table: Any, known: Mapping[str, Callable[[Any], Any]], n: int) -> dict[str, Any]:
        self.known(table, tuple(known), " in a table", n)
        out = dict[str, Any]()
        for name, value in table.items():
            try:
                out[name] = known[name](value)
            except CostError as error:
                self.fail(name, str(error), n)
        return out

    def known(self, table: Mapping[str, Any], known: tuple[str, ...], where: str, n: int = 0) -> None:
        for name in table:
            if name not in known:
                self.fail(name, f"is not known{where}. {nearest(name, list(known))}", n)

    def fail(self, field: str, wrong: str, n: int = 0) -> NoReturn:
        """Raise an error with the line of the field in the n-th table."""
        line = self.line_of(field, n)
        raise CostError(f"{self.path}{f', line {line}' if line else ''}: {field} {wrong}")

    def line_of(self, field: str, n: int) -> int:
        """The line of the n-th such field, or of the last; 0 if there is none."""
        found = self.lines_of(field)
        return found[min(n, len(found) - 1)] if found else 0

    def lines_of(self, field: str) -> list[int]:
        """The numbers of the lines that begin with this field, or table."""
        pattern = re.compile(rf"\s*\[*\s*\"?{re.escape(field)}\b")
        return [i for i, line in enumerate(self.lines, 1) if pattern.match(line)]
