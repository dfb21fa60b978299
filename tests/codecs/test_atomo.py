"""ATOMO's own tests: the probabilities, the variance, the bytes; and that nothing is drawn until it looks good.

Dice are fixed. With other dice, a right codec would fail a comparison of z < 5 with a chance of 6e-7, and 2 % of a variance
are beyond z = 5 at these counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import pytest
import torch
from tests.laws.blocks import agree, bits, context, roundtrip
from tests.laws.crew import Crew
from torch import Tensor, nn

from gossamer.codecs import DCT, SVD, Atomo, EntryAtom, SharedBasis
from gossamer.codecs.atoms import Basis, Shape
from gossamer.codecs.waterfill import independent, probabilities, systematic
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout
from gossamer.core.contracts import Codec
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import parse
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.simulate import replicas, train


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_rank(rank: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    return normal(rows, rank, seed=seed) @ normal(rank, columns, seed=seed + 1)


def matrix(g: Tensor) -> Bucket:
    return Bucket.of({"w": g})


# -- probabilities -----------------------------------------------------------------------------------------------------

EXAMPLE = torch.tensor([[10.0, 3.0, 2.0, 1.0, 1.0, 1.0]])


def test_the_worked_example_is_132() -> None:
    p = probabilities(EXAMPLE, 3)
    assert p.tolist() == [[1.0, 0.75, 0.5, 0.25, 0.25, 0.25]]
    assert float((EXAMPLE.double().square() / p).sum()) == 132


def test_cutting_off_at_one_without_spending_the_rest_would_give_148() -> None:
    cut = (3 * EXAMPLE.double() / EXAMPLE.sum()).clamp(max=1)
    assert float((EXAMPLE.double().square() / cut).sum()) == pytest.approx(148)


def solved(weights: Tensor, budget: float) -> Tensor:
    """The optimum, by halving: where atoms cost alike, p = min(1, theta w) for the theta that spends the budget."""
    low, high = 0.0, 1e6 / float(weights[weights > 0].min())
    for _ in range(400):
        middle = (low + high) / 2
        spent = float((middle * weights.double()).clamp(max=1).sum())
        low, high = (middle, high) if spent < budget else (low, middle)
    return (low * weights.double()).clamp(max=1)


@pytest.mark.parametrize("budget", [0.3, 1.0, 2.5, 7.0, 40.0, 199.0])
@pytest.mark.parametrize("power", [0, 1, 3, 9])
def test_probabilities_are_those_of_a_solver(budget: float, power: int) -> None:
    weights = normal(4, 200, seed=power).abs() ** power
    weights[2, 50:] *= 1e-6
    p = probabilities(weights, budget)
    for row, given in zip(p, weights, strict=True):
        torch.testing.assert_close(row, solved(given, budget), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(p.sum(1), torch.full((4,), budget, dtype=torch.float64), rtol=1e-9, atol=0)


def test_no_change_of_the_probabilities_makes_the_variance_less() -> None:
    weights = normal(1, 60, seed=3).abs() ** 2
    p = probabilities(weights, 8)
    least = float((weights.double().square() / p).sum())
    for k in range(200):
        other = (p * (1 + 0.05 * normal(1, 60, seed=k).double())).clamp(max=1)
        other = other * min(1.0, 8 / float(other.sum()))
        assert float((weights.double().square() / other).sum()) >= least


def test_terngrad_and_qsgd_are_special_cases() -> None:
    g = normal(1, 500, seed=5)
    size = g.double().abs()
    for norm in (size.max(), size.norm()):
        p = probabilities(g.abs(), float(size.sum() / norm))
        torch.testing.assert_close(p, size / norm, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", [[0.0] * 5, [0.0, 3.0, 0.0, 1.0, 0.0], [1e-30, 0.0, 1e30, 1e-30, 0.0]])
def test_what_weighs_nothing_is_never_kept_and_what_fits_is_certain(weights: list[float]) -> None:
    given = torch.tensor([weights])
    assert torch.equal(probabilities(given, 4), (given > 0).double())
    assert torch.equal(probabilities(given, 9), (given > 0).double())


def test_systematic_and_independent_draws_keep_each_atom_as_often_as_they_should() -> None:
    """20,000 draws; z < 5 for each atom."""
    p, count = probabilities(EXAMPLE, 3), 20_000
    rng = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    places, there = systematic(p.expand(count, -1), 3, rng)
    assert there.all()
    assert (places.sort(1)[0].diff(dim=1) > 0).all(), "an atom was kept twice"
    many = torch.rand(count, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for kept in (places.view(-1), torch.cat(independent(p.expand(count, -1), many))):
        often = torch.bincount(kept, minlength=6) / count
        assert ((often - p[0]).abs() <= 5 * (p[0] * (1 - p[0]) / count).sqrt()).all()


# -- decoding ----------------------------------------------------------------------------------------------------------


@cache
def framed(n: int) -> tuple[Tensor, Tensor]:
    """The frame's atoms, a column each, and what finds the smallest coefficients."""
    atoms = torch.cat([torch.eye(n, dtype=torch.float64), 2 * torch.linalg.qr(normal(n, n, seed=8).double())[0]], 1)
    return atoms, torch.linalg.pinv(atoms)


@dataclass(frozen=True, repr=False)
class Frame(SharedBasis):
    """A user's own: twice as many atoms as elements, askew, and of unlike lengths."""

    name = "frame"

    @property
    def stretch(self) -> float:
        return 5.0

    def analysis(self, tensors: Tensor) -> Tensor:
        flat = tensors.reshape(tensors.shape[0], -1)
        return flat @ framed(flat.shape[1])[1].t().to(flat)

    def synthesis(self, coefficients: Tensor, shape: Shape) -> Tensor:
        return (framed(prod(shape))[0].to(coefficients) @ coefficients).view(shape)

    def norms(self, shape: Shape) -> Tensor:
        return framed(prod(shape))[0].norm(dim=0)

    def count(self, shape: Shape) -> int:
        return 2 * prod(shape)


WAYS = [
    Atomo(EntryAtom(), atoms=20),
    Atomo(EntryAtom(), share=0.25, draws="independent"),
    Atomo(DCT(16), atoms=20),
    Atomo(DCT(16), atoms=19.5, draws="independent"),
    Atomo(SVD(), atoms=3),
    Atomo(SVD(head=2), atoms=3),
    Atomo(SVD(head=0), atoms=2.5, draws="independent"),
    Atomo(SVD(head=2), atoms=2.5, draws="independent"),
    Atomo(Frame(), atoms=20, draws="independent"),
]
each_way = pytest.mark.parametrize("codec", WAYS, ids=repr)


COPIES = 250


def errors(codec: Codec, given: Tensor, draws: int) -> Tensor:
    """What is lost of a tensor, draw after draw: many copies of it stand in one block, each with its own dice."""
    block = Bucket.of({f"w{i}": given for i in range(COPIES)})
    steps = [roundtrip(codec, block, context(step=k)).view(COPIES, -1) for k in range(draws // COPIES)]
    return torch.cat(steps).double() - given.view(-1)


def unbiased(codec: Codec, given: Tensor, draws: int) -> None:
    lost = errors(codec, given, draws)
    z = lost.mean(0) / lost.std(0).clamp(min=float(lost.std()) / 10) * draws**0.5
    assert float(z.abs().max()) < 5


@each_way
def test_it_is_right_on_average(codec: Codec) -> None:
    """2,000 draws of 216 coordinates."""
    unbiased(codec, of_rank(2, 12, 18) + 0.2 * normal(12, 18, seed=4), 2000)


@pytest.mark.slow
@each_way
def test_it_is_right_on_average_of_many(codec: Codec) -> None:
    """The matrix's U*: 100,000 draws, 5e4 of which show a shrinkage of a hundredth of one deviation."""
    unbiased(codec, of_rank(2, 12, 18) + 0.2 * normal(12, 18, seed=4), 100_000)


def weights_of(codec: Atomo, g: Tensor) -> Tensor:
    if isinstance(codec.basis, SVD):
        return torch.linalg.svdvals(g)[None]
    return codec.basis.apart(g[None], context().rng, "w").weights


@pytest.mark.parametrize("codec", [c for c in WAYS if "head=2" not in repr(c)], ids=repr)
def test_the_variance_is_that_of_the_formula(codec: Atomo) -> None:
    """sum w^2 (1 / p - 1), however atoms are drawn, and for atoms that are not orthogonal, too. 4,000 draws: 4 %."""
    g = of_rank(2, 12, 18) + 0.2 * normal(12, 18, seed=4)
    w = weights_of(codec, g).double()
    budget = codec.atoms or codec.share * g.numel() // 2  # pyright: ignore
    p = probabilities(w, budget)
    expected = float((w.square() * (1 / p - 1)).sum())
    assert float(errors(codec, g, 4000).square().sum(1).mean()) == pytest.approx(expected, rel=0.04)


def test_a_short_head_costs_some_variance_and_no_more_than_equal_weights_would() -> None:
    g = of_rank(2, 24, 40) + 0.2 * normal(24, 40, seed=4)
    found = {h: float(errors(Atomo(SVD(head=h), atoms=4), g, 1000).square().sum(1).mean()) for h in (0, 4, 24)}
    assert found[24] == pytest.approx(found[0], rel=0.05)
    assert found[0] < found[4] < 2 * found[0]


@pytest.mark.parametrize("shape", [(12, 18), (18, 12), (12, 3, 2, 3)])
@pytest.mark.parametrize("head", [0, 5, 64])
def test_as_many_atoms_as_the_rank_are_exact(shape: Shape, head: int) -> None:
    g = of_rank(3, shape[0], prod(shape[1:])).view(shape)
    for k in range(5):
        out = roundtrip(Atomo(SVD(head), atoms=3), matrix(g), context(step=k))
        torch.testing.assert_close(out, g.view(-1), rtol=1e-3, atol=1e-3)


def test_few_elements_arrive_as_they_were() -> None:
    g = torch.zeros(20, 30)
    g[::5, ::7] = normal(4, 5, seed=6) ** 9
    for draws in ("systematic", "independent"):
        assert torch.equal(roundtrip(Atomo(EntryAtom(), atoms=20, draws=draws), matrix(g)), g.view(-1))


@pytest.mark.parametrize("basis", [SVD(), SVD(head=0), SVD(head=2), DCT(), EntryAtom()], ids=repr)
def test_equal_singular_values_zeros_and_matrices_of_one_row(basis: Basis) -> None:
    for g in (torch.eye(16), torch.zeros(16, 16), torch.ones(16, 16), torch.ones(1, 64), -torch.ones(64, 1)):
        for k in range(5):
            out = roundtrip(Atomo(basis, atoms=2), matrix(g), context(step=k))
            assert out.isfinite().all()
            assert g.any() or not out.any()


def test_there_may_be_no_atom_and_it_is_not_drawn_again() -> None:
    """2,000 draws of p = (.15, .1, .05): none is kept in (.85)(.9)(.95) of them; z < 5."""
    g, draws = torch.zeros(8, 8), 2000
    g[0, :3] = torch.tensor([3.0, 2.0, 1.0])
    codec = Atomo(EntryAtom(), atoms=0.3, draws="independent")
    wires = [codec.encode(matrix(g), {}, context(step=k)) for k in range(draws)]
    empty = [w for w in wires if w.numel() == 4]
    expected = 0.85 * 0.9 * 0.95
    assert abs(len(empty) / draws - expected) < 5 * (expected * (1 - expected) / draws) ** 0.5
    assert not codec.decode(empty[0], matrix(g)).any()


def test_any_directions_do_where_lapack_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*_: object) -> None:
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    unbiased(Atomo(SVD(head=0), atoms=4), normal(12, 18), 500)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_independent_draws_send_the_bytes_of_the_table_on_average() -> None:
    """24,576 bytes for 1024 x 1024, and 4 that say how many atoms there are. 300 draws; z < 5."""
    codec, size = Atomo(SVD(head=16), atoms=3, draws="independent"), 1024
    assert codec.encode(matrix(of_rank(3, size, size)), {}, context()).numel() == 24_576 + 4
    small, draws = matrix(normal(40, 60)), 300
    lengths = [codec.encode(small, {}, context(step=k)).numel() // (4 * 100) for k in range(draws)]
    assert len(set(lengths)) > 3
    assert abs(sum(lengths) / draws - 3) < 5 * (3 / draws) ** 0.5


def test_every_tensor_s_bytes_are_its_own_and_those_that_would_not_shrink_travel_as_they_are() -> None:
    layout = Layout.of({"w": (40, 60), "bias": (60,), "v": (40, 60), "small": (4, 4), "conv": (16, 8, 3, 3)})
    plain = 4 * (60 + 16)
    assert Atomo(SVD(), atoms=3).wire_bytes(layout) == plain + 4 * 3 * (100 + 100 + 88)
    assert Atomo(SVD(), share=0.1).wire_bytes(layout) == 4 * (60 + 2 * 100 + 2 * 100 + 2 + 88)
    assert Atomo(EntryAtom(), share=0.1).wire_bytes(layout) == 8 * (120 + 3 + 120 + 1 + 57)
    assert Atomo(EntryAtom(), atoms=1).wire_bytes(layout) == 8 * 5


@pytest.mark.parametrize("basis", [SVD(), EntryAtom()], ids=repr)
def test_a_share_in_two_phases_does_not_grow_with_the_number_of_ranks(basis: Basis) -> None:
    recipe = Recipe.of(f"scatter(atomo({basis}, share=0.05))")
    sent = [bytes_per_step(recipe, {"w": (1024, 1024)}, size) for size in (2, 4, 8, 64)]
    limit = 2 * 0.05 * 4 * 1024**2
    assert all(s <= limit for s in sent)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("exchange", ["gather(atomo(svd(), atoms=1))", "scatter(atomo(svd(), atoms=1))"])
def test_matrices_reach_the_codec_as_matrices(exchange: str, size: int) -> None:
    """A chunk of a matrix of one direction has one direction, too: nothing is lost but digits, whoever owns what."""
    g = of_rank(1, 48, 40)
    mean = Crew(exchange, size).step([matrix(g.clone()) for _ in range(size)])
    torch.testing.assert_close(mean, g.view(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", ["atomo(svd(head=4), share=0.2)", "atomo(entry(), share=0.2, draws='independent')"])
@pytest.mark.parametrize("exchange", ["gather", "scatter"])
def test_all_ranks_read_the_same(exchange: str, codec: str) -> None:
    blocks = [Bucket.of({"w": normal(30, 40, seed=r), "b": normal(40, seed=9 + r)}) for r in range(3)]
    parsed = Recipe.of(f"{exchange}({codec})").exchange
    echoes, _ = agree([parsed.average(b, {}, context(rank=r, size=3)) for r, b in enumerate(blocks)])
    assert len({bits(e.mean) for e in echoes}) == 1


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [False, True])
def test_a_bf16_model_learns_and_an_infinity_leaves_no_trace(spoil: bool) -> None:
    def model() -> nn.Module:
        return nn.Linear(16, 12, bias=False).to(torch.bfloat16)

    def backward(m: nn.Module, rank: int, step: int) -> float:
        x = normal(32, 16, seed=100 * step + rank).bfloat16()
        loss = (m(x) - x[:, :12]).float().square().mean()
        loss.backward()
        if spoil and (rank, step) == (1, 5):
            next(m.parameters()).grad.view(-1)[7] = float("inf")  # pyright: ignore
        return loss.item()

    torch.manual_seed(0)
    ranks = replicas("gather(atomo(svd(), atoms=2))", model, lambda m: torch.optim.SGD(m.parameters(), lr=0.5), size=3)
    run = train(ranks, backward, steps=60)
    assert all(torch.equal(r.flat(), ranks[0].flat()) for r in ranks)
    assert sum(run.replicas[0].losses[-5:]) < 0.3 * sum(run.replicas[0].losses[:5])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("atomo(svd())", "pass a budget: either atoms"),
        ("atomo(svd(), atoms=3, share=0.1)", "pass a budget: either atoms"),
        ("atomo(svd(), atoms=0)", "with none nothing would be learned"),
        ("atomo(svd(), atoms=-1)", "atoms must be more than 0"),
        ("atomo(entry(), share=1.5)", "share must lie between 0 and 1"),
        ("atomo(svd(), atoms=2.5)", "use draws='independent'"),
        ("atomo(svd(head=-1), atoms=2)", "head must be at least 0"),
        ("atomo(dct(length=1), atoms=2)", "length must be between 2 and 4096"),
        ("atomo(ring(), atoms=2)", "basis must be a basis (dct, entry, svd)"),
        ("gather(svd())", "codec must be a codec"),
        ("gather(atomo(svd(), atoms=3)) + error_feedback()", "can diverge"),
        ("allreduce(atomo(svd(), atoms=3))", "use scatter("),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        Recipe.of(text) if "(atomo" in text or "gather" in text else parse(text)
    assert words in str(refusal.value)


def world(**shapes: Shape) -> Binding:
    return Binding(2, [Layout.of(shapes)])


@pytest.mark.parametrize(
    ("codec", "met", "words"),
    [
        (Atomo(SVD(), atoms=2), world(w=(64,), b=(3,)), "which svd() does not take"),
        (Atomo(SVD(), atoms=12), world(w=(10, 30)), "each of 10 atoms is 160 bytes long, and all of it 1200"),
        (Atomo(EntryAtom(), atoms=600), world(w=(10, 30)), "each of 300 atoms is 8 bytes long"),
    ],
)
def test_a_budget_that_would_save_nothing_is_refused_when_it_meets_the_model(
    codec: Atomo, met: Binding, words: str
) -> None:
    with pytest.raises(AttachError) as refusal:
        Recipe.of(f"gather({codec})").fits(met)
    assert words in str(refusal.value)
    assert "Use fewer atoms" in str(refusal.value)


def test_gossip_asks_for_a_rate_where_the_vector_it_tries_would_be_sent_in_full() -> None:
    """Which shows nothing of the noise of matrices."""
    matrices = world(w=(64, 32), b=(64,))
    gossip = "allreduce(fp32()) + gossip(choco({}))"
    with pytest.raises(AttachError, match=r"would diverge: pass one, such as gamma=0\.02$"):
        Recipe.of(gossip.format("atomo(svd(), atoms=1)")).fits(matrices)
    for fine in ("atomo(svd(), atoms=1), gamma=0.02", "fp32()", "qsgd()", "topk()"):
        Recipe.of(gossip.format(fine)).fits(matrices)


@dataclass(frozen=True, repr=False)
class Lossy(SharedBasis):
    name = "lossy"

    def analysis(self, tensors: Tensor) -> Tensor:
        return tensors.reshape(tensors.shape[0], -1)

    def synthesis(self, coefficients: Tensor, shape: Shape) -> Tensor:
        return coefficients.view(shape) * 0.999


def test_a_basis_that_does_not_give_back_what_it_got_is_refused() -> None:
    with pytest.raises(AttachError, match="is not x for tensors of"):
        Atomo(Lossy(), atoms=2).fits(world(w=(10, 30)))
    Atomo(Frame(), atoms=2).fits(world(w=(10, 30)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
