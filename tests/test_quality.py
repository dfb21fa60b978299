"""The rule of `benchmarks/quality.py`: which of two settings stands in the table."""

import json
import math
import os
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from benchmarks.quality import DENSE, Curve, Curves, judge_all, keep, refuse_another

from gossamer.bench.tune import Search, SearchOverride, SearchPlan, Tuning
from gossamer.bench.tune.points import Setting
from gossamer.recipe import Recipe

ENDS = {
    1.0: [5.0, 5.1],
    2.0: [4.5, 4.6],
    3.0: [4.4, 1982.0],
    4.0: [math.nan, 4.4],
}  # after the steps, by rate, on two seeds


@dataclass
class Known:
    """What training would have come to; who was asked for which goal."""

    seeds: tuple[int, ...] = (10, 11)
    steps: int = 8
    asked: list[tuple[str, float, float]] = field(default_factory=list)

    def of(self, name: str, setting: Setting, seed: int, goal: float) -> Curve:
        self.asked.append((name, setting.lr, goal))
        return Curve(name, repr(setting.recipe), setting.lr, seed, [4, 8], [6.0, ENDS[setting.lr][seed - 10]])


def at(*rates: float) -> list[Setting]:
    return [Setting(Recipe.of("allreduce"), rate, {}) for rate in rates]


def test_who_diverges_on_a_seed_that_judges_makes_room_for_the_next() -> None:
    known = Known()
    judged = judge_all({DENSE: at(3.0, 2.0), "a": at(4.0, 1.0), "b": at(1.0, 2.0), "c": at(3.0), "d": []}, known, 1)  # type: ignore[arg-type]
    found = {name: each and (each.setting.lr, each.struck, each.diverges(1)) for name, each in judged.items()}
    assert found == {
        DENSE: (2.0, [3.0], False),
        "a": (1.0, [4.0], False),
        "b": (1.0, [], False),  # the other one is better there, which is for nobody to know
        "c": (3.0, [], True),
        "d": None,
    }
    assert [(name, rate) for name, rate, _ in known.asked if name == "b"] == [("b", 1.0)] * 2
    assert {goal for name, _, goal in known.asked if name != DENSE} == {4.5, 4.6}  # of the dense that stands there


def test_without_dense_there_is_no_table() -> None:
    with pytest.raises(SystemExit, match="lower ones with --lr"):
        judge_all({DENSE: at(3.0, 4.0)}, Known(), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("qualities", "error", "sign", "diverges"),
    [
        ([6.0, 5.0], "", 1, False),
        ([6.0, 6.1], "", 1, True),
        ([6.0, math.nan], "", 1, True),
        ([], "the loss is inf", 1, True),
        ([0.1, 0.7], "", -1, False),
        ([0.5, 0.1], "", -1, True),
    ],
)
def test_to_diverge_is_to_end_worse_than_after_the_first_steps(
    qualities: list[float], error: str, sign: int, diverges: bool
) -> None:
    steps = [4 * (i + 1) for i in range(len(qualities))]
    assert Curve("a", "", 1.0, 0, steps, qualities, error).diverges(sign) == diverges


def test_what_is_kept_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tmp_path / "curves.json", "[1]")
    assert [p.name for p in tmp_path.iterdir()] == ["curves.json"]

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        keep(tmp_path / "curves.json", "[1, 2]")
    assert (tmp_path / "curves.json").read_text() == "[1]"


def searched(steps: int = 4, lr: str = "lr=0.25..8") -> Tuning:
    wishes = [SearchOverride.of(lr)]
    return Search(SearchPlan({DENSE: "allreduce"}, "ridge", trials=1, steps=steps, repeats=0, wishes=wishes)).tuning


def test_the_record_of_another_search_is_not_gone_on_with() -> None:
    refuse_another(searched(), searched())
    with pytest.raises(SystemExit, match="steps was 4, and is 8 now; give another --out"):
        refuse_another(searched(), searched(steps=8))
    with pytest.raises(SystemExit, match="ddp had other knobs; give another --out"):
        refuse_another(searched(), searched(lr="lr=0.5..8"))


def test_a_curve_that_ended_at_another_dense_s_quality_is_trained_on(tmp_path: Path) -> None:
    """More trials may choose another rate for dense; then what was kept may not have got to its quality yet."""
    asked = Namespace(workload="ridge", shards="iid", seeds=1, steps=8)
    setting = at(1.0)[0]
    short = Curve("a", repr(setting.recipe), 1.0, 10, [4, 8], [0.9, 0.5])
    keep(tmp_path / "curves.json", json.dumps([asdict(short)]))
    curves = Curves(asked, tmp_path)
    assert curves.of("a", setting, 10, goal=0.5) == short
    assert curves.of("a", setting, 10, goal=-1.0).steps == [4, 8, 12, 16]
    assert Curves(asked, tmp_path).of("a", setting, 10, goal=-2.0).steps == [4, 8, 12, 16]
