"""Unequal machines: shares by speed, and the mean of all samples whatever they are."""

import time
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fabrics import streams
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, data, flat, same, sgd
from tests.integrations.test_weights import nesterov, step_on
from torch import Tensor, nn

from gossamer.core.errors import GossamerError
from gossamer.core.load_balance import divided, planned, step_seconds
from gossamer.fabrics.ledger import Ledger
from gossamer.integrations.weights import Stopwatch

SECONDS = (0.01, 0.02)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 2.0, 3.0), (5.0, 0.1, 1.0), (1.0, 1.0, 100.0)])
@pytest.mark.parametrize("most", [(9, 9, 9), (2, 9, 9), (3, 3, 9)])
def test_no_other_shares_would_be_done_earlier(seconds: tuple[float, ...], most: tuple[int, ...]) -> None:
    shares = divided(9, seconds, most)
    every = [s for s in product(range(1, 10), repeat=3) if sum(s) == 9 and all(a <= b for a, b in zip(s, most))]
    assert tuple(shares) in every
    assert step_seconds(shares, seconds) == pytest.approx(min(step_seconds(s, seconds) for s in every))


def test_a_host_half_as_fast_costs_three_others_little() -> None:
    seconds = (1.0, 1.0, 1.0, 2.0)
    assert step_seconds(divided(64, seconds, [64] * 4), seconds) <= 0.75 * step_seconds([16] * 4, seconds)


def test_a_plan_stays_where_another_would_hardly_be_faster() -> None:
    most, now = [64, 64], [32, 32]
    assert planned(64, [1.0, 1.1], most, now) == now
    assert planned(64, [1.0, 1.5], most, now) == [39, 25]
    assert planned(64, [1.0, 1.0], [30, 64], now) == [30, 34]
    assert planned(60, [1.0, 1.0], most, now) == [30, 30]


def test_a_gpu_is_timed_by_its_own_clock_also_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under rounds of local steps the host waits for it once a round: the other steps were as long as their launches."""
    streams.install(monkeypatch)
    worker: Any = SimpleNamespace(device=streams.GPU, step=1, ranks=SimpleNamespace(weight=1.0))
    ledger = Ledger()
    watch = Stopwatch(worker, ledger)
    monkeypatch.setattr(streams.Event, "elapsed_time", lambda begin, end: 3500.0)
    for _ in range(4):
        watch.start()
        worker.step += 1
        ledger.exposed_seconds += 0.5
        watch.stop(6)
    assert watch.seconds() == pytest.approx((3.5 - 0.5) / 6)


def shared(rank: int, size: int, recipe: str) -> tuple[list[int], Tensor]:
    """Shares of 12 rows; after two steps the other rank is the slow one."""
    shares, model = list[int](), Awkward(torch.float64)
    with attached(recipe, model, nesterov) as (_, optimizer, comm):
        for step in range(1, 5):
            if step in (1, 3):
                shares.append(comm.share(12, SECONDS[rank if step == 1 else 1 - rank]))
            step_on(model, optimizer, *data(rank, step, shares[-1], torch.float64))
        comm.check_sync()
        comm.finish()
    return shares, flat(model)


@pytest.mark.parametrize("recipe", ["scatter(fp32())", "gather(topk(ratio=1.0)) + error_feedback()"])
@pytest.mark.gang
def test_training_by_shares_is_that_of_all_rows_in_one_batch(gang2: Gang, recipe: str) -> None:
    alone = Awkward(torch.float64)
    optimizer = nesterov(alone)
    for step, shares in zip(range(1, 5), [(8, 4), (8, 4), (4, 8), (4, 8)], strict=True):
        pairs = [data(rank, step, rows, torch.float64) for rank, rows in enumerate(shares)]
        step_on(alone, optimizer, *(torch.cat([pair[i] for pair in pairs]) for i in range(2)))
    (first, model), (second, other) = gang2.run(shared, recipe)
    assert (first, second) == ([8, 4], [4, 8])
    assert same(model, other)
    exact = 1e-7 if "topk" in recipe else 1e-12  # whose values travel as float32
    torch.testing.assert_close(model, flat(alone), rtol=exact, atol=exact)


def at_own_pace(rank: int, size: int) -> list[int]:
    """Plan before each step; rank 1 is slow, so that rank 0 waits for its plan while rank 1 has rounds to close."""
    model, shares = nn.Linear(2, 1), list[int]()
    with attached("allreduce + quorum_rounds(4, quorum=2)", model, sgd) as (_, optimizer, comm):
        while comm.step < 12:
            shares.append(comm.share(8))
            time.sleep(0.05 * rank)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
        comm.finish()
    return shares


@pytest.mark.gang
def test_who_waits_for_a_plan_answers_the_rounds_of_those_who_have_not_come_to_it(gang2: Gang) -> None:
    first, second = gang2.run(at_own_pace)
    assert len(first) == len(second) == 12
    assert all(one + other == 8 for one, other in zip(first, second))


def refused(rank: int, size: int, recipe: str, given: tuple[dict[str, Any], ...]) -> str:
    with attached(recipe, Awkward(), sgd) as (model, optimizer, comm):
        comm.share(12, 1.0) if "diana" in recipe else None
        step_on(model, optimizer, *data(rank, 1))
        with pytest.raises(GossamerError) as caught:
            comm.share(**given[rank])
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("qsgd", ({"samples": 1, "seconds": 1.0},) * 2, "each needs one"),
        ("qsgd", ({"samples": 8, "seconds": 0.0}, {"samples": 8, "seconds": 1.0}), "a number above 0"),
        ("qsgd", ({"samples": 8, "seconds": 1.0}, {"samples": 9, "seconds": 1.0}), r"[8, 9]"),
        ("qsgd", ({"samples": 8, "seconds": 1.0, "most": 3},) * 2, r"do not fit: ranks take at most [3, 3]"),
        ("qsgd", ({"samples": 8, "seconds": 1.0, "most": 0},) * 2, "at least 1 sample"),
        ("sgp", ({"samples": 8, "seconds": 1.0},) * 2, "end at their plain mean"),
        ("diana", ({"samples": 12, "seconds": 1.0}, {"samples": 12, "seconds": 3.0}), "before the first step"),
    ],
)
@pytest.mark.gang
def test_what_cannot_be_shared_is_refused_on_all_ranks(
    gang2: Gang, recipe: str, given: tuple[dict[str, Any], ...], words: str
) -> None:
    texts = gang2.run(refused, recipe, given)
    assert any(words in text for text in texts)
    assert all(words in text or "rank 0" in text for text in texts)
