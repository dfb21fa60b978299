"""The figures of the house: sizes, contracts, names, private doors, circles and duplicates.

    python -m campaigns.house [ROOT]      prints the table of this checkout, or of another one

`tests/test_house.py` holds them below its budgets.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

SMALL = 60  # lines
SAME = 6  # lines of code in a row that stand twice
MOST_PARAMETERS = 6
# Called by users and by the command line, which give names to what they pass.
FRONT_DOORS = {"integrations/attach.py:attach", "integrations/ddp.py:register"}
# A file of a part may be as short as its part.
PARTS = {"codecs", "memories", "exchanges", "mixers", "schedules", "controllers", "topologies", "updates", "recipes"}
LOOP = ("Averages", "Messages", "OptimizerView", "Ranks", "RecordView")


class House:
    """A checkout's sources, parsed and walked through once."""

    def __init__(self, root: Path) -> None:
        self.source = root / "src" / "gossamer"
        self.texts = {p.relative_to(self.source).as_posix(): p.read_text() for p in sorted(self.source.rglob("*.py"))}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        # Most figures look at all nodes, and to walk through the trees takes over a second.
        self.nodes = {name: [*ast.walk(tree)] for name, tree in self.trees.items()}

    # -- sizes -------------------------------------------------------------------------------------------------------

    def lines(self) -> Counter[str]:
        """Lines by room; modules of the package itself are `.`."""
        out = Counter[str]()
        for name, text in self.texts.items():
            out[name.split("/")[0] if "/" in name else "."] += text.count("\n")
        return out

    def library(self) -> int:
        return sum(count for room, count in self.lines().items() if room != "bench")

    def tool(self) -> int:
        return self.lines()["bench"]

    def small_files(self) -> list[str]:
        """Files of fewer than 60 lines that are no parts and no `__init__`."""
        return [
            name
            for name, text in self.texts.items()
            if text.count("\n") < SMALL and not name.endswith("__init__.py") and name.split("/")[0] not in PARTS
        ]

    # -- contracts ---------------------------------------------------------------------------------------------------

    def classes(self) -> dict[str, list[str]]:
        """The files of each class name."""
        out = dict[str, list[str]]()
        for name, nodes in self.nodes.items():
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    out.setdefault(node.name, []).append(name)
        return out

    def shared_names(self) -> dict[str, list[str]]:
        return {name: where for name, where in self.classes().items() if len(where) > 1}

    def members(self, file: str, name: str) -> list[str]:
        """Methods and class attributes of a class, without private ones; empty where there is no such class."""
        out = list[str]()
        for node in ast.walk(self.trees.get(file, ast.Module([], []))):
            if isinstance(node, ast.ClassDef) and node.name == name:
                for child in node.body:
                    if isinstance(child, ast.FunctionDef):
                        out.append(child.name)
                    elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                        out.append(child.target.id)
        return [each for each in dict.fromkeys(out) if not each.startswith("_")]

    def attributes(self, file: str, name: str) -> list[str]:
        """What `__init__` of a class sets on the object, without what is private."""
        out = list[str]()
        for node in ast.walk(self.trees.get(file, ast.Module([], []))):
            if not (isinstance(node, ast.ClassDef) and node.name == name):
                continue
            starts = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
            for child in (each for start in starts for each in ast.walk(start)):
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
                    out.append(child.attr)
        return [each for each in dict.fromkeys(out) if not each.startswith("_")]

    def seen_by_schedules(self) -> dict[str, list[str]]:
        """The members of the loop, and of each of its objects."""
        return {name: self.members("core/loop.py", name) for name in ("Loop", *LOOP)}

    def long_signatures(self) -> list[str]:
        """Functions with more than 6 parameters outside of the front doors, the command line, parts and presets."""
        out = list[str]()
        for name, nodes in self.nodes.items():
            if name.startswith(("bench/cli/", "recipes/")):
                continue
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    count = len([a for a in named if a.arg not in ("self", "cls")])
                    if count > MOST_PARAMETERS and f"{name}:{node.name}" not in FRONT_DOORS:
                        out.append(f"{name}:{node.name} ({count})")
        return out

    # -- private doors -----------------------------------------------------------------------------------------------

    def private_doors(self) -> dict[str, list[str]]:
        """The files that look at stack frames, scan the heap, or use private names of torch."""
        marks = {
            "sys._getframe": ("sys._getframe(",),
            "gc": ("gc.get_objects(", "gc.get_referrers("),
            "private torch": ("torch._C", "private_name("),
        }
        every = tuple(mark for which in marks.values() for mark in which)
        some = {name: tree for name, tree in self.trees.items() if any(mark in self.texts[name] for mark in every)}
        code = {name: _without_docstrings(tree) for name, tree in some.items()}
        return {kind: [n for n, text in code.items() if any(m in text for m in which)] for kind, which in marks.items()}

    # -- circles and duplicates --------------------------------------------------------------------------------------

    def circles(self) -> list[list[str]]:
        """Groups of modules that import one another, counting lazy imports and those for types."""
        graph = {name: {*_imports(nodes, self.texts)} - {name} for name, nodes in self.nodes.items()}
        return sorted(sorted(group) for group in _components(graph) if len(group) > 1)

    def duplicates(self) -> list[tuple[str, str]]:
        """Runs of six and more equal lines of code, by the places where they begin."""
        seen, out = dict[tuple[str, ...], str](), list[tuple[str, str]]()
        for name, text in self.texts.items():
            code = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if _is_code(line)]
            reached = 0
            for at in range(len(code) - SAME + 1):
                window = tuple(line for _, line in code[at : at + SAME])
                where = f"{name}:{code[at][0]}"
                if (first := seen.setdefault(window, where)) != where and at >= reached:
                    out.append((first, where))
                    reached = at + SAME
        return out


def _without_docstrings(tree: ast.AST) -> str:
    """The code as it prints, without strings that stand alone."""
    lines = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call | ast.ImportFrom)]
    return "\n".join(line for line in lines if not line.startswith(("'", '"')))


def _is_code(line: str) -> bool:
    stripped = line.strip()
    return len(stripped) > 3 and not stripped.startswith(("#", "import ", "from ", '"""', "@"))


def _imports(nodes: Iterable[ast.AST], files: dict[str, str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gossamer"):
            base = node.module.removeprefix("gossamer").lstrip(".").replace(".", "/")
            for alias in node.names:
                for name in (f"{base}/{alias.name}.py".lstrip("/"), f"{base}.py", f"{base}/__init__.py".lstrip("/")):
                    if name in files:
                        yield name
                        break


def _components(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components (Tarjan), without recursion."""
    index, low, stack, on, count = dict[str, int](), dict[str, int](), list[str](), set[str](), 0
    for root, others in graph.items():
        work = [(root, iter(others))] if root not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = count
                count += 1
                stack.append(node)
                on.add(node)
            step = next((n for n in rest if n not in index or n in on), None)
            if step is not None and step not in index:
                work.append((step, iter(graph[step])))
                continue
            if step is not None:
                low[node] = min(low[node], index[step])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[node])
            if low[node] == index[node]:
                group = list[str]()
                while not group or group[-1] != node:
                    group.append(stack.pop())
                    on.discard(group[-1])
                yield group


def table(house: House) -> list[tuple[str, str]]:
    """The figures, in words."""
    lines, seen = house.lines(), house.seen_by_schedules()
    worker = house.members("runtime/worker.py", "Worker"), house.attributes("runtime/worker.py", "Worker")
    private = house.private_doors()
    return [
        *((f"lines of {room}", str(count)) for room, count in sorted(lines.items())),
        ("lines of the library", str(house.library())),
        ("lines of the tool", str(house.tool())),
        ("files", str(len(house.texts))),
        ("files under 60 lines", str(len(house.small_files()))),
        ("members of a schedule's contract", str(len(house.members("core/schedule.py", "Schedule")))),
        ("facts of its shape", str(len(house.members("core/schedule.py", "Shape")))),
        *((f"members of {name}, as a schedule sees it", str(len(found))) for name, found in seen.items()),
        ("methods of Worker", str(len(worker[0]))),
        ("attributes of Worker", str(len(worker[1]))),
        ("class names that are shared", str(len(house.shared_names()))),
        ("functions over 6 parameters", str(len(house.long_signatures()))),
        *((f"files with {kind}", ", ".join(where) or "none") for kind, where in private.items()),
        ("circles of imports", str([len(group) for group in house.circles()])),
        ("duplicates of 6 lines", str(len(house.duplicates()))),
    ]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, value in table(House(root)):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
