"""How simulated runs are shown: a table with what happened to their ranks, or JSON."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.markup import escape

from gossamer import simulated_members, simulated_restarts
from gossamer.bench import workloads
from gossamer.bench.cli.console import columns, console, print_table
from gossamer.bench.report.formatting import fixed
from gossamer.costs import Cluster
from gossamer.costs.events import Events
from gossamer.costs.quantities import say_rate, say_seconds, say_size
from gossamer.fabrics.liveness.heartbeat import ranks as numbered

POINTS = 20  # of a loss curve that are printed as JSON
KINDS = ("computing", "coding", "sending", "waiting")


class Simulated(NamedTuple):
    """A recipe's run: the losses of its steps (mean over ranks), the moment of each, bytes a rank sent, and the quality."""

    recipe: str
    steps: int
    seconds: float
    sent: float
    losses: list[float]
    moments: list[float]
    quality: float
    lines: dict[int, list[tuple[str, float, float]]]
    gradients: int  # steps that count, summed over ranks
    on_loss: str = ""  # what happens where ranks go or come: "restart" or "members"
    restarts: Sequence[simulated_restarts.Restart] = ()
    changes: Sequence[simulated_members.MembersChange] = ()
    stood: float = 0.0  # seconds of ranks in which members met, handed over, or computed what was dropped

    def share(self, kind: str) -> float:
        """The share of the first rank's time that it spends so; sending may overlap with computing."""
        spent = sum(end - begin for what, begin, end in self.lines.get(0, []) if what == kind)
        return spent / self.seconds if self.seconds else 0.0

    @property
    def hourly(self) -> float:
        """Steps that count, in an hour of the virtual clock."""
        return 3600 * self.steps / self.seconds if self.seconds else 0.0


def as_dict(run: Simulated) -> dict[str, Any]:
    """A run as JSON, with some points of its loss curve."""
    every = max(len(run.losses) // POINTS, 1)
    curve = [
        {"step": i + 1, "seconds": at, "loss": loss, "bytes": run.sent * (i + 1) / run.steps}
        for i, (at, loss) in enumerate(zip(run.moments, run.losses))
        if (i + 1) % every == 0 or i + 1 == len(run.losses)
    ]
    shares = {kind: run.share(kind) for kind in KINDS}
    restarts, changes = [restart._asdict() for restart in run.restarts], [change._asdict() for change in run.changes]
    told = run._asdict() | {"curve": curve, "shares": shares, "restarts": restarts, "changes": changes}
    told["steps_an_hour"] = run.hourly
    del told["losses"], told["moments"]
    return told


def show(runs: list[Simulated], task: workloads.Workload, cluster: Cluster, events: Events) -> None:
    """Print the events, a row for each run, and what went on in it."""
    screen = console()
    links = f"{say_rate(cluster.rate)}, {say_seconds(cluster.latency)} a message"
    screen.print(
        escape(f"{task.name} on {cluster.size} virtual ranks, {links}; seconds are those of the cluster's clock.")
    )
    for sentence in events.sentences():
        screen.print(escape(f"event: {sentence}"))
    losses = ["on a loss", "steps an hour", "gradients"] if events.changes_ranks else []
    table = columns("recipe", "steps", "seconds", "a step", *losses, "sent a rank", "loss", task.metric, *KINDS)
    for run in runs:
        table.add_row(
            escape(run.recipe),
            str(run.steps),
            _digits(run.seconds),
            say_seconds(run.seconds / run.steps),
            *([run.on_loss, f"{run.hourly:,.0f}", f"{run.gradients:,}"] if losses else []),
            say_size(run.sent),
            f"{fixed(run.losses[0], 3)} to {fixed(run.losses[-1], 3)}",
            fixed(run.quality, 3),
            *(f"{100 * run.share(kind):.0f} %" for kind in KINDS),
        )
    print_table(screen, table)
    for run in runs:
        for restart in run.restarts:
            screen.print(escape(f"{run.recipe}: {_sentence(restart)}"))
        for change in run.changes:
            screen.print(escape(f"{run.recipe}: {_sentence_of(change)}"))
        if run.changes:
            dropped, unshared = (sum(each) for each in zip(*((c.dropped, c.unshared) for c in run.changes)))
            screen.print(
                escape(
                    f"{run.recipe}: {dropped} gradients were dropped, and {unshared} steps of lost ranks were in no average; in all "
                    f"ranks together {say_seconds(run.stood)} were lost so, or stood still"
                )
            )
    for run in runs:
        every = max(len(run.losses) // 5, 1)
        points = [*zip(run.moments, run.losses)][every - 1 :: every]
        screen.print(
            escape(f"{run.recipe}: loss " + ", ".join(f"{fixed(loss, 3)} at {say_seconds(at)}" for at, loss in points))
        )


def _digits(seconds: float) -> str:
    """Four digits; long times in whole seconds, and not in powers of ten."""
    return f"{seconds:.4g}" if seconds < 9999.5 else f"{seconds:.0f}"


def _sentence(restart: simulated_restarts.Restart) -> str:
    away = say_seconds(restart.resumed - restart.clock)
    return (
        f"ranks changed at {_digits(restart.clock)} s; after {away} {len(restart.present)} ranks went on from step {restart.done + 1}"
        + (f", and {restart.again} steps were made again" if restart.again else "")
    )


def _sentence_of(change: simulated_members.MembersChange) -> str:
    words = {"lost": change.lost, "gone": change.left, "come": change.came}
    named = ", ".join(f"{numbered([*ranks])} {what}" for what, ranks in words.items() if ranks)
    stood = say_seconds(change.resumed - change.noticed)
    return (
        f"{named or 'nobody is gone'} at {_digits(change.clock)} s; noticed at {_digits(change.noticed)} s, and after {stood} "
        f"{len(change.present)} ranks went on with step {change.step}"
        + (f", and {change.dropped} gradients were dropped" if change.dropped else "")
    )
