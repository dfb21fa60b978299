"""Count sketches: the same bits everywhere, sums of tables are tables of sums, and estimates as good as the theory says.

Statistics draw with fixed keys. Deviations of means over 200 draws or more are judged at five standard errors: with other keys
a right sketch would fail one comparison with a chance of 6e-7.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer import kernels

KEY = (0x9E3779B9, 0xDEADBEEF)
needs_numba = pytest.mark.skipif("numba" not in kernels.backends(), reason="numba is not installed")


def key(draw: int) -> tuple[int, int]:
    return int(kernels.mix3(torch.tensor([draw]), KEY)), int(kernels.mix3(torch.tensor([draw]), (5, 7)))


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def told(x: Tensor, rows: int, columns: int, draw: int) -> Tensor:
    return kernels.sketch_estimate(kernels.sketch_encode(x, rows, columns, key(draw)), x.numel(), key(draw))


@needs_numba
@settings(deadline=None, max_examples=40)
@given(
    n=st.sampled_from([0, 1, 31, 2047, 2048, 2049, 6000]),
    rows=st.sampled_from([1, 3, 5, 7]),
    columns=st.sampled_from([1, 7, 64, 1000, 2048, 2500, 9000]),
    seed=st.integers(0, 2**20),
)
def test_all_backends_add_and_estimate_the_same_bits(n: int, rows: int, columns: int, seed: int) -> None:
    if n > 40 * columns:
        return  # the reference takes a second for a thousand layers
    x, found = normal(n, seed), list[list[Tensor]]()
    x[::5] = -0.0
    for backend in ("torch", "numba"):
        with kernels.using(backend):
            table = kernels.sketch_encode(x, rows, columns, key(seed))
            found.append([table, kernels.sketch_estimate(table, n, key(seed))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_tables_of_whole_numbers_add_up_exactly() -> None:
    xs = [(100 * normal(5000, r)).round() for r in range(8)]
    total = sum(kernels.sketch_encode(x, 5, 300, KEY) for x in xs)
    assert isinstance(total, Tensor)
    assert torch.equal(total, kernels.sketch_encode(torch.stack(xs).sum(0), 5, 300, KEY))


def test_what_fits_into_a_row_comes_back_as_it_was() -> None:
    for n in (1, 100, 2100):
        assert torch.equal(told(normal(n), 5, n, 1), normal(n))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_every_row_shows_a_number_that_is_not_finite(value: float) -> None:
    for place in (0, 777, 2999):
        x = normal(3000)
        x[place] = value
        assert (kernels.sketch_encode(x, 5, 100, KEY).isfinite().logical_not().sum(1) == 1).all()


def test_a_row_is_right_on_average_and_errs_as_the_theory_says() -> None:
    """Var = (|x|^2 - x_i^2) / c, less what shares a layer, which never meets; here a layer is an eighth of the vector."""
    x, draws, columns = normal(800), 400, 100
    errors = torch.stack([told(x, 1, columns, d) for d in range(draws)]) - x
    layers = x.view(8, 100).square().sum(1)
    variance = ((layers.sum() - layers) / columns).repeat_interleave(100)
    assert float((errors.mean(0) / (variance / draws).sqrt()).abs().max()) < 5
    assert float(errors.square().mean() / variance.mean()) == pytest.approx(1, abs=0.05)


def test_neither_neighbours_nor_equal_places_meet_more_often_than_they_should() -> None:
    """Elements a layer apart, and any two of other layers, share a cell of a row once in `columns` draws."""
    columns, draws = 16, 600
    for other in (16, 17, 32, 77):
        pair = torch.zeros(80)
        pair[0], pair[other] = 1.0, 1.0
        met = sum(int((kernels.sketch_encode(pair, 1, columns, key(d)) != 0).sum() != 2) for d in range(draws))
        # They meet in one cell as 0 or as +-2: in both cases fewer than two cells are not zero.
        assert abs(met - draws / columns) < 5 * (draws / columns) ** 0.5, other


def planted(kind: str, n: int, count: int) -> Tensor:
    """Heavy elements of equal size in noise: anywhere, in a row of a matrix, or in a column of it."""
    places = {
        "anywhere": torch.randperm(n, generator=torch.Generator().manual_seed(3))[:count],
        "rows": torch.arange(count) % 25 + n // 8 * (torch.arange(count) // 25) + 11,
        "columns": torch.arange(count) * (n // count) + 5,
    }[kind]
    x = 0.02 * normal(n)
    x[places] = 1.0
    return x


@pytest.mark.parametrize("kind", ["anywhere", "rows", "columns"])
def test_heavy_elements_are_among_four_times_as_many_candidates(kind: str) -> None:
    """The paper's setting: 50 of 100,000 in 4,000 columns; also where they lie together, or at equal distances."""
    x = planted(kind, 100_000, 50)
    heavy, first = (x == 1).nonzero().view(-1), 0
    for draw in range(10):
        said = told(x, 5, 4000, draw)
        assert torch.isin(heavy.int(), kernels.topk(said, 200)).all()
        first += int(torch.isin(heavy.int(), kernels.topk(said, 50)).sum())
    assert first >= 490


@pytest.mark.parametrize("kind", ["anywhere", "rows", "columns"])
def test_clustered_gradients_are_found_as_well_as_by_hashing_every_element(kind: str) -> None:
    """A crowded table. Means over 30 draws; each spreads by less than .03, so .05 is more than five standard errors of both."""
    x, rows, columns, draws = planted(kind, 20_000, 200), 5, 600, 30
    heavy = (x == 1).nonzero().view(-1)
    ours = plain = 0.0
    for draw in range(draws):
        rng = torch.Generator().manual_seed(draw)
        cells = torch.randint(0, columns, (rows, x.numel()), generator=rng)
        signs = torch.randint(0, 2, (rows, x.numel()), generator=rng) * 2.0 - 1
        table = torch.zeros(rows, columns).scatter_add_(1, cells, signs * x)
        by_element = (table.gather(1, cells) * signs).median(0).values
        for said in (told(x, rows, columns, draw), by_element):
            share = float(torch.isin(heavy, said.abs().topk(400).indices).float().mean()) / draws
            ours, plain = (ours + share, plain) if said is not by_element else (ours, plain + share)
    assert ours > plain - 0.05, (ours, plain)
    assert plain > 0.5


@pytest.mark.parametrize(("rows", "columns"), [(2, 10), (0, 10), (5, 0)])
def test_a_table_without_a_middle_row_or_a_column_is_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match="odd number of rows and at least one column"):
        kernels.sketch_encode(normal(10), rows, columns, KEY)
