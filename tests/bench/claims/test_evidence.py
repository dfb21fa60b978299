"""What is read from the runs of a claim."""

import math

from gossamer.bench.claims.evidence import ClaimFigure, ClaimRun, Evidence, Line, by_steps_and_bytes, mean
from gossamer.bench.claims.pages import drawn


def run(case: str, seed: int, quality: list[float], error: str = "") -> ClaimRun:
    rows = {"steps": [0.0, 10.0], "sent": [0.0, 80.0], "quality": quality}
    return ClaimRun("training", case, "judged", 0, seed, {}, rows, 0.0, 0.0, error)


def test_a_contest_is_drawn_by_bytes_and_by_steps() -> None:
    evidence = Evidence([run("dense", 30, [4.0, 2.0]), run("dense", 31, [4.0, 3.0]), run("sparse", 30, [4.0, 3.5])])
    sent, steps = by_steps_and_bytes(evidence, "training", ("dense", "sparse"), "loss")
    assert [line.name for line in sent.lines] == [line.name for line in steps.lines] == ["dense", "sparse"]
    assert sent.lines[0].points == [[0.0, 4.0], [80.0, 2.5]]
    assert steps.lines[1].points == [[0.0, 4.0], [10.0, 3.5]]
    assert (sent.log_x, steps.log_x) == (True, False)
    assert (sent.y, sent.title) == ("loss", "Held-out loss over bytes of a rank")


def test_a_run_that_diverged_has_no_last_value() -> None:
    evidence = Evidence([run("dense", 30, [4.0, 2.0]), run("dense", 31, [4.0], error="not finite at step 7")])
    last = evidence.last("training", "dense", "quality")
    assert last[30] == 2.0
    assert math.isnan(last[31])
    assert evidence.first("training", "dense", "quality") == {30: 4.0, 31: 4.0}
    assert math.isnan(mean({}))


def test_a_value_that_is_no_number_is_left_out_of_a_figure() -> None:
    points = [[0.0, 1.0], [1.0, math.nan], [2.0, 3.0]]
    lines = [Line("diverged", points), Line("never begun", [[0.0, math.nan]]), Line("whole", [[0.0, 2.0], [2.0, 4.0]])]
    svg = drawn(ClaimFigure("steps", "A loss", "steps", "loss", lines=lines))
    assert "nan" not in svg
    assert svg.count("whole") == 1
