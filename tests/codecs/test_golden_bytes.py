"""The ledger against the published table: what 8 workers hand to the network for one 1024 x 1024 gradient."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.laws.blocks import context
from tests.laws.crew import Crew

from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Codec
from gossamer.fabrics.ledger import Ledger
from gossamer.recipe import Recipe

TABLE: dict[str, int] = json.loads((Path(__file__).parents[1] / "golden" / "bytes.json").read_text())
TABLE.pop("comment")  # pyright: ignore
SIZE, NUMEL = 8, 2**20


@cache
def gradients() -> tuple[Bucket, ...]:
    rng = torch.Generator().manual_seed(1)
    return tuple(Bucket.of({"w": torch.randn(1024, 1024, generator=rng)}) for _ in range(SIZE))


@cache
def exchanged(recipe: str) -> Ledger:
    crew = Crew(recipe, SIZE)
    crew.step(gradients())
    return crew.ledger


@pytest.mark.parametrize("recipe", TABLE)
def test_every_worker_hands_over_the_bytes_of_the_table(recipe: str) -> None:
    handed = dict.fromkeys(range(SIZE), 0)
    for entry in exchanged(recipe):
        handed[entry.rank] += entry.handed
    assert set(handed.values()) == {TABLE[recipe]}


def test_a_dense_ring_receives_seven_eighths_of_twice_the_gradient() -> None:
    entries = list(exchanged("allreduce"))
    assert {e.received for e in entries} == {e.sent for e in entries} == {7_340_032}
    assert {e.handed for e in entries} == {4 * NUMEL}


@pytest.mark.parametrize("recipe", [r for r in TABLE if r.startswith("gather")])
def test_a_gather_receives_everybody_else_s_message(recipe: str) -> None:
    assert {e.received for e in exchanged(recipe)} == {(SIZE - 1) * TABLE[recipe]}


@pytest.mark.parametrize("recipe", [r for r in TABLE if r.startswith("gather")])
def test_the_codec_foretells_its_bytes(recipe: str) -> None:
    codec = Recipe.of(recipe).exchange.codec  # pyright: ignore
    assert isinstance(codec, Codec)
    given = gradients()[0]
    assert codec.wire_bytes(given.layout) == codec.encode(given, {}, context()).numel() == TABLE[recipe]


@pytest.mark.parametrize("codec", ["ternary()", "qsgd()", "qsgd(bits=8)", "eden()", "int8()", "bf16()", "topk()"])
def test_two_phases_cost_two_messages_less_the_own_share(codec: str) -> None:
    recipe = f"scatter({codec}) + none(allow_biased=True)"
    message = Recipe.of(recipe).exchange.codec.wire_bytes(gradients()[0].layout)  # pyright: ignore
    sent = dict.fromkeys(range(SIZE), 0)
    for entry in exchanged(recipe):
        sent[entry.rank] += entry.sent
    for total in sent.values():
        assert total == pytest.approx(2 * 7 / 8 * message, rel=0.001)


@pytest.mark.parametrize("size", [2, 3, 8, 32])
def test_a_gather_grows_with_the_number_of_workers_and_two_phases_do_not(size: int) -> None:
    blocks = [Bucket.of({"w": torch.ones(64, 65)}) for _ in range(size)]
    sent = dict[str, int]()
    for word in ("gather", "scatter"):
        crew = Crew(f"{word}(qsgd())", size)
        crew.step(blocks)
        sent[word] = crew.ledger.sent // size
    message = Recipe.of("gather(qsgd())").exchange.codec.wire_bytes(blocks[0].layout)  # pyright: ignore
    assert sent["gather"] == (size - 1) * message
    assert sent["scatter"] < 2 * message + 16 * size  # chunks round their norms and planes up
