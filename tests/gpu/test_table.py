"""The table of docs/gpu.md says what is measured today."""

import pytest
from tests.gpu.loops import World
from tests.gpu.subjects import own_pace, short_presets, waits_for_few
from tests.gpu.table import PAGE, differs, rows, written

pytestmark = pytest.mark.gang


def test_the_page_is_not_stale(world: World) -> None:
    there, found = written(PAGE.read_text()), rows(world.run, without_triton=False)
    assert there.keys() == found.keys(), "python -m tests.gpu.table writes it anew"
    timed = {n for n, text in short_presets().items() if own_pace(text) or waits_for_few(text)}  # the machine's pace
    stale = {n: (there[n], row) for n, row in found.items() if n not in timed and differs(there[n], row)}
    assert not stale, "python -m tests.gpu.table writes it anew"


def test_another_number_is_stale() -> None:
    row = ("1", "0", "?", "26", "4", "8")
    assert not differs(row, row)
    assert not differs(("1", "0", "30", "27", "4", "9"), row)
    assert differs(("1", "1", "?", "26", "4", "8"), row)
    assert differs(("1", "0", "?", "26", "7", "8"), row)
    assert differs(("1", "0", "?", "40", "4", "8"), row)
    assert differs(("does not run", "", "", "", "", ""), row)
