"""A wire lies nowhere in its block: the mean may be written over that while the wire is still on its way."""

import pytest
import torch
from tests.laws.samples import codecs

from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec, Context
from gossamer.core.rng import CounterRng


@pytest.mark.parametrize("codec", codecs(), ids=repr)
def test_a_wire_shares_no_memory_with_its_block(codec: Codec) -> None:
    layout = Layout.of({"a": (6, 8), "b": (5,)})
    block = Bucket(torch.linspace(-1, 1, layout.numel), layout)
    wire = codec.encode(block, {}, Context(0, 2, 1, CounterRng(0, 1, 0)))
    assert wire.untyped_storage().data_ptr() != block.flat.untyped_storage().data_ptr()
