"""Recipe texts, recipe files and records, at random and damaged: each is read, or refused in a few words of ours.

    python campaigns/texts.py [COUNT [SEED]]

A case is wrong if it ends in another error than ours, takes longer than 5 seconds, makes Python warn, or is refused in
more than 2,500 characters. What is read must print as a text that reads as the same. Wrong cases are printed.
"""

import json
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from gossamer import catalogue
from gossamer.core.errors import GossamerError
from gossamer.core.parts import registry
from gossamer.recipe import Recipe, known_presets
from gossamer.record import Evaluation, Record, Run, Step
from gossamer.report import render, write_markdown

PATIENCE, LONGEST = 5.0, 2500
PARTS, PRESETS = [*registry.of()], [*known_presets()]
GOOD = [repr(catalogue.sample(n)) for n in PARTS] + [repr(catalogue.example(n)) for n in PRESETS] + PRESETS
ARGUMENTS = sorted({f.name for p in registry.of().values() for f in fields(p)})  # type: ignore[arg-type]
VALUES = [
    *(
        "-1",
        "0",
        "1",
        "2",
        "3",
        "8",
        "12",
        "0.5",
        "1e-320",
        "1e308",
        "1e400",
        "inf",
        "nan",
        "-inf",
        "True",
        "None",
        "''",
    ),
    *(
        "'x'",
        "'max'",
        "()",
        "(1,)",
        "(1,2)",
        "('a','b')",
        "0x1F",
        "9223372036854775807",
        "9223372036854775808",
        "1_000",
    ),
    *("0x1for 1", "1if", "'é'", "b'x'", "...", "1j", "-x", "[1]", "{1}", "{}", "lambda:0"),
]
NOISE = [
    *"()[]{}+-*/,.=:'\"\\#@!~^&|<> \t\n\r\f\0é中\ud800\ufeff",
    "not ",
    "for x in ",
    "**",
    "'''",
    "\\d",
    "\\N{X}",
    "9" * 30,
]
CONDITIONS = [
    "ndim < 2",
    "numel >= 1000",
    "name == 'a*'",
    "name != '[z-a]*['",
    "not ndim == 1",
    "(ndim < 2)",
    "ndim",
    "1 < 2",
]


class HangError(Exception):
    """A case took too long."""


class Maker:
    """Cases, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def call(self, depth: int = 0) -> str:
        d = self.rng
        if d.random() < 0.6:
            return d.choice(GOOD)
        arguments = [self.value(depth + 1) for _ in range(d.choice([0, 0, 1, 1, 2, 3]))]
        named = [f"{d.choice(ARGUMENTS)}={v}" if d.random() < 0.5 else v for v in arguments]
        return f"{d.choice(PARTS + PRESETS)}({', '.join(named)})"

    def value(self, depth: int) -> str:
        d = self.rng
        return self.call(depth) if depth < 6 and d.random() < 0.5 else d.choice(VALUES)

    def condition(self) -> str:
        joined = self.rng.choice([" or ", " and ", " "]).join(self.rng.choices(CONDITIONS, k=self.rng.randint(1, 4)))
        return self.damaged(joined) if self.rng.random() < 0.2 else joined

    def recipe(self) -> str:
        d = self.rng
        parts = [self.call() for _ in range(d.choice([1, 1, 1, 2, 3]))]
        if d.random() < 0.3:
            parts.append(f"rule({self.condition()!r}, {d.choice(GOOD)})")
        text = " + ".join(parts)
        return self.damaged(text) if d.random() < 0.5 else text

    def damaged(self, text: str) -> str:
        """A few letters lost, doubled, swapped, or noise among them; now and then a thousandfold."""
        d = self.rng
        for _ in range(d.choice([1, 1, 2, 5])):
            a, b = sorted(d.choices(range(len(text) + 1), k=2))
            change = d.randrange(5)
            if change == 0:
                text = text[:a] + text[min(b, a + 3) :]
            elif change == 1:
                text = text[:a] + d.choice(NOISE) + text[a:]
            elif change == 2:
                text = text[:a] + text[a:b] * 2 + text[b:]
            elif change == 3:
                text = text[:a] + d.choice(VALUES) + text[b:]
            elif d.random() < 0.01:
                text = text[:a] + d.choice(NOISE) * d.choice([100, 10_000]) + text[a:]
        return text

    def toml(self) -> str:
        d = self.rng
        keys = [
            "recipe",
            "exchange",
            "memory",
            "schedule",
            "controller",
            "bucket",
            "rules",
            "routes",
            "x",
            "a.b",
            '"é"',
        ]
        lines = list[str]()
        for _ in range(d.randint(0, 3)):
            key, value = d.choice(keys), repr(self.call())
            if d.random() < 0.5:  # a part where it belongs
                part = catalogue.sample(d.choice(PARTS))
                key, value = "recipe" if part.kind == "exchange" and d.random() < 0.3 else part.kind, repr(repr(part))
            value = f"[{value}, {value}]" if d.random() < 0.2 else d.choice(VALUES) if d.random() < 0.2 else value
            lines.append(f"{key} = {value}")
        text = "\n".join(lines)
        return self.damaged(text) if d.random() < 0.6 else text

    def record(self) -> str:
        """A record with values exchanged, or its text damaged."""
        d, table = self.rng, deepcopy(WHOLE)
        for _ in range(d.choice([0, 1, 1, 2])):
            place = d.choice([*_places(table)])
            inner: Any = table
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = d.choice(JSON)
        text = json.dumps(table)
        return text if d.random() < 0.6 else text[: d.randrange(len(text))] if d.random() < 0.2 else self.damaged(text)


JSON: list[Any] = [
    *("text", "", "é" * 50, "<script>", None, True, [], {}, [[1, 2]], {"a": None}),
    *(-1, 0, 1, 2**62, 10**19, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf")),
]
STEPS = [Step(n, n / 10, 2.0 / n, 100 * n, 0.01, 0.02, 0.03) for n in (1, 2, 3)]
JUDGED = [Evaluation(0, 0.0, 0, 3.0), Evaluation(3, 0.3, 300, 2.0)]
RUNS = [
    Run(
        "ddp", "ddp", yardstick=True, steps=STEPS, evaluations=JUDGED, wire_bytes=300, logical_bytes=150, nic_bytes=310
    ),
    Run("x", "bf16", "failed", "no room", "", False, STEPS, JUDGED, {"w": 0.5}, [(2, 1.0)], [(1, "less")]),
]


def _whole() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        Record("c", "2026-01-01T00:00:00+00:00", "lm", "", "loss", True, 10, 2, "200mbit", 0, runs=RUNS).write(path)
        return json.loads(path.read_text())


WHOLE = _whole()


def _places(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in children for place in [(*so_far, key), *_places(child, (*so_far, key))]]


def read_recipe(text: str) -> None:
    recipe = Recipe.of(text)
    for name, shape in {"a.weight": (3, 4), "b": (5,), "": ()}.items():
        recipe.way(name, shape)
    if repr(Recipe.of(repr(recipe))) != repr(recipe):
        raise AssertionError("it prints as another recipe")


def read_toml(text: str) -> None:
    path = FOLDER / "x.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    recipe = Recipe.of(path)
    path.write_text(recipe.to_toml())
    if repr(Recipe.of(path)) != repr(recipe):
        raise AssertionError("it is written as another recipe")


def read_record(text: str) -> None:
    path = FOLDER / "record.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        record = Record.read(path)
    except ValueError as error:
        raise GossamerError(str(error)) from None  # what a record is refused with, in words
    write_markdown(record)
    render(record)


def judge(do: Callable[[str], None], text: str) -> tuple[str, str]:
    """What became of a case, and what is wrong with it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)  # processor time: others may use the machine
        signal.setitimer(signal.ITIMER_REAL, 20 * PATIENCE)
        try:
            do(text)
            outcome, wrong = "read", ""
        except GossamerError as error:
            outcome, wrong = (
                "refused",
                "" if len(str(error)) <= LONGEST else f"a message of {len(str(error))} characters",
            )
        except HangError:
            outcome, wrong = "hang", f"longer than {PATIENCE:g} s"
        except Exception as error:
            outcome, wrong = "raw error", f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    return ("warning", str(told[0].message)) if told and not wrong else (outcome, wrong)


def main(count: int, seed: int) -> int:
    def hang(number: int, frame: object) -> None:
        raise HangError

    for number in (signal.SIGALRM, signal.SIGVTALRM):
        signal.signal(number, hang)
    began = time.monotonic()
    kinds = [("records", Maker(seed).record, read_record, 0.05), ("recipe files", Maker(seed).toml, read_toml, 0.15)]
    kinds.append(("recipe texts", Maker(seed).recipe, read_recipe, 0.8))
    bad = 0
    for name, make, do, share in kinds:
        outcomes = Counter[str]()
        for _ in range(round(count * share)):
            text = make()
            outcome, wrong = judge(do, text)
            outcomes[outcome] += 1
            if wrong:
                bad += 1
                print(f"WRONG ({name}): {wrong}\n  {text[:300]!r}", flush=True)
        print(f"{name}: {outcomes.total()}, " + ", ".join(f"{n} {o}" for o, n in outcomes.most_common()), flush=True)
    print(f"{bad} wrong, seed {seed}, {time.monotonic() - began:.0f} s")
    return min(bad, 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        sys.exit(main(*map(int, (sys.argv[1:] + ["200000", "0"][len(sys.argv) - 1 :])[:2])))
