"""The table of docs/gpu.md says what is measured today."""

import pytest
from tests.gpu.loops import World
from tests.gpu.subjects import is_async, short_presets, waits_for_few
from tests.gpu.table import PAGE, differs, rows, written

pytestmark = pytest.mark.gang


def test_the_page_is_not_stale(world: World) -> None:
    there, found = written(PAGE.read_text()), rows(world.run, without_triton=False)
    assert there.keys() == found.keys(), "python -m tests.gpu.table writes it anew"
    texts = short_presets()
    timed = {name for name, text in texts.items() if is_async(text)}  # what these do depends on the machine
    late = {name for name, text in texts.items() if waits_for_few(text)}  # and of these the peak, as ranks are late
    seen = {name: row[:-1] if name in late else row for name, row in found.items() if name not in timed}
    stale = {name: (there[name], row) for name, row in seen.items() if differs(there[name], row)}
    assert not stale, "python -m tests.gpu.table writes it anew"


def test_another_number_is_stale() -> None:
    row = ("1", "0", "?", "26", "4", "8")
    assert not differs(row, row)
    assert not differs(("1", "0", "30", "27", "4", "9"), row)
    assert differs(("1", "1", "?", "26", "4", "8"), row)
    assert differs(("1", "0", "?", "26", "7", "8"), row)
    assert differs(("1", "0", "?", "40", "4", "8"), row)
    assert differs(("does not run", "", "", "", "", ""), row)
