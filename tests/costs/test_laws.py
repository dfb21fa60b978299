"""Laws of computing: the slowest of many ranks, draws, and traces that are refused."""

from math import sqrt
from pathlib import Path
from statistics import mean

import pytest

from gossamer import CostError
from gossamer.costs.cluster_file import read_cluster, write_cluster
from gossamer.costs.laws import AtShare, ComputingLaw, Constant, Lognormal, ShiftedExponential, SlowRank, Trace, law_of

LAWS = (ShiftedExponential(0.2), Lognormal(0.2), Lognormal(0.5), SlowRank(3.0), SlowRank(3.0, 0.3))
FILE = 'format = 1\n[[hosts]]\ncount = 4\nup = "1 Gbit/s"\n\n[compute]\n'


@pytest.mark.parametrize(
    ("law", "ranks", "steps", "published"),
    [
        (ShiftedExponential(0.2), 32, 1, 1.61),
        (Lognormal(0.2), 32, 1, 1.49),
        (Lognormal(0.5), 32, 1, 2.55),
        (ShiftedExponential(0.2), 32, 8, 1.18),
        (Lognormal(0.2), 32, 8, 1.16),
        (Lognormal(0.5), 32, 8, 1.45),
        (SlowRank(2.0), 32, 1, 2.0),
        (SlowRank(2.0), 32, 8, 2.0),
    ],
)
def test_the_slowest_of_many_is_as_slow_as_simulations_say(
    law: ComputingLaw, ranks: int, steps: int, published: float
) -> None:
    """Values of 3,000 simulated steps, two digits after the point: 2 % is over three standard errors of each."""
    assert law.slowest(ranks, steps) == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("law", [Lognormal(2.0), Lognormal(1.0), Lognormal(0.01), ShiftedExponential(1.0)])
@pytest.mark.parametrize("steps", [1, 4])
def test_one_rank_takes_the_mean_however_long_the_tail(law: ComputingLaw, steps: int) -> None:
    assert law.slowest(1, steps) == pytest.approx(1.0, rel=5e-3)


@pytest.mark.parametrize("law", LAWS)
def test_more_ranks_are_slower_and_longer_rounds_quicker(law: ComputingLaw) -> None:
    assert law.slowest(2, 1) <= law.slowest(64, 1) + 1e-9
    assert law.slowest(64, 16) <= law.slowest(64, 1) + 1e-9
    assert AtShare(law, 0.1).slowest(8, 1) <= law.slowest(8, 1) <= AtShare(law, 0.9).slowest(8, 1) + 1e-9


@pytest.mark.parametrize("law", LAWS[:3])
def test_draws_follow_the_law_and_are_the_same_each_time(law: ComputingLaw) -> None:
    """Of 4,000 rounds of 8 ranks, the mean slowest within 4 standard errors: wrong once in 16,000 such tests."""
    slowest = [max(law.at(rank, step) for rank in range(8)) for step in range(4000)]
    middle = mean(slowest)
    error = sqrt(sum((x - middle) ** 2 for x in slowest)) / 4000
    assert abs(middle - law.slowest(8, 1)) < 4 * error
    assert law.at(3, 7) == law.at(3, 7) != law.at(4, 7)


def test_a_trace_is_relative_to_its_mean() -> None:
    law = Trace(((1.0,) * 199 + (3.0,), (1.0,) * 200))
    assert law.slowest(2, 1) == pytest.approx(1 / 1.005 * (1 + 2 * (1 - (399 / 400) ** 2)), rel=1e-2)
    assert law.at(0, 199) / law.at(1, 199) == pytest.approx(3)


@pytest.mark.parametrize("steps", [1, 8])
def test_a_rank_that_is_slow_in_all_its_rows_is_waited_for_in_every_round(steps: int) -> None:
    quick, slow = (1.0,) * 200, (2.0,) * 200
    law = Trace((quick, quick, quick, slow))
    assert law.slowest(4, steps) == pytest.approx(2 / 1.25, rel=0.01)
    assert law.slowest(3, steps) == pytest.approx(1 / 1.25, rel=0.01)
    assert law.slowest_at(0.1, 4, steps) == pytest.approx(2 / 1.25, rel=1e-6)


def rows(ranks: int, steps: int) -> str:
    return "rank,step,seconds\n" + "".join(f"{r},{s},0.1\n" for r in range(ranks) for s in range(steps))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (rows(2, 199), r"rank 0 has 199 rows.*record 200 at least"),
        (rows(1, 200).replace("0,7,0.1", "0,7,-1"), r"line 9: seconds must be more than 0, not '-1'"),
        (rows(1, 200).replace("0,7,0.1", "x,7,0.1"), r"line 9: rank must be a whole number"),
        (rows(1, 200).replace("0,7,0.1", "0,7"), r"line 9: must be rank,step,seconds, not '0,7'"),
        ("x" * 200_000, r"is not text: field larger than field limit"),
        (rows(1, 200).replace("0,7,0.1", "0,7,nan"), r"line 9: seconds must be more than 0"),
        ("rank,step,seconds\n", "has no rows"),
    ],
)
def test_a_bad_trace_is_refused_with_its_file_line_and_field(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "moods.csv").write_text(text)
    with pytest.raises(CostError, match=says) as refused:
        law_of(f"trace {tmp_path / 'moods.csv'}")
    assert "moods.csv" in str(refused.value)
    (tmp_path / "c.toml").write_text(FILE + 'law = "trace"\ntrace = "moods.csv"\n')
    with pytest.raises(CostError, match=r"c.toml, line 8: trace cannot be used: .*moods.csv"):
        read_cluster(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("table", "law"),
    [
        ('law = "lognormal"\nsigma = 0.2\n', Lognormal(0.2)),
        ('law = "exponential"\ntail = 0.1\n', ShiftedExponential(0.1)),
        ('law = "slow"\nfactor = 2\nrank = 3\n', SlowRank(2.0, 1.0, 3)),
        ('law = "slow"\nfactor = 5\nshare = 0.02\n', SlowRank(5.0, 0.02)),
        ('law = "constant"\n', Constant()),
    ],
)
def test_a_law_is_read_from_the_file_and_written_back(table: str, law: ComputingLaw, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(FILE + table)
    assert read_cluster(path).law == law
    path.write_text(write_cluster(read_cluster(path)))
    assert read_cluster(path).law == law


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("", r"line 6: compute needs a law"),
        ('law = "pareto"\n', r"line 7: law must be 'constant' or 'exponential'"),
        ('law = "lognormal"\n', r"line 7: law 'lognormal' needs sigma"),
        ('law = "lognormal"\nsigma = -1\n', r"line 8: sigma must lie above 0 and up to 2"),
        ('law = "lognormal"\nsigma = "wide"\n', r"line 8: sigma must be a number"),
        ('law = "lognormal"\nsigma = 0.1\ntail = 0.1\n', r"line 9: tail is not of the law 'lognormal'"),
        ('law = "exponential"\ntail = 1.5\n', r"line 8: tail must lie above 0 and up to 1"),
        ('law = "slow"\nfactor = 0.5\n', r"line 8: factor must be 1 or more"),
        ('law = "slow"\nfactor = 2\nshare = 0\n', r"line 9: share must lie above 0"),
        ('law = "slow"\nfactor = 2\nrank = 4\n', r"rank 4 is to be slow, and ranks are numbered from 0 to 3"),
        ('law = "trace"\ntrace = "none.csv"\n', r"line 8: trace cannot be used: .*none.csv cannot be read"),
    ],
)
def test_a_law_that_cannot_be_is_refused_with_its_line(table: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(FILE + table)
    with pytest.raises(CostError, match=says) as refused:
        read_cluster(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["", "weibull 2", "lognormal", "lognormal wide", "slow 2 3 4"])
def test_what_is_no_law_is_refused_with_examples(text: str) -> None:
    with pytest.raises(CostError, match=r"is no law of computing: write 'constant', 'lognormal 0.2'"):
        law_of(text)
