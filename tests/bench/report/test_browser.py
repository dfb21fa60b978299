"""The page in a real Chromium: it opens without a complaint, answers to hands and keys, and shows its data."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.bench.report.browser import CHROMIUM, Browser
from tests.bench.report.made import made

from gossamer.bench.record import Record
from gossamer.bench.report import write_html
from gossamer.bench.report.formatting import number, seconds, size, times
from gossamer.bench.report.study import study_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as tab:
        yield tab


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(made(), path)
    return path


def shown(browser: Browser, chart: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('#{chart} .series')].map(g => g.dataset.run)")


def tip(browser: Browser, chart: str) -> dict[str, str]:
    """What the card beside the pointer says; nothing when it is hidden."""
    box = f"document.querySelector('#{chart} .tip')"
    rows = browser.run(
        f"{box}.hidden ? [] : [['run', {box}.querySelector('b').textContent],"
        f" ...[...{box}.querySelectorAll('div')].map(d => [...d.children].map(s => s.textContent))]"
    )
    return dict(rows)


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"width": 390, "height": 844, "phone": True}], ids=str)
def test_it_opens_quietly_and_fits(browser: Browser, page: Path, look: dict[str, Any]) -> None:
    browser.open(page, **look)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]
    assert browser.run("document.querySelectorAll('figure svg').length") == 5
    assert browser.run("document.documentElement.scrollWidth") <= look.get("width", 1100)
    assert browser.run("[...document.querySelectorAll('text')].every(t => !/NaN|undefined|null/.test(t.textContent))")
    assert browser.run("!/NaN|Infinity/.test(document.getElementById('charts').innerHTML)")


def test_figures_equal_the_record(browser: Browser, page: Path) -> None:
    browser.open(page)
    marks = browser.run(
        "[...document.querySelectorAll('#quality-time .series')].map(g => [Number(g.dataset.run),"
        " [...g.querySelectorAll('.mark')].map(m => [Number(m.dataset.x), Number(m.dataset.y)])])"
    )
    runs = made().runs
    assert marks == [[i, [[e.seconds, e.quality] for e in run.evaluations]] for i, run in enumerate(runs)]
    data = json.loads(browser.run("document.getElementById('data').textContent"))
    bars = next(chart for chart in data["charts"] if chart["id"] == "step-time")
    parts = browser.run(
        "[...document.querySelectorAll('#step-time .row')].map(r => [Number(r.dataset.run),"
        " [...r.querySelectorAll('.part')].map(p => Number(p.dataset.seconds)), Number(r.dataset.total)])"
    )
    assert parts == [[row["run"], row["parts"], row["total"]] for row in bars["rows"]]
    assert browser.run("document.getElementById('command').textContent") == made().command


def table(browser: Browser, section: str) -> dict[str, list[str]]:
    """What the cells of a table say, by the name in front."""
    return browser.run(
        f"Object.fromEntries([...document.querySelector('#{section} table').tBodies[0].rows]"
        ".map(r => [r.cells[0].innerText.trim(), [...r.cells].slice(1).map(c => c.innerText.trim())]))"
    )


def reached(evaluations: list[dict[str, float]], target: float) -> dict[str, float] | None:
    """Between two evaluations in a straight line."""
    for before, after in pairwise(evaluations):
        if after["quality"] <= target:
            part = (target - before["quality"]) / (after["quality"] - before["quality"])
            return {key: before[key] + part * (after[key] - before[key]) for key in ("seconds", "step", "sent")}
    return None


def test_tables_say_what_the_json_says(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Every number is worked out again here, from the file that `compare` writes."""
    made().write(tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    base = next(r for r in record["runs"] if r["name"] == record["baseline"])
    target = base["evaluations"][-1]["quality"]
    browser.open(page)
    race, sizes = table(browser, "time-to-quality"), table(browser, "bytes")
    assert race.keys() == sizes.keys() == {r["name"] for r in record["runs"]}
    for run in record["runs"]:
        there = reached(run["evaluations"], target)
        steps = run["steps"]
        pace = (steps[-1]["seconds"] - steps[0]["seconds"]) / (len(steps) - 1)
        time, ratio, _, taken, sent, step, _, last = race[run["name"]]
        assert (step, last) == (seconds(pace), number(run["evaluations"][-1]["quality"], 4))
        if there is None:
            assert (time, ratio, taken, sent) == ("failed" if run["error"] else "not reached", "–", "–", "–")
        else:
            assert (time, taken, sent) == (seconds(there["seconds"]), f"{there['step']:.0f}", size(there["sent"]))
            assert ratio.removesuffix(" tied") == times(there["seconds"] / base["evaluations"][-1]["seconds"])
        logical, wire, nic, checked, per_step, _ = sizes[run["name"]]
        if run["error"]:  # cut off: what rank 0 had sent by then is all that is known
            assert (logical, wire, nic, checked) == ("–", size(steps[-1]["sent"]), "not measured", "–")
        else:
            assert (logical, wire, nic) == tuple(size(run[f"{k}_bytes"]) for k in ("logical", "wire", "nic"))
            assert checked.endswith(f"{run['nic_bytes'] / run['wire_bytes']:.3f}")
        assert per_step == size(steps[-1]["sent"] / len(steps))


def test_errors_by_parameter_unfold(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = "document.querySelector('#layers .heat').checkVisibility()"
    assert not browser.run(shown)
    browser.click("#layers summary")
    assert browser.run(shown)
    record = made()
    cells = browser.run("[...document.querySelectorAll('#layers .heat tbody tr')][3].innerText.split('\\t')")
    name = cells[0].replace("\n", "")
    assert cells[1:] == [number(r.layer_errors[name]) for r in record.runs if r.layer_errors]


def test_lines_are_where_their_axes_say(browser: Browser, page: Path) -> None:
    """Two labelled ticks give the scale back; a mark must lie where its value belongs."""
    browser.open(page)
    ticks, mark = browser.run(
        "(() => { const c = document.querySelector('#quality-time svg');"
        " const t = [...c.querySelectorAll('text[text-anchor=middle]')].map(e => [Number(e.getAttribute('x')), parseFloat(e.textContent)]);"
        " const m = [...c.querySelectorAll('.mark')].at(40);"
        " return [t, [m.transform.baseVal[0].matrix.e, Number(m.dataset.x)]]; })()"
    )
    (x0, v0), (x1, v1) = ticks[0], ticks[-1]
    assert mark[0] == pytest.approx(x0 + (mark[1] - v0) * (x1 - x0) / (v1 - v0), abs=0.2)


def test_the_legend_toggles_every_chart(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click("#legend [data-run='0']")
    for chart in ("quality-time", "quality-bytes", "loss-time"):
        assert "0" not in shown(browser, chart)
        assert len(shown(browser, chart)) == 7
    assert browser.run("document.querySelectorAll('#step-time .row').length") == 7
    assert browser.run("document.querySelector('#legend [data-run=\"0\"]').getAttribute('aria-pressed')") == "false"
    browser.click("#all")
    assert len(shown(browser, "quality-time")) == 8
    for _ in range(2):  # the second click of a double click is a click, too
        browser.click("#legend [data-run='3']")
    browser.run("document.querySelector('#legend [data-run=\"3\"]').dispatchEvent(new MouseEvent('dblclick'))")
    assert shown(browser, "quality-time") == ["3"]
    browser.click("#legend [data-run='3']")
    assert shown(browser, "quality-time") == []
    assert "No recipe selected." in browser.run("document.querySelector('#quality-time').textContent")
    assert browser.errors == []


def test_hover_shows_the_value_under_the_pointer(browser: Browser, page: Path) -> None:
    browser.open(page)
    x, y = browser.middle("#quality-time .s3 .mark:nth-of-type(8)")
    evaluation = json.loads(
        browser.run("JSON.stringify(document.querySelector('#quality-time .s3 .mark:nth-of-type(8)').dataset)")
    )
    browser.mouse("mouseMoved", x, y)
    said = tip(browser, "quality-time")
    assert said["run"] == "terngrad"
    assert said["held-out loss (nats/byte)"] == f"{float(evaluation['y']):.3f}"
    assert said["training time"] == f"{float(evaluation['x']):.2f} s"
    assert said["step"] == "60"
    browser.mouse("mouseMoved", x, y - 700)
    assert tip(browser, "quality-time") == {}


def test_hover_over_a_bar_shows_its_parts_or_that_there_are_none(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = {r.run.name: r for r in study_of(made()).rows}
    browser.mouse("mouseMoved", *browser.middle("#step-time .row[data-run='3'] .reach"))
    told = ["compute", "codec", "exposed wait", "whole step"]
    expected = [rows["terngrad"].compute, rows["terngrad"].codec, rows["terngrad"].wait, rows["terngrad"].step]
    assert tip(browser, "step-time") == {"run": "terngrad"} | dict(zip(told, map(seconds, expected), strict=True))
    browser.mouse("mouseMoved", *browser.middle("#step-time .row[data-run='0'] .reach"))
    said = tip(browser, "step-time")
    assert said == {"run": "ddp", "whole step": seconds(rows["ddp"].step), "parts": "not measured apart"}


def test_drag_zooms_and_double_click_resets(browser: Browser, page: Path) -> None:
    browser.open(page)
    path = "document.querySelector('#loss-time .s0 .main').getAttribute('d')"
    x, y = browser.middle("#loss-time svg")
    before = browser.run(path)
    browser.drag((x - 200, y), (x, y + 5))
    assert browser.run(path) != before
    assert not browser.run("document.querySelector('#loss-time [data-reset]').hidden")
    browser.click("#loss-time [data-reset]")
    assert browser.run(path) == before
    x, y = browser.middle("#loss-time svg")
    browser.drag((x - 200, y), (x, y + 90))
    assert browser.run(path) != before
    browser.run("document.querySelector('#loss-time svg').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.run(path) == before


def span(browser: Browser, chart: str) -> tuple[float, float]:
    """The steps between which marks are shown."""
    box = f"document.querySelector('#{chart} svg')"
    xs = browser.run(
        f"(s => [...s.querySelectorAll('.mark')].filter(m => {{ const at = m.transform.baseVal[0].matrix.e;"
        f" const axis = s.querySelector('.axis').getBBox(); return at >= axis.x - 1 && at <= axis.x + axis.width + 1; }})"
        f".map(m => Number(m.dataset.x)))({box})"
    )
    return min(xs), max(xs)


def test_buttons_and_keys_zoom_in_and_out(browser: Browser, page: Path) -> None:
    browser.open(page)
    whole = span(browser, "quality-time")
    browser.click("#quality-time [data-zoom=in]")
    half = span(browser, "quality-time")
    assert whole[0] < half[0] < half[1] < whole[1]
    browser.run("document.querySelector('#quality-time svg').focus()")
    browser.key("+")
    quarter = span(browser, "quality-time")
    assert half[0] < quarter[0] < quarter[1] < half[1]
    browser.key("-")
    assert span(browser, "quality-time") == half
    browser.click("#quality-time [data-zoom=out]")
    assert span(browser, "quality-time") == whole
    assert browser.run("document.querySelector('#quality-time [data-reset]').hidden")  # all there is needs no way back
    browser.click("#quality-time [data-zoom=out]")
    assert span(browser, "quality-time") == whole
    assert browser.errors == []


def test_logarithmic_axis_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run("document.querySelector('#quality-bytes [data-log=x]').getAttribute('aria-pressed')") == "false"
    browser.click("#quality-bytes [data-log=x]")
    assert browser.run("document.querySelector('#quality-bytes [data-log=x]').getAttribute('aria-pressed')") == "true"
    assert "sent per host, logarithmic" in browser.run("document.querySelector('#quality-bytes').textContent")
    before = browser.run("document.querySelector('#quality-time .s0 .main').getAttribute('d')")
    browser.click("#quality-time [data-log=x]")
    assert browser.run("document.querySelector('#quality-time .s0 .main').getAttribute('d')") != before
    browser.run("document.querySelector('#quality-time svg').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
        browser.key(key)
    assert tip(browser, "quality-time")["run"] == "bf16"
    assert browser.run("document.getElementById('say').textContent").startswith("bf16: held-out loss")
    browser.key("Escape")
    assert tip(browser, "quality-time") == {}


def test_the_table_sorts_by_a_column_and_goes_back(browser: Browser, page: Path) -> None:
    browser.open(page)
    names = "[...document.querySelectorAll('.ladder tbody th')].map(e => e.innerText.trim())"
    came = browser.run(names)
    head = ".ladder thead th:last-child"
    finals = {row.run.name: row.final for row in study_of(made()).rows}
    for way, sign in (("ascending", 1), ("descending", -1)):
        browser.click(f"{head} .sort")
        assert browser.run(f"document.querySelector('{head}').ariaSort") == way
        assert browser.run(names) == sorted(came, key=lambda name: sign * (finals[name] or 0.0))
    browser.click(f"{head} .sort")
    assert browser.run(names) == came
    assert browser.errors == []


def test_one_crosshair_reads_every_line(browser: Browser, page: Path) -> None:
    browser.open(page)
    x, y = browser.middle("#quality-time .s1 .mark:nth-of-type(8)")
    browser.mouse("mouseMoved", x, y)
    assert browser.run("document.querySelectorAll('#quality-time .cross').length") == 1
    said = tip(browser, "quality-time")
    evaluations = made().runs[1].evaluations[6]
    ddp = made().runs[0].evaluations
    before, after = next((a, b) for a, b in pairwise(ddp) if a.seconds <= evaluations.seconds <= b.seconds)
    part = (evaluations.seconds - before.seconds) / (after.seconds - before.seconds)
    there = before.quality + part * (after.quality - before.quality)
    assert float(said["ddp"]) == pytest.approx(there, abs=0.01)


def test_the_winner_has_its_name_on_a_phone(browser: Browser, page: Path) -> None:
    browser.open(page, 390, 800, phone=True)
    named = browser.run("[...document.querySelectorAll('#quality-time text.end')].map(e => e.textContent)")
    assert named == [study_of(made()).first[0].run.name]
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_theme_button(browser: Browser, page: Path) -> None:
    browser.open(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(ground)
    browser.click("#theme")
    assert browser.run(ground) == light
    browser.click("#theme")
    assert browser.run(ground) != light
    browser.click("#theme")
    assert browser.run(ground) == light


def test_print(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert len(browser.call("Page.printToPDF", printBackground=True)["data"]) > 10_000
    assert browser.errors == []


@pytest.mark.parametrize("case", ["nothing", "no evaluations", "not finite", "evil"])
def test_poor_records_open_quietly(browser: Browser, tmp_path: Path, case: str) -> None:
    record: Record = made(["ddp", "topk"], steps=12, evaluate=case != "no evaluations")
    if case == "nothing":
        record.runs = []
    elif case == "not finite":
        record.runs[1].steps = [type(s)(s.step, s.seconds, float("nan"), s.sent) for s in record.runs[1].steps]
        record.runs[0].evaluations = record.runs[0].evaluations[:1]
    elif case == "evil":
        record.runs[1].name = "</script><img src=x onerror=console.error(1)>"
    write_html(record, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert browser.errors == []
    assert browser.run("!/NaN|Infinity/.test(document.getElementById('charts').innerHTML)")


@pytest.mark.parametrize("look", [{}, {"width": 390, "height": 844, "phone": True}], ids=str)
def test_the_legend_of_many_long_names_leaves_room_for_the_charts(
    browser: Browser, tmp_path: Path, look: dict[str, Any]
) -> None:
    record = made(["ddp", "topk"], steps=12)
    record.runs += [replace(record.runs[1], name=f"{i} {'scatter(qsgd()) + ' * 9}local_sgd(8)") for i in range(150)]
    write_html(record, tmp_path / "report.html")
    browser.open(tmp_path / "report.html", **look)
    assert browser.run("document.getElementById('legend').offsetHeight / innerHeight") < 0.4
    assert browser.run("document.documentElement.scrollWidth") <= look.get("width", 1100)
