"""The lists of mistakes that tests must see: none of them has rotted."""

import re

import pytest
from campaigns import gpu_mutations, mutations
from campaigns.mutating import ROOT, SOURCE, Mutation

ALL = [*mutations.MUTATIONS, *gpu_mutations.MUTATIONS]


@pytest.mark.parametrize("mutation", ALL, ids=lambda m: m.finding)
def test_a_mistake_can_be_made_in_one_place_and_there_is_a_test_for_it(mutation: Mutation) -> None:
    text = (SOURCE / "gossamer" / mutation.file).read_text()
    assert text.count(mutation.right) == 1, f"{mutation.file} reads otherwise now: say what it says today"
    compile(text.replace(mutation.right, mutation.wrong), mutation.file, "exec")
    file, _, test = mutation.test.partition("::")
    assert re.search(rf"^def {re.escape(test.partition('[')[0])}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_there_are_many_and_no_two_are_alike() -> None:
    assert len(mutations.MUTATIONS) >= 44
    assert len({(m.file, m.right) for m in ALL}) == len(ALL)
