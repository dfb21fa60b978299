"""Backup workers (Chen, Pan, Monga, Bengio, Jozefowicz 2016): do not wait for the slowest."""

import random
from statistics import fmean

import torch
from torch import nn

from gossamer.bench.claims import DEAR, Evidence, Figure, PaperClaim, Rows, Statement, Study
from gossamer.bench.claims.clocks import SPLITS, best_split, throughput
from gossamer.bench.claims.verdict import Judgement, all_of, apart, better, gaps, no_worse
from gossamer.bench.tune.training import batches_of, crew_of, judge
from gossamer.bench.workloads import get
from gossamer.recipe import Recipe
from gossamer.simulate import Backward, Seconds, train, train_on_arrival

RANKS, EVERY = 50, 20
SPARE = (0, 1, 2, 4, 8, 16)
SYNCHRONOUS = {f"{b} spare": {"spare": b, "updates": 200, "lr": 8.0} for b in SPARE}


def law(seed: int) -> Seconds:
    """Seconds of computing: .8, and an exponential of mean .2."""
    return lambda rank, step: 0.8 + random.Random(f"{seed} {rank} {step}").expovariate(5.0)


def synchronous(seed: int, spare: int, updates: int, lr: float) -> Rows:
    """Updates without the `spare` slowest ranks: accuracy by updates and by virtual seconds."""
    task = get("digits", seed=seed)
    task.prepare()
    crew = crew_of(task, Recipe.of(f"backup({spare})"), lr, RANKS)
    backward, seconds = batches_of(task, RANKS), law(seed)
    rows: Rows = {"updates": [0], "seconds": [0.0], "accuracy": [judge(task, crew[:1])]}
    while rows["updates"][-1] < updates:
        train(crew, backward, EVERY, seconds=seconds)
        rows["updates"].append(rows["updates"][-1] + EVERY)
        rows["seconds"].append(rows["seconds"][-1] + max(r.clock for r in crew))
        rows["accuracy"].append(judge(task, crew[:1]))
    return rows


def on_arrival(seed: int, updates: int, lr: float) -> Rows:
    """Every gradient on arrival, at a rate of its own; as many gradients as without spare ranks."""
    task = get("digits", seed=seed)
    task.prepare()
    backward: Backward = batches_of(task, RANKS)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = task.optimizer(model)
        for group in made.param_groups:
            group["lr"] *= lr
        return made

    run = train_on_arrival(task.model, optimizer, RANKS, backward, updates * RANKS, law(seed))
    fine = torch.isfinite(torch.tensor(run.losses[-RANKS:])).all()
    return {
        "seconds": [run.seconds],
        "accuracy": [task.evaluate(run.model) if fine else float("nan")],
        "staleness": [fmean(run.staleness)],
    }


def _quality(evidence: Evidence) -> Judgement:
    without, four = (evidence.last("synchronous", f"{b} spare", "accuracy") for b in (0, 4))
    start = evidence.first("synchronous", "0 spare", "accuracy")
    slow, fast = (evidence.last("synchronous", f"{b} spare", "seconds") for b in (0, 4))
    return all_of({"as good": no_worse(gaps(four, without, start), 0.02), "faster": better(apart(slow, fast), "s")})


def _time_to(evidence: Evidence, spare: int) -> dict[int, float]:
    """Virtual seconds until the accuracy that no spare ranks end with; infinite if it was not reached."""
    target = evidence.last("synchronous", "0 spare", "accuracy")
    found = dict[int, float]()
    for seed, run in evidence.run("synchronous", f"{spare} spare").items():
        there = (t for t, a in zip(run.rows["seconds"], run.rows["accuracy"], strict=True) if a >= target[seed])
        found[seed] = next(there, float("inf"))
    return found


def _pays(evidence: Evidence) -> Judgement:
    without = _time_to(evidence, 0)
    judged = {b: better(apart(without, _time_to(evidence, b)), "s") for b in SPARE[1:]}
    best = next((b for b in judged if judged[b].verdict == "holds"), None)
    best = next((b for b in judged if judged[b].verdict == "partly"), SPARE[1]) if best is None else best
    late = evidence.last("asynchronous", "on arrival", "accuracy")
    four = evidence.last("synchronous", "4 spare", "accuracy")
    return all_of({f"{best} spare ranks": judged[best], "4 spare, against asynchronous": better(apart(four, late))})


def _figures(evidence: Evidence) -> list[Figure]:
    lines = [evidence.mean_line("synchronous", f"{b} spare", "seconds", "accuracy") for b in SPARE]
    return [Figure("accuracy", "Accuracy on digits, 50 ranks", "virtual seconds", "accuracy", lines=lines)]


CLAIM = PaperClaim(
    name="backup",
    paper="Chen, Pan, Monga, Bengio, Jozefowicz 2016: Revisiting Distributed Synchronous SGD. The abstract.",
    module=__name__,
    statements=(
        Statement("a", "Synchronous updates with backup workers 'can avoid asynchronous noise while mitigating for the worst stragglers'",
            "4 of 50 spare: the gap to none at equal updates is at most 2 % (upper bound), in less time (lower bound)", "holds", _quality),
        Statement("b", "They 'converge faster and to better test accuracies'", "some number of spare ranks is faster to the accuracy without (bound); 4 spare end above asynchronous (bound)",
            "holds", _pays),
        Statement("c", "The best split of 100 machines.",
            "three laws: the best of the tried numbers of spare ranks is within 50 % of what order statistics say; all seeds",
            "holds", best_split),
        Statement("d", "The asynchronous error grows with staleness.", "four values", "holds", waits="a run at fixed staleness"),
    ),
    setup=("digits on 50 virtual ranks of 16 images, 200 updates; computing takes .8 s and an exponential of mean .2 s.",
           "What travels takes no time. Gradients of late ranks are dropped. c: 100 ranks that only compute, 25 updates.",
           "Asynchronous: each gradient on arrival, as many in all. Rates are the best of five each on seed 0: 8 and .02 of the usual."),
    limits="Inception on 200 GPUs, and queues at a parameter server.",
    plan={
        "synchronous": Study(synchronous, SYNCHRONOUS, quick={"updates": 20}, seeds=DEAR),
        "asynchronous": Study(on_arrival, {"on arrival": {"updates": 200, "lr": 0.02}}, quick={"updates": 4}, seeds=DEAR),
        "split": Study(throughput, SPLITS, quick={"steps": 5}, seeds=DEAR),
    },
    methods=("gossamer.simulate", "gossamer.schedules.backup_workers", "gossamer.bench.claims.clocks"),
    figures=_figures,
)  # fmt: skip
