"""Dice follow from (seed, step, rank, name) alone; private ones differ everywhere, shared ones nowhere."""

import inspect
import re
from itertools import product

import pytest
import torch

import gossamer
from gossamer.core.rng import CounterRng

NAMES = ["w", "w/qsgd", "layer.0.weight", "layer.0.weight@17", "é", ""]
ALL = [CounterRng(seed, step, rank) for seed, step, rank in product(range(5), range(8), range(8))]


def test_private_keys_differ_between_any_two_of_seed_step_rank_and_name() -> None:
    keys = [d.key(n) for d, n in product(ALL, NAMES)]
    assert len(set(keys)) == len(keys)


def test_shared_keys_are_equal_on_all_ranks_and_differ_otherwise() -> None:
    for name in NAMES:
        assert len({CounterRng(1, 2, rank).shared_key(name) for rank in range(64)}) == 1
    keys = {(d.seed, d.step, n): d.shared_key(n) for d, n in product(ALL, NAMES)}
    assert len(set(keys.values())) == len(keys)


def test_a_shared_key_is_nobody_s_private_key() -> None:
    private = {d.key(n) for d, n in product(ALL, NAMES)}
    assert private.isdisjoint({d.shared_key(n) for d, n in product(ALL, NAMES)})


def test_a_second_encoding_in_the_same_step_has_other_dice() -> None:
    keys = {d.key(n) for d, n in product(ALL, NAMES)} | {d.again().key(n) for d, n in product(ALL, NAMES)}
    assert len(keys) == 2 * len(ALL) * len(NAMES)


def test_many_keys_are_the_keys_of_each_name() -> None:
    for rng in ALL[::17]:
        assert rng.keys(NAMES).tolist() == [[*rng.key(name)] for name in NAMES]
    assert ALL[0].keys([]).shape == (0, 2)


def test_keys_are_two_32_bit_numbers_that_never_change() -> None:
    assert CounterRng(7, 3, 1).key("layer.weight") == (4198740161, 997557944)
    assert all(0 <= k < 2**32 for d in ALL for k in d.key("w"))


def test_every_bit_of_a_key_is_set_half_of_the_time() -> None:
    keys = [k0 << 32 | k1 for k0, k1 in (d.key(n) for d, n in product(ALL, NAMES))]
    for bit in range(64):
        share = sum(k >> bit & 1 for k in keys) / len(keys)
        assert abs(share - 0.5) < 5 * 0.5 / len(keys) ** 0.5  # z < 5


def test_shared_normals_are_equal_on_all_ranks_and_standard() -> None:
    a = CounterRng(1, 2, 0).shared_normal("q", 40, 500)
    assert torch.equal(a, CounterRng(1, 2, 5).shared_normal("q", 40, 500))
    assert not torch.equal(a, CounterRng(1, 3, 0).shared_normal("q", 40, 500))
    assert not torch.equal(a, CounterRng(1, 2, 0).shared_normal("r", 40, 500))
    assert abs(float(a.mean())) < 5 / 20_000**0.5  # z < 5
    assert abs(float(a.var()) - 1) < 5 * (2 / 20_000) ** 0.5


def test_a_default_device_changes_no_draw() -> None:
    """Under torch.set_default_device("cuda") torch took no generator of the CPU, and nothing with `powersgd` started."""
    with torch.device("meta"):
        drawn = CounterRng(1, 2, 0).shared_normal("q", 40)
    assert torch.equal(drawn, CounterRng(1, 2, 0).shared_normal("q", 40))


def test_no_draw_touches_the_global_generator() -> None:
    before = torch.get_rng_state()
    CounterRng(1, 2, 3).shared_normal("q", 100)
    CounterRng(1, 2, 3).key("q")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("package", ["core", "codecs", "memories", "exchanges", "schedules", "controllers"])
def test_no_algorithm_names_a_global_generator(package: str) -> None:
    from importlib import import_module
    from pathlib import Path

    folder = Path(inspect.getfile(import_module(f"{gossamer.__name__}.{package}"))).parent
    for file in folder.rglob("*.py"):
        text = file.read_text()
        assert "manual_seed(" not in text.replace("Generator().manual_seed(", ""), file
        assert not any(word in text for word in ("rand_like(", "randn_like(", "import random")), file
        assert all("generator=" in call for call in re.findall(r"torch\.rand\w*\([^\n]*", text)), file
