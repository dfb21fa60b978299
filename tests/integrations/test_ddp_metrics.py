"""What a DDP hook tells: the numbers that attach gives, at the same moments, and whether the replicas are equal."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED, attached, loss_of, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import gossamer
from gossamer.core.errors import PeerError

pytestmark = pytest.mark.gang

RECIPE = "topk(ratio=0.1) + bucket(0.0005)"
# Times; and totals, for attach copies rank 0's model, and DDP has done so before.
NOT_ALIKE = {"exposed_seconds", "exposed_seconds_per_step", "step_seconds", "sent_bytes", "received_bytes"}

Told = list[tuple[int, dict[str, float]]]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(17, 17) for _ in range(4)), nn.Linear(17, 7))


def watchers() -> int:
    return len(optimizers._global_optimizer_post_hooks)


def hooked(rank: int, size: int, steps: int) -> dict[str, Any]:
    told: Told = []
    model = model_of()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    before = watchers()
    hook = gossamer.ddp.register(
        ddp, RECIPE, seed=SEED, deadline=DEADLINE, on_metrics=lambda *seen: told.append(seen), metrics_every=3
    )
    optimizer, stranger = sgd(model), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    strange = 0
    try:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            known = len(told)
            stranger.step()  # has nothing to do with it
            strange += len(told) - known
            optimizer.step()
        requests, metrics = hook.ledger.requests, hook.metrics()
        hook.check_sync()
        if rank == 1:
            with torch.no_grad():
                model.get_parameter("2.weight")[0, 0] += 1
        with pytest.raises(PeerError, match=r"2\.weight differs between ranks \[0\] and \[1\]"):
            hook.check_sync()
        hook.load_state_dict(hook.state_dict())
        anew = hook.metrics()
    finally:
        hook.close()
    return {
        "told": told,
        "strange": strange,
        "metrics": metrics,
        "anew": anew,
        "requests": requests,
        "left": watchers() - before,
    }


def attached_loop(rank: int, size: int, steps: int) -> Told:
    told: Told = []
    with attached(RECIPE, model_of(), on_metrics=lambda *seen: told.append(seen), metrics_every=3) as (model, opt, _):
        for step in range(1, steps + 1):
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            opt.step()
    return told


def test_a_hook_tells_what_attach_tells(gang2: Gang) -> None:
    for seen, wanted in zip(gang2.run(hooked, 7), gang2.run(attached_loop, 7), strict=True):
        assert [step for step, _ in seen["told"]] == [step for step, _ in wanted] == [3, 6]
        for (_, by_hook), (_, by_attach) in zip(seen["told"], wanted, strict=True):
            assert by_hook.keys() == by_attach.keys()
            assert all(by_hook[key] == by_attach[key] for key in by_hook.keys() - NOT_ALIKE)
            assert 0 < by_hook["exposed_seconds_per_step"] < by_hook["step_seconds"]
            assert by_hook["residual_norm"] > 0
        assert seen["strange"] == 0
        assert seen["requests"] > 0
        assert seen["metrics"]["step"] == seen["anew"]["step"] == 7
        assert seen["metrics"]["ratio_to_dense"] == seen["told"][0][1]["ratio_to_dense"]
        assert seen["anew"]["ratio_to_dense"] == 1.0
        assert seen["left"] == 0


def unwatched(rank: int, size: int) -> int:
    before = watchers()
    hook = gossamer.ddp.register(DistributedDataParallel(model_of()), RECIPE, deadline=DEADLINE)
    try:
        return watchers() - before
    finally:
        hook.close()


def test_without_a_logger_no_optimizer_is_watched(gang2: Gang) -> None:
    assert gang2.run(unwatched) == [0, 0]


def skipping(rank: int, size: int) -> Told:
    """Rank 1 overflows in the third step; gradients were averaged all the same, and the scaler leaves the step out."""
    told: Told = []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    model = model_of()
    ddp, optimizer = DistributedDataParallel(model), sgd(model)
    hook = gossamer.ddp.register(
        ddp, RECIPE, deadline=DEADLINE, scaler=scaler, on_metrics=lambda *seen: told.append(seen), metrics_every=3
    )
    for step in range(1, 8):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, rank, step) * (float("inf") if (rank, step) == (1, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    hook.close()
    return told


def test_a_skipped_step_is_told_with_the_next(gang2: Gang) -> None:
    for told in gang2.run(skipping):
        assert [step for step, _ in told] == [4, 6]
        assert told[0][1]["sent_bytes"] + told[1][1]["sent_bytes_per_step"] * 2 == told[1][1]["sent_bytes"]
        said = 1 / 4  # in one of the first four steps a byte says whose fault it was that it was skipped
        assert told[0][1]["sent_bytes_per_step"] - said == told[1][1]["sent_bytes_per_step"] > 0
