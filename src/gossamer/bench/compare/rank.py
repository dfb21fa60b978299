"""Run one rank of a comparison: `gossamer.bench.compare.rank PLAN`, in JSON. Rank 0 sends events to the launcher."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count, islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gossamer.bench import workloads
from gossamer.bench.compare import checkpoints, events
from gossamer.bench.compare.control_group import ControlGroup, attempt, meet, new_group
from gossamer.bench.compare.events import OnEvent, RankEvent, tell
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.rank_run import RankRun
from gossamer.bench.lab import in_lab, name_rank
from gossamer.bench.record import Evaluation, Step
from gossamer.bench.workloads.emulated import emulated
from gossamer.core import plugins
from gossamer.core.errors import GossamerError, PeerError
from gossamer.core.process_exit import exit_in_order

# Events that a resumed run must not lose.
HISTORY = (Step, Evaluation, events.ResidualNorm, events.RecipeChange, events.SpoiltCounts, events.ModelAges)
START = 60.0  # seconds at least for the ranks to meet: all load torch first, on few cores


def take_part(plan: ComparePlan, on_event: OnEvent) -> int:
    """Take part in a comparison as one rank; return 1 if a run failed. Rank 0 calls `on_event` with every event."""
    torch.set_num_threads(1)
    for each in plan.imports:
        plugins.import_named(each)
    try:
        meet(max(plan.deadline, START))
    except PeerError as error:
        return _give_up(str(error), on_event)
    try:
        code = RankLoop(plan, on_event).run()
    except GossamerError as error:
        who = name_rank(dist.get_rank(), plan.per_host)
        return _give_up(f"{who}: {error}", on_event if dist.get_rank() == 0 else None)
    if code == 0:  # after a failure the other ranks may be gone
        _shut_down()
    return code


def _shut_down() -> None:
    """Destroy the process group: a backend thread that frees a tensor while Python exits aborts the process."""
    with suppress(RuntimeError):  # a rank that dies now has done its work
        dist.barrier()  # torch 2.6 hangs if a collective still holds its last tensors
        dist.destroy_process_group()


def _give_up(why: str, on_event: OnEvent | None) -> int:
    if on_event is not None:
        on_event(RankEvent(events.Broken(why[:1500])))
    else:
        print(why, file=sys.stderr, flush=True)
    return 1


class RankLoop:
    """One rank's main loop: trains all runs in slices until each one is done."""

    def __init__(self, plan: ComparePlan, on_event: OnEvent) -> None:
        self.plan, self.on_event = plan, on_event
        self.control = ControlGroup(plan.deadline, plan.per_host)
        self.alive = dict[str, RankRun]()
        self.reached = dict[str, float]()  # the last quality of each run
        self.saved = dict[str, int]()
        self.history: checkpoints.History = []  # events of the one run of a plan with checkpoints; rank 0 has them
        self.failures = 0
        self.lower = workloads.find(plan.workload).lower_is_better

    def run(self) -> int:
        plan = self.plan
        workload = emulated(workloads.get(plan.workload, seed=plan.seed, **plan.options), plan.compute)
        told = {k: v for k, v in asdict(plan).items() if k != "checkpoint"}
        self.control.same("the ranks were started with different commands", told)
        self.control.same("the ranks have different data", {"the data's hash": workload.fingerprint()})
        metric = workloads.find(plan.workload).metric  # sacrebleu may be on some hosts alone
        self.control.same("the ranks judge by different metrics", {"the metric": metric})
        self._tell(events.Started(dist.get_world_size(), in_lab()))
        for name, kind in plan.contenders.items():
            self._add(name, kind, workload)
        self._rounds()
        for run in self.alive.values():
            attempt(self.control, run.close)
        self._tell(events.AllDone())
        return 1 if self.failures else 0

    def _tell(self, what: Any, run: str = "") -> None:
        if dist.get_rank() == 0:
            self.on_event(RankEvent(what, run))
            if self.plan.checkpoint and isinstance(what, HISTORY):
                self.history.append((events.NAMES[type(what)], vars(what)))

    def _together(self, name: str, do: Callable[[], None]) -> bool:
        """Run an action on all ranks; if it fails, drop the run and let the others go on. Returns True on success."""
        why = attempt(self.control, do)
        if not why:
            return True
        self.failures += 1
        self._tell(events.Failed(why), name)
        lost = self.alive.pop(name, None)
        if lost is not None:
            attempt(self.control, lost.close)
        return False

    def _add(self, name: str, kind: str, workload: workloads.Workload) -> None:
        # All ranks make the groups in one order, even if the run fails to start.
        group = new_group(self.plan.deadline)

        def make() -> None:
            self.alive[name] = RankRun(name, kind, workload, self.plan, group)

        if not self._together(name, make):
            return
        run = self.alive[name]
        if self.plan.resume and not self._together(name, lambda: self._go_on(run)):
            return
        self.saved[name] = run.steps_done
        self._tell(events.Entered(run.recipe, run.steps_done), name)
        self._together(name, lambda: self._judge(run))

    def _go_on(self, run: RankRun) -> None:
        """Resume a run from its checkpoint, and send its earlier events again."""
        told = checkpoints.restore(self.plan, self.control, run)
        done = run.steps_done  # its model is evaluated again
        self.history = [(e, facts) for e, facts in told if not (e == "evaluation" and facts["step"] == done)]
        for start in range(0, len(self.history), 100):  # lines longer than 64 KiB would be cut
            self._tell(events.History(self.history[start : start + 100]), run.name)

    def _rounds(self) -> None:
        """Train all runs in slices until each has its steps, or has reached the baseline's quality.

        A slice goes on to the end of a round; a run that is ahead by that waits until the others have caught up.
        """
        done, chunk = min((c.steps_done for c in self.alive.values()), default=0), self.plan.chunk
        # A resumed run is evaluated at the same steps as an uninterrupted one.
        waiting, pace = list(self.alive), done // chunk * chunk
        while waiting:
            pace += chunk
            for name in self._in_turn(waiting, pace // chunk):
                run, target = self.alive[name], min(pace, self._limit(name))
                if run.steps_done < target:
                    if not self._together(name, partial(self._slice, run, target)):
                        waiting.remove(name)
                        continue
                    self._save(run)
                if self._is_done(run):
                    waiting.remove(name)
                    self._finish(run)

    def _in_turn(self, waiting: list[str], turn: int) -> list[str]:
        """The baseline, then the others, in reverse in every other turn: a run finds in caches what the one before has left."""
        return sorted(waiting[:: 1 if turn % 2 else -1], key=lambda name: name != self.plan.baseline)

    def _limit(self, name: str) -> int:
        alone = self.plan.contenders[name] == "compute"
        chases = self.plan.baseline in self.alive and name != self.plan.baseline and not alone
        return int(self.plan.steps * self.plan.patience) if chases else self.plan.steps

    def _is_done(self, run: RankRun) -> bool:
        """True if a run has had all its steps, the baseline's quality, or more time than the baseline took."""
        base = self.alive.get(self.plan.baseline)
        if run.steps_done >= self._limit(run.name):
            return True
        if base is None or base.steps_done < self.plan.steps or run.steps_done < self.plan.steps:
            return False
        quality, target = self.reached[run.name], self.reached[base.name]
        reached = quality <= target if self.lower else quality >= target
        return self.control.first_says(reached or run.clock.seconds > base.clock.seconds)

    def _slice(self, run: RankRun, target: int) -> None:
        comm = run.comm
        heard = len(comm.ledger.decisions) if comm else 0

        def told(step: Step) -> None:
            nonlocal heard
            self.control.expect_all()  # a slice may have many steps without a message: check for failures of other ranks
            self._tell(step, run.name)
            made = comm.ledger.decisions[heard:] if comm else []
            for decision in made:
                self._tell(events.RecipeChange(step.step, decision.decision), run.name)
            heard += len(made)

        run.train_slice(target, self._limit(run.name), told)
        spoilt = run.spoilt()
        if spoilt.skipped_steps or spoilt.dropped_rounds:
            self._tell(spoilt, run.name)
        self._judge(run)
        if ages := run.ages():
            self._tell(events.ModelAges({str(age): n for age, n in ages.items()}), run.name)
        if comm is not None:
            self._tell(events.ResidualNorm(run.steps_done, comm.metrics()["residual_norm"]), run.name)

    def _judge(self, run: RankRun) -> None:
        quality = self.reached[run.name] = run.quality()
        sent = run.sent() if self.plan.per_host == 1 else self._over_links(run).get("between")
        self._tell(Evaluation(run.steps_done, run.clock.seconds, sent, quality), run.name)

    def _over_links(self, run: RankRun) -> dict[str, int]:
        """Bytes of a host's ranks over its link, between each other, and to their backends; means over the hosts."""
        totals = run.totals()
        means = self.control.means(totals._asdict() if totals else {})
        return {k: int(v * self.plan.per_host) for k, v in means.items()}

    def _save(self, run: RankRun) -> None:
        step, last = run.steps_done, self.saved[run.name]
        due = step - last >= self.plan.checkpoint_every or (step >= self.plan.steps and step > last)
        if not self.plan.checkpoint or not run.can_be_saved or not due:
            return
        why = checkpoints.save(self.plan, self.control, run, self.history)
        if why:
            self._tell(events.Note(f"no checkpoint at step {step}: {why}; the last checkpoint is kept"))
        self.saved[run.name] = step

    def _finish(self, run: RankRun) -> None:
        # Under scatter a rank's own chunks are exact, so one rank's errors are not enough. Some ranks may have none:
        # a rank that was late under backup workers has measured nothing.
        found = self.control.means(run.comm.worker.measurement.errors if run.comm else {})
        names = [n for n, _ in run.model.named_parameters() if n in found]  # backward fills them from the last layer
        rest = iter([(n, found[n]) for n in names])
        while some := dict(islice(rest, 16)):  # a line longer than a pipe's page may be mixed with another rank's
            self._tell(events.CompressionErrors(some), run.name)
        self._tell_if_within_a_round(run)
        links = self._over_links(run)
        nic = self.control.means({"nic": run.clock.nic} if in_lab() else {})  # all ranks of a host read one counter
        totals = (links.get("between"), links.get("inside"), links.get("handed"))
        load = self.control.means(run.load.means())
        self._tell(events.Ended(*totals, int(nic["nic"]) if nic else None, **load), run.name)

    def _tell_if_within_a_round(self, run: RankRun) -> None:
        last = run.steps_done
        if run.ends_round(last):
            return
        end = next(step for step in count(last) if run.ends_round(step))
        why = f"{run.name} had its last step within a round that would have ended with step {end}"
        self._tell(events.Note(f"{why}; at step {last} each rank's own model was evaluated, and the mean counts"))


def main(plan: str) -> NoReturn:
    """Run as a separate process."""
    exit_in_order(take_part(ComparePlan.of_json(plan), tell))


if __name__ == "__main__":
    main(sys.argv[1])
