"""Digits with two members, then four, then one, beside a fixed world of four, at equal samples.

`python -m tests.integrations.test_members_quality 5` prints the accuracies of five seeds of each.
"""

import os
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection

import pytest
import torch
from tests.integrations.test_members import Learners, hold
from tests.marked import wait_for

import gossamer
from gossamer.bench.workloads.images import Digits
from gossamer.fabrics.liveness.members import Members

MOST, BATCH, SAMPLES = 4, 16, 24_000
RECIPE = "decoupled_diloco(8)"


def learn_digits(number: int, least: int, port: int, recipe: str, silence: float, seed: str, pipe: Connection) -> None:
    """Train until all members together have seen so many samples; each draws its own from all of them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    work = Digits(seed=int(seed), batch_size=BATCH)
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    group = gossamer.members(silence, least=least, most=MOST, store=f"127.0.0.1:{port}")
    comm = gossamer.attach(model, optimizer, recipe, group, deadline=60.0)
    store = group.store.raw
    while store.add("samples", BATCH) <= SAMPLES:
        optimizer.zero_grad()
        work.loss(model, work.batch(comm.step, comm.rank, MOST)).backward()
        optimizer.step()
        store.add(f"taken/{comm.rank}", BATCH)
        time.sleep(0.002)
    comm.finish()
    pipe.send((comm.rank, work.evaluate(model), comm.present))


def train(seed: int, changing: bool) -> float:
    """The accuracy at the end of one run."""
    store = hold()
    crew = Learners(2 if changing else MOST, store.port, RECIPE, 5.0, learn_digits)
    seen = Members(store, None, MOST).store.raw

    def after(share: float) -> None:
        wait_for(lambda: seen.add("samples", 0) >= share * SAMPLES, 240.0)

    try:
        for number in range(2 if changing else MOST):
            crew.start(number, dies=str(seed))
        if changing:
            after(0.3)
            for number in (2, 3):
                crew.start(number, dies=str(seed))
            wait_for(lambda: all(seen.add(f"taken/{rank}", 0) for rank in range(MOST)), 120.0)
            after(0.8)
            for number in (0, 2, 3):
                crew.processes[number].kill()
        rank, accuracy, present = crew.hear(1, 240.0)
        assert len(present) == (1 if changing else MOST), present
        assert rank in present
        return accuracy
    finally:
        crew.close()


@pytest.mark.gang
@pytest.mark.slow
def test_members_that_come_and_go_learn_as_much_as_a_fixed_world() -> None:
    """Not below the fixed world's by more than its seeds lie apart; three seeds of each."""
    fixed, changing = ([train(seed, way) for seed in range(3)] for way in (False, True))
    spread = max(fixed) - min(fixed)
    assert statistics.mean(changing) >= min(fixed) - spread, (fixed, changing)


if __name__ == "__main__":
    for way in (False, True):
        print(
            "2, 4, 1" if way else "fixed", [round(train(seed, way), 4) for seed in range(int(sys.argv[1]))], flush=True
        )
