"""What auto may choose unless told otherwise is what docs/quality.md speaks for."""

import re
from pathlib import Path

import pytest

from gossamer.controllers.auto_candidates import keeps_nothing
from gossamer.controllers.auto_table import TABLE, AllowedRecipe
from gossamer.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.recipe)
def test_it_averages_gradients_at_every_step_and_keeps_no_memory(row: AllowedRecipe) -> None:
    assert keeps_nothing(Recipe.of(row.recipe), Recipe.of("allreduce"))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.recipe)
def test_it_cannot_be_told_from_dense_at_denses_rate_by_the_table_of_the_docs(row: AllowedRecipe) -> None:
    section = PAGE.read_text().partition("## At dense's rate")[2]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| `{row.recipe}` |")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == row.above_dense["fashion"]
    assert cells[5] in ("", row.above_dense["lm"])
    for said in row.above_dense.values():
        low, high = map(float, re.findall(r"[-+]\d\.\d+", said)[1:])
        assert low <= 0 <= high, said
