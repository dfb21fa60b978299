"""A wire lies nowhere in its block: the mean may be written over that while the wire is still on its way."""

import pytest
import torch
from tests.laws.samples import codecs

from gossamer.core.block import Block, Layout
from gossamer.core.contracts import Codec, Context
from gossamer.core.dice import Dice


@pytest.mark.parametrize("codec", codecs(), ids=repr)
def test_a_wire_shares_no_memory_with_its_block(codec: Codec) -> None:
    layout = Layout.of({"a": (6, 8), "b": (5,)})
    block = Block(torch.linspace(-1, 1, layout.numel), layout)
    wire = codec.encode(block, {}, Context(0, 2, 1, Dice(0, 1, 0)))
    assert wire.untyped_storage().data_ptr() != block.flat.untyped_storage().data_ptr()
