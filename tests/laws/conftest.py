"""What `make test` leaves of the products of codecs with precisions and shapes."""

from typing import Any

import pytest
import torch
from tests.laws.samples import plainest

from gossamer.core.parts import registry

# What other settings of a codec show on these the plain one shows there, and they themselves on `several`, which has a
# matrix, a parameter of zeros and one of one element, and on `long`, which is longer than any bucket.
OTHERS = ("matrices", "two elements")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Double precision and all shapes are for every codec as it says itself that it is typical; of its other settings they are slow."""
    plain = {repr(plainest(part)) for part in registry.of("codec").values()}
    for item in items:
        params: dict[str, Any] = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        many = params.get("dtype") is torch.float64 or params.get("shape") in OTHERS
        if many and "codec" in params and repr(params["codec"]) not in plain:
            item.add_marker(pytest.mark.slow)
