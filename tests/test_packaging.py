"""What is released: an sdist, the wheel that is built from it and trains where it is installed, a conda recipe."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gossamer
from gossamer.trainers.releases import ACCELERATE, LIGHTNING, TRANSFORMERS

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "conda" / "recipe.yaml"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA_NAMES = {"torch": "pytorch"}

TRAIN = """
import torch
import gossamer

model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
comm = gossamer.attach(model, optimizer, "scatter(qsgd()) + local_sgd(2)")
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
print(gossamer.__file__, comm.step)
"""


class Released(NamedTuple):
    sdist: Path
    source: Path  # the sdist, unpacked
    wheel: Path
    target: Path  # where the wheel is installed


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    """The wheel is built from the unpacked sdist, which is all that who builds from an index has."""
    home = tmp_path_factory.mktemp("released")
    build = (sys.executable, "-m", "hatchling", "build", "-d", home)
    run(*build, "-t", "sdist", cwd=ROOT)
    (sdist,) = home.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(home, filter="data")
    source = home / sdist.name.removesuffix(".tar.gz")
    run(*build, "-t", "wheel", cwd=source)
    (wheel,) = home.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*pip, "--target", home / "site", wheel, cwd=home)
    return Released(sdist, source, wheel, home / "site")


def metadata(target: Path) -> Message:
    (file,) = target.glob("gossamer-*.dist-info/METADATA")
    return Parser().parsestr(file.read_text())


def test_an_installed_wheel_trains_and_starts_its_command(released: Released, tmp_path: Path) -> None:
    said = run(sys.executable, "-c", TRAIN, cwd=tmp_path, path=str(released.target))
    assert said.split() == [str(released.target / "gossamer" / "__init__.py"), "4"]
    command = run(released.target / "bin" / "gossamer", "--version", cwd=tmp_path, path=str(released.target))
    assert command == f"gossamer {gossamer.__version__}\n"


def test_the_sdist_holds_what_the_wheel_and_its_tests_are_made_of(released: Released) -> None:
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "requirements-dev.txt"):
        assert (released.source / name).is_file(), name
    assert not list(released.source.rglob("__pycache__"))
    assert not (released.source / ".venv").exists()
    ours = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "gossamer").rglob("*") if "__pycache__" not in p.parts}
    installed = {p.relative_to(released.target) for p in (released.target / "gossamer").rglob("*")}
    assert {p for p in ours if p.suffix in {".py", ".typed"}} <= installed
    assert {p for p in installed if p.suffix == ".py"} <= ours


def test_metadata_says_who_where_and_what_for(released: Released) -> None:
    data = metadata(released.target)
    assert data["Version"] == gossamer.__version__
    assert data["Author"]
    assert data["License-Expression"] == "Apache-2.0"
    assert (released.target / f"gossamer-{gossamer.__version__}.dist-info" / "licenses" / "LICENSE").is_file()
    assert {"pytorch", "distributed-training"} <= set(data["Keywords"].split(","))
    urls = dict(line.split(", ") for line in data.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())


def test_pages_that_the_metadata_names_are_in_the_tree() -> None:
    for url in PROJECT["urls"].values():
        _, found, path = url.partition("/blob/main/")
        assert not found or (ROOT / path).is_file(), url


def test_trainers_is_the_sum_of_the_extras_of_each_trainer(released: Released) -> None:
    wanted = metadata(released.target).get_all("Requires-Dist", [])

    def of(extra: str) -> set[str]:
        return {line.partition(";")[0].strip() for line in wanted if line.endswith(f"extra == '{extra}'")}

    assert of("trainers") == of("accelerate") | of("hf") | of("lightning")
    assert {re.split("[<>]", line)[0] for line in of("trainers")} == {"accelerate", "transformers", "lightning"}


def test_every_extra_that_an_error_or_a_page_names_is_there() -> None:
    """Of another one pip installs nothing, and warns in one line of many."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    found = {names for page in pages for names in re.findall(r"(?:gossamer|'\.)\[([a-z,]+)\]'", page.read_text())}
    named = {served.extra for served in (ACCELERATE, LIGHTNING, TRANSFORMERS)}.union(
        *(names.split(",") for names in found)
    )
    assert {"fast", "cli", "gpu"} <= named <= set(PROJECT["optional-dependencies"])


def conda() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(RECIPE.read_text())


def spaced(requirement: str) -> str:
    """A requirement as conda writes it.

    >>> spaced("torch>=2.6")
    'pytorch >=2.6'
    """
    name, version = requirement.split(">=")
    return f"{CONDA_NAMES.get(name, name)} >={version}"


def test_the_conda_recipe_asks_for_what_the_wheel_asks_for() -> None:
    recipe, extras = conda(), PROJECT["optional-dependencies"]
    assert recipe["context"] == {"version": gossamer.__version__, "python_min": PROJECT["requires-python"][2:]}
    run = recipe["requirements"]["run"]
    assert set(run) == {"python >=${{ python_min }}", *map(spaced, PROJECT["dependencies"])}
    bounds = recipe["requirements"]["run_constraints"]
    assert set(bounds) == {spaced(r) for r in [*extras["cli"], *extras["fast"]]}
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command.split(" = ") == ["gossamer", PROJECT["scripts"]["gossamer"]]
    about = recipe["about"]
    assert (about["license"], about["summary"]) == (PROJECT["license"], PROJECT["description"])
    assert (about["homepage"], about["documentation"]) == (
        PROJECT["urls"]["Homepage"],
        PROJECT["urls"]["Documentation"],
    )


def test_whoever_builds_has_a_hatchling_that_reads_the_project() -> None:
    """Before 1.26 a list of licence files was an error of another kind."""
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed == "hatchling>=1.26"
    assert spaced(needed) in conda()["requirements"]["host"]
    assert f"{needed}\n" in (ROOT / "requirements-dev.txt").read_text()


def test_rattler_build_takes_the_conda_recipe() -> None:
    build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    (variant,) = build.Stage0Recipe.from_file(RECIPE).render(build.VariantConfig())
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": "gossamer", "version": gossamer.__version__}
    assert rendered["build"]["noarch"] == "python"
    assert "pytorch >=2.6" in rendered["requirements"]["run"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("noarch: python", "noarch: pyton"),
        ("run_constraints:", "run_constrains:"),
        ("license: Apache-2.0", "license: Apache 2"),
        ("version: ${{ version }}", "version: ${{ versoin }}"),
    ],
)
def test_rattler_build_refuses_a_recipe_with_a_mistake(right: str, wrong: str) -> None:
    build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    text = RECIPE.read_text()
    assert right in text
    with pytest.raises(build.RattlerBuildError):
        build.Stage0Recipe.from_yaml(text.replace(right, wrong)).render(build.VariantConfig())


def test_the_command_line_asks_for_a_typer_that_knows_its_options() -> None:
    """Choices are written as Literals, on which typer ends in a traceback before 0.19."""
    commands = "".join(path.read_text() for path in (ROOT / "src" / "gossamer" / "bench" / "cli").glob("*.py"))
    assert "Literal[" in commands
    (least,) = (line.partition(">=")[2] for line in PROJECT["optional-dependencies"]["cli"] if line.startswith("typer"))
    assert tuple(map(int, least.split("."))) >= (0, 19)
    assert f"typer>={least}\n" in (ROOT / "requirements-dev.txt").read_text()


def test_who_tests_has_the_versions_that_who_uses_is_asked_for() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    tested = dict(line.split(">=") for line in lines if ">=" in line)
    extras = PROJECT["optional-dependencies"].values()
    asked = dict(re.split(">=|,|;", line)[:2] for each in extras for line in each if ">=" in line)
    shared = tested.keys() & asked.keys()
    assert {"typer", "numba", "transformers", "lightning"} <= shared
    assert {name: tested[name] for name in shared} == {name: asked[name] for name in shared}
