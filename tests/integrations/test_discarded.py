"""Gradients that are thrown away, kept, or never stepped on: GANs, loops that accumulate, people who look at p.grad."""

import warnings

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, SMALL, Awkward, attached, flat, loss_of, same, sgd
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def gan(
    rank: int, size: int, how: str, recipe: str = "topk(ratio=0.1)" + SMALL
) -> tuple[Tensor, list[str], dict[str, float]]:
    """The loop of PyTorch's DCGAN example, on something smaller. `how`: as it stands, or with the one line for D."""
    made, judge = adversaries()
    of_g, of_d = torch.optim.Adam(made.parameters(), 0.02), torch.optim.Adam(judge.parameters(), 0.02)
    loss = nn.BCEWithLogitsLoss()
    with (
        gossamer.attach(made, of_g, "topk(ratio=0.3)", deadline=20.0),
        gossamer.attach(judge, of_d, recipe, deadline=20.0) as comm,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for step in range(6):
            rng = torch.Generator().manual_seed(100 * step + rank)
            real, noise = torch.randn(8, 6, generator=rng) + 2, torch.randn(8, 4, generator=rng)
            judge.zero_grad()
            fake = made(noise)
            scores = torch.cat([judge(real), judge(fake.detach())])
            loss(scores, torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])).backward()
            of_d.step()
            made.zero_grad()
            if how == "plain":
                loss(judge(fake), torch.ones(8, 1)).backward()
            else:
                with comm.no_sync():
                    loss(judge(fake), torch.ones(8, 1)).backward()
            of_g.step()
        return torch.cat([flat(made), flat(judge)]), [str(w.message) for w in said], comm.metrics()


def test_discarded_gradients_leave_no_trace(gang2: Gang) -> None:
    plain, careful = gang2.run(gan, "plain"), gang2.run(gan, "one line")
    for (a, said, wasted), (b, silence, spared) in zip(plain, careful):
        assert same(a, b)  # top-k's dice are the same at every step, and D's memory knows nothing of G's loss
        assert len(said) == 1
        assert "run it under comm.no_sync()" in said[0]
        assert not silence
        assert wasted["skipped_steps"] == 5
        assert spared["skipped_steps"] == 0
        assert wasted["residual_norm"] == spared["residual_norm"]


def test_a_model_all_of_whose_means_are_thrown_away_is_told_that_it_never_trains(gang2: Gang) -> None:
    """Under `delayed` a step applies the mean of the pass before it, and in a GAN that is always one of no step."""
    start = flat(adversaries()[1])
    plain, careful = (gang2.run(gan, how, "allreduce + delayed()") for how in ("plain", "one line"))
    for (a, said, _), (b, silence, _) in zip(plain, careful):
        assert torch.equal(a[-len(start) :], start)
        assert len(said) == 1
        assert (
            "so was the mean of the step before, and where that happens to each mean the model never trains" in said[0]
        )
        assert not torch.equal(b[-len(start) :], start)
        assert not silence


def accumulating(rank: int, size: int, how: str) -> tuple[Tensor, int, list[str]]:
    """Four micro-steps a step: as they come, under no_sync, or with the flag of DDP that nanoGPT sets in place of it."""
    with attached("allreduce") as (model, optimizer, comm), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if how == "one line":
            model.no_sync = comm.no_sync
        for step in range(1, 4):
            for micro in range(4):
                loss = loss_of(model, rank, 10 * step + micro) / 4
                if how == "one line" and micro < 3:
                    with model.no_sync():
                        loss.backward()
                else:
                    if how == "flag":
                        model.require_backward_grad_sync = micro == 3
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(model), comm.step, [str(w.message) for w in said]


def test_accumulation_without_no_sync_is_told_the_one_line(gang2: Gang) -> None:
    plain, line, flag = (gang2.run(accumulating, how) for how in ("plain", "one line", "flag"))
    for (a, steps, said), (b, fewer, silence), by_flag in zip(plain, line, flag):
        torch.testing.assert_close(a, b)
        assert (steps, fewer) == (12, 3)
        assert len(said) == 1
        assert "model.no_sync = comm.no_sync" in said[0]
        assert not silence
        assert torch.equal(by_flag[0], b)
        assert by_flag[1:] == (3, [])


def added(rank: int, size: int, recipe: str) -> str:
    """Two micro-batches a step, each of which is averaged."""
    with attached(recipe) as (model, optimizer, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for step in range(1, 4):
                for micro in range(2):
                    loss_of(model, rank, 10 * step + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
        except AttachError as refused:
            return str(refused)
    return ""


@pytest.mark.parametrize(
    ("recipe", "refused"),
    [
        ("topk(ratio=0.3)", False),
        ("gather(topk(ratio=0.3)) + momentum_correction()", True),
        ("distributed_lion", True),
        ("ef21", True),
        ("allreduce + delayed()", True),
    ],
)
def test_nothing_is_added_to_what_is_no_gradient(gang2: Gang, recipe: str, refused: bool) -> None:
    """A momentum grew without end, signs were added to gradients, and under `delayed` no mean was ever used."""
    for said in gang2.run(added, recipe):
        assert ("no gradient to add to; run all but the last one under comm.no_sync()" in said) is refused


def kept(rank: int, size: int, recipe: str) -> None:
    """Gradients of the last steps are kept, to look at how they turn; in several ways."""
    with attached(recipe, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01)) as (model, optimizer, _):
        held, copies = list[Tensor](), list[Tensor]()
        for step in range(1, 6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert model.matrix.grad is not None
            mine = [model.matrix.grad, model.bias.grad.view(-1), model.turned.grad.t()[0]][step % 3]
            held.append(mine)
            copies.append(mine.clone())
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(held, copies))


@pytest.mark.parametrize("recipe", ["allreduce", "terngrad" + SMALL, "topk(ratio=0.3)" + SMALL, "backup(0)"])
def test_gradients_that_somebody_keeps_are_not_written_over(gang2: Gang, recipe: str) -> None:
    gang2.run(kept, recipe)


def buffers_of(rank: int, size: int, to_none: bool) -> int:
    """Nobody keeps anything: the same memory serves all steps."""
    with attached("allreduce" + SMALL) as (model, optimizer, _):
        seen = set[int]()
        for step in range(1, 6):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, rank, step).backward()
            assert model.matrix.grad is not None
            seen.add(model.matrix.grad.data_ptr())
            optimizer.step()
        return len(seen)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_nobody_keeps_cost_no_memory(gang2: Gang, to_none: bool) -> None:
    assert gang2.run(buffers_of, to_none) == [1, 1]


def never_stepped(rank: int, size: int) -> list[str]:
    """Another optimizer than the one that was given moves the model."""
    with attached("local_sgd(2)") as (model, _, comm), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        other = sgd(model)
        for step in range(1, 70):
            other.zero_grad()
            loss_of(model, rank, step).backward()
            other.step()
        assert comm.step == 0
        return [str(w.message) for w in said]


def test_local_steps_that_never_come_are_asked_for(gang2: Gang) -> None:
    for said in gang2.run(never_stepped):
        assert len(said) == 1
        assert "without a step() of the optimizer that was given to attach" in said[0]


def skipping(rank: int, size: int) -> tuple[Tensor, float]:
    """A step left out on purpose is as if its gradients had never been."""
    with attached("topk(ratio=0.3)" + SMALL, Awkward()) as (model, optimizer, comm):
        for step in range(1, 6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 3:
                before = comm.metrics()["residual_norm"]
                comm.skip()
                assert comm.metrics()["residual_norm"] == before
            else:
                optimizer.step()
        assert comm.step == 5
        comm.check_sync()
        return flat(model), comm.metrics()["skipped_steps"]


def test_a_step_left_out_on_purpose_leaves_no_trace(gang2: Gang) -> None:
    (a, skipped), (b, _) = gang2.run(skipping)
    assert same(a, b)
    assert skipped == 1


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 7))


def taking_turns(rank: int, size: int) -> tuple[Tensor, int, list[str]]:
    """Two optimizers of one attached model, each of which steps after a backward pass of its own."""
    model = deep()
    turns = [torch.optim.SGD(model[:3].parameters(), lr=0.05), torch.optim.SGD(model[3:].parameters(), lr=0.05)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with gossamer.attach(model, turns, "local_sgd(2)", seed=SEED, deadline=DEADLINE) as comm:
            for step in range(1, 6):
                model.zero_grad()
                loss_of(model, rank, step).backward()
                turns[step % 2].step()
            steps = comm.step
            comm.finish()
    return flat(model), steps, [str(w.message) for w in said]


def test_a_round_may_end_in_a_step_in_which_an_optimizer_rests(gang2: Gang) -> None:
    (one, steps, said), (other, _, _) = gang2.run(taking_turns)
    assert steps == 4  # the fifth is still under way
    assert same(one, other)
    assert len(said) == 1
    assert "call attach once for each" in said[0]


def stumbling(rank: int, size: int) -> tuple[Tensor, int]:
    """The optimizer's step that would end a round fails on all ranks, and the loop goes on."""

    def stumble(*_: object) -> None:
        raise RuntimeError("out of memory")

    with attached("local_sgd(2)", deep(), sgd) as (model, optimizer, comm):
        for step in range(1, 6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step != 2:
                optimizer.step()
                continue
            hook = optimizer.register_step_pre_hook(stumble)
            with pytest.raises(RuntimeError, match="out of memory"):
                optimizer.step()
            hook.remove()
        steps = comm.step
        comm.finish()
    return flat(model), steps


def test_a_round_may_end_after_a_step_that_failed(gang2: Gang) -> None:
    (one, steps), (other, _) = gang2.run(stumbling)
    assert steps == 5
    assert same(one, other)
