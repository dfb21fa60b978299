"""What was written down, as lines to read from the top."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gossamer.bench.explain.messages import Message
from gossamer.bench.explain.numbers import numbers
from gossamer.bench.explain.run import Explained, ExplainedStep, KeptTensor

WIDTH = 100  # columns, from which a message takes two lines
Rows = list[tuple[str, str, str]]  # whose, what, and the numbers


def as_text(told: Explained) -> str:
    """
    >>> from gossamer.bench.explain import explain
    >>> print(as_text(explain("allreduce")).partition("Step 2")[0])  # doctest: +ELLIPSIS
    allreduce(fp32())
    3 ranks, 8 parameters (bias 2, weight 2 x 3), SGD of rate 0.5
    <BLANKLINE>
    Step 1
      has
        all ranks: parameters ...
    """
    lines = [told.recipe, f"{len(told.steps[0].ranks)} ranks, {model(told)}, {told.optimizer}", ""]
    for step in grouped(told.steps):
        lines += [*_silence(step), ""] if isinstance(step, list) else [*_step(step), ""]
    return "\n".join(lines).rstrip() + "\n"


def model(told: Explained) -> str:
    """Its parameters, in the order in which their gradients are made and travel."""
    shapes = [f"{name} {' x '.join(map(str, shape))}" for name, shape in told.parameters.items()]
    return f"{told.steps[0].ranks[0].before.numel()} parameters ({', '.join(shapes)})"


def grouped(steps: Sequence[ExplainedStep]) -> Iterator[ExplainedStep | list[ExplainedStep]]:
    """Steps, and runs of steps in which nobody says anything."""
    silent = list[ExplainedStep]()
    for step in steps:
        if step.messages:
            if silent:
                yield silent
            silent = []
            yield step
        else:
            silent.append(step)
    if silent:
        yield silent


def _silence(steps: list[ExplainedStep]) -> list[str]:
    return [
        f"{title(steps)}: nobody says anything, every rank goes its own way",
        *_table("after it", outcome(steps[-1])),
    ]


def title(steps: ExplainedStep | list[ExplainedStep]) -> str:
    """
    >>> title([ExplainedStep(3, [], [], []), ExplainedStep(4, [], [], [])])
    'Steps 3 to 4'
    """
    if isinstance(steps, ExplainedStep):
        return f"Step {steps.number}"
    first, last = steps[0].number, steps[-1].number
    return f"Step {first}" if first == last else f"Steps {first} to {last}"


def _step(step: ExplainedStep) -> list[str]:
    lines = [title(step), *_table("has", given(step))]
    lines += ["  is said", *(f"    {line}" for said in step.messages for line in message(said))]
    lines += [f"  decided: {text}" for text in step.decisions]
    return [*lines, *_table("after it", outcome(step))]


def message(said: Message) -> list[str]:
    """One line, or two where one would be long.

    >>> message(Message(1, "rank 0 to rank 2", "signs + - of 0.3", 5, "9a 01", "ternary()"))
    ['rank 0 to rank 2: signs + - of 0.3   (5 bytes: 9a 01, by ternary())']
    """
    line = f"{said.way}: {said.says}"
    aside = ", ".join(filter(None, [_length(said), f"by {said.by}" if said.by else ""]))
    if not aside:
        return [line]
    return [f"{line}   ({aside})"] if len(line) + len(aside) < WIDTH else [line, f"  ({aside})"]


def _length(said: Message) -> str:
    if not said.bytes:
        return ""
    return f"{said.bytes} byte{'s' * (said.bytes != 1)}" + (f": {said.hex}" if said.hex else "")


def given(step: ExplainedStep) -> Rows:
    """What ranks have before it."""
    rows = _alike("parameters", [r.before for r in step.ranks])
    for part in range(max(len(r.gradients) for r in step.ranks)):
        name = "gradient" if part == 0 else f"gradient {part + 1}"
        rows += _alike(name, [r.gradients[part] if part < len(r.gradients) else None for r in step.ranks])
    return rows + _kept([r.kept_before for r in step.ranks])


def outcome(step: ExplainedStep) -> Rows:
    """What their optimizers step with, and what they have when it is over."""
    used = _alike("steps with", [r.used for r in step.ranks])
    return used + _alike("parameters", [r.after for r in step.ranks]) + _kept([r.kept for r in step.ranks])


def _kept(ranks: Sequence[Sequence[KeptTensor]]) -> Rows:
    """Each entry of every part's memory."""
    entries = dict.fromkeys((k.role, k.name) for kept in ranks for k in kept)
    rows = Rows()
    for role, name in entries:
        found = [next((k.values for k in kept if (k.role, k.name) == (role, name)), None) for kept in ranks]
        rows += _alike(f"{role} keeps {name}", found)
    return rows


def _alike(name: str, values: Sequence[Tensor | None]) -> Rows:
    """One row if it is the same on all ranks, else one for each that has it."""
    first = values[0]
    if first is not None and len(values) > 1 and all(v is not None and torch.equal(first, v) for v in values):
        return [("all ranks", name, numbers(first))]
    return [(f"rank {rank}", name, numbers(value)) for rank, value in enumerate(values) if value is not None]


def _table(head: str, rows: Rows) -> list[str]:
    return [f"  {head}", *(f"    {who}: {what} {said}" for who, what, said in rows)]
