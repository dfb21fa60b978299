"""How a plan is shown: a table, JSON, or every piece of one recipe's step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from typing import Any

from rich.markup import escape
from rich.table import Table

from gossamer.bench import utility
from gossamer.bench.cli.console import columns, console, fits, print_table
from gossamer.bench.published import PAPER, SIZES
from gossamer.costs import Cluster, Crossing
from gossamer.costs.quantities import say_money, say_parameters, say_rate, say_seconds, say_size
from gossamer.costs.severity import severity, two_digits
from gossamer.planning.baselines import sharded
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.peak import PeakMemory
from gossamer.planning.plan import Row, TrainingPlan, chosen, refuse_odd_ranks, refuse_to_shard
from gossamer.planning.rates import BUSY, Interval
from gossamer.planning.replay import StartProgram, StepSeconds
from gossamer.planning.scaling import Scaling
from gossamer.planning.targets import HOSTS, Reached, Target
from gossamer.planning.work import WorkSource

DETAILS = ("between", "by card", "keeps", "at peak", "busy 90 % at", "every")
LEFT_OUT = (), DETAILS, (*DETAILS, "work", "network", "sent")  # of the table, on a terminal that has no room for it


def table(plan: TrainingPlan, words: list[str]) -> None:
    """Print the sentence, what goes with it, and a row for each baseline and recipe."""
    screen = console()
    for i, line in enumerate(words):
        screen.print(escape(line), style="bold" if i == 0 else None)
    screen.print()
    screen.print(escape(_setting(plan)))
    tables = [_rows(plan, left_out) for left_out in LEFT_OUT]
    print_table(screen, next((made for made in tables if fits(screen, made)), tables[-1]))
    for row in plan.recipes:
        if row.choice:
            screen.print(escape(f"{row.name}: planned as {row.choice}, which it is predicted to choose"))
        if row.simulated:
            screen.print(escape(f"{row.name}: simulated on {row.simulated} ranks, who do not all wait for the slowest"))
        elif row.error:
            screen.print(escape(f"{row.name}: {row.error}"))
    screen.print()
    screen.print(escape(_legend(plan)))


def _setting(plan: TrainingPlan) -> str:
    cluster, model = plan.cluster, plan.model
    hosts = f"{cluster.nodes} host{'s' * (cluster.nodes > 1)} of {cluster.ranks_per_node} rank"
    sharded = f", sharded over {plan.shards}" if plan.shards > 1 else ""
    return (
        f"{model.name}: {say_parameters(model.numel)} in {model.dtype}, {say_seconds(model.computing)} of computing a step; {hosts}"
        f"{'s' * (cluster.ranks_per_node > 1)}{sharded}, {say_rate(cluster.rate)}, {say_seconds(cluster.latency)} a message, "
        f"{cluster.backend}; severity {two_digits(_severity(plan))}."
    )


def _severity(plan: TrainingPlan) -> float:
    return severity(plan.model.numel, plan.cluster.rate, plan.model.computing)


def _rows(plan: TrainingPlan, left_out: Sequence[str]) -> Table:
    names = [row.name for row in plan.baselines if row.name != "compute"]
    short = [name.replace(", ", " x").removesuffix(" micro-batches") for name in names]
    titles = ["recipe", "a step", "between", "busy", *(f"of {name}" for name in short)]
    titles += ["work", "network", "sent", "by card", "keeps", "at peak", "pays below", "busy 90 % at", "every"]
    rows = [*plan.baselines, *plan.possible]
    money = next((row.money for row in rows if row.money is not None), None)  # failures may leave DDP no time
    titles += [] if money is None else [f"{money.currency} / 1000 steps"]
    titles += ["time kept"] if plan.dense.kept is not None else []
    shown = [i for i, title in enumerate(titles) if title not in left_out]
    made = columns(*(titles[i] for i in shown))
    for row in rows:
        cells = _cells(row, names, plan.dense.name, money is not None)
        made.add_row(*(cells[i] for i in shown))
    return made


def _cells(row: Row, names: list[str], dense: str, priced: bool) -> list[str]:
    assert row.seconds is not None
    s = row.seconds
    between = f"{say_seconds(row.low)} - {say_seconds(row.high)}"
    cells = [escape(row.name), say_seconds(s.step), between, f"{s.utilisation:.0%}"]
    cells += [f"{row.of[n]:.2f}" for n in names]
    cells += [_time(s.work), _time(s.network), say_size(s.sent), say_size(s.card)]
    held = row.memory
    kept = say_size(held.keeps) if held is not None and held.keeps else ""
    cells += [kept, "" if held is None else f"{'over ' if held.is_least else ''}{say_size(held.peak)}"]
    cells.append(_intervals(row.pays.get(dense, [])))
    cells.append(say_rate(row.busy_at[0.9]) if 0.9 in row.busy_at else "")
    cells.append("" if row.every is None else str(row.every))
    cells += ["" if row.money is None else say_money(1000 * row.money.amount, "").strip()] if priced else []
    cells += [f"{row.kept:.0%}"] if row.kept is not None else []
    return cells


def _time(value: float) -> str:
    return "" if value < 5e-5 else say_seconds(value)


def _intervals(found: list[Interval]) -> str:
    """Where a recipe pays, as an upper end; a lower end is said where there is one."""
    return ", ".join(
        ("any rate" if one.high == inf else say_rate(one.high))
        if one.low <= 125e3
        else f"{say_rate(one.low)} to {say_rate(one.high)}"
        for one in found
    )


def _legend(plan: TrainingPlan) -> str:
    sources = sorted({row.work for row in plan.possible if row.work})
    cluster = plan.cluster
    figures = ", ".join(
        f"{name} {cluster.source(name)}"
        for name in ("rate", "latency", "inside", "cores", "efficiency", "byte_seconds")
    )
    return (
        f"Computing: {plan.model.source}. Work of recipes: {'; '.join(sources) or 'none'}. Cluster: {figures}.\n"
        "a step: a mean over whole rounds. between: with every uncertain figure at its best, and at its worst. busy: computing "
        "over the step. work, network: what nothing hides. severity: seconds to send the model once over those of computing.\n"
        "pays below: the rate up to which it is faster than the first row by over 5 %. every: the shortest round that keeps "
        "machines busy for 90 % of the time."
    )


def as_dict(plan: TrainingPlan, words: list[str]) -> dict[str, Any]:
    cluster, model = plan.cluster, plan.model
    return {
        "verdict": words,
        "model": {
            "name": model.name,
            "parameters": model.numel,
            "dtype": model.dtype,
            "forward": model.forward,
            "backward": model.backward,
            "optimizer": model.optimizer,
            "source": model.source,
        },
        "cluster": {
            "nodes": cluster.nodes,
            "ranks_per_node": cluster.ranks_per_node,
            "backend": cluster.backend,
            "rate": None if cluster.rate == inf else cluster.rate,
            "latency": cluster.latency,
            "sources": dict(cluster.sources),
        },
        "severity": _severity(plan),
        "shards": plan.shards,
        "accumulate": plan.accumulate,
        "baselines": [_row_dict(row) for row in plan.baselines],
        "recipes": [_row_dict(row) for row in plan.recipes],
        "measuring_seconds": plan.measuring,
    }


def _row_dict(row: Row) -> dict[str, Any]:
    if row.seconds is None:
        return {"recipe": row.name, "error": row.error, "memory": _memory(row.memory)}
    return {
        "recipe": row.name,
        "step_s": row.seconds.step,
        "low_s": row.low,
        "high_s": row.high,
        "split": _split(row.seconds),
        "utilisation": row.seconds.utilisation,
        "sent_bytes": row.seconds.sent,
        "nic_bytes": row.seconds.card,
        "extra_memory_bytes": 0.0 if row.memory is None else row.memory.keeps,
        "memory": _memory(row.memory),
        "of": dict(row.of),
        "pays": {base: [[i.low, None if i.high == inf else i.high] for i in found] for base, found in row.pays.items()},
        "pays_at": {f"{share:g}": rate for share, rate in row.busy_at.items()},
        "every_for_90": row.every,
        "money_per_step": None if row.money is None else [row.money.amount, row.money.currency],
        "goodput": row.kept,
        "estimated": row.estimated,
        "simulated_ranks": row.simulated,
        "choice": row.choice or None,
        "source": {"work": row.work},
    }


def _memory(held: PeakMemory | None) -> dict[str, float] | None:
    """Bytes by kind, and their sum; None for a baseline, and for a recipe that cannot run."""
    return None if held is None else {**asdict(held), "peak": held.peak}


def _split(s: StepSeconds) -> dict[str, float]:
    return {
        "forward": s.forward,
        "backward": s.backward,
        "work": s.work,
        "network": s.network,
        "waiting": s.waiting,
        "optimizer": s.optimizer,
    }


# -- one recipe ---------------------------------------------------------------------------------------------------------------


def explain(recipe: str, model: ModelCost, cluster: Cluster, work: WorkSource, shards: int) -> None:
    """Print the pieces of a step, and the null model beside the prediction."""
    refuse_odd_ranks(cluster, shards)
    refuse_to_shard(recipe, shards)
    model = model.at_speed(cluster.speed)
    mine = sharded(model, cluster, shards) if shards > 1 else model
    prepared = chosen(recipe, mine, cluster, work, shards)
    found, screen = prepared.seconds(cluster), console()
    screen.print(escape(f"{recipe}: {say_seconds(found.step)} a step"), style="bold")
    split = ", ".join(f"{name} {say_seconds(value)}" for name, value in _split(found).items() if value > 0)
    screen.print(f"  {split}")
    if prepared.choice:
        screen.print(escape(f"  of {prepared.choice}, which it is predicted to choose"))
    screen.print(f"  work: {work.name}; computing: {model.source}")
    screen.print(f"  memory at its peak, {say_size(prepared.memory.peak)}: {prepared.memory.in_words()}")
    if model.is_narrow:
        screen.print(f"  parameters in {model.dtype}; the recipe averages in fp32, and copies the means back")
    for number, step in enumerate(prepared.steps[prepared.warm :], 1):
        for action in step:
            if isinstance(action, StartProgram) and action.pieces:
                screen.print(f"  step {number} of {prepared.warm}, on the {action.lane} thread:")
                for piece in action.pieces:
                    screen.print(
                        escape(f"    {_piece(piece.work, piece.inside, piece.crossing, prepared.programs.cluster)}")
                    )
    screen.print(
        escape(
            f"  null model: {say_seconds(prepared.null_seconds(cluster))}, by bytes over rate and an unlimited network's step"
        )
    )


def _piece(work: float, inside: float, crossing: Crossing | None, cluster: Cluster) -> str:
    said = f"{say_seconds(work)} of work"
    if crossing is None:
        return said
    during = f", {say_seconds(inside)} of work meanwhile" if inside else ""
    return (
        f"{said}, then {say_seconds(crossing.seconds(cluster))} of network: {crossing.pattern}, "
        f"{crossing.messages} message{'s' * (crossing.messages != 1)}, "
        f"{say_size(crossing.sent)} of a rank, {say_size(crossing.card)} by the card{during}"
    )


# -- more hosts -----------------------------------------------------------------------------------------------------------------


def scaling_table(found: Scaling, model: ModelCost, cluster: Cluster) -> None:
    """Print a row for each recipe: a step's seconds for each number of hosts, and the share of it that is computing."""
    counts, screen = sorted({count for row in found.seconds.values() for count in row}), console()
    computing = model.in_turns(cluster.turns).computing / cluster.speed
    made = columns("recipe", *(f"{count} hosts" for count in counts))
    for name, row in sorted(found.seconds.items(), key=lambda one: one[1].get(counts[-1], inf)):
        if row:
            cells = (f"{say_seconds(row[c])} {computing / row[c]:4.0%}" if c in row else "" for c in counts)
            made.add_row(escape(name), *cells)
    screen.print(
        f"{model.name}: a step with so many hosts, and the share of it that is computing. Each rank's batch stays the same."
    )
    print_table(screen, made)
    for name, why in found.refused.items():
        screen.print(escape(f"{name}: {why}"))


TARGETS: Mapping[Target, str] = {
    "rate": "the lowest rate of a link",
    "every": "the shortest round, in steps,",
    "ranks": f"the most ranks, of {HOSTS[0]}, {HOSTS[1]}, {HOSTS[2]}, ... {HOSTS[-1]:,} hosts,",
}


def target_table(target: Target, found: Reached, model: ModelCost, cluster: Cluster) -> None:
    """Print a row for each recipe, with what keeps machines busy for each share of the time."""
    most = HOSTS[-1] * cluster.ranks_per_node if target == "ranks" else inf

    def say(value: float) -> str:
        return say_rate(value) if target == "rate" else f"{value:,.0f}{' or more' * (value >= most)}"

    made, screen = columns("recipe", *(f"{share:.0%} busy" for share in BUSY)), console()
    for name, row in found.values.items():
        made.add_row(escape(name), *(say(row[share]) if share in row else "" for share in BUSY))
    links = "" if target == "rate" else f" at {say_rate(cluster.rate)}"
    screen.print(
        f"{model.name}: {TARGETS[target]} with which machines compute for so much of the time{links}. "
        "Each rank's batch stays the same."
    )
    print_table(screen, made)
    for name, why in found.refused.items():
        screen.print(escape(f"{name}: {why}"))


# -- others' figures ----------------------------------------------------------------------------------------------------------


def show_published(as_json: bool) -> None:
    """Print TernGrad's published speeds, the formula that they follow, and our own program's plan beside them."""
    rows = [
        {
            "network": bars.network.name,
            "fabric": bars.fabric,
            "form": "ternary" if ternary else "fp32",
            "gpus": size,
            "shown": shown,
            "formula": round(bars.speed(size, ternary)),
            "planned": round(bars.planned(size, ternary)),
        }
        for bars in PAPER
        for ternary, row in ((False, bars.dense), (True, bars.ternary))
        for size, shown in zip(SIZES, row, strict=True)
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    made = Table(box=None, pad_edge=False)
    for title in rows[0]:
        made.add_column(title, justify="right" if title not in ("network", "fabric", "form") else "left")
    for row in rows:
        made.add_row(*map(str, row.values()))
    screen = console()
    screen.print(
        "Images a second: TernGrad's slides, the formula that they follow, and our program on the same clusters."
    )
    screen.print(made)


def show_utility(as_json: bool) -> None:
    """Print what compression gains on overlapped DDP in data centres, as a heat map, and six statements about it."""
    grid = utility.cells()
    said = utility.statements(grid, utility.break_evens())
    if as_json:
        rows = [
            cell.setup._asdict() | {"ddp_s": cell.ddp, "ddp_bf16_s": cell.bf16} | {"gains": cell.gains()}
            for cell in grid
        ]
        print(json.dumps({"statements": [each._asdict() for each in said], "setups": rows}, indent=1))
        return
    screen = console()
    for each in said:
        screen.print(escape(f"{'yes' if each.holds else 'no '}  {each.says}: {each.found}."))
    screen.print(
        "\nThe share of overlapped DDP's step that each recipe saves. Work is passes over memory, not measured."
    )
    for name in utility.RECIPES:
        print_table(screen, _heat_map(name, grid))


def _heat_map(name: str, grid: Sequence[utility.Cell]) -> Table:
    """A row for each model, step and number of ranks, a column for each rate."""
    made = columns("model", "step", "ranks", *(f"{gbit} Gbit/s" for gbit in utility.RATES))
    made.title, made.title_justify = escape(name), "left"
    rows = dict[tuple[str, float, int], list[float]]()
    for cell in grid:
        model, step, _, ranks = cell.setup
        rows.setdefault((model, step, ranks), []).append(cell.gains()[name])
    for (model, step, ranks), gains in rows.items():
        made.add_row(model, say_seconds(step), str(ranks), *(_heat(gain) for gain in gains))
    return made


def _heat(gain: float) -> str:
    """A share, on green from a tenth on, on red where it costs as much."""
    said = f"{gain:6.0%}"
    if gain > 0.5:
        return f"[white on green]{said}[/]"
    if gain > 0.1:
        return f"[black on bright_green]{said}[/]"
    return f"[white on red]{said}[/]" if gain < -0.1 else said
