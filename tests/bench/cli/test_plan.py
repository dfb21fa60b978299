"""`gossamer plan`: what a user reads, the same as JSON, and what is refused before anything is planned."""

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.loaded import SUBPROCESS

from gossamer.bench import utility
from gossamer.bench.compare.script_cost import measure_script
from gossamer.bench.report import grid
from gossamer.costs.quantities import say_seconds
from gossamer.planning import rates
from gossamer.planning.peak import PeakMemory

Say = Callable[..., tuple[int, str, str]]
GPT2 = ("plan", "gpt2", "--nodes", "2", "--gpus", "1", "--step", "350ms")


@pytest.fixture(autouse=True)
def few_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is replayed at a hundred rates for each recipe; tests/planning sees that those where it begins to pay are found."""
    monkeypatch.setattr(rates, "RATES", rates.RATES[::6])
    monkeypatch.setattr(rates, "_bisect", lambda holds, a, b: (a * b) ** 0.5)


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank holds at its peak takes longest to find; tests/planning/test_peak.py looks at it."""
    monkeypatch.setattr(
        "gossamer.planning.plan.memory_of", lambda programs, model, keeps: PeakMemory(0, 0, 0, keeps, 0)
    )


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in processes that have torch loaded."""
    monkeypatch.setattr("gossamer.bench.compare.script_cost.subprocess", SUBPROCESS)


@pytest.mark.usefixtures("unrehearsed")
def test_it_says_what_pays_on_a_slow_link(say: Say) -> None:
    code, out, err = say(*GPT2, "--rate", "1gbit")
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith("powersgd: ")
    assert "DDP" in first
    for word in ("What to change first", "passes over memory, not measured", "latency default", "backup: "):
        assert word in out, word
    assert "use at least 3 ranks" in out


@pytest.mark.usefixtures("unrehearsed")
def test_it_says_no_on_a_fast_one(say: Say) -> None:
    code, out, _ = say(*GPT2, "--rate", "25gbit")
    assert code == 0
    assert out.startswith("Leave DDP alone")


@pytest.mark.usefixtures("unrehearsed")
def test_a_severity_has_two_digits_and_no_power_of_ten(say: Say) -> None:
    _, out, _ = say(*GPT2, "qsgd", "--rate", "50mbit")
    assert ", nccl; severity 230.\n" in out


@pytest.mark.usefixtures("unrehearsed")
def test_a_sharded_model_of_seven_billion_is_planned_from_its_shapes(say: Say) -> None:
    code, out, _ = say(
        "plan", "llama-7b", "qsgd", "local_sgd(32)", "--shard", "8", "--nodes", "4", "--gpus", "8", "--rate", "25gbit",
        "--step", "2s",
    )  # fmt: skip
    assert code == 0
    assert "hsdp" in out
    assert "fsdp" in out
    assert "sharded over 8" in out


def test_json_says_the_same(say: Say) -> None:
    code, out, _ = say(*GPT2, "qsgd", "backup", "--rate", "1gbit", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["verdict"][0].startswith("qsgd: ")
    assert found["severity"] == pytest.approx(4 * found["model"]["parameters"] / 125e6 / 0.35, rel=1e-3)
    assert [row["recipe"] for row in found["baselines"]] == ["ddp", "ddp-bf16", "ddp, 4 micro-batches", "compute"]
    row, refused = found["recipes"]
    assert row["low_s"] <= row["step_s"] <= row["high_s"]
    assert sum(row["split"].values()) == pytest.approx(row["step_s"], rel=1e-3)
    assert row["of"]["ddp"] == pytest.approx(row["step_s"] / found["baselines"][0]["step_s"])
    assert row["source"]["work"] == "passes over memory, not measured"
    assert "at least 3 ranks" in refused["error"]


def test_the_dtype_stands_in_the_table_the_json_and_the_explanation(say: Say) -> None:
    asked = (*GPT2, "qsgd", "--rate", "1gbit", "--dtype", "bf16")
    code, out, _ = say(*asked)
    assert code == 0
    assert "124 M parameters in bf16" in out
    assert "ddp-bf16" not in out
    code, out, _ = say(*asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["model"]["dtype"] == "bf16"
    assert [row["recipe"] for row in found["baselines"]] == ["ddp", "ddp, 4 micro-batches", "compute"]
    assert found["baselines"][0]["sent_bytes"] == 2 * found["model"]["parameters"]
    code, out, _ = say(*asked, "--explain", "qsgd")
    assert code == 0
    assert "parameters in bf16; the recipe averages in fp32" in out


def test_a_model_that_is_cut_among_eight_is_planned_on_hosts_of_eight(say: Say) -> None:
    asked = ("plan", "gpt2", "qsgd", "--shard", "8", "--nodes", "4", "--rate", "25gbit", "--step", "1s", "--json")
    implied, said = (json.loads(say(*asked, *more)[1]) for more in ((), ("--gpus", "8")))
    assert implied["cluster"]["ranks_per_node"] == 8
    assert implied == said


def test_a_target_says_what_keeps_machines_busy(say: Say) -> None:
    asked = (*GPT2, "local_sgd(8)", "qsgd", "--rate", "1gbit", "--target", "every")
    code, out, _ = say(*asked)
    assert code == 0
    assert "gpt2: the shortest round, in steps, with which machines compute for so much of the time at 1 Gbit/s." in out
    assert "qsgd: it has no rounds whose length is free" in out
    code, out, _ = say(*asked, "--json")
    assert code == 0
    assert [*json.loads(out)["values"]] == ["local_sgd(8)"]


@pytest.mark.usefixtures("unrehearsed")
def test_several_numbers_of_hosts_stand_side_by_side(say: Say) -> None:
    asked = (
        "plan",
        "gpt2",
        "topk",
        "scatter(topk())",
        "--gpus",
        "1",
        "--step",
        "350ms",
        "--rate",
        "10gbit",
        "--over",
        "2,64",
    )
    code, out, _ = say(*asked)
    assert code == 0
    assert "2 hosts" in out
    assert "64 hosts" in out
    assert "scatter(topk()): scatter(topk()) is biased" in out
    code, out, _ = say(*asked, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["seconds"]["topk"]["64"] > found["seconds"]["topk"]["2"]
    code, _, err = say(*asked[:-1], "2,zero")
    assert code == 2
    assert "--over takes numbers of hosts, such as --over 2,8,32, not '2,zero'" in err


def test_a_workload_is_measured_on_this_machine(say: Say) -> None:
    code, out, _ = say("plan", "digits", "qsgd", "--nodes", "4", "--rate", "200mbit")
    assert code == 0
    assert "Computing: measured on this machine" in out
    assert "Work of recipes: measured on this machine" in out


def test_every_piece_is_explained_with_the_null_model(say: Say) -> None:
    code, out, _ = say(*GPT2, "--rate", "1gbit", "--explain", "scatter(qsgd()) + local_sgd(8)")
    assert code == 0
    assert "step 8 of 8, on the comm thread" in out
    assert "pairs, 1 message, " in out
    assert "null model: " in out


def test_shapes_may_come_from_a_file_or_a_function(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tmp_path / "shapes.toml"
    shapes.write_text('"w" = [100, 50]\n"b" = [50]\n')
    asked = ("qsgd", "--nodes", "2", "--rate", "1mbit", "--step", "10ms", "--json")
    code, out, _ = say("plan", str(shapes), *asked)
    assert (code, json.loads(out)["model"]["parameters"]) == (0, 5050)
    (tmp_path / "mine_to_plan.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(10, 10)\ndef lazy(): return torch.nn.LazyLinear(3)\n"
        "def no(): return 3\n"
    )
    monkeypatch.setattr("sys.path", [*sys.path])  # the program gossamer is not started as python -m, which looks here
    code, out, _ = say("plan", "mine_to_plan:make", *asked)
    assert (code, json.loads(out)["model"]["parameters"]) == (0, 110)
    for name, says in (("lazy", "lazy parameters"), ("no", "returned int"), ("none", "AttributeError")):
        code, _, err = say("plan", f"mine_to_plan:{name}", *asked)
        assert code == 2
        assert says in err


def test_a_function_may_lie_in_the_folder_where_plan_is_started(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed command looks in its own folder for modules, and not in this one."""
    (tmp_path / "here_to_plan.py").write_text("import torch\ndef make(): return torch.nn.Linear(10, 10)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = say("plan", "here_to_plan:make", "qsgd", "--rate", "1mbit", "--step", "10ms", "--json")
    assert code == 0, err
    assert json.loads(out)["model"]["parameters"] == 110


def test_a_cluster_may_come_from_a_file(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('format = 1\n[[hosts]]\ncount = 3\nup = "100 Mbit/s"\nlatency = "1 ms"\n')
    code, out, _ = say("plan", "gpt2", "qsgd", "--cluster", str(path), "--step", "1s", "--json")
    assert code == 0
    assert json.loads(out)["cluster"] | {"sources": {}} == {
        "nodes": 3,
        "ranks_per_node": 1,
        "backend": "gloo",
        "rate": 12.5e6,
        "latency": 1e-3,
        "sources": {},
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rate", "1gbit"), "give a model"),
        (("--rate", "1gbit", "--script", "none.py"), "there is no script none.py"),
        (("--rate", "1gbit", "--script", "none.py", "--step", "0s"), "--step must be more than 0"),
        (("--rate", "1gbit", "--script", "train.py", "--gpus", "1"), "--work-of-this-machine"),
        (("gpt2", "--step", "1s"), "give --rate"),
        (("gpt2", "--rate", "1gbit"), "--step 350ms"),
        (("gpt2", "--rate", "0gbit", "--step", "1s"), "more than 0"),
        (("gpt2", "--rate", "fast", "--step", "1s"), "is not a rate"),
        (("gpt2", "--rate", "1gbit", "--step", "0s"), "--step must be more than 0"),
        (("gpt2", "--rate", "1gbit", "--step", "soon"), "is not a time"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--cores", "0"), "--cores must be more than 0"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--gpus", "2", "--ranks", "2"), "both count the ranks"),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--gpus", "2", "--cores", "2"),
            "--cores are for ranks on processors",
        ),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--cluster", "c.toml"), "give one of them"),
        *(
            (("gpt2", "--step", "1s", "--cluster", "c.toml", flag, "1"), f"{flag} and --cluster both describe")
            for flag in ("--nodes", "--gpus", "--ranks")
        ),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--", "--lr", "1"), "arguments after -- belong to a script"),
        (("--rate", "1gbit", "--script", "train.py", "--step", "0s"), "--step must be more than 0"),
        (("gpt2", "--step", "1s", "--cluster", "none.toml"), "cannot be read"),
        (("gpt9", "--rate", "1gbit", "--step", "1s"), "gpt2"),
        (("digits", "--rate", "1gbit", "--gpus", "1"), "--work-of-this-machine"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--nodes", "1"), "one rank alone"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--gpus", "8", "--shard", "3"), "--shard 3"),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--shard", "8", "--accumulate", "8"),
            "--accumulate is of DDP, and --shard compares with HSDP and FSDP",
        ),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--nodes", "1", "--explain", "qsgd"), "one rank alone"),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--gpus", "8", "--shard", "3", "--explain", "qsgd"),
            "not cut into groups of 3",
        ),
        (("none.toml", "--rate", "1gbit", "--step", "1s"), "cannot be read"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--explain", "qsgd(bits=99)"), "bits"),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--dtype", "int4"),
            "there is no dtype called 'int4' for parameters here",
        ),
        (
            ("lm", "--rate", "1gbit", "--dtype", "bf16"),
            "lm is trained here in fp32: say how long a step takes in bf16, with --step",
        ),
        (
            ("--rate", "1gbit", "--script", "train.py", "--dtype", "bf16"),
            "in the dtype of its own parameters; leave --dtype out",
        ),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--target", "rate", "--over", "2,4"),
            "--target and --over are two questions",
        ),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--target", "rate", "--page", "p.html"),
            "leave out --explain, --over and --target",
        ),
        (
            ("gpt2", "--rate", "1gbit", "--step", "1s", "--explain", "qsgd", "--json"),
            "leave out --over, --target and --json",
        ),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--page", "no/such/p.html"), "there is no folder no/such"),
        (("gpt2", "--rate", "1gbit", "--step", "1s", "--target", "speed"), "'speed' is not one of"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(words: tuple[str, ...], says: str, say: Say) -> None:
    code, out, err = say("plan", *words)
    assert (code, out) == (2, "")
    assert says in err


def test_a_page_that_cannot_be_written_does_not_take_the_plan_along(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.bench.cli.plan._planned", lambda *of, **options: None)
    monkeypatch.setattr("gossamer.bench.cli.plan.sentences", lambda found: ["the plan"])
    monkeypatch.setattr("gossamer.bench.cli.plan.table", lambda found, words: print(*words))
    monkeypatch.setattr("gossamer.bench.cli.plan.grid_of", lambda *of: None)
    monkeypatch.setattr("gossamer.bench.cli.plan.planned.write_html", full)
    code, out, err = say(*GPT2, "qsgd", "--rate", "1gbit", "--page", "p.html")
    assert (code, out) == (1, "the plan\n")
    assert "p.html could not be written: No space left on device" in err


def test_a_recipe_that_cannot_be_read_is_a_row(say: Say) -> None:
    code, out, _ = say(*GPT2, "qsgd(bits=99)", "qsgd", "--rate", "1gbit")
    assert code == 0
    assert "qsgd(bits=99): " in out
    assert "bits" in out.split("qsgd(bits=99): ")[1]


def test_terngrads_published_speeds_stand_beside_ours(say: Say) -> None:
    code, out, _ = say("plan", "terngrad-paper", "--json")
    rows = json.loads(out)
    assert (code, len(rows)) == (0, 60)
    eight = {row["form"]: row for row in rows if row["network"] == "AlexNet" and row["gpus"] == 8}
    assert eight["ternary"]["shown"] > 1.1 * eight["fp32"]["shown"]
    code, out, _ = say("plan", "terngrad-paper")
    assert code == 0
    assert "VGG-A" in out
    for ignored in (["--rate", "1gbit"], ["--page", "p.html"], ["qsgd"]):
        code, _, err = say("plan", "terngrad-paper", *ignored)
        assert code == 2
        assert "leave" in err


def test_what_compression_gains_in_data_centres_is_a_heat_map(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility, "STEPS", {"resnet50": (0.07, 0.25)})
    monkeypatch.setattr(utility, "RANKS", (8, 16, 32))
    for name in ("cells", "break_evens"):  # computed once for both ways of printing
        monkeypatch.setattr(utility, name, cache(getattr(utility, name)))
    code, out, _ = say("plan", "utility", "--json")
    found = json.loads(out)
    assert (code, len(found["statements"]), len(found["setups"])) == (0, 6, 30)
    code, out, _ = say("plan", "utility")
    assert code == 0
    for word in ("no   From 10 Gbit/s on", "PowerSGD, rank 4", "100 Gbit/s", "not measured"):
        assert word in out, word


def test_a_page_is_written_where_it_is_asked_for(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "HOSTS", ())
    monkeypatch.setattr(grid, "FACTORS", (0.5, 1.0, 2.0))
    path, shapes = tmp_path / "plan.html", tmp_path / "shapes.json"
    shapes.write_text('{"w": [100, 50]}')
    asked = ("plan", str(shapes), "qsgd", "--gpus", "1", "--step", "10ms", "--rate", "10mbit", "--page", str(path))
    code, out, err = say(*asked)
    assert (code, "wrote" in err, "qsgd" in out) == (0, True, True)
    assert "<!doctype html>" in path.read_text()
    path.write_text("my own notes")
    code, _, err = say(*asked)
    assert code == 2
    assert "plan.html is there already, and is no report that gossamer wrote; it stays as it is; give --page" in err
    assert path.read_text() == "my own notes"
    code, _, err = say(*asked, "--over", "2,4")
    assert code == 2
    assert "--page is of a whole plan: leave out --explain, --over and --target" in err


# -- the user's own script ----------------------------------------------------------------------------------------------------

OWN_LOOP = Path(__file__).parents[3] / "examples" / "own_loop.py"
LOOP = """
import torch, gossamer
model = torch.nn.Linear(40, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
comm = gossamer.attach(model, optimizer)
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.ones(4, 40)).square().mean().backward()
    optimizer.step()
"""


def test_a_users_own_script_is_planned_with_its_arguments(say: Say) -> None:
    """It wraps its model in DDP, accumulates, clips and judges: its parameters are seen, and what a step takes."""
    code, out, err = say(
        "plan", "qsgd", "--script", str(OWN_LOOP), "--nodes", "4", "--rate", "200mbit", "--json", "--", "--width", "64"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["model"]["name"] == "own_loop.py"
    assert found["model"]["parameters"] == 64 * (256 + 64 + 256) + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert min(found["model"][k] for k in ("forward", "backward", "optimizer")) > 0
    assert [row["recipe"] for row in found["recipes"]] == ["qsgd"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LOOP.format(steps=4), "took 4 of 11 steps"),
        ("print('nothing')", "ended and never attached"),
        ("raise ValueError('no data')", "failed (ValueError: no data) and never attached"),
        (LOOP.format(steps=2) + "raise RuntimeError('disk full')", "took 2 of 11 steps: RuntimeError: disk full"),
        (LOOP.format(steps=2).replace("for step", "gossamer.attach(torch.nn.Linear(2, 2), torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=.1))\nfor step"), "attaches twice"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("forked")
def test_a_script_that_cannot_be_planned_is_refused(text: str, says: str, say: Say, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    code, out, err = say("plan", "qsgd", "--script", str(script), "--nodes", "4", "--rate", "200mbit")
    assert (code, out) == (2, "")
    assert says in err


RECOMPUTED = """
import torch, gossamer
from torch.utils.checkpoint import checkpoint
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(3))
        self.base = torch.nn.Linear(200, 200).requires_grad_(False)
        self.head = torch.nn.Linear(200, 10)
    def forward(self, x):
        x = self.base(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
comm = gossamer.attach(model, optimizer)
for step in range(12):
    optimizer.zero_grad()
    model(torch.ones(64, 200, requires_grad=True)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("forked")
def test_passes_of_reentrant_checkpointing_are_parts_of_one_backward_pass(tmp_path: Path) -> None:
    """The last of them alone was taken for it, and the gradients before for late ones: nothing was left that hides a network."""
    script = tmp_path / "train.py"
    script.write_text(RECOMPUTED)
    cost = measure_script(script, [])
    weights = [cost.shares[f"{name}.weight"] for name in ("head", "blocks.2", "blocks.1", "blocks.0")]
    assert weights == sorted(weights)
    assert weights[0] < weights[1] < weights[2] < 1
    assert (cost.numel, cost.frozen) == (3 * 40_200 + 2010, 4 * 40_200)


# -- work that the cluster's file has ------------------------------------------------------------------------------------------

WORKED = """format = 1
backend = "{backend}"
[[hosts]]
count = 4
up = "1 Gbit/s"
device = "{device}"
[work."qsgd"]
device = "cpu"
bytes = 6000000
ranks = [2, 4]
seconds = [[0.01, 0.0, 0.01, 0.01, 0.0, 0.0], [0.01, 0.0, 0.02, 0.02, 0.0, 0.0]]
"""


def test_a_plan_takes_work_from_the_file(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(WORKED.format(backend="gloo", device="cpu"))
    code, out, err = say("plan", "gpt2", "qsgd", "--cluster", str(path), "--step", "1s", "--json")
    assert code == 0, err
    assert json.loads(out)["recipes"][0]["source"]["work"] == "in the file"


def test_prices_have_a_column_also_where_failures_leave_ddp_no_time(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    fails = 'price = "2 USD/h"\nmtbf = "1 s"\n'
    path.write_text(f'format = 1\n[[hosts]]\ncount = 4\nup = "1 Gbit/s"\nlatency = "1 ms"\n{fails}')
    code, out, err = say("plan", "gpt2", "local_sgd(8)", "--cluster", str(path), "--step", "1s")
    assert code == 0, err
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line.strip()}
    assert rows["recipe"].endswith("USD / 1000 steps time kept")
    assert rows["local_sgd(8)"].endswith(" 1%")


def test_a_gpu_cluster_is_not_planned_with_a_processors_work(say: Say, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(WORKED.format(backend="nccl", device="gpu"))
    asked = ("plan", "gpt2", "bf16", "--cluster", str(path), "--step", "1s", "--json")
    code, out, err = say(*asked)
    assert (code, out) == (2, "")
    assert "the [work] tables of its file were measured on processors" in err
    assert "doctor --gpu --save" in err
    code, out, err = say(*asked, "--work-of-this-machine")
    assert code == 0, err


def test_a_law_of_computing_is_waited_for(say: Say) -> None:
    code, out, err = say(*GPT2, "allreduce", "decoupled_diloco(8)", "--rate", "25gbit", "--law", "slow 2", "--json")
    assert code == 0, err
    rows = {row["recipe"]: row for row in json.loads(out)["recipes"]}
    assert rows["allreduce"]["split"]["waiting"] == pytest.approx(0.35)
    assert (rows["allreduce"]["simulated_ranks"], rows["decoupled_diloco(8)"]["simulated_ranks"]) == (0, 2)
    code, out, _ = say(*GPT2, "decoupled_diloco(8)", "--rate", "25gbit")
    assert "decoupled_diloco(8): simulated on 2 ranks" in out
    code, _, err = say(*GPT2, "allreduce", "--rate", "25gbit", "--law", "pareto 2")
    assert code == 2
    assert "is no law of computing" in err


@pytest.mark.parametrize("width", [80, 100, 120, 250])
def test_a_terminal_shows_whole_numbers_however_narrow_it_is(
    say: Say, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    asked = (*GPT2, "--rate", "1gbit", "qsgd", "scatter(qsgd()) + local_sgd(32)")
    found = json.loads(say(*asked, "--json")[1])
    for name, value in {"COLUMNS": str(width), "TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, _ = say(*asked)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()
    assert code == 0
    assert not [line for line in lines if "\N{HORIZONTAL ELLIPSIS}" in line or len(line) > width]
    assert ("at peak" in " ".join(lines)) == (width == 250)
    for row in found["recipes"]:
        figures = say_seconds(row["step_s"]), f"{row['utilisation']:.0%}", f"{row['of']['ddp']:.2f}"
        assert any(all(figure in line for figure in figures) for line in lines), (row["recipe"], figures, out)


def test_a_model_of_billions_is_said_without_powers_of_ten(say: Say) -> None:
    """Of llama-7b it said 6.74e+03 M parameters."""
    code, out, _ = say(
        "plan", "llama-7b", "allreduce", "--step", "2s", "--nodes", "2", "--gpus", "1", "--rate", "25gbit"
    )
    assert code == 0
    assert "llama-7b: 6738 M parameters in fp32" in out
