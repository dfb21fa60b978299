"""What the ranks of a trial say to one another: whoever does not come is named."""

import pytest
import torch.distributed as dist
from tests.gang import Gang

from gossamer.core.errors import PeerError
from gossamer.trial.agree import Circle

pytestmark = pytest.mark.gang


def one_stays_away(rank: int, size: int, absent: int) -> str:
    """All meet, in an earlier circle and in this one; then one does not come, nor leave before the others have noticed."""
    earlier, circle = Circle(10.0), Circle(0.2)
    assert [earlier.first_says(True) for _ in range(9)] == [True] * 9
    assert circle.texts(f"I am {rank}") == [f"I am {r}" for r in range(size)]
    said = ""
    if rank != absent:
        try:
            circle.all_fine(True, hurry=True)
        except PeerError as error:
            said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize("absent", [0, 2])
def test_whoever_does_not_come_is_named(absent: int) -> None:
    gang = Gang(3)
    try:
        said = gang.run(one_stays_away, absent)
    finally:
        gang.close()
    for rank, text in enumerate(said):
        if rank != absent:
            assert text.startswith(f"no word from rank {absent}: dead, frozen, cut off, or late (")
            assert "\n" not in text
