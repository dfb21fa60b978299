"""What the ranks of a trial say to one another: whoever does not come is named."""

import math

import pytest
import torch.distributed as dist
from tests.gang import Gang

from gossamer.bench.compare.control_group import ControlGroup
from gossamer.core.errors import PeerError

pytestmark = pytest.mark.gang


def one_stays_away(rank: int, size: int, absent: int) -> str:
    """All meet, in an earlier control and in this one; then one does not come, nor leave before the others have noticed."""
    earlier, control = ControlGroup(10.0), ControlGroup(0.2)
    assert [earlier.first_says(True) for _ in range(9)] == [True] * 9
    assert control.texts(f"I am {rank}") == [f"I am {r}" for r in range(size)]
    said = ""
    if rank != absent:
        try:
            control.all_fine(True, hurry=True)
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
            assert text.startswith(f"no message from rank {absent}: dead, frozen, cut off, or late (")
            assert "\n" not in text


def of_all_sizes(rank: int, size: int) -> tuple[list[int], dict[str, float], str]:
    """Ranks that have seen different things say different things."""
    control, plan = ControlGroup(10.0), {"contenders": {f"x{i}": 300 * "long" for i in range(30)}}
    lengths = [len(text) for text in control.texts("\u00e9" * 9000 * rank)]
    numbers = {"a": 1.0, "b": 2.0} if rank else {"b": 4.0, "c": math.inf, "d": 1e9}
    means = control.means(numbers)
    assert control.means({}) == {}
    control.same("different commands", plan)
    try:
        control.same("different commands", plan | {"contenders": rank * 50_000 * "y"})
    except PeerError as error:
        return lengths, means, str(error)
    return lengths, means, ""


def test_what_ranks_say_may_be_of_any_length_and_of_other_things(gang2: Gang) -> None:
    for lengths, means, error in gang2.run(of_all_sizes):
        assert lengths == [0, 9000]
        assert means == {"b": 3.0, "c": math.inf, "d": 1e9, "a": 1.0}
        assert error.startswith("different commands: contenders is '' on rank 0 and 'yyy")
        assert len(error) < 500
