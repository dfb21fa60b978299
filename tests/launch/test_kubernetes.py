"""The files for Kubernetes are what its API takes, and fit the scripts that they start."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "launch" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents(name) if each["kind"] == kind)
    return found


@pytest.mark.parametrize("release", ["1.31", "1.34", "newest"])
@pytest.mark.parametrize("name", ["members.yaml", "torchrun.yaml"])
def test_the_api_takes_each_document(name: str, release: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    if release == "newest":
        release = kubernetes.latest_version()
    for document in documents(name):
        kubernetes.validate(document, release, strict=True)
    broken = documents(name)[-1]
    broken["spec"]["backoffLimits"] = 3
    with pytest.raises(kubernetes.ValidationError, match="backoffLimits"):
        kubernetes.validate(broken, release, strict=True)


def missing_from(what: Any, kept: Any, where: str = "") -> list[str]:
    """Fields that a model has not kept, since it does not know them."""
    if isinstance(what, dict):
        known = kept if isinstance(kept, dict) else {}
        return [m for key, v in what.items() for m in missing_from(v, known.get(key), f"{where}.{key}")]
    if isinstance(what, list):
        rest = kept if isinstance(kept, list) and len(kept) == len(what) else [None] * len(what)
        return [m for i, (v, k) in enumerate(zip(what, rest)) for m in missing_from(v, k, f"{where}[{i}]")]
    return [] if what == kept else [where]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kubeflow_knows_each_field_of_the_trainjob() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    read: dict[str, Callable[[Any], Any]] = {
        "TrainJob": models.TrainerV1alpha1TrainJob.from_dict,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime.from_dict,
    }
    found = documents("trainjob.yaml")
    assert {each["kind"] for each in found} == read.keys()
    for document in found:
        assert missing_from(document, read[document["kind"]](document).to_dict()) == []
    wrong = of_kind("trainjob.yaml", "TrainJob")
    wrong["spec"]["trainer"]["elasticPolicy"] = {"minNodes": 2}
    assert missing_from(wrong, read["TrainJob"](wrong).to_dict()) == [".spec.trainer.elasticPolicy.minNodes"]


def pods() -> dict[str, dict[str, Any]]:
    runtime = of_kind("trainjob.yaml", "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"][0]
    specs = {name: of_kind(name, "Job")["spec"] for name in ("members.yaml", "torchrun.yaml")}
    return specs | {"trainjob.yaml": runtime["template"]["spec"]}


@pytest.mark.parametrize("name", pods())
def test_a_pod_that_was_told_has_the_time_that_the_script_counts_on_and_is_started_again(name: str) -> None:
    job, script = pods()[name], (EXAMPLES / "resumable.py").read_text()
    seconds = re.search(r"leaving_at\(seconds=(\d+)\)", script)
    assert seconds is not None
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= int(seconds[1])
    rules = job["podFailurePolicy"]["rules"]
    assert all(rule["action"] == "Ignore" for rule in rules)
    (codes,) = (rule["onExitCodes"] for rule in rules if "onExitCodes" in rule)
    assert codes["values"] == [os.EX_TEMPFAIL]
    assert codes["containerName"] in {c["name"] for c in job["template"]["spec"]["containers"]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # what a policy for failures asks for


def test_as_many_members_run_as_the_world_has() -> None:
    job = of_kind("members.yaml", "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert job["completions"] == job["parallelism"] == int(env["WORLD_SIZE"])
    assert env["MASTER_ADDR"] == of_kind("members.yaml", "Service")["metadata"]["name"]


def test_scripts_that_the_files_name_are_there_and_may_be_run() -> None:
    for file in FOLDER.glob("*.yaml"):
        for name in re.findall(r"examples/launch/[\w/.]+\.(?:py|sh)", file.read_text()):
            path = EXAMPLES.parent / name
            assert path.exists(), f"{file.name}: {name}"
            assert path.suffix == ".py" or os.access(path, os.X_OK), f"{file.name}: {name}"


def test_a_run_that_fails_again_and_again_ends_its_pod_so_that_the_job_can_count(tmp_path: Path) -> None:
    settings = {"PYTHON": "false", "NODES": "1", "JOB_COMPLETION_INDEX": "0", "WAIT": "0", "MOST_FAILURES": "2"}
    command = [str(FOLDER / "ranks.sh"), "127.0.0.1", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **settings}, timeout=30, check=False)
    assert done.returncode == 1  # that of `false`, which stands for a script that cannot be imported
