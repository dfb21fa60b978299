"""Every workload keeps the contract: a value from which model, batches and quality follow."""

import hashlib
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gossamer.bench import workloads
from gossamer.bench.workloads import Workload, WorkloadError, translation

# Steps on an effective batch of four ranks, and the quality they reach with room to spare: a smoke test of learning.
LEARNS = {
    "digits": (60, 0.85),
    "fashion": (20, 0.4),
    "fashion-resnet": (12, 0.15),
    "lm": (10, 6.8),
    "lm-bytes": (15, 3.4),
    "lm-lstm": (15, 6.2),
    "logistic": (100, 0.02),
    "ridge": (100, 0.05),
    "translate": (25, 0.05),
    "translate-rnn": (15, 0.05),
    "wiki-lm": (5, 7.8),
    "wiki-topics": (150, 0.5),
}


def test_all_are_listed_here() -> None:
    assert set(LEARNS) == set(workloads.names())


def test_the_model_follows_from_the_seed_and_nothing_else_moves(workload: Workload) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = workload.model().state_dict()
    workload.batch(3, 0, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = workloads.get(workload.name).model().state_dict()
    other = workloads.get(workload.name, seed=1).model().state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_batch_follows_from_step_rank_and_size(workload: Workload) -> None:
    first = workload.batch(5, 1, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, workload.batch(5, 1, 4)))
    assert all(len(tensor) == workload.batch_size for tensor in first)
    for other in (workload.batch(5, 0, 4), workload.batch(6, 1, 4)):
        assert not torch.equal(first[0], other[0])


def test_a_group_is_for_few_ranks(workload: Workload) -> None:
    shards = workloads.get(workload.name, shards=workload.group)
    object.__setattr__(shards, "data", workload.data)  # loaded once is enough
    groups = workload.data.groups
    assert len(groups) == len(workload.data.train[0])
    assert shards.batch(0, 0, 4)[0].shape == workload.batch(0, 0, 4)[0].shape
    assert len(groups.unique()) > 1


def test_the_loss_is_a_number_that_all_parameters_move(workload: Workload) -> None:
    model = workload.model()
    loss = workload.loss(model, workload.batch(0, 0, 1))
    assert loss.shape == ()
    assert bool(loss.isfinite())
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.trains
def test_judging_changes_nothing(workload: Workload) -> None:
    model = workload.model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = workload.evaluate(model)
    assert first == workload.evaluate(model)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.trains
def test_it_learns(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "HAS_BLEU", False)  # which stays at 0 for a long while
    steps, target = LEARNS[workload.name]
    model = workload.model()
    optimizer = workload.optimizer(model)
    first = workload.evaluate(model)
    for step in range(steps):
        loss = sum(workload.loss(model, workload.batch(step, rank, 4)) for rank in range(4)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    last = workload.evaluate(model)
    if workload.lower_is_better:
        assert last < min(first, target)
    else:
        assert last >= target


def test_held_rows_are_not_trained_on(workload: Workload) -> None:
    if workload.name in ("ridge", "logistic"):
        pytest.skip("judged on the training objective by intent")
    train = {row.numpy().tobytes() for row in workload.data.train[0].flatten(1)}
    held = [row.numpy().tobytes() for row in workload.data.held[0].flatten(1)]
    assert sum(row in train for row in held) <= 0.02 * len(held)  # a licence header recurs in source code


PROGRAM = """
from tests.bench.workloads.test_workloads import trace
print(trace())
"""


def trace() -> str:
    """All that must not depend on the process."""
    digest = hashlib.sha256()
    for name in ("lm", "ridge", "logistic"):
        made = workloads.get(name)
        digest.update(made.fingerprint().encode())
        for tensor in (*made.model().parameters(), *(t for rank in range(3) for t in made.batch(7, rank, 3))):
            digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def test_two_processes_agree() -> None:
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}  # sets of strings in another order
    command = [sys.executable, "-c", PROGRAM]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == trace()


def test_the_fingerprint_tells_data_apart() -> None:
    prints = [workloads.get("ridge", **options).fingerprint() for options in ({}, {"seed": 1}, {"spread": 0.5})]
    assert len(set(prints)) == 3
    assert prints[0] == workloads.get("ridge").fingerprint()


def test_names_are_sorted_and_described() -> None:
    assert all(a < b for a, b in pairwise(workloads.names()))
    for name in workloads.names():
        found = workloads.find(name)
        assert found.name == name
        assert len(found.summary) < 100
        assert all((found.metric, found.group))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fashoin", {}, "Did you mean 'fashion'"),
        ("", {}, "Known: digits"),
        ("lm", {"sed": 1}, "Did you mean 'seed'"),
        ("lm", {"batch_size": 0}, "at least 1"),
        ("lm", {"batch_size": "4"}, "must be of type int"),
        ("lm", {"seed": True}, "must be of type int"),
        ("lm", {"shards": "label"}, "choose 'iid' or 'file'"),
        ("fashion-resnet", {"norm": "layer"}, "norm must be"),
        ("wiki-lm", {"length": -1}, "length"),
    ],
)
def test_bad_requests_are_refused(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        workloads.get(name, **options)
