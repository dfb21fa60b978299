"""Accelerated SGD in a world of another size, from plain dictionaries: its aggregate is what a new stage begins from."""

from copy import deepcopy

import torch
from tests.runtime.gym import contents, held, make, parameters, pull, sgd, train

from gossamer.checkpoints import state as checkpoint

RECIPE = "allreduce(fp32()) + accelerated()"


def test_a_plain_dictionary_in_another_world_keeps_the_aggregate() -> None:
    ranks = make(RECIPE, 3, optimizer=sgd(0.05, 0.0))
    train(ranks, pull, 6)
    judged, files = held(ranks[0]), contents(ranks)
    fewer = make(RECIPE, 2, optimizer=sgd(0.05, 0.0))
    for r in fewer:
        r.model.load_state_dict(deepcopy(files[0]["model"]))  # where gradients are taken, and not what is judged
        checkpoint.load(r.worker, [file["comm"] for file in files])
    assert not torch.equal(parameters(ranks)[0], judged)
    assert all(torch.equal(held(r), judged) and torch.equal(x, judged) for r, x in zip(fewer, parameters(fewer)))
    gradients = list[torch.Tensor]()

    def seen(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        gradients.append(
            torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in model.parameters()])
        )
        return loss

    train(fewer, seen, 1)
    torch.testing.assert_close(held(fewer[0]), judged - 0.05 * sum(gradients) / 2)  # a plain step from it
