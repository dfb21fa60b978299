"""Rehearses a recipe's schedule for whole rounds: the steps of its training loop, with all programs cut into pieces."""

from collections.abc import Sequence

from gossamer.planning.dry_run import DryRun, span
from gossamer.planning.events import Busy, Event, Launch, OptimizerSteps, StepEnds, Wait
from gossamer.planning.pieces import Piece, Programs
from gossamer.planning.replay import Action, StartProgram, Step
from gossamer.planning.work import MeasuredWork

TIMED = 8_000_000  # elements of all buckets in a run that is timed; a larger model's work is scaled


class TimedSteps:
    """The steps to replay: `warm` steps, a whole cycle, and the cycle that comes next."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self.names = programs, [bucket.names for bucket in programs.buckets]
        first, last = span(programs.recipe)
        count = 2 * (last - first + 1)  # in the first half nothing was in flight when it began
        run = DryRun.of(programs.recipe, programs.buckets, programs.size)
        while run.step <= first + count:  # what a program asks for is known once a later step has waited for it
            run.take_step()
        self.copies = _copies(run)
        steps = self._resolved(run.events)[:count]
        self.warm = cycle(steps, programs.recipe.schedule.shape.period)
        self.steps = self._with_schedule_work(steps[: 2 * self.warm])

    def _resolved(self, events: Sequence[Event]) -> list[Step]:
        """Steps with each program's pieces in place of its requests."""
        out, step = list[Step](), list[Action]()
        for event in events:
            known = isinstance(event, Launch)
            step.append(StartProgram(event.key, event.lane, self._programs.pieces(event.requests)) if known else event)
            if isinstance(event, StepEnds):
                out.append(tuple(step))
                step.clear()
        return out

    @property
    def overlaps(self) -> bool:
        """True if a program is waited for in a later step than the one that started it."""
        for step in self.steps[self.warm :]:
            started = {action.key for action in step if isinstance(action, StartProgram)}
            waited = {key for action in step if isinstance(action, Wait) for key in action.keys}
            if not waited <= started:
                return True
        return False

    # -- what the schedule itself computes ---------------------------------------------------------------------------------

    def _with_schedule_work(self, steps: Sequence[Step]) -> Sequence[Step]:
        """The steps with what the schedule computes besides its requests: measured here, or counted as passes over memory."""
        programs = self._programs
        if not isinstance(programs.work, MeasuredWork) or programs.work.device != "cpu":  # a rehearsal is on the CPU
            return [self._with_passes(step) for step in steps]
        numels = [bucket.layout.numel for bucket in programs.buckets]
        part = min(TIMED / sum(numels), 1.0)
        run = DryRun.of(programs.recipe, programs.buckets, programs.size, [max(int(part * n), 1) for n in numels])
        for _ in steps:
            run.take_step()
        timed = list[list[float]]()
        for event in run.events:
            if not timed or isinstance(event, StepEnds):
                timed.append([])
            if isinstance(event, Busy):
                timed[-1].append(event.seconds / part)
        return [_busy_after_update(step, sum(seconds)) for step, seconds in zip(steps, timed)]

    def _with_passes(self, step: Step) -> Step:
        """Three passes over each bucket that the schedule itself sends: to read, to change and to write it."""
        starts = sum(isinstance(action, StartProgram) for action in step)
        ready = any(isinstance(action, StartProgram) for action in step[: _updates_at(step)])
        if not starts or ready:
            return step
        mean = sum(bucket.layout.numel for bucket in self._programs.buckets) / len(self._programs.buckets)
        return _busy_after_update(step, 3 * 8 * mean * starts / self._programs.cluster.memory_rate)


def _copies(run: DryRun) -> float:
    """The tensors of a model's size that schedule, mixer and update keep, seen on a model of one number a bucket."""
    kept = [t for bucket in run.buckets for state in bucket.states.values() for t in state.values()]
    return sum(t.numel() for t in kept if t.dim()) / len(run.buckets)


def _updates_at(step: Step) -> int:
    return next((i for i, action in enumerate(step) if isinstance(action, OptimizerSteps)), len(step) - 1)


def _busy_after_update(step: Step, seconds: float) -> Step:
    place = _updates_at(step) + 1
    return (*step[:place], Busy(seconds), *step[place:])


def cycle(steps: Sequence[Step], period: int) -> int:
    """The fewest steps, in whole periods of the schedule, after which the same actions repeat, once they do; else half of all."""
    said = [tuple(map(_without_number, step)) for step in steps]
    late = said[len(said) // 2 :]  # in the first rounds nothing is in flight yet
    for length in range(period, len(late) // 2 + 1, period):
        if all(a == b for a, b in zip(late, late[length:])):
            return length
    return len(late)


def _without_number(action: Action) -> tuple[str | int | tuple[Piece, ...], ...] | Action:
    """What an action does, without the numbers of its programs."""
    match action:
        case StartProgram(_, lane, pieces):  # tickets are numbered too
            return "start", lane, tuple(p._replace(opens=p.opens[:1], needs=p.needs[:1]) for p in pieces)
        case Wait(keys):
            return "wait", len(keys)
        case _:
            return action
