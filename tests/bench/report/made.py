"""A record such as `gossamer compare` leaves: eight runs on four hosts at 200 Mbit/s, one dead, one with a controller."""

import math
import random

from gossamer.bench.record import Evaluation, Record, Run, Step

MODEL = 34_900_000  # bytes that DDP sends per worker and step
SHAPES = {  # name: recipe, seconds per step, codec, wait, bytes as a fraction of DDP's, how much slower per step it learns
    "ddp": ("ddp", 1.571, 0.0, 0.0, 1.0, 1.0),
    "bf16": ("allreduce(bf16())", 0.832, 0.004, 0.66, 0.5, 1.0),
    "qsgd": ("scatter(qsgd(bits=4, bucket=512))", 0.338, 0.018, 0.158, 0.126, 1.04),
    "terngrad": ("scatter(ternary()) + error_feedback()", 0.214, 0.014, 0.04, 0.051, 1.12),
    "topk": ("gather(topk(ratio=0.01)) + error_feedback()", 0.219, 0.031, 0.035, 0.06, 1.5),
    "powersgd": ("allreduce(powersgd(rank=4)) + error_feedback()", 0.205, 0.022, 0.02, 0.03, 2.9),
    "slowmo": ("allreduce() + slowmo(every=8)", 0.335, 0.0, 0.18, 0.125, 1.25),
    "sgp": ("allreduce(fp32()) + gossip()", 0.61, 0.002, 0.45, 0.33, 1.6),
}
LAYERS = ["embed.weight"] + [
    f"blocks.{i}.{part}.weight" for i in range(6) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
]
ALARM = "rank 2 did not answer within 20 s\n  step 57, bucket 3, verb AllToAll\n  <its host was killed> & gone"


def made(recipes: list[str] | None = None, steps: int = 150, dead: str = "sgp", evaluate: bool = True) -> Record:
    """The same numbers on every call."""
    draw = random.Random(3)
    # As `compare` does it: the others train on, for a while, until they are where the baseline ended.
    runs = [
        _run(
            name,
            draw,
            57 if name == dead else steps if name == "ddp" else int(steps * min(2.0, SHAPES[name][5] * 1.1)),
            name == dead,
            evaluate,
        )
        for name in recipes or SHAPES
    ]
    return Record(
        command="gossamer compare ddp bf16 qsgd terngrad topk powersgd slowmo sgp --hosts 4 --rate 200mbit --steps 150",
        created="2025-11-21T04:43:50+00:00",
        workload="stdlib-lm",
        summary="Byte-level transformer on the Python standard library",
        metric="held-out loss (nats/byte)",
        lower_is_better=True,
        parameters=5_816_320,
        hosts=4,
        rate="200mbit",
        seed=7,
        versions={"gossamer": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.4.6", "python": "3.11.7"},
        machine="2 cores, x86_64, Linux 6.1",
        runs=runs,
    )


def _run(name: str, draw: random.Random, steps: int, dead: bool, evaluate: bool) -> Run:
    recipe, pace, codec, wait, share, slow = SHAPES[name]
    run = Run(name, recipe, status="failed" if dead else "ok", error=ALARM if dead else "")
    run.about, run.yardstick = f"What {name} does.", name == "ddp"
    clock, sent = 0.0, 0
    if evaluate:
        run.evaluations.append(Evaluation(0, 0.0, 0, _loss(0, slow)))
    for k in range(1, steps + 1):
        clock += pace * draw.uniform(0.93, 1.12) + (0.8 if k == 1 else 0.0)
        sent += int(MODEL * share)
        step = Step(k, clock, _loss(k, slow) + draw.gauss(0, 0.09), sent)
        if name != "ddp":  # it does not say where it waits
            parts = 0.148 * draw.uniform(0.95, 1.1), codec * draw.uniform(0.9, 1.2), wait * draw.uniform(0.8, 1.2)
            step.compute, step.codec, step.wait = parts
        run.steps.append(step)
        if evaluate and k % 10 == 0:
            run.evaluations.append(Evaluation(k, clock, sent, _loss(k, slow) + draw.gauss(0, 0.004)))
    if not dead:
        run.logical_bytes, run.wire_bytes = int(sent / 1.5), sent
        run.nic_bytes = int(sent * (1.083 if name == "topk" else 1.031))
    _extras(name, run, draw)
    return run


def _extras(name: str, run: Run, draw: random.Random) -> None:
    if name in ("qsgd", "terngrad", "topk", "powersgd"):
        level = {"qsgd": 0.21, "terngrad": 0.74, "topk": 0.88, "powersgd": 0.55}[name]
        run.layer_errors = {layer: level * draw.uniform(0.75, 1.12) for layer in LAYERS}
    if name in ("terngrad", "topk", "powersgd"):
        scale = {"terngrad": 0.8, "topk": 4.1, "powersgd": 2.2}[name]
        run.residuals = [
            (s.step, scale * (1 - math.exp(-s.step / 18)) * draw.uniform(0.93, 1.07)) for s in run.steps[::3]
        ]
    if name == "powersgd":
        run.decisions = [
            (1, "rank 4 on every matrix: the first steps matter"),
            (40, "rank 2 on blocks.0 to blocks.5: gradient norms changed by 3 % only"),
            (90, "rank 4 again: the learning rate fell"),
        ]


def _loss(step: int, slow: float) -> float:
    return 3.92 + 1.7 * math.exp(-step / (55 * slow))
