"""Counters are kept as long as somebody may ask for them, and not for ever."""

from torch.distributed import HashStore

from gossamer.fabrics.liveness.store import SharedStore
from gossamer.fabrics.torch.tickets import KEPT, Tickets


def crew(size: int) -> tuple[HashStore, list[Tickets]]:
    store = HashStore()
    return store, [Tickets(SharedStore(store, rank, size)) for rank in range(size)]


def step(ranks: list[Tickets], name: str, late: int | None = None) -> None:
    """All but the late one claim; all see who was first, and meet."""
    for rank, tickets in enumerate(ranks):
        if rank != late:
            tickets.claim(name)
    first = tuple(r for r in range(len(ranks)) if r != late)
    for tickets in ranks:
        tickets.sweep()
        assert tickets.holders(name, len(first)) == first
        tickets.all_have_come()


def test_keys_do_not_grow_with_the_steps() -> None:
    store, ranks = crew(3)
    for number in range(500):
        step(ranks, f"step/{number}", late=number % 4 if number % 4 < 3 else None)
        assert store.num_keys() <= (KEPT + 2) * 4
    assert store.num_keys() > KEPT


def test_a_claim_that_is_under_way_when_its_step_closes_makes_no_key_anew() -> None:
    store, ranks = crew(3)
    for number in range(200):
        step(ranks, f"step/{number}", late=2)
        if number:
            assert ranks[2].claim(f"step/{number - 1}") == 3
    assert store.num_keys() <= (KEPT + 2) * 4


def test_nothing_is_deleted_that_a_rank_may_not_have_read() -> None:
    """Rank 0 runs ahead; no collective tells it that the others have come."""
    _, ranks = crew(2)
    for number in range(3 * KEPT):
        ranks[0].claim(f"round/{number}")
        ranks[0].sweep()
        assert ranks[0].holders(f"round/{number}", 1) == (0,)
    for number in range(3 * KEPT):
        assert ranks[1].holders(f"round/{number}", 1) == (0,)
