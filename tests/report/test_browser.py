"""The page in a real Chromium: it opens without a complaint, answers to hands and keys, and shows its data."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import CHROMIUM, Browser
from tests.report.made import made

from gossamer.record import Record
from gossamer.report import write_html

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
    rows = {row["name"]: row for row in data["rows"]}
    cells = browser.run(
        "Object.fromEntries([...document.querySelectorAll('#bytes tbody tr')]"
        ".map(r => [r.cells[0].innerText.trim(), [...r.cells].slice(1).map(c => c.innerText.trim())]))"
    )
    assert cells["terngrad"][3] == f"{rows['terngrad']['nic_ratio']:.3f}"
    assert cells["ddp"][1].replace("\u00a0", " ") == f"{rows['ddp']['wire'] / 1e9:.2f} GB"


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
    assert said["time"].startswith(f"{float(evaluation['x']):.1f}"[:3])
    browser.mouse("mouseMoved", x, y - 700)
    assert tip(browser, "quality-time") == {}


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


def test_logarithmic_axis_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run("document.querySelector('#quality-bytes [data-log=x]').getAttribute('aria-pressed')") == "true"
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
