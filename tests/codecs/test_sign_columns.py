"""1-bit SGD's codec: two numbers a row."""

import pytest
import torch
from tests.laws.blocks import roundtrip

from gossamer.codecs import SignColumns
from gossamer.core.bucket import Bucket, Layout


def test_bytes_of_a_message() -> None:
    assert SignColumns().wire_bytes(Layout.of({"w": (1024, 1024)})) == 139_264


def test_a_row_without_one_sign_and_rows_of_unlike_size() -> None:
    given = Bucket.of(
        {"w": torch.tensor([[1.0, 3.0, 2.0], [-1e-6, -3e-6, -2e-6], [0.0, 0.0, 0.0]]), "b": torch.tensor([0.1, -7.0])}
    )
    through = roundtrip(SignColumns(), given)
    torch.testing.assert_close(through[:6], torch.tensor([2.0] * 3 + [-2e-6] * 3))
    assert not through[6:9].any()
    assert torch.equal(through[9:], given.flat[9:])


@pytest.mark.parametrize("threshold", ["zero", "mean"])
def test_a_constant_row_is_exact(threshold: str) -> None:
    given = Bucket.of({"w": torch.full((4, 30), 0.25)})
    assert torch.equal(roundtrip(SignColumns(threshold), given), given.flat)  # pyright: ignore


def test_of_a_gaussian_little_more_than_a_third_is_left() -> None:
    """.363 in the limit; in rows of 1024 the deviation of what is left is far below .01."""
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(3))
    given = Bucket.of({"w": x * torch.logspace(-3, 3, 64)[:, None]})
    lost = (roundtrip(SignColumns(), given) - given.flat).view(64, 1024).square().sum(1)
    shares = lost / given.flat.view(64, 1024).square().sum(1)
    assert float(shares.mean()) == pytest.approx(0.36, abs=0.01)
