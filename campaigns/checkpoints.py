"""Damaged checkpoints: each is refused with a CheckpointError, or loads to the bit what was saved.

python -m campaigns.checkpoints --count 300 --seed 1

From the repository's root. A quarter of the cases each, under recipes of every kind:

- file: a rank's file, of which bytes were changed, cut off, put in or zeroed;
- entries: a communicator's dictionary, of which entries were dropped, renamed, reshaped, retyped, changed or added, or whose
  head says something else;
- ranks: dictionaries of a world of three for a world of two: doubled, left out, of other steps or runs;
- folder: what two real ranks saved with `gossamer.checkpoint.save`: files damaged, lost, swapped, or of another step.

Counts what was refused, what was loaded and is equal, and what must never be: wrong (loaded, and something differs, or
refused, and something was changed), raw (another error than ours) and hang (no end within a minute). Exit code 0 if
there was none of these.
"""

import argparse
import copy
import io
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import torch
from tests.gang import Gang, GangError
from tests.integrations.loops import attached, small_step
from tests.runtime.gym import make, on_all, pull, sgd, train
from torch import Tensor

from gossamer.checkpoints import state as checkpoint
from gossamer.core.errors import CheckpointError
from gossamer.integrations.checkpoint import load, read, save
from gossamer.runtime import Worker

RECIPES = [
    *("allreduce", "topk(ratio=0.1)", "powersgd", "scatter(topk(ratio=0.2)) + error_feedback()", "terngrad"),
    *("diana(bits=4, bucket=16)", "slowmo(3)", "topk(ratio=0.1) + overlap_local_sgd(3)", "sgp(every=3)", "osgp"),
    *("slowmo_sgp(3)", "accordion(epoch=2, mild=3, harsh=1, interval=1, threshold=0.1)", "backup(backups=0)"),
]
PATIENCE = 60  # seconds
BAD = ("wrong", "raw", "hang")
Dictionary = dict[str, Any]


class Hang(BaseException):
    pass


class Campaign:
    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.home, self.gang = random.Random(seed), folder, Gang(2)
        self.counts, self.files = Counter[str](), dict[tuple[str, int, int, float], list[Dictionary]]()
        self.saved = dict[tuple[str, int], list[str]]()

    def case(self, number: int) -> None:
        kind = ("file", "entries", "ranks", "folder")[number % 4]
        recipe = self.rng.choice(RECIPES)
        try:
            signal.alarm(PATIENCE)
            verdict, told = getattr(self, kind)(recipe)
        except Hang:
            verdict, told = "hang", traceback.format_exc()
        except Exception:
            verdict, told = "raw", traceback.format_exc()
        finally:
            signal.alarm(0)
        self.counts[f"{kind}: {verdict}"] += 1
        if verdict in BAD:
            print(f"case {number}, {kind}, {recipe}: {verdict}\n{told}")

    # -- kinds -------------------------------------------------------------------------------------------------------

    def file(self, recipe: str) -> tuple[str, str]:
        whole = self.ranks_of(recipe, 3)[0]
        file = io.BytesIO()
        torch.save(whole, file)
        path = self.home / "rank0.pt"
        told = self.damage(file.getvalue(), path)
        worker = make(recipe, 3)[0].worker
        return self.judge(worker, whole, lambda: load_file(worker, path, whole), told)

    def entries(self, recipe: str) -> tuple[str, str]:
        whole = self.ranks_of(recipe, 3)[0]
        damaged = copy.deepcopy(whole["comm"])
        told = "; ".join(self.change(damaged) for _ in range(self.rng.choice((1, 1, 2))))
        worker = make(recipe, 3)[0].worker
        return self.judge(worker, whole, lambda: checkpoint.load(worker, damaged), told)

    def ranks(self, recipe: str) -> tuple[str, str]:
        right = [r["comm"] for r in self.ranks_of(recipe, 3)]
        others = {
            "step": [r["comm"] for r in self.ranks_of(recipe, 3, steps=6)],
            "run": [r["comm"] for r in self.ranks_of(recipe, 3, rate=0.1)],
            "world": [r["comm"] for r in self.ranks_of(recipe, 4)],
        }
        given, told = list(right), list[str]()
        for _ in range(self.rng.choice((1, 1, 2))):
            at, what = self.rng.randrange(len(given)), self.rng.choice(("double", "drop", *others))
            told.append(f"{what} {at}")
            if what in others:
                given[at] = self.rng.choice(others[what])
            elif what == "double":
                given.insert(at, self.rng.choice(given))
            elif len(given) > 1:
                given.pop(at)
        if self.rng.random() < 0.3:
            self.rng.shuffle(given)
        size = 3 if recipe.startswith("first") else 2
        worker, expected = make(recipe, size)[0].worker, make(recipe, size)[0].worker
        checkpoint.load(expected, right)
        before = table(worker)
        try:
            checkpoint.load(worker, given)
        except CheckpointError as error:
            return ("refused" if table(worker) == before else "wrong"), f"{told}: {error}"
        return ("equal" if table(worker) == table(expected) else "wrong"), str(told)

    def folder_of(self, recipe: str, steps: int) -> Path:
        """What two ranks saved after so many steps, once."""
        path = self.home / f"{RECIPES.index(recipe)}-{steps}"
        if (recipe, steps) not in self.saved:
            self.saved[recipe, steps] = self.gang.run(write, recipe, str(path), steps)
        return path

    def folder(self, recipe: str) -> tuple[str, str]:
        path = self.folder_of(recipe, 4)
        damaged = self.home / "damaged"
        rmtree(damaged, ignore_errors=True)
        copytree(path, damaged)
        victim = self.rng.choice(sorted(damaged.iterdir()))
        how = self.rng.choice(("bytes", "bytes", "bytes", "bytes", "lost", "swapped", "earlier"))
        told = f"{how} {victim.name}"
        if how == "bytes":
            told += ": " + self.damage(victim.read_bytes(), victim)
        elif how == "lost":
            victim.unlink()
        elif how == "swapped":
            other = self.rng.choice(sorted(damaged.iterdir()))
            one, two = victim.read_bytes(), other.read_bytes()
            victim.write_bytes(two)
            other.write_bytes(one)
        else:
            victim.write_bytes((self.folder_of(recipe, 5) / victim.name).read_bytes())
        try:
            answers = self.gang.run(take_up, recipe, str(damaged), timeout=PATIENCE - 10)
        except GangError as error:
            return ("hang" if "no answer" in str(error) else "raw"), f"{told}\n{error}"
        verdicts = {verdict for verdict, _ in answers}
        if verdicts == {"loaded"}:
            equal = [content for _, content in answers] == self.saved[recipe, 4]
            return ("equal" if equal else "wrong"), told
        return ("refused" if verdicts == {"refused"} else "wrong"), f"{told}: {answers}"

    # -- damage ------------------------------------------------------------------------------------------------------

    def damage(self, raw: bytes, path: Path) -> str:
        at, data = self.rng.randrange(len(raw)), bytearray(raw)
        how = self.rng.choice(("bit", "bit", "byte", "bytes", "cut", "put in", "zeros"))
        if how == "bit":
            data[at] ^= 1 << self.rng.randrange(8)
        elif how in ("byte", "bytes"):
            for i in range(at, min(at + (1 if how == "byte" else 50), len(data))):
                data[i] = self.rng.randrange(256)
        elif how == "cut":
            del data[at:]
        elif how == "put in":
            data[at:at] = self.rng.randbytes(self.rng.choice((1, 8, 1000)))
        else:
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        path.write_bytes(data)
        return f"{how} at {at} of {len(raw)}"

    def change(self, d: Dictionary) -> str:
        key = self.rng.choice(sorted(d))
        how = self.rng.choice(("drop", "rename", "shape", "type", "nudge", "value", "add", "swap"))
        value = d[key]
        if how == "drop":
            del d[key]
        elif how == "rename":
            d[key[:-1] + self.rng.choice("xyz/0")] = d.pop(key)
        elif how == "add":
            d[key + "x"] = copy.deepcopy(value)
        elif how == "swap":
            other = self.rng.choice(sorted(d))
            d[key], d[other] = d[other], value
        elif not isinstance(value, Tensor) or how == "value":
            strange = (
                None,
                0,
                -1,
                1,
                10**18,
                10**5000,
                "",
                "x" * 100,
                "{}",
                "[1]",
                0.5,
                float("nan"),
                [],
                {},
                b"x",
                True,
            )
            d[key] = self.rng.choice((*strange, torch.zeros(()), torch.zeros(3), torch.zeros(2, 3).to_sparse()))
        elif how == "shape":
            d[key] = self.rng.choice(
                (value.reshape(-1), value.unsqueeze(0), value.reshape(-1)[:-1], torch.cat([value.reshape(-1)] * 2))
            )
        elif how == "type":
            d[key] = value.to(
                self.rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
            )
        elif value.numel():
            flat = value.clone().reshape(-1)
            flat.view(torch.uint8)[self.rng.randrange(flat.numel() * flat.element_size())] ^= 1 << self.rng.randrange(8)
            d[key] = flat.view(value.shape)
        return f"{how} {key}"

    # -- the rest ----------------------------------------------------------------------------------------------------

    def ranks_of(self, recipe: str, size: int, steps: int = 4, rate: float = 0.05) -> list[Dictionary]:
        """What every rank saves after so many steps; made once."""
        key = recipe, size, steps, rate
        if key not in self.files:
            ranks = make(recipe, size, optimizer=sgd(lr=rate))
            train(ranks, pull, steps)
            on_all(ranks, Worker.quiesce)
            self.files[key] = [
                {"model": r.model.state_dict(), "opt": r.optimizer.state_dict(), "comm": checkpoint.save(r.worker)}
                for r in ranks
            ]
        return self.files[key]

    def judge(self, worker: Worker, whole: Dictionary, do: Callable[[], Any], told: str) -> tuple[str, str]:
        before = table(worker)
        try:
            found = do()
        except CheckpointError as error:
            return ("refused" if table(worker) == before else "wrong"), f"{told}: {error}"
        equal = table(worker) == whole["comm"]["rank0/contents"] and (found is None or same(found, whole))
        return ("equal" if equal else "wrong"), told


def table(worker: Worker) -> str:
    """Every entry's type, shape and check sum."""
    return checkpoint.save(worker)[f"rank{worker.rank}/contents"]


def load_file(worker: Worker, path: Path, whole: Dictionary) -> Any:
    found = read(path)
    if not isinstance(found, dict) or found.keys() != whole.keys():
        raise CheckpointError("something else")  # as any user's own code would notice
    checkpoint.load(worker, found["comm"])
    return found


def same(a: Any, b: Any) -> bool:
    """Trees of tensors and values, to the bit."""
    if isinstance(a, Tensor):
        mine, other = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(mine, other)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def contents(model: Any, optimizer: Any, comm: Any) -> str:
    state = comm.state_dict()
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return state[f"rank{comm.rank}/contents"] + str([t.detach().reshape(-1).tolist() for t in tensors])


# -- what the ranks of a gang run --------------------------------------------------------------------------------------


def write(rank: int, size: int, recipe: str, path: str, steps: int) -> str:
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < steps:
            small_step(model, optimizer, comm, rank)
        save(comm, path, {"epoch": steps})
        return contents(model, optimizer, comm)


def take_up(rank: int, size: int, recipe: str, path: str) -> tuple[str, str]:
    with attached(recipe) as (model, optimizer, comm):
        before = contents(model, optimizer, comm)
        try:
            extra = load(comm, path)
        except CheckpointError as error:
            untouched = contents(model, optimizer, comm) == before or str(error).startswith("rank ")
            return ("refused" if untouched else "changed"), str(error)
        return ("loaded" if extra == {"epoch": 4} else "wrong"), contents(model, optimizer, comm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    def give_up(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, give_up)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(options.seed, Path(folder))
        for number in range(options.count):
            campaign.case(number)
        campaign.gang.close()
    for what, count in sorted(campaign.counts.items()):
        print(f"{count:5} {what}")
    bad = {b: sum(n for what, n in campaign.counts.items() if what.endswith(b)) for b in BAD}
    print(f"of {options.count}: " + ", ".join(f"{n} {b}" for b, n in bad.items()))
    return int(any(bad.values()))


if __name__ == "__main__":
    sys.exit(main())
