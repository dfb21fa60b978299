"""gossamer plan: which recipe pays on these machines, and whether any does."""

import importlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from torch import nn

from gossamer.bench import workloads
from gossamer.bench.cli.console import console, is_watched
from gossamer.bench.cli.errors import InputError
from gossamer.bench.cli.imports import Imports
from gossamer.bench.cli.output import writing
from gossamer.bench.cli.pass_through import arguments
from gossamer.bench.cli.plan_tables import (
    as_dict,
    explain,
    scaling_table,
    show_published,
    show_utility,
    table,
    target_table,
)
from gossamer.bench.cli.script import is_said, refuse_arguments
from gossamer.bench.compare.script_cost import measure_script
from gossamer.bench.report import planned
from gossamer.bench.report.grid import grid_of
from gossamer.bench.report.pages import PAGE
from gossamer.core import files
from gossamer.core.errors import CostError
from gossamer.core.parts import nearest
from gossamer.core.plugins import see_this_folder
from gossamer.costs import Cluster, from_flags, quantities
from gossamer.costs.cluster_file import read_cluster
from gossamer.costs.laws import law_of
from gossamer.planning.measured_model import measure, untrained, with_step
from gossamer.planning.model_cost import ModelCost, require_dtype
from gossamer.planning.model_shapes import MODELS, from_shapes, known_model
from gossamer.planning.plan import TrainingPlan, plan
from gossamer.planning.scaling import scaling
from gossamer.planning.targets import Target, reached
from gossamer.planning.verdict import sentences
from gossamer.planning.work import MeasuredWork, WorkSource
from gossamer.planning.work_tables import work_of
from gossamer.recipes import presets

T = TypeVar("T")
PAPERS = {"terngrad-paper": show_published, "utility": show_utility}  # instead of a model: others' figures
HERE = (
    "would be measured on this processor, and the cluster has GPUs: say how long a step takes there with --step, or plan with "
    "--work-of-this-machine"
)
LAW_HELP = "How computing varies: 'lognormal 0.2', 'exponential 0.2', 'slow 2', 'trace FILE'."


def plan_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A workload, a known model (gpt2, llama-7b, ...), module:callable, or a file of shapes."),
    ] = None,
    recipes: Annotated[
        list[str] | None, typer.Argument(help="Recipes to plan; a line-up of about twenty by default; 'all' presets.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=2**20, help="Number of hosts.")] = 4,
    gpus: Annotated[int, typer.Option(min=0, max=64, help="GPUs of a host, one rank each; 0 plans processors.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Ranks of a host, on its processors.")] = 1,
    cores: Annotated[
        float | None, typer.Option(help="Cores that the ranks of a host share; no limit by default.")
    ] = None,
    rate: Annotated[str | None, typer.Option(help="Rate of a host's link: '25gbit'.")] = None,
    latency: Annotated[str | None, typer.Option(help="Seconds of a message between hosts: '30us'.")] = None,
    inside: Annotated[str | None, typer.Option(help="Rate between two ranks of a host: '300 GB/s'.")] = None,
    law: Annotated[str | None, typer.Option(help=LAW_HELP)] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file instead; see docs/plan.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="Your training script instead of a model; its arguments after --.")
    ] = None,
    step: Annotated[str | None, typer.Option(help="Seconds of one step of one rank alone: '350ms'.")] = None,
    accumulate: Annotated[int, typer.Option(min=2, max=1024, help="Micro-batches of the accumulating DDP.")] = 4,
    dtype: Annotated[
        str | None, typer.Option(help="Of parameters, gradients and momenta: 'fp32' (the default), 'bf16' or 'fp16'.")
    ] = None,
    shard: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Ranks that FSDP2 shards the model over; a host has as many GPUs unless said."
        ),
    ] = 1,
    work_of_this_machine: Annotated[
        bool, typer.Option("--work-of-this-machine", help="Use this processor's codecs for a cluster of GPUs.")
    ] = False,
    explain_recipe: Annotated[
        str | None, typer.Option("--explain", help="Say every piece of one recipe's step, and each number's source.")
    ] = None,
    over: Annotated[str | None, typer.Option(help="Numbers of hosts to plan one beside the other: '2,8,32'.")] = None,
    target: Annotated[
        Target | None,
        typer.Option(
            help="What keeps machines busy: the lowest 'rate', the shortest round ('every'), or the most 'ranks'."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with sliders for rate, latency, hosts and computing.")
    ] = None,
    imports: Imports = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict seconds, bytes and memory of recipes and of DDP on a cluster, and say which of them pays, if any does."""
    if model in PAPERS:
        for param in context.command.params:
            if param.name and param.name not in ("model", "as_json") and is_said(context, param.name):
                raise InputError(f"{model} has a paper's machines and recipes: leave {param.opts[0]} out")
        PAPERS[model](as_json)
        return
    if explain_recipe is not None and (over is not None or target is not None or as_json):
        raise InputError("--explain follows one recipe's step, in words: leave out --over, --target and --json")
    if page is not None:
        _page_fits(page, explain_recipe, over, target)
    asked = {"--rate": rate, "--latency": latency, "--inside": inside, "--cores": cores, "--law": law}
    counts = {"nodes": nodes, "gpus": gpus, "ranks": ranks}
    asked |= {f"--{name}": count for name, count in counts.items() if is_said(context, name)}
    if shard > 1 and is_said(context, "accumulate"):
        raise InputError("--accumulate is of DDP, and --shard compares with HSDP and FSDP: leave one of them out")
    if script is None:
        refuse_arguments(context, None)
    if shard > 1 and gpus == 0 and ranks == 1:  # a model is cut within a host, so a host has that many ranks
        gpus = shard
    where = cluster_of(cluster, nodes, gpus, ranks, asked)
    if script is not None:
        recipes = [*([] if model is None else [model]), *(recipes or [])]
        if dtype is not None:
            raise InputError(f"a plan of {script.name} is in the dtype of its own parameters; leave --dtype out")
        what = _script(script, arguments(context), step, where, work_of_this_machine)
    elif model is None:
        raise InputError("give a model, such as gpt2, or --script train.py")
    else:
        what = cost_of(model, step, where, work_of_this_machine, dtype)
    work = MeasuredWork() if work_of_this_machine else work_of(where)
    if explain_recipe is not None:
        explain(explain_recipe, what, where, work, shard)
        return
    options: dict[str, Any] = {"work": work, "accumulate": accumulate, "shards": shard}
    if target is not None:
        if over is not None:
            raise InputError("--target and --over are two questions; ask one of them")
        options["curves"] = target == "rate"
        found = reached(target, where, lambda there: _planned(what, there, _recipes(recipes), **options))
        print(json.dumps(found._asdict(), indent=1)) if as_json else target_table(target, found, what, where)
        return
    if over is not None:
        found = scaling(
            where, _numbers(over), lambda there: _planned(what, there, _recipes(recipes), **options, curves=False)
        )
        print(json.dumps(found._asdict(), indent=1)) if as_json else scaling_table(found, what, where)
        return
    found = _planned(what, where, _recipes(recipes), **options)
    print(json.dumps(as_dict(found, sentences(found)), indent=1)) if as_json else table(found, sentences(found))
    if page is not None:  # last: it takes minutes, and may not fit on the disk
        _write_page(found, work, page)


def _page_fits(path: Path, explain_recipe: str | None, over: str | None, target: str | None) -> None:
    """Refuse a page before anything is planned."""
    if any(asked is not None for asked in (explain_recipe, over, target)):
        raise InputError("--page is of a whole plan: leave out --explain, --over and --target")
    with writing(path, "give --page another file"):
        files.writable(path, PAGE)
    if not path.parent.is_dir():
        raise InputError(
            f"{path} cannot be written: there is no folder {path.parent}; make it, or give --page another file"
        )


def _write_page(found: TrainingPlan, work: WorkSource, path: Path) -> None:
    """Replay the plan on a grid, which takes minutes for large models, and write the page."""
    screen = console(stderr=True)
    with (screen if is_watched(screen) else Console(quiet=True)).status("replaying") as status:
        grid = grid_of(found, work, lambda count: status.update(f"replaying {count}"))
    with writing(path, "give --page another file"):
        planned.write_html(found, grid, path)
    screen.print(f"wrote {path}", markup=False)


def _planned(model: ModelCost, cluster: Cluster, recipes: list[str], **options: Any) -> TrainingPlan:
    screen = console(stderr=True)
    if not is_watched(screen):
        return plan(model, cluster, recipes, **options)
    with screen.status("planning") as status:
        return plan(model, cluster, recipes, **options, tell=lambda name: status.update(f"planning {name}"))


def _numbers(text: str) -> list[int]:
    """Read '2,8,32'."""
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InputError(f"--over takes numbers of hosts, such as --over 2,8,32, not {text!r}")
    return found


def _recipes(asked: list[str] | None) -> list[str]:
    return list(presets()) if asked == ["all"] else asked or []


def cluster_of(path: Path | None, nodes: int, gpus: int, ranks: int, asked: dict[str, Any]) -> Cluster:
    """The cluster of a file, or of flags by their names."""
    flags = [flag for flag, value in asked.items() if value is not None]
    if path is not None:
        if flags:
            raise InputError(f"{flags[0]} and --cluster both describe the cluster; give one of them")
        return read_cluster(path)
    if asked["--rate"] is None:
        raise InputError("the cluster's links are missing: give --rate, such as --rate 25gbit, or --cluster FILE")
    if gpus and ranks > 1:
        raise InputError("--gpus and --ranks both count the ranks of a host; give one of them")
    if gpus and asked["--cores"] is not None:
        raise InputError("--cores are for ranks on processors, and these are on GPUs: leave --cores out")
    if asked["--cores"] is not None and asked["--cores"] <= 0:
        raise InputError(f"--cores must be more than 0, not {asked['--cores']:g}")
    found = from_flags(
        nodes=nodes,
        gpus=gpus,
        ranks=ranks,
        rate=of_flag("--rate", quantities.rate, asked["--rate"]),
        latency=given("--latency", quantities.seconds, asked["--latency"], None),
        inside=given("--inside", quantities.rate, asked["--inside"], None),
        cores=asked["--cores"],
    )
    return found if asked.get("--law") is None else replace(found, law=law_of(asked["--law"]))


def of_flag(flag: str, read: Callable[[str], float], text: str) -> float:
    """Read a quantity; an error names its flag."""
    try:
        return read(text)
    except CostError as error:
        raise InputError(f"{flag} {error}") from None


def given(flag: str, read: Callable[[str], float], text: str | None, usual: T) -> float | T:
    """Read a quantity, if its flag was given."""
    return usual if text is None else of_flag(flag, read, text)


def step_of(text: str | None) -> float | None:
    """Read --step; None if it was not given."""
    found = given("--step", quantities.seconds, text, None)
    if found is not None and found <= 0:
        raise InputError(f"--step must be more than 0, not {text!r}")
    return found


# -- the model --------------------------------------------------------------------------------------------------------------


def cost_of(text: str, step: str | None, cluster: Cluster, mixed: bool, dtype: str | None = None) -> ModelCost:
    require_dtype(dtype or "fp32")
    seconds = step_of(step)
    if text in workloads.names():
        if cluster.has_gpus and seconds is None and not mixed:
            raise InputError(f"{text} {HERE}")
        if seconds is None and dtype not in (None, "fp32"):
            raise InputError(
                f"{text} is trained here in fp32: say how long a step takes in {dtype}, with --step, or leave --dtype out"
            )
        found = measured(workloads.get(text)).of_dtype(dtype or "fp32")
        return found if seconds is None else with_step(found, seconds)
    if seconds is None:
        raise InputError(f"{text} is not trained here, so say how long a step of one rank takes: --step 350ms")
    if text in MODELS:
        return known_model(text, seconds, memory_rate=cluster.memory_rate, dtype=dtype or "fp32")
    if text.endswith((".toml", ".json")):
        shapes = _shapes_in(Path(text))
        return from_shapes(shapes, seconds, name=text, memory_rate=cluster.memory_rate, dtype=dtype or "fp32")
    if ":" in text:
        return untrained(_built(text), seconds, name=text, memory_rate=cluster.memory_rate, dtype=dtype)
    raise InputError(f"there is no model called {text!r}. {nearest(text, [*MODELS, *workloads.names()])}")


def _script(script: Path, words: list[str], step: str | None, cluster: Cluster, mixed: bool) -> ModelCost:
    """Run the user's script alone for a few steps."""
    seconds = step_of(step)
    if cluster.has_gpus and seconds is None and not mixed and not torch.cuda.is_available():
        raise InputError(f"{script.name} {HERE}")
    found = measure_script(script, words)
    return found if seconds is None else with_step(found, seconds)


def measured(workload: workloads.Workload) -> ModelCost:
    """Train a few steps of a workload here, on one thread."""
    workload.prepare()
    torch.set_num_threads(1)
    model = workload.model()
    optimizer = workload.optimizer(model)
    return measure(model, optimizer, lambda step: workload.loss(model, workload.batch(step, 0, 1)), name=workload.name)


def _built(text: str) -> nn.Module:
    """Build the model of module:callable on the meta device."""
    module, _, name = text.partition(":")
    see_this_folder()
    try:
        make = getattr(importlib.import_module(module), name)
        with torch.device("meta"):
            model = make()
    except (Exception, SystemExit) as error:
        raise InputError(f"{text} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{text} returned {type(model).__name__}, not a torch.nn.Module")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise InputError(
            f"{text} has lazy parameters, whose shapes are not known before a forward pass; give them shapes"
        )
    return model


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Read shapes by parameter: name = [rows, columns]."""
    try:
        text = path.read_text(encoding="utf-8")
        raw: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no list of shapes: {error}") from None
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{path} must hold a shape for each parameter: weight = [768, 3072]")
    for name, shape in raw.items():
        if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape) or prod(shape) >= 2**40:
            raise InputError(f"{path}: {name} must be a list of positive whole numbers, not {shape!r}")
    return {name: tuple(shape) for name, shape in raw.items()}
