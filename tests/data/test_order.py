"""Orders: every sample once in an epoch, whoever is there, whatever is fetched ahead, and wherever a run goes on."""

import pickle
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from gossamer.core.errors import CheckpointError, GossamerError
from gossamer.data import Order, Rows, Shards
from gossamer.data.parts import Parts, part
from gossamer.data.shuffled import Permutation


class World:
    """What all ranks of a run see alike: the step, who is there, and the weights."""

    def __init__(self, weights: tuple[float, ...], accumulate: int = 1) -> None:
        self.step, self.weights, self.accumulate, self.retries = 0, weights, accumulate, 0


class Member:
    """One rank of it, as an order asks it."""

    def __init__(self, world: World, place: int) -> None:
        self.world, self.place = world, place

    @property
    def step(self) -> int:
        return self.world.step

    @property
    def accumulate(self) -> int:
        return self.world.accumulate

    @property
    def retries(self) -> int:
        return self.world.retries

    @property
    def parts(self) -> Parts:
        return Parts(self.world.weights, self.place)


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: int) -> int:
        return number


class FetchesAhead:
    """A loader that asks its sampler for so many batches before it hands out the first, as one with workers does."""

    def __init__(self, order: Order, ahead: int) -> None:
        self.order, self.ahead = order, ahead

    def __iter__(self) -> Iterator[list[Any]]:
        asked, waiting = iter(self.order), list[list[Any]]()
        for batch in asked:
            waiting.append(batch)
            if len(waiting) > self.ahead:
                yield waiting.pop(0)
        yield from waiting


def alone(n: int, samples: int, seed: int = 1, **options: Any) -> tuple[World, Order]:
    world = World((1.0,))
    return world, Order(n, seed, samples, Member(world, 0), **options)


def of_all(world: World, source: Any, samples: int, **options: Any) -> list[Order]:
    return [Order(source, 5, samples, Member(world, place), **options) for place in range(len(world.weights))]


# -- the permutation -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 3000), st.text(max_size=5))
def test_a_permutation_has_each_number_once(n: int, key: str) -> None:
    assert sorted(Permutation(n, key)(0, n).tolist()) == list(range(n))


@given(st.integers(1, 2**62 - 1), st.data())
def test_it_is_computed_where_it_is_asked(n: int, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, n - 1))
    end = min(n, begin + data.draw(st.integers(1, 50)))
    asked = Permutation(n, "a")(begin, end)
    assert len({*asked.tolist()}) == end - begin
    assert all(0 <= number < n for number in asked.tolist())
    assert asked[-1:].tolist() == Permutation(n, "a")(end - 1, end).tolist()


def test_each_number_comes_to_each_place_equally_often() -> None:
    """Chi-square of 10 numbers at 10 places over 4000 keys: 81 degrees of freedom, below 128.6 with probability 0.9994."""
    counts = np.zeros((10, 10))
    for key in range(4000):
        counts[np.arange(10), Permutation(10, str(key))(0, 10).astype(int)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 128.6


def test_neighbours_do_not_stay_neighbours() -> None:
    """Of 10^6 numbers one follows its neighbour about 2 times: Poisson, 12 or more with probability below 2e-6."""
    numbers = Permutation(10**6, "neighbours")(0, 10**6).astype(np.int64)
    assert int((np.abs(np.diff(numbers)) == 1).sum()) < 12


# -- parts -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_shares_that_were_planned_come_out_exactly(shares: list[int]) -> None:
    samples = sum(shares)
    weights = [len(shares) * share / samples for share in shares]
    parts = [part(samples, weights, place) for place in range(len(shares))]
    assert [high - low for low, high in parts] == shares


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(any), st.integers(0, 200))
def test_parts_are_all_samples_and_each_has_one(weights: list[float], more: int) -> None:
    samples = len(weights) + more
    parts = [part(samples, weights, place) for place in range(len(weights))]
    assert [0, *(high for _, high in parts)] == [*(low for low, _ in parts), samples]
    assert all(high > low for low, high in parts)


def test_more_ranks_than_samples_are_told_so() -> None:
    world = World((1.0,) * 6)
    with pytest.raises(GossamerError, match=r"a batch of 4 sample\(s\) is too small for 6 ranks.* say samples=6"):
        next(iter(of_all(world, 100, 4)[0]))


# -- every sample once -----------------------------------------------------------------------------------------------------


def for_ever(order: Order, ahead: int) -> Iterator[list[Any]]:
    while True:
        yield from order.over(FetchesAhead(order, ahead))


def step(world: World, loops: list[Iterator[list[Any]]], batches: int) -> list[list[Any]]:
    """What each rank trains on in one step."""
    got = [[sample for _ in range(batches) for sample in next(loop)] for loop in loops]
    world.step += 1
    return got


sources = st.one_of(
    st.integers(60, 300),
    st.builds(
        lambda sizes, streams, run: Shards({f"f{i}": size for i, size in enumerate(sizes)}, streams=streams, run=run),
        st.lists(st.integers(20, 90), min_size=3, max_size=8),
        st.integers(1, 12),
        st.integers(1, 5),
    ),
)
weights = st.lists(st.floats(0.1, 3), min_size=1, max_size=5).map(tuple)


@settings(max_examples=75)
@given(sources, st.integers(5, 20), st.integers(1, 3), st.integers(0, 6), st.data())
def test_every_sample_once_whoever_is_there(source: Any, samples: int, batches: int, ahead: int, data: Any) -> None:
    """Ranks are lost, come, are resumed and get other shares; what is missed is what a lost rank had under way."""
    world, seen = World(data.draw(weights), batches), Counter[Any]()
    orders = of_all(world, source, samples)
    loops = [for_ever(order, ahead) for order in orders]
    while orders[0].epoch < 2:
        for samples_of_rank in step(world, loops, batches):
            seen.update(samples_of_rank)
        event = data.draw(st.sampled_from(["nothing"] * 8 + ["weights", "lost", "dropped", "resumed", "came"]))
        if event == "weights":
            world.weights = data.draw(st.tuples(*[st.floats(0.1, 3)] * len(orders)))
        elif event == "dropped" and len(orders) > 1:  # a rank dies in a step, which the others take again
            step(world, loops, batches)
            world.step, world.retries = world.step - 1, world.retries + 1
            del orders[-1], loops[-1]
            world.weights = world.weights[: len(orders)]
        elif event == "lost" and len(orders) > 1:  # a rank dies in a step, which the others take without it
            for samples_of_rank in step(world, loops, batches):  # its own are missed, and no others
                seen.update(samples_of_rank)
            del orders[-1], loops[-1]
            world.weights = world.weights[: len(orders)]
        elif event == "resumed":  # from a checkpoint, by other ranks, with other batches
            state, samples = orders[0].state_dict(), data.draw(st.integers(5, 20))
            assert all(order.state_dict() == state for order in orders)
            world.weights = data.draw(weights)
            orders = of_all(world, source, samples)
            for order in orders:
                order.load_state_dict(state)
            loops = [for_ever(order, ahead) for order in orders]
        elif event == "came" and len(orders) < 5:
            world.weights = (*world.weights, 1.0)
            orders.append(Order(source, 5, samples, Member(world, len(orders))))
            orders[-1].load_state_dict(orders[0].state_dict())
            loops.append(for_ever(orders[-1], ahead))
    assert len({order.taken for order in orders}) == 1
    assert seen == Counter(orders[0]._items(0, orders[0].taken))
    assert len(seen) == len(orders[0]._source)


@given(st.integers(40, 200), st.integers(4, 20), st.integers(1, 4), st.integers(0, 400))
def test_who_comes_with_the_step_alone_is_where_the_others_are(n: int, samples: int, ranks: int, steps: int) -> None:
    world = World((1.0,) * ranks)
    first = of_all(world, n, samples)[0]
    for _ in range(steps):
        world.step += 1
        assert first.taken > 0
    new = Order(n, 5, samples, Member(world, 0))
    assert new.state_dict() == first.state_dict()


@given(st.integers(1, 400), st.integers(1, 30), st.integers(1, 3), st.booleans())
def test_an_epoch_has_the_steps_that_its_length_says(n: int, samples: int, batches: int, drop_last: bool) -> None:
    world = World((1.0,), batches)
    wanted = samples * batches
    if wanted > n:
        with pytest.raises(
            GossamerError, match=f"a step takes {wanted} samples, and an epoch of {n} samples has fewer"
        ):
            Order(n, 1, samples, Member(world, 0), drop_last=drop_last)
        return
    order = Order(n, 1, samples, Member(world, 0), drop_last=drop_last)
    for epoch in range(2):
        assert order.epoch == epoch
        assert len(order) == n // wanted * batches
        sizes = [len(batch) for batch in order]
        assert len(sizes) == len(order)
        assert sum(sizes) == (n // wanted * wanted if drop_last else n)
        assert {*sizes} == {samples} if drop_last else max(sizes) - min(sizes) <= 2
        world.step += n // wanted
    assert order.taken == 2 * n


def test_epochs_have_other_orders_and_so_have_seeds() -> None:
    world, order = alone(50, 10)
    first = [*chain.from_iterable(order)]
    world.step = 5
    second = [*chain.from_iterable(order)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert len({tuple(first), tuple(second), tuple(chain.from_iterable(alone(50, 10, seed=2)[1]))}) == 3


# -- loops as people write them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "stays"), [(0, False), (2, False), (2, True)])
def test_what_a_loader_fetches_ahead_is_not_used(workers: int, stays: bool) -> None:
    world, order = alone(64, 4)
    loader = DataLoader(Numbers(64), batch_sampler=order, num_workers=workers, persistent_workers=stays)
    seen = list[int]()
    for number, batch in enumerate(order.over(loader)):
        seen += batch.tolist()
        world.step += 1
        if number == 4:
            assert order.state_dict()["taken"] == order.taken == 20
            world.weights = (1.0, 1.0)  # another rank has come: half of each batch is its own
    rest = 64 - 20
    assert len(seen) == 20 + rest // 2
    assert len({*seen}) == len(seen)


def test_a_loader_without_batches_of_its_own_takes_it_as_sampler() -> None:
    world, order = alone(12, 4)
    got = list[int]()
    for batch in DataLoader(Numbers(12), sampler=order, batch_size=None):  # type: ignore[arg-type]
        got += batch
        world.step += 1
    assert sorted(got) == list(range(12))
    assert (order.epoch, order.taken) == (1, 12)


def test_a_plain_loader_says_that_it_has_fetched_for_others() -> None:
    world, order = alone(64, 4)
    batches = iter(DataLoader(Numbers(64), batch_sampler=order))
    next(batches)
    world.step, world.weights = 1, (1.0, 1.0)
    with pytest.raises(GossamerError, match=r"have changed at step 1.*: iterate over order.over\(loader\) instead of"):
        next(batches)


def test_batches_that_a_loop_accumulates_by_itself_count_once() -> None:
    world, order = alone(40, 4)
    seen = list[int]()
    for epoch in range(2):
        assert order.epoch == epoch
        for number, batch in enumerate(order.over(DataLoader(Numbers(40), batch_sampler=order))):
            seen += batch.tolist()
            if number % 3 == 2:
                world.step += 1
                assert order.taken == len(seen)
        world.step += 1  # the rest of the epoch
        assert order.taken == len(seen) == 40 * (epoch + 1)
    assert {*Counter(seen).values()} == {2}


def test_a_loop_that_ends_early_goes_on_there() -> None:
    world, order = alone(40, 4)
    first = list[int]()
    for batch in order.over(DataLoader(Numbers(40), batch_sampler=order)):
        first += batch.tolist()
        world.step += 1
        if world.step == 3:
            break
    assert len(order) == 7
    rest = [n for batch in order.over(DataLoader(Numbers(40), batch_sampler=order)) for n in batch.tolist()]
    assert sorted(first + rest) == list(range(40))


def test_a_second_data_set_begins_at_the_current_step() -> None:
    world, order = alone(40, 4)
    world.step = 7
    assert order.taken == 28
    order.start()
    assert (order.taken, order.epoch) == (0, 0)
    world.step = 8
    assert order.taken == 4


def test_the_scale_makes_the_mean_over_ranks_one_over_samples() -> None:
    world = World((2.0, 0.5, 0.5))
    orders, means, whole = of_all(world, 55, 11), list[float](), list[int]()
    for order in orders:
        batch = next(iter(order.over(DataLoader(Numbers(55), batch_sampler=order))))
        means.append(world.weights[len(means)] * order.scale * float(batch.double().mean()))
        whole += batch.tolist()
    assert sum(means) / 3 == pytest.approx(sum(whole) / len(whole), rel=1e-12)


def test_a_loader_whose_batches_come_in_any_order_is_refused() -> None:
    _, order = alone(64, 4)
    loader = DataLoader(Numbers(64), batch_sampler=order)
    loader.in_order = False  # type: ignore[attr-defined]  # torch 2.6 does not have it
    with pytest.raises(GossamerError, match="in_order=False"):
        next(order.over(loader))


# -- bad input -------------------------------------------------------------------------------------------------------------


def test_an_order_of_another_length_or_seed_is_refused() -> None:
    _, order = alone(64, 4)
    state = order.state_dict()
    with pytest.raises(
        CheckpointError, match="order is of 64 samples with seed 1, and this one of 65 samples with seed 1"
    ):
        alone(65, 4)[1].load_state_dict(state)
    with pytest.raises(CheckpointError, match="with seed 1, and this one of 64 samples with seed 2"):
        alone(64, 4, seed=2)[1].load_state_dict(state)
    with pytest.raises(CheckpointError, match="the checkpoint's order is damaged: it is at"):
        order.load_state_dict({**state, "taken": -1})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: alone(0, 4), r"Order\(n\): n is the number of samples"),
        (lambda: alone(10, 0), "samples must be a whole number of 1 or more, got 0"),
        (lambda: alone(10, 2, micro_batches=0), "micro_batches must be a whole number of 1 or more, got 0"),
        (lambda: Shards({}), "Shards needs files"),
        (lambda: Shards({"a": 3}, streams=0), "streams=0"),
        (lambda: Shards({"a.tar": 0}), "a.tar must have a number of samples of 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_said(make: Any, says: str) -> None:
    with pytest.raises(GossamerError, match=says):
        make()


# -- shards ----------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(max_size=3), st.integers(1, 30), min_size=1, max_size=9),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_shards_hold_each_row_once(files: dict[str, int], streams: int, run: int) -> None:
    shards = Shards(files, streams=streams, run=run)
    rows = shards.items("k", 0, len(shards))
    assert sorted(rows) == sorted((file, row) for file, samples in files.items() for row in range(samples))
    middle = len(shards) // 2
    assert shards.items("k", middle, len(shards)) == rows[middle:]


def test_each_rank_reads_its_files_from_front_to_back() -> None:
    opened = Counter[str]()

    def read(file: str) -> Iterator[str]:
        opened[file] += 1
        yield from (f"{file}/{row}" for row in range(100))

    shards = Shards({f"f{i}": 100 for i in range(8)}, streams=4, run=2)
    world = World((1.0, 1.0))
    seen = list[str]()
    for order in of_all(world, shards, 8):
        world.step, before = 0, sum(opened.values())
        for batch in order.over(DataLoader(Rows(read), batch_sampler=order)):
            seen += batch
            world.step += 1
        assert sum(opened.values()) - before == 4  # half of the files, each once
    assert len({*seen}) == len(seen) == 800


def test_a_file_that_ends_early_is_named() -> None:
    rows = Rows(lambda file: iter("ab"), most=1)
    assert (rows["x", 1], rows["y", 0], rows["x", 0]) == ("b", "a", "a")
    with pytest.raises(GossamerError, match="x ends before its sample 2: count its samples again"):
        rows["x", 2]


def test_shards_of_other_files_are_another_order() -> None:
    world = World((1.0,))
    state = Order(Shards({"a": 9, "b": 3}), 1, 2, Member(world, 0)).state_dict()
    with pytest.raises(CheckpointError, match=r"12 samples in 2 files .* and this one of 12 samples in 2 files"):
        Order(Shards({"a": 8, "b": 4}), 1, 2, Member(world, 0)).load_state_dict(state)


def lines_of(path: str) -> Iterator[str]:
    with open(path) as file:
        yield from file


def test_workers_open_their_own_files_where_some_are_open_already(tmp_path: Path) -> None:
    """Of lines that fill many buffers: a forked worker would read on where another process is in the same file."""
    path = tmp_path / "lines.txt"
    lines = [f"line {number} of the file\n" for number in range(4000)]
    path.write_text("".join(lines))
    rows, asked = Rows(lines_of), [(str(path), number) for number in range(4000)]
    assert rows[asked[0]] == lines[0]
    loader = DataLoader(rows, sampler=asked, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == lines
    assert rows[asked[-1]] == lines[-1]
    assert pickle.loads(pickle.dumps(rows))[asked[7]] == lines[7]  # as for a worker that is spawned
