"""What `make test` leaves of the product of codecs and precisions."""

import pytest
import torch
from tests.laws.samples import plainest

from gossamer.core.parts import registry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Double precision is for every codec as it says itself that it is typical; its other settings are slow."""
    plain = {repr(plainest(part)) for part in registry.of("codec").values()}
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("dtype") is torch.float64 and repr(params.get("codec")) not in plain and "codec" in params:
            item.add_marker(pytest.mark.slow)
