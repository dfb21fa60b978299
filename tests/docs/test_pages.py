"""What the pages say to type runs, and what they link to exists."""

import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import gossamer
from gossamer import recipe
from gossamer.bench.cli.app import COMMANDS, HELP
from gossamer.core.parts import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("launch/*.md"))]
ELSEWHERE = {
    "lab.md",
    "report.md",
    "workloads.md",
}  # whose code needs a lab or the record of a run, or is run beside the workloads
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


class Logger:
    """A fake of every logger the pages speak of: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **options: Any) -> "Logger":
        return self

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))

    def log(self, values: dict[str, float], step: int) -> None:
        self.told += [(name, value, step) for name, value in values.items()]

    log_metrics = log


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Logger]:
    board, wandb, mlflow = (Logger() for _ in range(3))
    modules = {
        "torch.utils.tensorboard": {"SummaryWriter": board},
        "wandb": {"init": wandb},
        "mlflow": {"log_metrics": mlflow.log},
    }
    for name, members in modules.items():
        fake = types.ModuleType(name)
        vars(fake).update(members)
        monkeypatch.setitem(sys.modules, name, fake)
    return {"TensorBoard": board, "W&B": wandb, "MLflow": mlflow}


@pytest.fixture
def tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts that a page registers are gone afterwards; dice are where they were."""
    monkeypatch.setattr(registry, "_parts", dict(registry.of()))
    monkeypatch.setattr(recipe, "presets", dict(recipe.known_presets()))
    rng = torch.get_rng_state()
    yield
    torch.set_rng_state(rng)


@pytest.mark.parametrize("page", [p for p in OWN if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: p.name)
@pytest.mark.usefixtures("tidy")
def test_code_on_a_page_runs(page: Path, loggers: dict[str, Logger], capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    for i, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}[{i}]", "exec"), space)
    if page.name == "metrics.md":
        for name, logger in loggers.items():
            assert {t[0] for t in logger.told} >= {"gossamer/sent_bytes", "gossamer/step_seconds"}, name
            assert {t[2] for t in logger.told} == {10, 20}, name


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower().replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", OWN, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target) or "/parts/" in f"/{target}":  # those are made at build, and tested apart
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else page.parent / path
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


def test_links_to_made_pages_lead_somewhere() -> None:
    names = {f"parts/{n}.md" for n in ("index", "api", "presets", "refusals")}
    sys.path.insert(0, str(DOCS / "ext"))
    import parts

    names |= {f"parts/{parts.path_of(p)}" for p in registry.of().values()}
    for page in OWN:
        for target in LINK.findall(page.read_text()):
            path = target.partition("#")[0]
            if path.startswith("parts/"):
                assert path in names, f"{page.name} links to {target}"


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (DOCS / "index.md").read_text()
    listed = re.findall(r"^[\w/*\[\]]+$", index, re.M)
    for page in [*DOCS.glob("*.md"), *DOCS.glob("launch/*.md")]:
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or any(fnmatch(name, entry) for entry in listed), page.name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    import subprocess

    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "parts" / "codecs" / "ternary.html").exists()


@pytest.mark.parametrize("page", OWN, ids=lambda p: p.name)
def test_torchrun_of_several_machines_is_told_which_one_it_is_on(page: Path) -> None:
    """Without a node rank or a rendezvous backend, torchrun takes each machine for the first, and no ranks meet."""
    for line in page.read_text().replace("\\\n", "").splitlines():
        if re.match(r"(\$ )?torchrun .*--nnodes", line) and "..." not in line:
            assert "--node-rank" in line or "--rdzv-backend" in line, line


def test_the_front_page_names_every_command() -> None:
    named = (ROOT / "README.md").read_text().partition("The commands are ")[2].partition(";")[0]
    assert {word.removeprefix("gossamer ") for word in re.findall(r"`([^`]+)`", named)} == set(HELP)


def test_an_example_that_leaves_its_recipe_to_the_environment_says_how_to_name_one() -> None:
    """Without it such a script ends before its first step."""
    texts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    left = [text for text in texts if re.search(r"gossamer\.(ddp\.register\(\w+\)|attach\(\w+, \w+\))", text)]
    assert left
    for text in left:
        started = re.findall(r"^\$ .*torchrun .*", text, re.M)
        assert started
        assert [line for line in started if not line.startswith("$ GOSSAMER_RECIPE=")] == []


@pytest.mark.parametrize("page", OWN, ids=lambda p: p.name)
def test_names_of_ours_exist(page: Path) -> None:
    for name in re.findall(r"`(gossamer(?:\.\w+)+)[`(]", page.read_text()):
        if not name.startswith("gossamer.trainers."):  # their frameworks may be missing
            pkgutil.resolve_name(name)


def test_parts_that_a_page_calls_typical_of_a_recipe_exist() -> None:
    table = (DOCS / "how.md").read_text().partition("```text\ncontroller ")[2].partition("```")[0]
    named = {name for line in table.splitlines() for name in line.rpartition("  ")[2].strip().split(", ")}
    assert {"qsgd", "every_step"} <= named
    assert named - {*registry.of()} == set()


@pytest.mark.parametrize("page", OWN, ids=lambda p: p.name)
def test_simulations_that_a_page_shows_have_a_network(page: Path) -> None:
    """Else they are refused."""
    text = page.read_text().replace("\\\n", "")
    shown = re.findall(r"`(gossamer simulate [^`]*--[^`]*)`", text) + re.findall(
        r"^(?:\$ )?(gossamer simulate .*)", text, re.M
    )
    assert [line for line in shown if "--rate" not in line and "--cluster" not in line] == []


SAID = re.compile(r"\bgossamer (?=(\w+)(?: (kernels|noise|steps)\b)?([^`\n#]*))")


def given_options(text: str) -> Iterator[tuple[str, str, str]]:
    """Command, command of `bench`, and option, wherever a page has a command line; what follows `--` belongs to others."""
    text = re.sub(r"`[^`\n]*\n[^`\n]*`", lambda span: span[0].replace("\n", " "), text.replace("\\\n", " "))
    for name, below, words in SAID.findall(text):
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", words.split(" -- ")[0]):
            yield name, below, option


@pytest.mark.parametrize("page", OWN, ids=lambda p: p.name)
def test_options_that_a_page_gives_to_a_command_exist(page: Path) -> None:
    for name, below, option in given_options(page.read_text()):
        command: Any = {command.name: command for command in COMMANDS}[name].load()
        command = command.commands[below] if below and name == "bench" else command
        known = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
        assert option in {*known, "--help"}, f"{page.name}: gossamer {name} {below} {option}"


def test_every_number_of_metrics_is_on_its_page() -> None:
    model = torch.nn.Linear(2, 1)
    page = (DOCS / "metrics.md").read_text()
    with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk") as comm:
        assert [name for name in (*comm.metrics(), "accepted_share") if f"`{name}`" not in page] == []


def test_the_codec_that_one_is_told_to_add_is_not_there_yet() -> None:
    name = (ROOT / "CONTRIBUTING.md").read_text().partition("Say it is called `")[2].partition("`")[0]
    assert name
    assert registry.get(name) is None
    assert f'@part("{name}")' in (DOCS / "own.md").read_text()
