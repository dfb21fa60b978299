"""`gossamer recipes`: what it says of presets and parts, and that what it says is so."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.bench import catalogue
from gossamer.bench.catalogue.samples import typical
from gossamer.bench.cli import list_cache
from gossamer.bench.workloads import get
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import registry
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.recipes import presets

Say = Callable[..., tuple[int, str, str]]


def facts(say: Say, *words: str) -> dict[str, Any]:
    code, out, err = say("recipes", *words, "--parameters", "40000", "--json")
    assert code == 0, err
    return json.loads(out)


def test_several_ranks_a_node_are_counted_at_the_nodes_card(say: Say) -> None:
    row = facts(say, "nodes(scatter(qsgd()), 4)", "--hosts", "8", "--rate", "100mbit")
    assert row["card_bytes_per_step"] < row["sent_bytes_per_step"] / 4
    assert row["seconds_per_step"] == pytest.approx(row["card_bytes_per_step"] * 8 / 100e6, rel=0.01)
    assert facts(say, "qsgd")["card_bytes_per_step"] is None
    code, out, _ = say("recipes", "nodes(scatter(qsgd()), 4)", "--hosts", "200", "--parameters", "40000")
    assert code == 0
    assert "through the card of a node:" in out


def test_a_card_says_up_to_what_severity_machines_are_busy(say: Say) -> None:
    row = facts(say, "diloco(30) + allreduce(fp32())")
    models = row["sent_bytes_per_step"] / (4 * row["parameters"])
    assert row["busy_up_to"] == [pytest.approx(1 / 19 / models, rel=1e-3), pytest.approx(1 / 0.95 / models, rel=1e-3)]
    code, out, _ = say("recipes", "diloco(30) + allreduce(fp32())", "--parameters", "40000")
    assert code == 0
    assert "95 % busy up to S = 1.1, with full overlap 21" in out
    assert "40 k parameters, " in out
    row = facts(say, "nodes(scatter(qsgd()), 4)", "--hosts", "8")
    assert row["busy_up_to"][0] == pytest.approx(row["parameters"] * 4 / 19 / row["card_bytes_per_step"], rel=1e-3)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_every_preset_says_when_to_use_it_and_when_not(name: str) -> None:
    docs = catalogue.read(presets()[name])
    assert docs.use, f"{name}: say in its docstring, after 'Use:', when to take it"
    assert docs.not_for, f"{name}: say in its docstring, after 'Not for:', when it does not pay"


@pytest.mark.parametrize("name", registry.of())
def test_every_part_says_when_to_use_it(name: str) -> None:
    assert catalogue.read(registry.of()[name]).use, f"{name}: say in its docstring, after 'Use:', when to take it"


SQUARES = {"w": (256, 256), "v": (256, 256)}


@cache
def dense(size: int) -> float:
    return bytes_per_step("allreduce", SQUARES, size)


@pytest.mark.parametrize("name", presets())
def test_what_bytes_are_promised_is_counted(name: str) -> None:
    """Where words say that bytes grow, or that they are a certain part of dense, they must."""
    docs, recipe = catalogue.read(presets()[name]), catalogue.example(name)
    few = 2 + getattr(recipe.schedule, "backups", 0)
    many = 100 if "rows is sent in full" in docs.not_for else 32  # of 32 ranks each has a chunk of sixteen
    ratios = {n: dense(n) / bytes_per_step(recipe, SQUARES, n) for n in (few, 4, many)}
    grows = ratios[many] < ratios[4] / 4
    assert bool(re.search("bytes grow with (their|the) number", docs.not_for)) == grows
    if "whatever the number of ranks" in docs.use:
        assert ratios[many] > 0.75 * ratios[4]
    for times in re.findall(r"([\d.]+) times fewer bytes", docs.use):
        assert ratios[4] == pytest.approx(float(times), rel=0.05)
    if "half the bytes" in docs.use:
        assert ratios[4] == 2
    if "at least half of dense" in docs.not_for:
        assert min(ratios.values()) == pytest.approx(1, rel=1e-4)  # two ranks: the model, and the weight it has
        assert max(ratios.values()) <= 2
    if name == "topk":  # "from 100 ranks on"
        assert dense(100) / bytes_per_step(recipe, SQUARES, 100) < 1 < dense(99) / bytes_per_step(recipe, SQUARES, 99)
    if name == "dgc":  # "with a thousand they are dense's"
        assert dense(1000) / bytes_per_step(recipe, SQUARES, 1000) == pytest.approx(1, rel=0.05)
    if name == "diana":  # "from 32 ranks on"
        assert ratios[many] < 1 < dense(31) / bytes_per_step(recipe, SQUARES, 31)


def test_of_those_that_meet_at_every_step_powersgd_sends_the_fewest_bytes_from_8_ranks_on() -> None:
    told = [n for n in presets() if Recipe.of(catalogue.example(n)).schedule.shape.averages_gradients]
    sent = {n: bytes_per_step(catalogue.example(n), {"w": (1024, 1024)}, 8) for n in told}
    assert min(sent, key=lambda n: sent[n]) == "powersgd"


# -- what is refused ---------------------------------------------------------------------------------------------------


@cache
def refusals(name: str) -> list[catalogue.Refusal]:
    return catalogue.refused_with(catalogue.example(name), name)


def with_length(name: str) -> str:
    given = typical(presets()[name])
    return f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})" if given else name


@pytest.mark.parametrize("name", presets())
def test_what_is_said_to_be_refused_is_refused_in_these_words(name: str) -> None:
    combined = [r for r in refusals(name) if r.text.startswith(f"{name} + ")]
    assert combined or name == "allreduce"  # with which everything goes
    for refusal in combined:
        with pytest.raises(RecipeError) as caught:
            Recipe.of(refusal.text.replace(name, with_length(name), 1))
        assert str(caught.value) == refusal.message
    for refusal in refusals(name):
        if re.match(r"(allreduce|gather|scatter)\(", refusal.text):
            with pytest.raises(RecipeError) as caught:
                Recipe.of(refusal.text)
            assert str(caught.value) == refusal.message


class Normed(nn.BatchNorm1d):
    """With a matrix, which some recipes ask for."""

    def __init__(self) -> None:
        super().__init__(16)
        self.matrix = nn.Parameter(torch.zeros(16, 16))


WAYS: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "attach(a model with BatchNorm, ...)": (Normed(), {}),
    "attach(..., buffers='average')": (nn.Linear(16, 16), {"buffers": "average"}),
    "attach(..., scaler=GradScaler())": (nn.Linear(16, 16), {"scaler": torch.amp.GradScaler("cpu")}),
    "attach(..., find_unused_parameters=True)": (nn.Linear(16, 16), {"find_unused_parameters": True}),
    "attach(a model in two precisions, ...)": (nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16).double()]), {}),
}


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("way", WAYS)
def test_attach_refuses_what_it_is_said_to_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    told = {r.text: r.message for r in refusals(name)}
    model, options = WAYS[way]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way in told:
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, optimizer, catalogue.example(name), **options)
        assert str(caught.value) == told[way]
    else:
        gossamer.attach(model, optimizer, catalogue.example(name), **options).detach()


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", presets())
def test_ddp_takes_what_is_not_said_to_be_refused(name: str) -> None:
    told = {r.text: r.message for r in refusals(name)}
    way = f"gossamer.ddp.register(ddp_model, {name!r})"
    model = DistributedDataParallel(nn.Linear(16, 16))
    if way in told:
        with pytest.raises(AttachError) as caught:
            gossamer.ddp.register(model, catalogue.example(name))
        assert str(caught.value) == told[way]
    else:
        gossamer.ddp.register(model, catalogue.example(name)).close()


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("backup", "attach(..., scaler=GradScaler())", "use bf16"),
        ("backup", "attach(..., buffers='average')", "late ranks are left out"),
        ("backup", "backup + error_feedback()", "would be lost"),
        ("backup", "training on 2 ranks", "one gradient a step"),
        ("local_sgd", "attach(a model with BatchNorm, ...)", "pass buffers="),
        ("local_sgd", "local_sgd + error_feedback(units='update')", "leave units out"),
        ("slowmo", "gossamer.ddp.register(ddp_model, 'slowmo')", "use gossamer.attach"),
        ("sgp", "attach(..., buffers='average')", "pass 'local'"),
        ("sgp", "sgp + error_feedback()", "drop the memory"),
        ("qsgd", "allreduce(qsgd(bucket=128))", "scatter(qsgd(bucket=128))"),
        ("powersgd", "powersgd + none()", "error_feedback()"),
        ("diana", "diana + error_feedback()", "can diverge"),
    ],
)
def test_refusals_of_every_kind_are_found(name: str, what: str, words: str) -> None:
    assert words in {r.text: r.message for r in refusals(name)}[what]


def test_what_goes_well_is_not_said_to_be_refused() -> None:
    told = {r.text for r in refusals("terngrad")}
    assert not told & {"terngrad + slowmo(8)", "terngrad + local_sgd(8)", "terngrad + none()", "gather(ternary())"}
    assert not any("attach" in text or "ddp" in text for text in told)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_a_workload_s_own_model(say: Say) -> None:
    named = dict(get("lm-bytes").model().named_parameters())
    told = json.loads(say("recipes", "powersgd", "--workload", "lm-bytes", "--hosts", "8", "--json")[1])
    assert told["parameters"] == sum(p.numel() for p in named.values())
    assert told["sent_bytes_per_step"] == round(bytes_per_step("powersgd", named, 8))
    assert told["dense_bytes_per_step"] == round(2 * 7 / 8 * 4 * told["parameters"])


def test_a_model_in_double_precision_is_counted_as_such(say: Say) -> None:
    told = json.loads(say("recipes", "allreduce", "--workload", "ridge", "--json")[1])
    assert told["sent_bytes_per_step"] == told["dense_bytes_per_step"] == 2 * 3 * 8 * told["parameters"] // 4


def test_without_a_word_it_is_the_model_that_compare_trains(say: Say) -> None:
    assert json.loads(say("recipes", "bf16", "--json")[1])["model"] == "the model of lm"


def test_seconds_are_bytes_over_the_rate(say: Say) -> None:
    told = facts(say, "terngrad", "--rate", "200mbit")
    assert told["seconds_per_step"] == pytest.approx(8 * told["sent_bytes_per_step"] / 200e6, abs=1e-6)
    assert told["dense_seconds_per_step"] == 8 * told["dense_bytes_per_step"] / 200e6
    assert facts(say, "terngrad")["seconds_per_step"] is None
    assert "at 200 Mbit/s" in say("recipes", "terngrad", "--rate", "200mbit", "--parameters", "40000")[1]


def test_a_huge_model_is_cut_into_matrices_that_are_counted_once(say: Say) -> None:
    told = json.loads(say("recipes", "allreduce", "--parameters", "7000000000", "--json")[1])
    assert told["sent_bytes_per_step"] == pytest.approx(1.5 * 4 * 7e9, rel=0.01)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_all_parts_are_listed_by_kind(say: Say) -> None:
    code, out, _ = say("recipes", "--parts")
    assert code == 0
    headings = [line.split(":")[0].lower() for line in out.splitlines() if re.match(r"[A-Z]\w+:", line)]
    assert headings == [plural for plural, _ in catalogue.KINDS.values()]
    listed = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert listed.keys() == registry.of().keys()
    assert all(catalogue.read(p).summary in listed[n] for n, p in registry.of().items())
    rows = json.loads(say("recipes", "--parts", "--json")[1])
    assert {(r["kind"], r["name"]) for r in rows} == {(p.kind, n) for n, p in registry.of().items()}


@pytest.mark.parametrize("name", registry.of())
def test_every_part_can_be_explained(say: Say, name: str) -> None:
    told = facts(say, name, "--parts")
    part = registry.of()[name]
    assert (told["name"], told["kind"]) == (name, part.kind)
    assert told["use"]
    assert told["presets"] == catalogue.users(name)
    if part.kind in ("codec", "exchange", "schedule", "topology"):
        assert told["recipes"]
        assert all(r["sent_bytes_per_step"] > 0 for r in told["recipes"])
    text = say("recipes", name, "--parts", "--parameters", "40000")[1]
    assert told["signature"] in text
    assert told["use"] in text
    assert all(r["expression"] in text for r in told["recipes"])


def test_a_part_is_explained_by_name_and_with_its_arguments(say: Say) -> None:
    assert facts(say, "ternary")["kind"] == "codec"
    assert facts(say, "gossip")["kind"] == "schedule"
    told = facts(say, "topk(index='rice')")
    assert (told["kind"], told["expression"]) == ("codec", "topk(index='rice')")
    assert [r["expression"] for r in told["recipes"]] == [
        "gather(topk(index='rice')) + error_feedback()",
        "scatter(topk(index='rice')) + error_feedback()",
    ]
    assert {r["text"] for r in told["refuses"]} >= {"allreduce(topk())", "gather(topk()) + diana()"}


def test_where_a_recipe_has_a_part_s_name_the_recipe_is_meant_unless_parts_are_asked_for(say: Say) -> None:
    assert facts(say, "qsgd")["expression"] == "scatter(qsgd(bucket=128))"
    assert facts(say, "qsgd", "--parts")["kind"] == "codec"
    assert facts(say, "qsgd(bits=2)")["expression"] == "scatter(qsgd(bits=2, bucket=128))"
    assert facts(say, "qsgd(bits=2)", "--parts")["expression"] == "qsgd(bits=2)"


def test_an_expression_that_starts_from_a_preset_keeps_its_words_unless_parts_follow(say: Say) -> None:
    told = facts(say, "topk(ratio=0.001)")
    assert told["paper"] == facts(say, "topk")["paper"]
    assert told["sent_bytes_per_step"] < facts(say, "topk")["sent_bytes_per_step"] / 5
    assert facts(say, "topk + slowmo(8)")["use"] == ""


def test_a_preset_tells_what_a_whole_training_lost_and_its_variants_do_not(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = {
        "text": "lost .0200 (one seed so far)",
        "short": "lost .0200, 1 seed",
        "seeds": 1,
        "on": "fashion, 2,500 steps",
    }
    monkeypatch.setattr(list_cache, "_verdicts", lambda: {"topk": verdict})
    assert facts(say, "topk")["to_the_end"] == verdict
    assert "to_the_end" not in facts(say, "topk(ratio=0.001)")
    assert "to_the_end" not in facts(say, "topk", "--parts")
    text = say("recipes", "topk")[1]
    assert "Trained to the end  fashion, 2,500 steps\n  lost .0200 (one seed so far)\n" in text
    assert "Trained to the end" not in say("recipes", "qsgd")[1]
    lines = say("recipes")[1].splitlines()
    assert {line.split()[0] for line in lines if "lost .0200, 1 seed" in line} == {"topk"}
    rows = json.loads(say("recipes", "--json")[1])
    assert [row["name"] for row in rows if "to_the_end" in row] == ["topk"]


def test_a_recipe_file_is_explained(say: Say, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('exchange = "scatter(qsgd())"\nschedule = "slowmo(8)"\n')
    assert facts(say, "mine.toml")["expression"] == "scatter(qsgd()) + slowmo(8)"


def test_parts_that_every_recipe_has_are_not_told(say: Say) -> None:
    assert [p["text"] for p in facts(say, "terngrad")["parts"]] == [
        "scatter(ternary(), answer=qsgd(bits=3))",
        "ternary()",
        "qsgd(bits=3)",
    ]
    assert "every_step(l1=0.1)" in [p["text"] for p in facts(say, "diana(l1=0.1)")["parts"]]


# -- wrong input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["recipes", "nonsense"], "there is no recipe 'nonsense', and no part"),
        (["recipes", "terngrd"], "Did you mean 'terngrad'?"),
        (["recipes", "ternry"], "Did you mean 'ternary'?"),
        (["recipes", "teranry()"], "Did you mean 'ternary'?"),
        (["recipes", "nonsense", "--parts"], "there is no recipe 'nonsense', and no part"),
        (["recipes", "terngrad", "--parts"], "'terngrad' is a recipe, not a part; leave out --parts"),
        (["recipes", "3", "--parts"], "'3' is not a single part"),
        (["recipes", "scatter(topk())"], "scatter(topk()) + error_feedback()"),
        (["recipes", "bf16", "--workload", "lmm"], "there is no workload called 'lmm'. Did you mean 'lm'?"),
        (["recipes", "bf16", "--workload", "lm", "--parameters", "9"], "give one of them"),
        (["recipes", "bf16", "--rate", "200"], "did you mean '200mbit'?"),
        (["train", "ternary"], "put it in an exchange: scatter(ternary())"),
        (["train", "ternary()"], "put it in an exchange: scatter(ternary())"),
        (["compare", "ddp", "ring"], "allreduce(fp32()) + gossip(push_sum(ring()))"),
        (["train", "gossip"], "such as allreduce(fp32())"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(say: Say, words: list[str], what: str) -> None:
    code, out, err = say(*words)
    assert (code, out) == (2, "")
    assert what in err
    assert len(err.splitlines()) == 1


# -- how it looks ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[80, 140])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What a terminal shows, without the white space: lines are folded, but nothing is cut off."""
    shown = io.StringIO()
    made = Console(file=shown, force_terminal=True, width=request.param, highlight=False, color_system=None)
    for module in ("help_pages", "list_tables"):
        monkeypatch.setattr(f"gossamer.bench.cli.{module}.console", lambda: made)

    def read() -> str:
        lines = shown.getvalue().splitlines()
        assert max(map(len, lines)) <= request.param
        assert "…" not in shown.getvalue()
        return re.sub(r"\s+", "", "".join(lines))

    return read


@pytest.mark.parametrize("name", ["sgp", "accordion", "scatter", "topk(index='rice')"])
def test_all_of_it_is_shown_on_a_terminal(screen: Callable[[], str], say: Say, name: str) -> None:
    assert say("recipes", name, "--rate", "1gbit", "--parameters", "40000")[0] == 0
    told = facts(say, name)
    for key in ("name", "expression", "use", "not_for", "paper"):
        assert re.sub(r"[\s`]+", "", told[key]) in screen()
    for refusal in told["refuses"]:
        partner = refusal["text"].rpartition(f"{told['name']} + ")[2]
        assert re.sub(r"\s+", "", partner) in screen()


@pytest.mark.parametrize("words", [[], ["--parts"]])
def test_a_list_shows_every_name_and_summary_on_a_terminal(
    screen: Callable[[], str], say: Say, words: list[str]
) -> None:
    assert say("recipes", *words)[0] == 0
    for row in json.loads(say("recipes", *words, "--json")[1]):
        assert row["name"] in screen()
        assert all(word in screen() for word in re.findall(r"\w+", row["summary"]))


def test_explaining_starts_quickly() -> None:
    """What takes most of a second to import is not needed: compiled kernels, torch's compiler, distributed checkpoints."""
    script = (
        "import sys\n"
        "from gossamer.bench.cli.app import run\n"
        "for name in ('slowmo_sgp', 'backup', 'ternary'):\n"
        "    sys.argv = ['gossamer', 'recipes', name]\n"
        "    assert run() == 0\n"
        "    slow = {'numba', 'torch._dynamo', 'torch.distributed.checkpoint'} & sys.modules.keys()\n"
        "    assert not slow, (name, slow)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
