"""Start a script on some ranks as torchrun does, but load what it imports once for all of them, which takes seconds.

python forked.py RANKS SCRIPT WORD...
"""

import ast
import gc
import importlib
import os
import runpy
import signal
import sys
from pathlib import Path

from gossamer import kernels
from gossamer.bench.compare.parent_death import end_with_parent


def load_imports(script: Path) -> None:
    """Load the libraries of a script and of its neighbours. They themselves are run by each rank: they ask which it is."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Import):
            for each in node.names:
                load(script.with_name(f"{each.name}.py"), each.name, [])
        elif isinstance(node, ast.ImportFrom):
            load(script.with_name(f"{node.module}.py"), str(node.module), [each.name for each in node.names])


def load(neighbour: Path, name: str, parts: list[str]) -> None:
    if neighbour.exists():
        load_imports(neighbour)
        return
    module = importlib.import_module(name)
    for part in parts:
        getattr(module, part, None)  # some libraries load a part when it is asked for


def run_as(rank: int, ranks: int, words: list[str]) -> None:
    end_with_parent()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["STANDALONE_PORT"]}
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    ranks, words = int(sys.argv[1]), sys.argv[2:]
    gc.disable()  # what is loaded stays: to look for garbage meanwhile takes a fifth of the time
    load_imports(Path(words[0]))
    importlib.import_module("torch._dynamo")  # which an optimizer's first step would load
    kernels.warmup()  # which the first step of a codec would load
    gc.freeze()  # what all begin with is not looked through by each as it ends, which takes a second
    gc.enable()
    living = set[int]()
    for rank in range(ranks):
        if not (child := os.fork()):
            run_as(rank, ranks, words)
            return  # it comes to its end as an interpreter does
        living.add(child)
    await_all(living)


def await_all(living: set[int]) -> None:
    """As under torchrun, all end with the first that fails."""
    while living:
        child, status = os.wait()
        living.discard(child)
        if status:
            for other in living:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
