"""attach to a model in DistributedDataParallel: every recipe trains in a loop that was written for DDP, by one line."""

from contextlib import ExitStack, nullcontext
from copy import deepcopy

import pytest
import torch
import torch._dynamo
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, Awkward, attached, data, flat, same, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError, GossamerError

pytestmark = pytest.mark.gang


def trained(rank: int, size: int, recipe: str, how: str) -> tuple[Tensor, int]:
    """Four steps of two micro-batches; plain, in DDP with its no_sync(), or with the flag that no_sync() sets."""
    with ExitStack() as stack:
        if how == "plain":
            model, optimizer, comm = stack.enter_context(attached(recipe))
            looped, no_sync = model, comm.no_sync
        else:
            model = Awkward()
            optimizer = sgd(model)
            looped = DistributedDataParallel(model) if how != "flag on a plain model" else model
            comm = stack.enter_context(gossamer.attach(looped, optimizer, recipe, seed=3, deadline=DEADLINE))
            no_sync = looped.no_sync if how == "no_sync" else nullcontext
        for step in range(1, 5):
            x, y = data(rank, step)
            for micro, (xs, ys) in enumerate(zip(x.chunk(2), y.chunk(2))):
                if how.startswith("flag"):
                    looped.require_backward_grad_sync = micro == 1  # pyright: ignore[reportArgumentType]
                with no_sync() if micro == 0 else nullcontext():
                    ((looped(xs) - ys).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        comm.check_sync()
        return flat(model), comm.ledger.sent


@pytest.mark.parametrize("recipe", ["qsgd", "scatter(qsgd()) + local_sgd(2)"])
@pytest.mark.parametrize("how", ["no_sync", "flag", "flag on a plain model"])
def test_a_loop_written_for_ddp_trains_as_a_plain_one(gang2: Gang, recipe: str, how: str) -> None:
    for (plain, sent), (wrapped, also_sent) in zip(
        gang2.run(trained, recipe, "plain"), gang2.run(trained, recipe, how), strict=True
    ):
        assert same(plain, wrapped)
        assert sent == also_sent


def given_back(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """After detach() DDP averages again, and knows nothing of what was."""
    torch.manual_seed(1)
    model = nn.Linear(17, 7)
    ddp = DistributedDataParallel(model)
    gossamer.attach(ddp, sgd(model), "local_sgd(2)").detach()
    x, y = data(rank, 1)
    (ddp(x) - y).square().mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad, flat(model)


def test_detach_gives_the_average_back_to_ddp(gang2: Gang) -> None:
    (one, _), (other, _) = gang2.run(given_back)
    assert same(one, other)


def buffers(rank: int, size: int) -> Tensor:
    """As under DDP, ranks keep rank 0's statistics."""
    model = nn.Sequential(nn.Linear(17, 7), nn.BatchNorm1d(7))
    ddp = DistributedDataParallel(model)
    optimizer = sgd(model)
    with gossamer.attach(ddp, optimizer, "local_sgd(2)"):
        for step in range(1, 3):
            x, y = data(rank, step)
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
    return torch.cat([b.float().view(-1) for b in model.buffers()])


def test_buffers_are_what_ddp_makes_of_them(gang2: Gang) -> None:
    a, b = gang2.run(buffers)
    assert same(a, b)


def refused(rank: int, size: int) -> list[str]:
    said = list[str]()
    hooked = DistributedDataParallel(nn.Linear(17, 7))
    gossamer.ddp.register(hooked, "allreduce").close()
    model = nn.Linear(17, 7)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    for ddp in (hooked, DistributedDataParallel(model)):
        with pytest.raises(AttachError) as caught:
            gossamer.attach(ddp, sgd(ddp), "qsgd")
        said.append(str(caught.value))
    return said


def test_what_ddp_was_told_and_a_recipe_would_not_do_is_refused(gang2: Gang) -> None:
    for hook, ignoring in gang2.run(refused):
        assert "has a communication hook, which would never run once it is attached" in hook
        assert "DDP ignores 'bias', but an attached model is averaged whole" in ignoring


def joined(rank: int, size: int) -> tuple[str, bool]:
    ddp = DistributedDataParallel(nn.Linear(17, 7))
    with gossamer.attach(ddp, sgd(ddp), "qsgd", deadline=DEADLINE):
        with pytest.raises(AttachError) as caught:
            ddp.join()
        with ddp.join(enable=False):
            pass
    return str(caught.value), "join" in vars(ddp)


def test_uneven_inputs_are_refused_before_ranks_wait_for_each_other(gang2: Gang) -> None:
    for said, stays in gang2.run(joined):
        assert "join() of an attached DDP model" in said
        assert not stays


def used_before(rank: int, size: int, recipe: str, how: str) -> tuple[Tensor, Tensor, bool]:
    """A DDP model that has run before it is attached, as a trainer's sanity check does, beside a plain one."""
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Awkward())
    x, y = data(rank, 9)
    if how == "judged":
        with torch.no_grad():
            ddp.eval()(x)
        ddp.train()
    elif how == "judged with gradients":  # DDP prepares an average that never comes
        (ddp(x) - y).square().mean().item()
    else:
        optimizer = sgd(ddp)
        for _ in range(3):
            optimizer.zero_grad()
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
    outcomes = list[Tensor]()
    plain = deepcopy(ddp.module)
    for looped in (plain, ddp):
        optimizer = sgd(looped)
        with gossamer.attach(looped, optimizer, recipe, seed=3, deadline=DEADLINE) as comm:
            for step in range(1, 18):  # strangers are looked for at some of these
                x, y = data(rank, step)
                optimizer.zero_grad()
                (looped(x) - y).square().mean().backward()
                if step == 3:
                    outcomes.append(torch.cat([p.grad.reshape(-1) for p in looped.parameters() if p.grad is not None]))
                optimizer.step()
            outcomes.append(flat(looped))
            sent = comm.ledger.sent
    optimizer = sgd(ddp)  # and DDP has its average back
    x, y = data(rank, 1)
    optimizer.zero_grad()
    (ddp(x) - y).square().mean().backward()
    again = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
    return torch.cat(outcomes), again, sent > 0


@pytest.mark.parametrize("recipe", ["qsgd", "allreduce(fp32()) + local_sgd(20)"])
@pytest.mark.parametrize("how", ["judged", "judged with gradients", "trained"])
def test_a_ddp_model_may_have_run_before_it_is_attached(gang2: Gang, recipe: str, how: str) -> None:
    (one, given_back, _), (other, also, _) = gang2.run(used_before, recipe, how)
    for outcomes in (one, other):
        plain, wrapped = outcomes.chunk(2)
        assert same(plain, wrapped)
    assert same(one, other) == (recipe == "qsgd")  # nobody averaged besides
    assert recipe != "qsgd" or same(given_back, also)


def refused_engine(rank: int, size: int) -> tuple[str, Tensor, int]:
    """After attach has refused, DDP averages as before, and the optimizer has no hook."""
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Linear(17, 7))
    optimizer = sgd(ddp)
    torch._dynamo.config.compiled_autograd = rank == 1
    try:
        with pytest.raises(GossamerError) as caught:
            gossamer.attach(ddp, optimizer, "local_sgd(2)", deadline=DEADLINE)
    finally:
        torch._dynamo.config.compiled_autograd = False
    x, y = data(rank, 1)
    (ddp(x) - y).square().mean().backward()
    return str(caught.value), flat_gradient(ddp), len(optimizer._optimizer_step_pre_hooks)


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_a_refused_attach_leaves_ddp_and_the_optimizer_as_they_were(gang2: Gang) -> None:
    (said, one, _), (other_said, other, hooks) = gang2.run(refused_engine)
    assert said.startswith("rank 1 cannot go on: torch._dynamo.config.compiled_autograd is on")
    assert other_said.startswith("torch._dynamo.config.compiled_autograd is on")
    assert same(one, other)
    assert hooks == 0
