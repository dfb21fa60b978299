"""The meter of heterogeneity: unbiased, blind to noise, and the same on the simulator and on real processes."""

import json
from types import SimpleNamespace

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, data, flat, loss_of, same, small_step
from torch import Tensor

from gossamer.core.errors import GossamerError
from gossamer.fabrics.sim import simulate
from gossamer.runtime import Heterogeneity, heterogeneity

RANKS, NUMBERS = 5, 7


def drawn(count: int, unlike: Tensor, noise: float, rng: torch.Generator) -> list[list[Tensor]]:
    shape = RANKS, count, NUMBERS
    gradients = 1 + unlike[:, None] + noise * torch.randn(shape, generator=rng, dtype=torch.float64)
    return [[*mine] for mine in gradients]


def measured(gradients: list[list[Tensor]]) -> Heterogeneity:
    results = simulate([heterogeneity(mine, RANKS) for mine in gradients]).results
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_estimates_are_unbiased(scale: float) -> None:
    """Over 300 draws the means lie within 4.5 standard errors of the truth: a right estimate fails with p < 3e-5 in all."""
    rng = torch.Generator().manual_seed(1)
    unlike = torch.randn(RANKS, NUMBERS, generator=rng, dtype=torch.float64)
    unlike = scale * (unlike - unlike.mean(0))
    found = [measured(drawn(3, unlike, 0.8, rng)) for _ in range(300)]
    truths = {
        "unlike": float(unlike.square().sum(1).mean()),
        "noise": NUMBERS * 0.64,
        "gradient": float(NUMBERS),
    }
    for name, truth in truths.items():
        values = torch.tensor([getattr(one, name) for one in found])
        assert abs(float(values.mean()) - truth) < 4.5 * float(values.std()) / len(found) ** 0.5, name


def test_advice_follows_the_ratio() -> None:
    words = [Heterogeneity(4, 2, unlike, 1.0, 4.0, 1.0).advice for unlike in (-0.5, 1.1, 200.0)]
    assert ["local steps, such as" in words[0], "inner_outer" in words[1], "minibatch, or allreduce" in words[2]] == [
        True
    ] * 3


def test_unequal_numbers_of_micro_batches_are_refused_on_all() -> None:
    programs = [heterogeneity([torch.ones(3)] * (2 + rank), 2) for rank in range(2)]
    with pytest.raises(GossamerError, match="between 2 and 3 micro-batches"):
        simulate(programs)
    with pytest.raises(GossamerError, match="there are 1 rank"):
        simulate([heterogeneity([torch.ones(3)] * 2, 1)])


def asked(rank: int, size: int, recipe: str) -> tuple[Heterogeneity, bool, list[Tensor]]:
    """In the midst of a round: what is found, whether anything changed, and the gradients at the consensus."""
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        before, grads = flat(model), [p.grad for p in model.parameters()]
        found = comm.heterogeneity(loss_of(model, rank, 50 + k) for k in range(3))
        unchanged = same(before, flat(model)) and all(p.grad is g for p, g in zip(model.parameters(), grads))
        with comm.consensus():
            own = list[Tensor]()
            for k in range(3):
                x, y = data(rank, 50 + k)
                grad = torch.autograd.grad((model(x) - y).square().mean(), [*model.parameters()])
                own.append(torch.cat([g.reshape(-1) for g in grad]))
        small_step(model, optimizer, comm, rank)
        return found, unchanged, own


@pytest.mark.gang
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(4)"])
def test_in_a_loop_it_is_asked_at_the_consensus_and_changes_nothing(gang2: Gang, recipe: str) -> None:
    outcomes = gang2.run(asked, recipe)
    virtual = simulate([heterogeneity(own, 2) for _, _, own in outcomes]).results[0]
    for found, unchanged, _ in outcomes:
        assert unchanged
        assert found == outcomes[0][0]
        assert found == pytest.approx(virtual, rel=1e-5)


def test_the_command_sees_labels(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.bench.cli.app import run

    found = dict[str, float]()
    for shards in ("iid", "source"):
        told = ["--workload", "ridge", "--shards", shards, "--micro-batches", "4", "--at", "0,3", "--json"]
        monkeypatch.setattr("sys.argv", ["gossamer", "heterogeneity", *told])
        assert run() == 0
        answers = json.loads(capfd.readouterr().out)
        assert answers.keys() == {"0", "3"}
        found[shards] = answers["0"]["ratio"]
    assert found["source"] > found["iid"] + 0.3


def test_a_ratio_without_measure_is_null_in_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where noise hides the mean gradient, the estimate of its length is below zero, and the ratio infinite."""
    from gossamer.bench.cli import heterogeneity as command
    from gossamer.bench.cli.app import run

    lost = Heterogeneity(4, 2, unlike=1.0, noise=9.0, gradient=-0.1, diversity=float("inf"))
    monkeypatch.setattr(command, "compared", lambda gradients, ranks: iter(()))
    monkeypatch.setattr(command, "simulate", lambda programs: SimpleNamespace(results=[lost]))
    monkeypatch.setattr("sys.argv", ["gossamer", "heterogeneity", "--workload", "ridge", "--json"])
    assert run() == 0
    told = json.loads(capfd.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (told["0"]["ratio"], told["0"]["diversity"]) == (None, None)
    assert "minibatch" in told["0"]["advice"]


def test_the_command_refuses_steps_that_are_none(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.bench.cli.app import run

    monkeypatch.setattr("sys.argv", ["gossamer", "heterogeneity", "--at", "soon"])
    assert run() == 2
    assert "--at takes steps" in capfd.readouterr().err
