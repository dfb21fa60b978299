"""One run on one rank: a model trained by a recipe or a baseline, with its own clock and byte counts."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gossamer.bench.compare.baselines import BASELINES, DECENT, KINDS, Baseline, has_decent
from gossamer.bench.compare.events import SpoiltCounts
from gossamer.bench.compare.load import LoadMeter
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.stragglers import sleep
from gossamer.bench.lab import lab_bytes
from gossamer.bench.record import Step
from gossamer.bench.workloads import Batch, Workload
from gossamer.core.errors import RecipeError
from gossamer.core.hashes import hash_of
from gossamer.core.parts import nearest, registry
from gossamer.fabrics.ledger import Ledger
from gossamer.integrations import Communicator, attach
from gossamer.recipe import Recipe
from gossamer.recipes import presets


class Totals(NamedTuple):
    """Bytes of one rank: over its host's link, to other ranks of its host, and to the backend."""

    between: int = 0
    inside: int = 0
    handed: int = 0

    @staticmethod
    def of(ledger: Ledger) -> "Totals":
        return Totals(ledger.between, ledger.inside, ledger.handed)

    def since(self, then: "Totals") -> "Totals":
        return Totals(*(a - b for a, b in zip(self, then, strict=True)))


@dataclass
class Clock:
    """Seconds of one run's own slices, and the bytes that the network card sent in them."""

    seconds: float = 0.0
    nic: int = 0


class RankRun:
    """One rank's part of a run. It trains in slices; the time between slices does not count."""

    def __init__(self, name: str, kind: str, workload: Workload, plan: ComparePlan, group: dist.ProcessGroup) -> None:
        self.name, self.kind, self.workload, self.group, self.plan = name, kind, workload, group, plan
        self.rank, self.size, self.per_host = dist.get_rank(), dist.get_world_size(), plan.per_host
        self.model = workload.model()
        self.optimizer = workload.optimizer(self.model)
        for settings in self.optimizer.param_groups:
            settings["lr"] = settings["lr"] * plan.lr.get(name, 1.0)
        self.clock, self.load, self.done, self.drawn = Clock(), LoadMeter(workload), 0, 0
        self.comm: Communicator | None = None
        self.baseline: Baseline | None = None
        if kind in KINDS:
            self.baseline = KINDS[kind](self.model, self.optimizer, group)
        else:
            self.comm = self._attach(plan)
        # The handshake and the first broadcast are not training; a run that goes on has sent something before.
        self._before = Totals.of(self.comm.ledger) if self.comm else Totals()
        # In an earlier part of the run, where the communicator does not count it.
        self._spoilt_before, self._ages_before = Counter[str](), Counter[int]()

    def _attach(self, plan: ComparePlan) -> Communicator:
        recipe = Recipe.of(self.kind)
        shapes = [one.schedule.shape for one in (recipe, *recipe.reached)]
        # A schedule that averages parameters must say what happens to buffers, also one that a controller may put in
        # force; without a barrier they stay local.
        alone = any(shape.mixes or shape.is_async for shape in shapes)
        buffers = None if all(shape.averages_gradients for shape in shapes) else "local" if alone else "average"
        comm = attach(
            self.model,
            self.optimizer,
            self.kind,
            seed=plan.seed,
            deadline=plan.deadline,
            buffers=buffers,
            measure_every=plan.measure_every,
        )
        comm.ledger.per_node = plan.per_host  # whatever the recipe says: here it means the ranks that share a link
        return comm

    @property
    def origin(self) -> str:
        """The recipe as given; a controller may have changed it since."""
        return repr(self.comm.worker.origin) if self.comm else self.kind

    @property
    def can_be_saved(self) -> bool:
        """False for torch's comm hooks and averagers, which have no public state dict."""
        return self.comm is not None or self.kind in ("compute", "ddp", "ddp-fp16")

    @property
    def recipe(self) -> str:
        return repr(self.comm.recipe) if self.comm else self.kind

    @property
    def steps_done(self) -> int:
        """Steps done, by the communicator's count: backup workers skip the steps they missed."""
        return self.comm.step if self.comm else self.done

    def ends_round(self, step: int) -> bool:
        """True if this is the last step of a round of the current schedule, which a controller may change."""
        if self.baseline is not None:
            return self.baseline.ends_round(step)
        assert self.comm is not None
        return self.comm.recipe.schedule.ends_round(step)

    def train_slice(self, target: int, limit: int, told: Callable[[Step], None]) -> None:
        """Train up to `target` and on to the end of its round, not beyond `limit`; all ranks begin and end together.

        A slice ends when its messages have arrived, so that their time and bytes are counted in it.
        """
        nic = lab_bytes()  # before any rank that shares the card goes on
        dist.barrier(self.group)
        self.load.begin()
        done, before, began = self.done, self.clock.seconds, perf_counter()
        try:
            while self.steps_done < limit and (self.steps_done < target or not self.ends_round(self.steps_done)):
                told(self._step(before, began))
            self._quiesce()
        except Exception:
            self.close()  # otherwise the others would wait for this rank, which lives on
            raise
        dist.barrier(self.group)
        self.clock.seconds = before + perf_counter() - began
        self.clock.nic += lab_bytes() - nic
        self.load.end(self.done - done)

    def _quiesce(self) -> None:
        if self.baseline is not None:
            self.baseline.quiesce()
        if self.comm is not None:
            self.comm.fabric.run(self.comm.worker.quiesce())

    def _step(self, before: float, began: float) -> Step:
        start, meters = perf_counter(), self._meters()
        loss = self._learn_alone(self.baseline) if self.baseline else self._learn()
        self.done += 1
        sent = self.sent() if self.per_host == 1 else None  # ranks that share a link are summed at each evaluation
        now = Step(self.steps_done, before + perf_counter() - began, loss, sent)
        if meters is not None and (after := self._meters()) is not None:
            now.wait, now.codec = after[0] - meters[0], after[1] - meters[1]
            now.compute = perf_counter() - start - now.wait
        return now

    def _learn(self) -> float:
        assert self.comm is not None
        self.optimizer.zero_grad()
        total, last = 0.0, False
        while not last:  # a controller may ask for several micro-batches per step
            with self.comm.accumulating() as last:
                loss = self.workload.loss(self.model, self._batch()) / self.comm.accumulate
                loss.backward()
                total += float(loss.detach())
        self.comm.log(loss=total)  # controllers may go by it
        self.optimizer.step()
        return total

    def _learn_alone(self, baseline: Baseline) -> float:
        baseline.begin_step()
        loss = self.workload.loss(baseline.forward, self._batch())
        loss.backward()
        baseline.end_step()
        return float(loss.detach())

    def _batch(self) -> Batch:
        """Next batch: no rank sees a batch twice, and a rank that missed steps continues where the others are."""
        self.drawn = max(self.drawn, self.steps_done) + 1
        sleep(self.plan.slow, self.rank, self.drawn, self.plan.seed)
        return self.workload.batch(self.drawn - 1, self.rank, self.size)

    def _meters(self) -> tuple[float, float] | None:
        """Seconds waited and coded so far; None for a baseline that does not measure them."""
        if self.comm is not None:
            return self.comm.exposed_seconds, self.comm.ledger.busy_seconds
        return (0.0, 0.0) if self.baseline is not None and self.baseline.says_where_time_goes else None

    def totals(self) -> Totals | None:
        """Bytes of this rank so far; None for a baseline with neither ledger nor formula."""
        if self.comm is not None:
            return Totals.of(self.comm.ledger).since(self._before)
        sent = self.baseline.sent(self.done) if self.baseline else None
        if sent is None:
            return None
        # A ring crosses a host's link once, between the last of its ranks and the next host's first.
        between = sent // self.per_host if self.size > self.per_host else 0
        return Totals(between, sent - between, sent * self.size // max(2 * (self.size - 1), 1))

    def sent(self) -> int | None:
        """Bytes over this host's link so far, by this rank."""
        totals = self.totals()
        return None if totals is None else totals.between

    def spoilt(self) -> SpoiltCounts:
        """Steps and rounds lost to values that are not finite, and the ranks they came from."""
        counts = self._count_spoilt() + self._spoilt_before
        by = {name: n for name, n in counts.items() if name.isdigit()}
        return SpoiltCounts(counts["skipped_steps"], counts["dropped_rounds"], by)

    def ages(self) -> dict[int, int]:
        """How often models arrived at each age in steps; empty where they arrive by schedule."""
        return dict(sorted((self._count_ages() + self._ages_before).items()))

    def _count_ages(self) -> Counter[int]:
        return Counter(self.comm.staleness if self.comm else {})

    def _count_spoilt(self) -> Counter[str]:
        """Counts by the communicator: lost steps and rounds by kind, causes by rank."""
        if self.comm is None:
            return Counter()
        metrics = self.comm.metrics()
        losses = {name: int(metrics.get(name, 0)) for name in ("skipped_steps", "dropped_rounds")}
        by: dict[int, int] = getattr(self.comm, "spoilt", {})
        return Counter({**losses, **{str(rank): n for rank, n in by.items()}})

    def quality(self) -> float:
        """Held-out quality: the mean over every rank's own model. All ranks call this together.

        Models are not averaged first: in a real training run that average would cost time and bytes.
        """
        equal = self._models_are_equal()  # then one evaluation is enough
        mine = 0.0 if equal and self.rank else self.workload.evaluate(self.model)
        total = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return float(total) / (1 if equal else self.size)

    def _models_are_equal(self) -> bool:
        hashes = torch.tensor([hash_of(t) for t in [*self.model.parameters(), *self.model.buffers()]])
        extremes = torch.stack([hashes, -hashes])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        return torch.equal(extremes[0], -extremes[1])

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}
        state |= {"drawn": self.drawn, "seconds": self.clock.seconds, "nic": self.clock.nic}
        if self.comm is not None:
            state["comm"] = self.comm.state_dict()  # may still send what was in flight
            state |= {"errors": self.comm.worker.measurement.errors, "measured": self.comm.worker.measurement.last}
        totals = self.totals() or Totals()
        state |= {"sent": totals.between, "inside": totals.inside, "handed": totals.handed}
        return state | {"spoilt": dict(self._count_spoilt() + self._spoilt_before), "ages": self.ages()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.drawn = state["done"], state["drawn"]
        self.clock.seconds, self.clock.nic = state["seconds"], state["nic"]
        if self.comm is not None:
            self.comm.load_state_dict(state["comm"])
            then = Totals(state["sent"], state.get("inside", 0), state["handed"])  # older checkpoints have no "inside"
            self._before = Totals.of(self.comm.ledger).since(then)
            self.comm.worker.measurement.errors, self.comm.worker.measurement.last = state["errors"], state["measured"]
            self._spoilt_before = Counter(state["spoilt"]) - self._count_spoilt()
            self._ages_before = Counter(state.get("ages", {})) - self._count_ages()

    def close(self) -> None:
        if self.comm is not None:
            self.comm.detach()


def about(kind: str) -> str:
    """Summary line of a preset or a baseline; empty for an expression.

    >>> about("topk(ratio=0.1)"), about("scatter(bf16())")
    ("Top one percent of the gradient's elements, with error feedback.", '')
    """
    name = kind.partition("(")[0].strip()
    known = KINDS.get(name) or (presets().get(name) if "+" not in kind else None)
    return " ".join((inspect.getdoc(known) or "").partition("\n\n")[0].split())


def check(kind: str) -> None:
    """Raise an error if `kind` is no recipe and no baseline, before any rank is started."""
    if kind == DECENT and not has_decent():
        raise RecipeError(f"the baseline {DECENT!r} needs a package: pip install {DECENT}")
    if kind in BASELINES:
        return
    try:
        Recipe.of(kind)
    except RecipeError as error:
        if kind.isidentifier() and kind not in presets() and registry.get(kind) is None:
            raise RecipeError(f"there is no recipe {kind!r}. {nearest(kind, [*presets(), *BASELINES])}") from None
        raise error
