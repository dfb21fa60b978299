"""On which code a claim was judged: the commit, and a fingerprint of each module that it stands on.

A fingerprint is of the code without comments, docstrings and layout, so that a better sentence makes no verdict stale.
"""

import ast
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from gossamer.bench import workloads
from gossamer.bench.claims.claim import PaperClaim
from gossamer.bench.claims.plan import Contest
from gossamer.bench.tune.knobs import nested
from gossamer.core.parts import Part
from gossamer.recipe import Recipe

# What is imported from here is followed; kernels are not, since other tests hold them to the bit.
_ROOMS = [
    "codecs",
    "controllers",
    "exchanges",
    "memories",
    "mixers",
    "schedules",
    "topologies",
    "updates",
    "bench.workloads",
]
FOLLOWED = tuple(f"gossamer.{room}" for room in _ROOMS)
NO_RESULT = {f"gossamer.bench.workloads.{name}" for name in ("cache", "errors", "packages")}  # whatever these do


def sources(claim: PaperClaim) -> dict[str, str]:
    """By module, the fingerprint of its code: what the claim names, and the methods and workloads that this reaches."""
    found, left = dict[str, str](), [*_named(claim)]
    for module in left:  # which grows meanwhile
        if module not in found:
            found[module] = fingerprint(module)
            left += _reached(module)
    return dict(sorted(found.items()))


def is_judged_code(claim: PaperClaim, recorded: Mapping[str, str]) -> bool:
    """True if the code is as a record has it: all of it, or in older ones, until they are confirmed, what the claim names."""
    return recorded in (sources(claim), {module: fingerprint(module) for module in _named(claim)})


def _named(claim: PaperClaim) -> Iterator[str]:
    """The claim's own functions, what its studies use, and the parts of all recipes."""
    yield from (claim.module, *claim.methods)
    for study in claim.plan.values():
        for text in study.recipes.values() if isinstance(study, Contest) else ():
            for recipe in (made := Recipe.of(text), *made.reached):
                yield from (type(part).__module__ for part, _ in nested(recipe) if isinstance(part, Part))


@lru_cache(maxsize=1024)
def _reached(module: str) -> set[str]:
    """The methods and workloads that a module imports, and the workloads that it names."""
    found = set[str]()
    for node in ast.walk(ast.parse(_text(module))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(FOLLOWED):
            found |= {_home(str(node.module), each.name) for each in node.names}
        elif isinstance(node, ast.Constant) and node.value in workloads.names():
            found.add(workloads.find(str(node.value)).__module__)
    return found - NO_RESULT


def _home(module: str, name: str) -> str:
    """The module that an import is of; a package passes on what its modules define."""
    package = import_module(module)
    found = getattr(package, name, None) if hasattr(package, "__path__") else None
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", module)
    return home if home.startswith("gossamer.") else module


@lru_cache(maxsize=1024)
def fingerprint(module: str) -> str:
    """Of a module's code; empty for one that is not there any more.

    >>> len(fingerprint("gossamer.recipe")), fingerprint("gossamer.no_such_module")
    (16, '')
    """
    return of_text(text) if (text := _text(module)) else ""


def _text(module: str) -> str:
    spec = find_spec(module)
    return "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


def of_text(text: str) -> str:
    """
    >>> of_text("def f():\\n  'one'\\n  return 1") == of_text("def f(): return 1  # one")
    True
    """
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not _declares(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return blake2b(ast.unparse(tree).encode(), digest_size=8).hexdigest()


def _declares(node: ast.stmt) -> bool:
    """The claim itself: its settings and rules are in the hash of the plan, and its sentences may be mended."""
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "CLAIM" for t in node.targets)


def commit() -> str:
    """Of the checkout this file is in, with a plus where it has other changes; empty where there is none."""
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)  # else this is installed within another project
        name = _git(here, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    asked = ["git", "-C", str(folder), *words]
    return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
