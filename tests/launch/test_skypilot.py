"""SkyPilot reads the job of a member, where SkyPilot is installed; no cloud is asked."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parents[2] / "examples" / "launch" / "skypilot" / "member.yaml"
READ = """
import copy, json, sys
import sky, yaml
job = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(copy.deepcopy(job), env_overrides=[("RANK", "2"), ("MASTER_ADDR", "10.0.0.1")])
(resources,) = task.resources
job["resources"]["use_spots"] = True
try:
    sky.Task.from_yaml_config(job, env_overrides=[("RANK", "2"), ("MASTER_ADDR", "10.0.0.1")])
    refused = ""
except Exception as error:
    refused = str(error)
print(json.dumps([task.num_nodes, task.envs, resources.use_spot, resources.job_recovery, refused]))
"""


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed")
@pytest.mark.slow
def test_its_parser_takes_the_job_of_a_member(tmp_path: Path) -> None:
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [sys.executable, "-c", READ, str(JOB)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    nodes, envs, is_spot, recovery, refused = json.loads(done.stdout.splitlines()[-1])
    assert (nodes, is_spot) == (1, True)
    assert (envs["RANK"], envs["MASTER_ADDR"], envs["WORLD_SIZE"]) == ("2", "10.0.0.1", "4")
    assert recovery["recover_on_exit_codes"] == [os.EX_TEMPFAIL]
    assert "use_spots" in refused  # or the parser would take anything
