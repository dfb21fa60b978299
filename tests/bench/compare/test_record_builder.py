"""What the launcher makes of the lines that ranks write, whole or not."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench.compare import ComparePlan
from gossamer.bench.compare.events import MARK, RankEvent, facts_of
from gossamer.bench.compare.launch import UNFINISHED, _record
from gossamer.bench.compare.record_builder import RecordBuilder
from gossamer.bench.record import Record
from gossamer.bench.report.time_to_target import arrival
from gossamer.core.errors import PeerError

STEP = {
    "event": "step",
    "run": "a",
    "step": 1,
    "seconds": 0.5,
    "loss": 2.0,
    "sent": 10,
    "compute": 0.1,
    "codec": 0.0,
    "wait": 0.2,
}
JUDGED = {"event": "evaluation", "run": "a", "step": 1, "seconds": 0.5, "sent": 10, "quality": 1.5}
END = {"event": "end", "run": "a", "wire_bytes": 10, "inside_bytes": 0, "logical_bytes": 20, "nic_bytes": None}


class Heard:
    """A builder to two contenders, and what it passes on."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        plan = ComparePlan({"a": "bf16", "b": "fp16"}, workload="ridge")
        self.builder = RecordBuilder(_record(plan, 2, None, "a command"), self.hear)
        self.record = self.builder.record

    def hear(self, event: RankEvent) -> None:
        self.events.append(facts_of(event))

    def lines(self, *lines: str) -> None:
        for line in lines:
            self.builder.line(0, line)

    def tell(self, *events: dict[str, Any]) -> None:
        self.lines(*(MARK + json.dumps(e) for e in events))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.mark.parametrize(
    "line",
    [
        *("plain words", MARK, MARK + "{", MARK + "7", MARK + "[]", MARK + "null", MARK + '"text"', MARK + "{}"),
        MARK + json.dumps(STEP)[:40],
        MARK + '{"event": "step", "run": "a"}',
        MARK + '{"event": "step", "run": "a", "step": 1, "colour": "red"}',
        MARK + '{"event": "end", "run": "a"}',
        MARK + '{"event": "evaluation", "run": ["a"]}',
        MARK + "\x00\ufffd",
    ],
)
def test_garbage_is_kept_as_words_and_harms_nothing(heard: Heard, line: str) -> None:
    before = json.dumps(heard.record.runs[0].steps)
    heard.lines(line)
    heard.tell(STEP)
    assert [e["event"] for e in heard.events] == ["step"]
    assert list(heard.builder.complaints) == [f"[0] {line}"]
    assert (before, len(heard.record.runs[0].steps)) == ("[]", 1)


def test_an_event_behind_another_ranks_unfinished_line_is_heard(heard: Heard) -> None:
    heard.lines("warning: no newline" + MARK + json.dumps(STEP))
    assert len(heard.record.runs[0].steps) == 1
    assert list(heard.builder.complaints) == ["[0] warning: no newline"]


def test_a_run_that_ended_is_whole_and_one_that_did_not_says_why(heard: Heard) -> None:
    heard.tell(STEP, JUDGED, END)
    record, code = heard.builder.follow(lambda: 137)
    assert code == 1
    a, b = record.runs
    assert (a.status, a.wire_bytes, a.evaluations[0].quality) == ("ok", 10, 1.5)
    assert (b.status, b.error) == ("failed", "the ranks ended early, with code 1")


def test_until_a_run_has_ended_its_record_does_not_say_that_it_has(heard: Heard) -> None:
    heard.tell(STEP, {**STEP, "run": "b"}, END)
    a, b = heard.record.runs
    assert (a.status, a.error) == ("ok", "")
    assert (b.status, b.error) == ("interrupted", UNFINISHED)


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (1, -9, "rank 1 was killed by SIGKILL"),
        (0, 139, "rank 0 was killed by SIGSEGV"),
        (1, 255, "rank 1 ended with code 255"),
        (1, 1, "words of the ranks"),
    ],
)
def test_who_was_killed_comes_before_what_the_others_noticed(number: int, code: int, text: str) -> None:
    heard = Heard()
    heard.lines("words of the ranks")
    heard.builder.ended(number, code)
    record, _ = heard.builder.follow(lambda: 1)
    assert all(run.error.endswith(text) or run.error.startswith(text) for run in record.runs)
    assert any(text in e.get("text", "") for e in heard.events)


def raising(error: BaseException) -> Any:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("stop", "code", "name"), [(KeyboardInterrupt(), 130, "SIGINT"), (KeyboardInterrupt(15), 143, "SIGTERM")]
)
def test_an_interruption_leaves_a_record_that_says_so(
    heard: Heard, stop: BaseException, code: int, name: str, tmp_path: Path
) -> None:
    heard.tell(STEP)
    record, got = heard.builder.follow(raising(stop))
    assert got == code
    record.write(tmp_path / "r.json")
    again = Record.read(tmp_path / "r.json")
    assert [r.status for r in again.runs] == ["interrupted", "interrupted"]
    assert [r.error for r in again.runs] == [f"interrupted by {name}"] * 2
    assert len(again.runs[0].steps) == 1


def test_whoever_was_done_before_an_interruption_is_done(heard: Heard) -> None:
    heard.tell(STEP, JUDGED, END)
    record, _ = heard.builder.follow(raising(KeyboardInterrupt()))
    assert [r.status for r in record.runs] == ["ok", "interrupted"]


def test_a_record_knows_the_model_and_the_recipes_before_any_rank_speaks(heard: Heard) -> None:
    record, _ = heard.builder.follow(lambda: 1)
    assert record.parameters == 32
    assert record.runs[0].about == "Gradients in bfloat16, summed in float32."
    assert not record.runs[0].yardstick


def test_a_network_that_breaks_down_is_an_error_of_the_record(heard: Heard) -> None:
    record, code = heard.builder.follow(raising(PeerError("the lab broke down")))
    assert (code, record.runs[0].error) == (1, "the lab broke down")


def test_a_resumed_run_keeps_its_history_up_to_the_checkpoint() -> None:
    first = Heard()
    for number in range(1, 6):
        first.tell({**STEP, "step": number}, {**JUDGED, "step": number})
    told = [(e["event"], {k: v for k, v in e.items() if k not in ("event", "run")}) for e in first.events]
    upto = [(kind, facts) for kind, facts in told if facts["step"] < 3 or (facts["step"] == 3 and kind == "step")]
    second = Heard()
    second.tell(
        {"event": "history", "run": "a", "events": upto},
        {"event": "contender", "run": "a", "recipe": "x", "done": 3},
        {**JUDGED, "step": 3},
        {**STEP, "step": 4},
    )
    assert [e["event"] for e in second.events] == ["contender", "evaluation", "step"]  # history is not told anew
    run = second.record.runs[0]
    assert [s.step for s in run.steps] == [1, 2, 3, 4]
    assert [e.step for e in run.evaluations] == [1, 2, 3]


def test_a_loss_that_ran_away_is_valid_json_and_comes_back_as_no_number(heard: Heard, tmp_path: Path) -> None:
    heard.lines(MARK + json.dumps({**STEP, "loss": math.nan}), MARK + json.dumps({**JUDGED, "quality": math.inf}))
    path = tmp_path / "r.json"
    heard.record.write(path)
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    run = Record.read(path).runs[0]
    assert math.isnan(run.steps[0].loss)
    assert math.isnan(run.evaluations[0].quality)
    assert arrival(run, 1.0, lower_is_better=True) is None
    assert Record.read(path).target() is None


def test_a_write_that_breaks_off_leaves_the_old_record(
    heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    heard.record.write(path)
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.core.files.os.replace", full)
    heard.record.command = "another"
    with pytest.raises(OSError, match="No space"):
        heard.record.write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_record_of_another_format_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"format": 1, "runs": []}')
    with pytest.raises(
        ValueError, match="it has format 1, and this version of gossamer reads format 2; run its command"
    ):
        Record.read(tmp_path / "r.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 99}', '{"format": 2}', '{"format": 2, "runs": [{}]}'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError):
        Record.read(tmp_path / "r.json")
