"""gossamer simulate: virtual ranks train a workload in this process, on the clock of a cluster."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from torch import nn

from gossamer import simulated_members, simulated_restarts
from gossamer.bench import workloads
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports
from gossamer.bench.cli.plan import LAW_HELP, cluster_of, given, measured, of_flag, step_of
from gossamer.bench.cli.simulate_tables import Simulated, as_dict, show
from gossamer.bench.record import finite
from gossamer.core.errors import AttachError
from gossamer.core.verbs import Present
from gossamer.costs import Cluster
from gossamer.costs.event_file import random_events, read_events
from gossamer.costs.events import Events
from gossamer.costs.quantities import say_size, seconds
from gossamer.costs.quantities import size as bytes_in
from gossamer.fabrics.sim import TimeSpan
from gossamer.integrations.checks.elastic_checks import refuse_recipe
from gossamer.planning.measured_model import untrained
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import prepare, work_of
from gossamer.planning.work import NoWork, WorkSource
from gossamer.recipe import Recipe
from gossamer.simulate import Backward, ClusterCosts, costs_on, replicas, replicas_of_one_body, train
from gossamer.simulated_bodies import mean_losses, stay_equal

OnLoss = Literal["restart", "members", "both"]
MEMORY = Path("/proc/meminfo")  # where Linux tells


def simulate_command(
    workload: Annotated[str, typer.Argument(help="A workload, such as digits; `gossamer workloads` lists them.")],
    recipe: Annotated[list[str] | None, typer.Option(help="A recipe; give it several times for several.")] = None,
    workers: Annotated[int, typer.Option(min=2, max=4096, help="Number of virtual ranks.")] = 8,
    rounds: Annotated[
        int, typer.Option(min=1, max=10**6, help="Rounds of each recipe; a round of local steps is one.")
    ] = 20,
    rate: Annotated[str | None, typer.Option(help="Rate of a rank's link: '200mbit'.")] = None,
    latency: Annotated[str | None, typer.Option(help="Seconds of a message between ranks: '30us'.")] = None,
    law: Annotated[str | None, typer.Option(help=LAW_HELP)] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file instead; see docs/plan.")] = None,
    step: Annotated[
        str | None, typer.Option(help="Seconds of one step of one rank alone; measured by default.")
    ] = None,
    free_work: Annotated[
        bool,
        typer.Option("--free-work", help="Charge nothing for encoding and decoding, so that times repeat exactly."),
    ] = False,
    events: Annotated[
        str | None, typer.Option(help="What goes wrong: a TOML file of events, or 'random:SEED'; see docs/simulator.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints, where events take ranks away or bring them.")
    ] = 50,
    saving: Annotated[str | None, typer.Option(help="Seconds of a checkpoint: '2s'; the cluster's by default.")] = None,
    restart: Annotated[
        str | None,
        typer.Option(help="Seconds from a change of ranks until training goes on; the cluster's by default."),
    ] = None,
    on_loss: Annotated[
        OnLoss,
        typer.Option(
            help="Where events take ranks away or bring them: all 'restart' from a checkpoint, or the others go on ('members')."
        ),
    ] = "restart",
    losses: Annotated[int, typer.Option(min=0, max=10_000, help="Losses of ranks that 'random:SEED' draws.")] = 0,
    silence: Annotated[
        str, typer.Option(help="members(silence=): seconds until a machine that falls silent is missed.")
    ] = "10s",
    least: Annotated[
        int | None, typer.Option(min=1, help="members(least=): ranks with which training begins; those at the start.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a rank and step.")] = 4,
    memory: Annotated[
        str | None, typer.Option(help="Bytes that all ranks may take: '4 GB'; half of what is free.")
    ] = None,
    seed: int = 0,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with time lines of up to 16 ranks.")] = False,
) -> None:
    """Train a workload on virtual ranks: the loss of each recipe by virtual seconds on a cluster, and by bytes."""
    if losses and events is None:
        raise InputError(f"--losses {losses} is for --events random:SEED; add it, such as --events random:1")
    asked = {"--rate": rate, "--latency": latency, "--inside": None, "--cores": None, "--law": law}
    where = cluster_of(cluster, workers, 0, 1, asked)
    if where.size != workers:
        raise InputError(f"{cluster} describes {where.size} ranks, and --workers asks for {workers}; make them equal")
    if workload not in workloads.names():
        raise InputError(f"only workloads can be simulated, and {workload!r} is none; 'gossamer workloads' lists them")
    task = workloads.get(workload, seed=seed, batch_size=batch_size)
    task.prepare()
    rows = len(task.data.train[0])
    if rows < workers * batch_size:
        raise InputError(
            f"{workload} has {rows} training rows, and {workers} ranks with {batch_size} each need {workers * batch_size} a step; "
            "lower --workers or --batch-size"
        )
    torch.set_num_threads(1)
    recipes = recipe or ["allreduce"]
    for each in recipes:
        Recipe.of(each)
    model = _cost(task, step, where)
    befalls = _events(events, where, rounds, model.computing, losses)
    shared = {r for r in recipes if not befalls.changes_ranks and stay_equal(Recipe.of(r), task.model())}
    refuse_beyond_memory(recipes, shared, model, where, _allowed(memory))
    work = NoWork() if free_work else work_of(where)
    back = given("--restart", seconds, restart, where.restart)
    restarts = simulated_restarts.Restarts(save_every, given("--saving", seconds, saving, where.checkpoint), back)
    times = simulated_members.MemberTimes(silence=of_flag("--silence", seconds, silence), starting=back)
    if befalls.changes_ranks and where.ranks_per_node > 1:
        raise InputError(
            "a host is lost with all its ranks, which is not simulated; give a cluster whose hosts have one rank each"
        )
    if on_loss != "restart" and befalls.changes_ranks:
        _refuse_members(recipes)
    costs, found = Costs(where, model, work), list[Simulated]()
    try:
        for each in recipes:
            if on_loss != "members" or not befalls.changes_ranks:
                found.append(simulated(each, task, rounds, costs, befalls, restarts))
            if on_loss != "restart" and befalls.changes_ranks:
                found.append(with_members(each, task, rounds, costs, befalls, least, times))
    finally:  # a recipe that fails, or an interrupt, does not take along what has been trained
        if as_json and found:
            told = [as_dict(run) | {"events": befalls.sentences()} for run in found]
            print(json.dumps(finite(told), indent=1, allow_nan=False))
        elif found:
            show(found, task, where, befalls)


def _refuse_members(recipes: Sequence[str]) -> None:
    """Refuse recipes that cannot go on without a lost rank, in the words of `attach`."""
    for recipe in recipes:
        try:
            refuse_recipe(Recipe.of(recipe))
        except AttachError as why:
            raise InputError(str(why)) from None


def _events(text: str | None, cluster: Cluster, rounds: int, step_seconds: float, losses: int) -> Events:
    """The events of a file, or drawn by the seed of 'random:SEED'; none where nothing is given."""
    if text is None:
        return Events()
    if not text.startswith("random:"):
        if losses:
            raise InputError(f"--losses {losses} is for --events random:SEED; write the losses into {text}")
        return read_events(Path(text), cluster.size)
    seed = text.removeprefix("random:")
    if not seed.isdecimal() or len(seed) > 20:
        raise InputError(f"--events random:SEED takes a whole number, such as random:1, not {text!r}")
    return random_events(int(seed), cluster, rounds, step_seconds, losses)


def _cost(task: workloads.Workload, step: str | None, cluster: Cluster) -> ModelCost:
    """What a step costs: measured here, or with its seconds as given, when each gradient comes is guessed from the shapes."""
    taken = step_of(step)
    if taken is None and cluster.has_gpus:
        raise InputError(
            f"a step of {task.name} would be measured on this processor, and the cluster has GPUs: say how long it takes there, with "
            "--step"
        )
    if taken is None:
        return measured(task)
    return untrained(task.model(), taken, name=task.name, memory_rate=cluster.memory_rate)


class Costs(NamedTuple):
    """What the steps of any recipe cost: the cluster, the model, and where the processor's seconds come from."""

    cluster: Cluster
    model: ModelCost
    work: WorkSource

    def of(self, recipe: str, events: Events) -> ClusterCosts:
        return costs_on(self.cluster, recipe, self.model, self.work, events)

    def of_nodes(self, nodes: Sequence[int]) -> "Costs":
        return self._replace(cluster=self.cluster.of_nodes(nodes))


def simulated(
    recipe: str,
    task: workloads.Workload,
    rounds: int,
    costs: Costs,
    events: Events,
    restarts: simulated_restarts.Restarts,
) -> Simulated:
    """Train one recipe for so many rounds; where ranks go or come, all start again from a checkpoint."""
    shape, size = Recipe.of(recipe).schedule.shape, costs.cluster.size
    steps, parts = rounds * shape.period, shape.micro_batches
    if not events.changes_ranks:
        fleet = replicas_of_one_body(recipe, task.model, task.optimizer, size, task.seed)
        run = train(fleet, _backward(task, size, parts), steps, costs.of(recipe, events))
        losses, gradients = mean_losses(fleet), sum(len(replica.losses) for replica in fleet)
        sent, quality, lines = run.ledger.sent / size, task.evaluate(fleet[0].model), _lines(run.spans)
        return Simulated(recipe, steps, run.seconds, sent, losses, run.moments(steps), quality, lines, gradients)

    def crew(present: Sequence[int]) -> simulated_restarts.Crew:
        fleet = replicas(recipe, task.model, task.optimizer, len(present), task.seed)
        backward = _backward(task, len(present), parts)
        return simulated_restarts.Crew(fleet, backward, costs.of_nodes(present).of(recipe, events))

    run = simulated_restarts.train(crew, size, steps, events, restarts)
    quality, lines, sent = task.evaluate(run.replicas[0].model), _lines(run.spans), run.ledger.sent / size
    facts = (recipe, steps, run.seconds, sent, run.losses, run.moments, quality, lines, run.gradients, "restart")
    return Simulated(*facts, restarts=run.restarts)


def with_members(
    recipe: str,
    task: workloads.Workload,
    rounds: int,
    costs: Costs,
    events: Events,
    least: int | None,
    times: simulated_members.MemberTimes,
) -> Simulated:
    """Train one recipe for so many rounds; where ranks go or come, the others go on. A step's samples are cut among those there."""
    shape, size = Recipe.of(recipe).schedule.shape, costs.cluster.size
    steps, parts, made = rounds * shape.period, shape.micro_batches, Counter[tuple[int, int]]()

    def backward(net: nn.Module, present: Present, step: int) -> float:
        mine = present.ranks[present.place], step
        made[mine] += 1
        batch = parts * (step - 1) + (made[mine] - 1) % parts  # a dropped step draws its own again
        return _pass(task, net, batch, present.place, len(present.ranks))

    start = simulated_members.starting(recipe, task.model, task.optimizer, size, task.seed)
    crew = simulated_members.MemberCrew(start, backward, costs.of(recipe, events))
    run = simulated_members.train(crew, size, steps, events, least, times)
    quality, lines = task.evaluate(next(iter(run.replicas.values())).model), _lines(run.spans)
    sent = run.ledger.sent / size
    facts = (recipe, steps, run.seconds, sent, run.losses, run.moments, quality, lines, run.gradients, "members")
    return Simulated(*facts, changes=run.changes, stood=run.stood)


def _lines(spans: Sequence[TimeSpan]) -> dict[int, list[tuple[str, float, float]]]:
    """The time lines of the first ranks."""
    lines = defaultdict[int, list[tuple[str, float, float]]](list)
    for span in spans:
        if span.rank < 16:
            lines[span.rank].append((span.kind, span.begin, span.end))
    return dict(lines)


def _backward(task: workloads.Workload, size: int, parts: int) -> Backward:
    """A backward pass on the next batch of a rank. A step has so many micro-batches, or more where a controller says so."""
    drawn = [0] * size

    def backward(net: nn.Module, rank: int, step: int) -> float:
        batch = max(drawn[rank], parts * (step - 1))
        drawn[rank] = batch + 1
        return _pass(task, net, batch, rank, size)

    return backward


def _pass(task: workloads.Workload, net: nn.Module, batch: int, rank: int, size: int) -> float:
    loss = task.loss(net, task.batch(batch, rank, size))
    loss.backward()
    return loss.item()


def _allowed(memory: str | None) -> float:
    """Bytes, as given, or half of what programs can still have; no limit where the system does not say."""
    if memory is not None:
        return of_flag("--memory", bytes_in, memory)
    found = re.search(r"MemAvailable: *(\d+) kB", MEMORY.read_text() if MEMORY.exists() else "")
    return 1024 * int(found[1]) / 2 if found else inf


def refuse_beyond_memory(
    recipes: list[str], shared: set[str], model: ModelCost, cluster: Cluster, allowed: float
) -> None:
    """Refuse ranks that would not fit, with what each recipe's would take; those of the `shared` ones have one model for all."""
    rows = list[tuple[str, float]]()
    for recipe in recipes:
        is_async = Recipe.of(recipe).schedule.shape.is_async  # such are not planned
        kept = model.bytes if is_async else prepare(recipe, model, cluster, NoWork()).keeps
        bodies = 1 if recipe in shared else cluster.size
        rows.append((recipe, bodies * model.training_bytes + cluster.size * (model.bytes + kept)))
    if max(taken for _, taken in rows) > allowed:
        table = "\n".join(f"  {recipe}: {say_size(taken)}" for recipe, taken in rows)
        raise InputError(
            f"{cluster.size} ranks do not fit into {say_size(allowed)}; lower --workers or raise --memory. They would take\n{table}"
        )
