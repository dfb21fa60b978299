"""Scripts of trainers, started on ranks, under torchrun or without it, or by themselves; they say in files what they saw."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.gang import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
FORKED = ROOT / "tests" / "forked.py"
BY_TORCHRUN = {"TORCHELASTIC_RUN_ID": "forked"}  # by which Lightning knows that somebody else starts its ranks
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# What each trainer says of the models in `scripts/wrappers.py`.
AVERAGE_THEMSELVES = {
    "DataParallel": "is wrapped in DataParallel, by which one process trains on several GPUs",
    "FSDP1": "is sharded by FullyShardedDataParallel, and gossamer averages whole parameters",
    "DeepSpeed": "is a DeepSpeedEngine, which averages and steps by itself",
}
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```", re.S | re.M)


def environment() -> dict[str, str]:
    """Scripts that start their ranks themselves would choose a port that the kernel may give to another process meanwhile."""
    names = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return names | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "STANDALONE_PORT": str(free_port())}


@contextmanager
def started(folder: Path, script: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script that runs meanwhile; killed in the end, if it has not ended."""
    with subprocess.Popen([sys.executable, "-W", "ignore", str(script)], cwd=folder, env=environment()) as running:
        try:
            yield running
        finally:
            running.kill()


def python(folder: Path, *words: str | Path, ends: bool = True, **variables: str) -> str:
    """Run Python in a folder and return what it printed; `ends=False` for a script that is killed."""
    env = environment() | variables
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    said = f"{' '.join(command)}\nended with {done.returncode} and said:\n{done.stdout}\n{done.stderr}"
    assert (done.returncode == 0) == ends, said
    return done.stdout + done.stderr


def on_ranks(script: str, folder: Path, *cases: str, ends: bool = True) -> str:
    """Run cases of a script on two ranks."""
    return python(folder, *TORCHRUN, SCRIPTS / script, folder, *cases, ends=ends)


def on_forked_ranks(script: str, folder: Path, *cases: str, ranks: int = 2, **variables: str) -> None:
    """The same, without torchrun: the libraries are loaded once for all ranks, which see these variables of the environment."""
    python(folder, FORKED, str(ranks), SCRIPTS / script, folder, *cases, **variables)


def seen(folder: Path, case: str, ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [torch.load(folder / f"{case}-rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / "docs" / "trainers" / page).read_text()
    return [block for of, block in BLOCK.findall(text) if of == kind]


def patched(script: str, diff: str) -> str:
    """The script after the changes of a diff as pages show them: each part between `@@` stands once in the script."""
    for part in re.split(r"^@@\n", diff, flags=re.M):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


def changed(diff: str) -> tuple[list[str], list[str]]:
    """The lines that a diff takes out and puts in, without empty ones."""
    out = [[line[1:].strip() for line in diff.splitlines() if line[0] == sign] for sign in "-+"]
    return tuple([line for line in lines if line] for lines in out)  # pyright: ignore[reportReturnType]
