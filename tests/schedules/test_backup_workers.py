"""Backup workers: the self-tests T6.1 to T6.6 of the method notes, on a virtual clock."""

from collections.abc import Callable

import pytest
import torch
from tests.runtime.gym import Flat, Network, Replica, bit_equal, make, noise, parameters, pull, sgd, train
from torch import Tensor

from gossamer.core.errors import AttachError, PeerError, RecipeError
from gossamer.core.verbs import AllReduce
from gossamer.costs.crossing import traffic
from gossamer.planning import bytes_per_step
from gossamer.schedules import BackupWorkers

Seconds = Callable[[int, int], float]
NUMEL = 5


def uneven(rank: int, step: int) -> float:
    """Distinct for all ranks at each step; the order changes from step to step."""
    return 1.0 + ((rank * 7 + step * 3) % 11) / 11 + rank * 1e-3


def watched(ranks: list[Replica]):
    """`pull`, and a list of (step, rank, gradient) that were computed."""
    computed = dict[tuple[int, int], Tensor]()

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        assert (step, rank) not in computed
        computed[step, rank] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return loss

    return backward, computed


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("over", ["allreduce(fp32())", "scatter(qsgd())", "gather(fp32())"])
def test_no_backups_is_synchronous_training_bit_for_bit_though_ranks_are_uneven(over: str, size: int) -> None:
    quorum, plain = make(f"{over} + backup_workers(backups=0)", size), make(over, size)
    train(quorum, pull, 12, Network(latency=1e-3), uneven)
    train(plain, pull, 12, Network(latency=1e-3), uneven)
    assert all(bit_equal(pair) for pair in zip(parameters(quorum), parameters(plain)))
    assert all(r.worker.record.dropped_steps == [] for r in quorum)


@pytest.mark.parametrize(
    ("recipe", "size", "words"),
    [
        ("backup", 2, "backup_workers(backups=1): 2 ranks leave one gradient a step"),
        ("backup(4)", 5, "backup_workers(backups=4): 5 ranks leave one gradient a step"),
        ("backup(2)", 2, "backup_workers(backups=2): 2 ranks leave no gradient to wait for"),
        ("scatter(qsgd()) + backup_workers(backups=3)", 2, "use at least 5 ranks, or every_step()"),
    ],
)
def test_ranks_that_leave_no_mean_are_refused_before_the_first_step(recipe: str, size: int, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make(recipe, size)
    assert words in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        bytes_per_step(recipe, {"x": (NUMEL,)}, size)
    assert words in str(caught.value)


@pytest.mark.parametrize("recipe", ["backup", "backup(0)"])
def test_alone_the_simulator_waits_for_nobody(recipe: str) -> None:
    """As a host alone does."""
    alone, plain = make(recipe, 1), make("allreduce", 1)
    train(alone, pull, 3)
    train(plain, pull, 3)
    assert torch.equal(alone[0].flat(), plain[0].flat())


@pytest.mark.parametrize(("size", "backups"), [(3, 1), (4, 1), (5, 2), (8, 3)])
def test_the_first_to_finish_are_accepted_in_order_and_nobody_waits_for_the_rest(size: int, backups: int) -> None:
    """All start the first step together, so the winners and the time it ends are known."""
    times = [9.0, 1.0, 2.5, 1.5, 8.0, 2.0, 3.0, 7.0][:size]
    ranks = make(f"backup({backups})", size)
    train(ranks, pull, 1, seconds=lambda rank, step: times[rank])
    order = sorted(range(size), key=times.__getitem__)
    accepted, late = order[: size - backups], order[size - backups :]
    assert all(r.worker.live["quorum"].accepted[1] == tuple(accepted) for r in ranks)
    assert all(ranks[r].clock == times[accepted[-1]] for r in accepted)
    assert all(ranks[r].clock == times[r] for r in late)  # a late rank learns it when it is done
    assert [r.worker.record.dropped_steps for r in ranks] == [[1] if r in late else [] for r in range(size)]


def test_the_fast_ranks_never_wait_for_a_rank_that_is_always_slow() -> None:
    ranks = make("backup(1)", 3)
    train(ranks, pull, 10, seconds=lambda rank, step: 100.0 if rank == 2 else 1.0)
    assert [r.clock for r in ranks] == pytest.approx([10.0, 10.0, 100.0])
    assert [set(ranks[0].worker.live["quorum"].accepted[k]) for k in range(1, 11)] == [{0, 1}] * 10
    assert bit_equal(parameters(ranks))
    assert ranks[2].worker.record.dropped_steps == [1]
    assert len(ranks[2].losses) == 1  # it computed one gradient, and took the ten updates


@pytest.mark.parametrize("latency", [0.0, 0.05, 0.4])
def test_stale_gradients_are_never_applied(latency: float) -> None:
    """Replay: every update is the mean of the gradients of just the accepted ranks, all of that very step.

    With a latency a rank may be ready after the step has closed and before it is told.
    """
    size, backups, steps = 5, 2, 12
    ranks = make(f"backup({backups})", size, optimizer=sgd(0.1, 0.0))
    backward, computed = watched(ranks)
    start = parameters(ranks)[0]
    train(ranks, backward, steps, Network(latency), uneven)
    model = start
    for step in range(1, steps + 1):
        accepted = ranks[0].worker.live["quorum"].accepted[step]
        assert len(accepted) == size - backups
        model = model - 0.1 * torch.stack([computed[step, rank] for rank in accepted]).double().mean(0)
    torch.testing.assert_close(parameters(ranks)[0].double(), model.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "recipe",
    [
        "backup(2)",
        "scatter(qsgd()) + backup_workers(backups=2)",
        "scatter(ternary(), feedback=1.0) + backup_workers(backups=2)",
    ],
)
@pytest.mark.parametrize("latency", [0.0, 0.01, 0.4])
def test_replicas_stay_bit_equal_though_some_are_late(recipe: str, latency: float) -> None:
    ranks = make(recipe, 6)
    train(
        ranks,
        pull,
        25,
        Network(latency=latency),
        lambda rank, step: 5.0 if (rank + step) % 6 == 0 else uneven(rank, step),
    )
    assert bit_equal(parameters(ranks))
    assert {r.worker.step for r in ranks} == {26}
    dropped = [r.worker.record.dropped_steps for r in ranks]
    assert sum(map(len, dropped)) > 10
    momenta = [r.optimizer.state[r.model.get_parameter("matrix")]["momentum_buffer"] for r in ranks]
    assert bit_equal(momenta)
    assert {tuple(sorted(r.worker.live["quorum"].accepted.items())) for r in ranks} == {
        tuple(sorted(ranks[0].worker.live["quorum"].accepted.items()))
    }


def test_dropped_steps_are_told_to_the_worker_that_computed_them() -> None:
    ranks = make("backup(1)", 4)
    backward, computed = watched(ranks)
    run = train(ranks, backward, 15, Network(latency=0.01), uneven)
    told = [(drop.rank, drop.step) for drop in run.ledger.drops]
    dropped = {(r.worker.rank, step) for r in ranks for step in r.worker.record.dropped_steps}
    assert set(told) == dropped
    assert len(told) == len(dropped) > 0
    accepted = {(rank, step) for step, who in ranks[0].worker.live["quorum"].accepted.items() for rank in who}
    assert {(rank, step) for step, rank in computed} == accepted | dropped
    assert not accepted & dropped


def test_the_mean_is_over_the_accepted_and_nothing_else() -> None:
    """Equal gradients everywhere: whatever is dropped, the mean is that gradient."""

    def alike(model: torch.nn.Module, rank: int, step: int) -> float:
        p = model.get_parameter("x")
        p.grad = noise(step, numel=NUMEL, dtype=torch.float32)
        return 0.0

    ranks = make("backup(1)", 3, lambda: Flat(NUMEL, torch.float32), sgd(1.0, 0.0))
    train(ranks, alike, 5, seconds=uneven)
    expected = Flat(NUMEL, torch.float32).x.detach() - sum(noise(step, numel=NUMEL) for step in range(1, 6))
    torch.testing.assert_close(parameters(ranks)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_late_rank_takes_missed_updates_with_the_rates_of_their_steps() -> None:
    """Every rank's scheduler follows its own step; the late one has not run it for the steps it missed."""

    def rate(step: int) -> float:
        return 0.3 / step

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        model.optimizer.param_groups[0]["lr"] = rate(step)  # pyright: ignore
        return loss

    def known(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        object.__setattr__(model, "optimizer", optimizer)
        return optimizer

    ranks = make("backup(1)", 3, optimizer=known)
    train(ranks, backward, 12, seconds=lambda rank, step: 4.5 if rank == 2 else 1.0 + rank / 10)
    assert bit_equal(parameters(ranks))
    assert [r.optimizer.param_groups[0]["lr"] for r in ranks] == [rate(12)] * 3
    assert len(ranks[2].worker.record.dropped_steps) >= 2


def test_parameter_groups_with_rates_of_their_own_close_with_one_ticket() -> None:
    def grouped(model: torch.nn.Module) -> torch.optim.Optimizer:
        names = dict(model.named_parameters())
        return torch.optim.SGD(
            [{"params": [names.pop("matrix")], "lr": 0.01}, {"params": list(names.values())}], lr=0.1, momentum=0.9
        )

    ranks, plain = (
        make("allreduce(fp32()) + backup_workers(backups=0)", 3, optimizer=grouped),
        make("allreduce", 3, optimizer=grouped),
    )
    train(ranks, pull, 6)
    train(plain, pull, 6)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(plain)))
    late = make("backup(1)", 3, optimizer=grouped)
    train(late, pull, 6, seconds=uneven)
    assert bit_equal(parameters(late))


def test_parameters_of_two_precisions_are_refused() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(3))
            self.b = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    with pytest.raises(AttachError, match="the same dtype"):
        make("backup", 3, Mixed)


@pytest.mark.parametrize(
    ("wanted", "backups", "rounds"),
    [
        pytest.param(8, 0, 300, marks=pytest.mark.slow),
        (4, 2, 150),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in [(8, 2, 300), (12, 4, 200)]),
    ],
)
def test_step_times_are_the_order_statistic_of_the_compute_times(wanted: int, backups: int, rounds: int) -> None:
    """T = c + Exp(m): E[T_(N) of N + b] = c + m (H_(N+b) - H_b).

    Rounds are independent (each is a run of one step); the mean over R of them lies within 4 standard errors of the
    formula, so a correct simulator fails with p < 7e-5.
    """
    c, m, size = 1.0, 1.0, wanted + backups
    rng = torch.Generator().manual_seed(wanted * 100 + backups)
    table = c + m * torch.empty(rounds, size).exponential_(generator=rng)
    closings = list[float]()
    for k in range(rounds):
        ranks = make(f"backup({backups})", size, lambda: Flat(1, torch.float32))
        train(ranks, pull_x, 1, seconds=lambda rank, _: float(table[k, rank]))  # noqa: B023 (called before k moves)
        accepted = ranks[0].worker.live["quorum"].accepted[1]
        closings.append(ranks[accepted[0]].clock)
    times = torch.tensor(closings)
    assert torch.equal(times, table.sort(dim=1).values[:, wanted - 1])
    formula = c + m * sum(1 / n for n in range(backups + 1, size + 1))
    assert abs(float(times.mean()) - formula) < 4 * float(times.std()) / rounds**0.5


def pull_x(model: torch.nn.Module, rank: int, step: int) -> float:
    x = model.get_parameter("x")
    x.grad = torch.ones_like(x)
    return 0.0


def test_backups_shorten_a_run_with_stragglers() -> None:
    def straggling(rank: int, step: int) -> float:
        return 10.0 if (rank * 13 + step * 7) % 8 == 0 else 1.0

    def seconds(recipe: str) -> float:
        ranks = make(recipe, 8)
        train(ranks, pull, 16, seconds=straggling)
        return min(r.clock for r in ranks)

    assert seconds("allreduce") == pytest.approx(160.0)
    assert seconds("backup(2)") < 60


def test_late_ranks_send_zeros_so_bytes_do_not_change() -> None:
    ranks = make("backup(1)", 4)
    run = train(ranks, pull, 6, seconds=uneven)
    d = ranks[0].flat().numel()
    expected = traffic(AllReduce(torch.zeros(d)), 0, 4)[1]
    rates = traffic(AllReduce(torch.zeros(1, dtype=torch.float64)), 0, 4)[1]
    assert run.ledger.by_verb() == {"AllReduce": (4 * 6 * 2, 4 * 6 * (expected + rates))}


def test_impossible_values_are_refused() -> None:
    with pytest.raises(RecipeError, match="0 or more"):
        BackupWorkers(-1)


def test_grace_waits_for_all_until_the_deadline_that_follows_them() -> None:
    """Arrivals at 1, 1.1, 1.2 and 1.3: median 1.15, median distance .1. So until 2.15; who takes longer is left out."""

    def seconds(rank: int, step: int) -> float:
        return 9.0 if (rank, step) == (3, 6) else 1.0 + rank / 10

    ranks = make("allreduce(fp32()) + backup_workers(grace=10.0)", 4)
    run = train(ranks, pull, 6, seconds=seconds)
    seen = ranks[0].worker.live["quorum"].accepted
    assert all(seen[step] == (0, 1, 2, 3) for step in range(1, 6))
    assert seen[6] == (0, 1, 2)
    assert ranks[3].worker.record.dropped_steps[-1] == 6
    assert bit_equal(parameters(ranks))
    assert min(r.clock for r in run.replicas) == pytest.approx(5 * 1.3 + 2.15)


def test_grace_without_late_ranks_is_synchronous_training() -> None:
    ranks, plain = make("allreduce(fp32()) + backup_workers(grace=5.0)", 3), make("allreduce", 3)
    train(ranks, pull, 6, seconds=lambda rank, step: 1.0 + rank / 10)
    train(plain, pull, 6)
    assert all(r.worker.record.dropped_steps == [] for r in ranks)
    assert all(bit_equal(pair) for pair in zip(parameters(ranks), parameters(plain)))


def stuck(rank: int, step: int) -> float:
    return 100.0 if rank >= 2 and step == 2 else 1.0


def test_an_exhausted_step_shrinks() -> None:
    ranks = make("allreduce(fp32()) + backup_workers(limit=5.0, on_exhausted='shrink')", 4)
    train(ranks, pull, 4, seconds=stuck)
    quorum = ranks[0].worker.live["quorum"]
    assert sorted(quorum.accepted[2]) == [0, 1]
    assert min(r.clock for r in ranks) == pytest.approx(16.0)  # 1, then 5 in each of the steps that two are late for
    assert bit_equal(parameters(ranks))


def test_an_exhausted_step_is_an_error_that_names_who_is_missing() -> None:
    with pytest.raises(PeerError, match=r"only 2 of 3 gradients came within 5 seconds, none from ranks \[2, 3\]"):
        train(make("allreduce(fp32()) + backup_workers(limit=5.0)", 4), pull, 4, seconds=stuck)


def test_samples_of_what_was_dropped_are_told_and_written_down() -> None:
    ranks = make("backup(1)", 3)
    last = ranks[2].worker.record

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        ranks[rank].worker.record.samples += [f"{rank}-{step}a", f"{rank}-{step}b"]
        return pull(model, rank, step)

    run = train(ranks, backward, 6, seconds=lambda rank, step: 2.5 if rank == 2 else 1.0)
    told = [(drop.step, drop.dropped) for drop in run.ledger.drops if drop.rank == 2]
    assert told == [(step, [f"2-{step}a", f"2-{step}b"]) for step in last.dropped_steps]
    assert told == [*last.dropped_samples.items()]
    assert len(told) == len(run.ledger.drops)
    assert last.accepted[0] == last.accepted[1] == last.closed_steps == 6
    assert last.accepted[2] == 0


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("backup_workers(grace=-1.0)", "grace must be"),
        ("backup_workers(limit=-1.0)", "limit must be"),
        ("backup_workers(on_exhausted='shrink')", "needs a limit"),
    ],
)
def test_impatience_that_cannot_be_is_refused(recipe: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make(f"allreduce(fp32()) + {recipe}", 4)
