"""What the checks of a training loop cost a step, alone: is the model as it was, does anybody keep a gradient, new views.

    python benchmarks/checks.py

In microseconds, for the language model of benchmarks/overhead.py, beside the processor time of computing one of its steps.
"""

import statistics
import time
from collections.abc import Callable

import torch

from gossamer.bench.workloads.transformer import Transformer
from gossamer.integrations.checks.param_watch import ParamWatch
from gossamer.integrations.checks.wrappers import refuse_ran_wrapper
from gossamer.integrations.grad_buckets import GradBuckets
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, params_of


def microseconds(call: Callable[[], object], times: int) -> float:
    taken = list[float]()
    for _ in range(times):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return 1e6 * statistics.median(taken)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    named = dict(model.named_parameters())
    worker = Worker(Recipe.of("allreduce"), params_of(named), optimizer, 0, 2)
    roster, intake = ParamWatch(model, named), GradBuckets(worker, lambda i, flat: None)

    def compute() -> None:
        optimizer.zero_grad()
        model(torch.randint(2048, (4, 33))).backward()
        optimizer.step()

    def views() -> None:
        for channel, flat in zip(worker.buckets, intake.flats, strict=True):
            channel.put_gradient(flat)

    step = microseconds(compute, 30)
    every = {
        "is the model as it was": microseconds(roster.is_as_before, 1000),
        "does anybody keep a gradient": microseconds(intake.reset, 1000),
        "views of the average as gradients": microseconds(views, 300),
    }
    print(f"computing a step: {step:.0f} us")
    for what, cost in every.items():
        print(f"{what}: {cost:.1f} us, {100 * cost / step:.3f} % of it")
    print(f"all of them: {100 * sum(every.values()) / step:.3f} %")
    once = microseconds(lambda: refuse_ran_wrapper(model), 5)
    print(f"is a wrapper around it, at the first, second and sixteenth backward: {once:.0f} us")


main()
