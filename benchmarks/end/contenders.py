"""Who is trained to the end, and in which order: what matters most comes first."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.end.records import DENSE, JUDGED, TUNING, Job, Run, Study

from gossamer.recipes import presets

RATES = (0.5, 1.0, 2.0)  # multiples of the workload's, of which the best is taken
# Each element moves by the whole learning rate, or each matrix by a norm of it, whatever the gradient's length. Under randk
# it waits for about a hundred steps, then moves by the sum of all of them.
SMALL_STEPS = dict.fromkeys(("signsgd", "distributed_lion", "demo", "randk"), (0.01, 0.03, 0.1))
FIRST = (  # what most people would take, and what was behind dense in earlier runs
    *("qsgd", "topk", "powersgd", "local_sgd", "slowmo", "sgp", "bf16", "int8", "terngrad", "local_gradients"),
    *("sketched_sgd", "ef21", "fetchsgd", "overlap_local_sgd", "diloco", "streaming_diloco", "dgc", "diana"),
)
MORE = ("diloco(50)", "scatter(qsgd()) + local_sgd(32)", "terngrad(last='qsgd')", "streaming_diloco(50)")
TWELVE = (  # on workloads whose runs are long
    *("qsgd", "bf16", "topk", "powersgd", "terngrad(last='qsgd')", "local_gradients", "local_sgd"),
    *("scatter(qsgd()) + local_sgd(32)", "slowmo", "diloco(50)", "sgp", "ef_signsgd"),
)
LEFT_OUT = {
    "auto": "it chooses by measured times, and virtual ranks have none",
    "accordion_batch": "its batch grows in mid-run, so that as many steps are more samples than others have",
}


def text_of(name: str, study: Study) -> str:
    """A preset as it is trained: with its defaults, and what it must know of the run.

    An epoch is a fiftieth of the run, so that Accordion decides in time; a warm-up is a fifth, as those who propose it say.

    >>> [text_of(name, Study("fashion", 2500)) for name in ("qsgd", "dqsgd", "accordion", "post_local", "hierarchical")]
    ['qsgd', 'dqsgd(2500)', 'accordion(50)', 'post_local(1250)', 'hierarchical(ranks=2)']
    """
    if name == "hierarchical":  # the default is a node of eight
        return "hierarchical(ranks=2)"
    half, steps = study.steps // 2, study.steps
    told = {"epoch": steps // 50, "steps": half if name == "post_local" else steps, "warmup": steps // 5}
    told["freeze"] = told["warmup"]
    parameters = inspect.signature(presets()[name]).parameters.values()
    missing = [str(told[p.name]) for p in parameters if p.default is p.empty]
    return f"{name}({', '.join(missing)})" if missing else name


def all_presets(study: Study) -> list[str]:
    """Every preset but dense, which is what they are compared with, and a few recipes besides."""
    names = [*FIRST, *(n for n in presets() if n not in (*FIRST, *LEFT_OUT, DENSE))]
    first = [text_of(name, study) for name in names[: len(FIRST)]]
    return [*first, *MORE, *(text_of(name, study) for name in names[len(FIRST) :])]


def rates_of(contender: str) -> tuple[float, ...]:
    return SMALL_STEPS.get(contender.partition("(")[0], RATES)


def best_rate(contender: str, known: Mapping[Job, Run]) -> float | None:
    """The best of three on the tuning seeds that all three were trained on; None while there is none."""
    tried = {rate: {s: known.get(Job(contender, rate, s)) for s in TUNING} for rate in rates_of(contender)}
    seeds = [s for s in TUNING if all(runs[s] is not None for runs in tried.values())]
    means = {rate: _mean([runs[s] for s in seeds]) for rate, runs in tried.items()}
    ended = {rate: mean for rate, mean in means.items() if mean is not None}
    return max(ended, key=lambda rate: ended[rate]) if ended else None


def _mean(runs: Sequence[Run | None]) -> float | None:
    """Of the quality, where more is better; None if one of them did not end."""
    if not runs or any(r is None or r.quality is None for r in runs):
        return None
    return fmean((-1 if r.lower_is_better else 1) * r.quality for r in runs if r is not None and r.quality is not None)


def jobs(contenders: Sequence[str], known: Mapping[Job, Run]) -> Iterator[Job]:
    """All runs of a table in the order of their importance; `known` grows while they are made.

    Dense on all seeds; everybody on the first; the three rates on a tuning seed, and the best of them on the first; then all
    other seeds. A recipe that is refused once is not asked again.
    """
    for job in _wanted(contenders, known):
        first = known.get(Job(job.contender, 1.0, JUDGED[0]))
        if job not in known and (first is None or first.outcome != "refused"):
            yield job


def _wanted(contenders: Sequence[str], known: Mapping[Job, Run]) -> Iterator[Job]:
    everybody = [DENSE, *contenders]
    yield from (Job(DENSE, 1.0, seed) for seed in JUDGED)
    yield from (Job(contender, 1.0, JUDGED[0]) for contender in contenders)
    for contender in everybody:
        yield from (Job(contender, rate, TUNING[0]) for rate in rates_of(contender))
        yield from _at_best(contender, known, JUDGED[:1])
    for seed in JUDGED[1:]:
        for contender in everybody:
            yield Job(contender, 1.0, seed)
            yield from _at_best(contender, known, (seed,))


def _at_best(contender: str, known: Mapping[Job, Run], seeds: Sequence[int]) -> Iterator[Job]:
    best = best_rate(contender, known)
    if best is not None:
        yield from (Job(contender, best, seed) for seed in seeds)
