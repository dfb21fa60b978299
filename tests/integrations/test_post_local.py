"""A schedule that averages gradients at first and models later, in a real loop: buffers, micro-batches, what is unused."""

import torch
from tests.gang import Gang
from tests.integrations.loops import attached, data, same
from torch import Tensor, nn

STEPS = 7


class Normed(nn.Module):
    """With running statistics, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(17, 5), nn.BatchNorm1d(5), nn.Linear(5, 7))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def statistics_and_models(rank: int, size: int, recipe: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    out = list[tuple[Tensor, Tensor, Tensor]]()
    options = {"buffers": "average", "find_unused_parameters": True}
    with attached(recipe, Normed(), decayed, **options) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            (x, y), (more, target) = data(rank, step), data(rank, step + 50)
            with comm.no_sync():
                (model(more) - target).square().mean().backward()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            comm.check_sync()
            mean = model.get_buffer("body.1.running_mean").clone()
            out.append(
                (
                    mean,
                    model.get_parameter("body.0.weight").detach().clone(),
                    model.get_parameter("idle").detach().clone(),
                )
            )
    return out


def test_statistics_are_shared_when_models_meet_and_what_is_unused_stays(gang2: Gang) -> None:
    one, other = gang2.run(statistics_and_models, "scatter(qsgd(bits=4, bucket=16)) + post_local(3, local_sgd(2))")
    for step, (mine, theirs) in enumerate(zip(one, other, strict=True), 1):
        meets = step <= 3 or step % 2 == 0
        assert [same(a, b) for a, b in zip(mine[:2], theirs[:2], strict=True)] == [meets, meets], step
        assert same(mine[2], torch.ones(3))
