"""inf and NaN in gradients, at random steps of random ranks, under every recipe of the laws' fleet, on real processes.

    python -m campaigns.nonfinite [--rounds 2] [--seed 1] [--ranks 2]

Each run is a loop with a GradScaler, some of whose gradients are spoilt (backup workers, which refuse one, are left out);
under gossip a parameter of one rank becomes NaN as well. It judges: every run ends; model, optimizer, memories and running statistics are finite on all ranks; what should be equal is equal
(`check_sync`); all ranks tell the same of who spoilt how much, and nobody is blamed who did nothing. Prints counts.
"""

import argparse
import random
import sys
import warnings
from typing import Any

import torch
from tests.gang import Gang, GangError
from tests.integrations.loops import Awkward, attached, loss_of
from tests.runtime import fleet
from torch import nn

STEPS = 12
Spoil = dict[tuple[int, int], float]  # (rank, iteration): what the loss is multiplied by


class Normalised(nn.Module):
    """The awkward model, and statistics that run."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = Awkward(), nn.BatchNorm1d(17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x))


def run(
    rank: int, size: int, recipe: str, spoil: Spoil, buffers: str | None, sick: tuple[int, int] | None
) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*was not finite at step")  # it is what this injects
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    with attached(recipe, Normalised(), scaler=scaler, buffers=buffers) as (model, optimizer, comm):
        for i in range(1, STEPS + 1):
            optimizer.zero_grad()
            if (rank, i) == sick:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] = float("nan")
            last = False
            while not last:
                with comm.accumulating() as last:
                    loss = loss_of(model, rank, i) * spoil.get((rank, i), 1.0) / comm.accumulate
                    scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        comm.check_sync()
        kept = [*model.state_dict().values(), *comm.state_dict().values()]
        kept += [v for state in optimizer.state.values() for v in state.values()]
        numbers = [t for t in kept if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return {"finite": all(bool(t.isfinite().all()) for t in numbers), "spoilt": comm.spoilt}


def judge(outcomes: list[dict[str, Any]], spoil: Spoil, alike: bool) -> str:
    """What is wrong; empty if nothing is."""
    if not all(outcome["finite"] for outcome in outcomes):
        return "something is not finite"
    if alike and any(outcome["spoilt"] != outcomes[0]["spoilt"] for outcome in outcomes):
        return f"ranks tell different things: {[outcome['spoilt'] for outcome in outcomes]}"
    innocent = {rank for outcome in outcomes for rank in outcome["spoilt"]} - {rank for rank, _ in spoil}
    return f"ranks {sorted(innocent)} are blamed and did nothing" if innocent else ""


def plan(recipe: str, rng: random.Random, size: int) -> tuple[Spoil, str | None]:
    spoil = {
        (rng.randrange(size), rng.randint(1, STEPS)): rng.choice([float("inf"), float("-inf"), float("nan")])
        for _ in range(rng.randint(1, 4))
    }
    averages = recipe in fleet.SYNCHRONOUS
    buffers = rng.choice(["average", "broadcast", "local"]) if recipe not in fleet.GOSSIP else "local"
    return spoil, buffers if not averages or rng.random() < 0.5 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rng, gang = random.Random(args.seed), Gang(args.ranks)
    counts = {"runs": 0, "injections": 0, "wrong": 0, "errors": 0}
    for recipe in [*fleet.SYNCHRONOUS, *fleet.LOCAL, *fleet.OVERLAP, *fleet.GOSSIP] * args.rounds:
        spoil, buffers = plan(recipe, rng, args.ranks)
        sick = (rng.randrange(args.ranks), rng.randint(2, STEPS - 4)) if recipe in fleet.GOSSIP else None
        counts["runs"] += 1
        counts["injections"] += len(spoil)
        try:
            said = judge(
                gang.run(run, recipe, spoil, buffers, sick), spoil | ({sick: 0.0} if sick else {}), sick is None
            )
        except GangError as error:
            counts["errors"] += 1
            said = str(error)
        else:
            counts["wrong"] += bool(said)
        if said:
            print(f"{recipe} with {spoil}, buffers {buffers}: {said}", flush=True)
    gang.close()
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    sys.exit(1 if counts["wrong"] or counts["errors"] else 0)


if __name__ == "__main__":
    main()
