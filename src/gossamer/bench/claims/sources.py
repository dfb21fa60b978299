"""On which code a claim was judged: the commit, and a fingerprint of each module that it stands on.

A fingerprint is of the code without comments, docstrings and layout, so that a better sentence makes no verdict stale.
"""

import ast
import subprocess
from collections.abc import Iterator
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from gossamer.bench.claims.claim import PaperClaim
from gossamer.bench.claims.plan import Contest
from gossamer.bench.tune.knobs import nested
from gossamer.core.parts import Part
from gossamer.recipe import Recipe


def sources(claim: PaperClaim) -> dict[str, str]:
    """By module, the fingerprint of its code: the parts of all recipes, what the studies use, and the claim's own functions."""
    return {name: fingerprint(name) for name in sorted({*_modules(claim)})}


def _modules(claim: PaperClaim) -> Iterator[str]:
    yield from (claim.module, *claim.methods)
    for study in claim.plan.values():
        for text in study.recipes.values() if isinstance(study, Contest) else ():
            for recipe in (made := Recipe.of(text), *made.reached):
                yield from (type(part).__module__ for part, _ in nested(recipe) if isinstance(part, Part))


def fingerprint(module: str) -> str:
    """Of a module's code; empty for one that is not there any more.

    >>> len(fingerprint("gossamer.recipe")), fingerprint("gossamer.no_such_module")
    (16, '')
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return of_text(Path(spec.origin).read_text(encoding="utf-8"))


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
