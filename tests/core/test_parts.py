"""Parts print as the text they are read from, and refuse everything else in words."""

import doctest
import importlib
import math
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.laws.samples import samples

from gossamer import recipes
from gossamer.codecs import QSGD, PowerSGD, Ternary, TopK
from gossamer.core.contracts import Codec, Exchange, LinearCodec
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, parse, part, registry
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.recipe import Recipe

PARTS = registry.of()
every_part = pytest.mark.parametrize("name", PARTS)
patient = settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    max_examples=settings.default.max_examples // 2,
)

FLOATS = st.one_of(st.floats(0, 2), st.floats(), st.sampled_from([0.0, 0.5, 1.0, 2.5, math.inf]))
INTS = st.one_of(st.integers(1, 9), st.integers())
CONDITIONS = st.sampled_from(["ndim < 2", 'numel >= 7 and not name == "a*"', "name != 'it\\'s'", "nonsense", "é\n'\""])


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation, legal or not."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Part):
        found = [s for s in samples(hint.kind) if isinstance(s, hint)]
        assert found, f"no sample is a {hint.__name__}"
        return st.sampled_from(found)
    plain = {int: INTS, float: FLOATS, str: CONDITIONS, bool: st.booleans(), type(None): st.none()}
    assert hint in plain, f"teach values() about {hint}"
    return plain[hint]


@every_part
@patient
@given(data=st.data())
def test_every_legal_part_prints_as_text_that_reads_back_equal(name: str, data: st.DataObject) -> None:
    cls = PARTS[name]
    hints = get_type_hints(cls)
    chosen = {f.name: data.draw(values(hints[f.name]), f.name) for f in fields(cls)}  # pyright: ignore
    try:
        made = cls(**chosen)
    except RecipeError:
        return  # refused by the part's own rules: nothing else may be raised
    assert parse(repr(made)) == made
    assert repr(parse(repr(made))) == repr(made)
    assert hash(parse(repr(made))) == hash(made)


@pytest.mark.parametrize("sample", samples(), ids=repr)
def test_every_sample_reads_back_equal_and_of_its_own_type(sample: Part) -> None:
    again = parse(repr(sample))
    assert again == sample
    assert type(again) is type(sample)


def test_fields_at_their_defaults_are_not_printed() -> None:
    assert repr(Gather(QSGD())) == "gather(qsgd())"
    assert repr(Gather(QSGD(bits=2))) == "gather(qsgd(bits=2))"
    assert repr(parse("slowmo(every=12, beta=0.7)")) == "slowmo(12)"


@every_part
def test_every_part_is_final_frozen_and_hashable(name: str) -> None:
    cls = PARTS[name]
    assert getattr(cls, "__final__", False), f"{cls.__name__} lacks @final"
    for sample in samples(cls.kind):
        hash(sample)
        with pytest.raises(FrozenInstanceError):
            sample.name = "other"


DECLARES_ITS_WIRE = ("codec", "exchange", "schedule", "topology", "memory", "controller")


@every_part
def test_every_part_explains_itself(name: str) -> None:
    cls = PARTS[name]
    doc = cls.__doc__ or ""
    first, _, rest = doc.partition("\n")
    assert first.strip().endswith((".", ";")), f"{cls.__name__}: the docstring must begin with one whole sentence"
    assert len(first) <= 120
    assert doctest.DocTestParser().get_examples(doc), f"{cls.__name__}: no doctest"
    silent = name in ("none", "fixed", "every_step")  # these hand on what others write
    assert silent or cls.kind not in DECLARES_ITS_WIRE or "Wire:" in rest, f"{cls.__name__}: no 'Wire:' line"


@pytest.mark.parametrize("name", recipes.presets())
def test_every_preset_explains_itself_and_cites_its_paper(name: str) -> None:
    doc = recipes.presets()[name].__doc__ or ""
    assert doc.strip().split("\n")[0].endswith(".")
    assert "Paper:" in doc


@every_part
def test_every_part_is_exported_by_the_package_of_its_kind(name: str) -> None:
    package = importlib.import_module(PARTS[name].__module__.rsplit(".", 1)[0])
    if package.__name__ != "gossamer":
        assert PARTS[name].__name__ in package.__all__


def test_a_name_can_be_taken_only_once() -> None:
    with pytest.raises(ValueError, match="two parts have the name 'qsgd'"):

        @part("qsgd")
        class Impostor(Part):
            """Not that one."""

    assert registry.get("qsgd") is QSGD


# -- what is refused ------------------------------------------------------------------------------------------------

TOKENS = [*PARTS, *"()=,+-.'\"[]{}*:", "bits", "ratio", "0", "1e999", "-inf", "nan", "None", "lambda", "\\", "\n", "**"]
SCRIBBLES = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TOKENS), max_size=14).map(" ".join))


@settings(max_examples=4 * settings.default.max_examples)
@given(SCRIBBLES)
def test_arbitrary_text_is_read_or_refused_with_a_recipe_error(text: str) -> None:
    with suppress(RecipeError):
        parse(text, recipes.presets())


@settings(max_examples=2 * settings.default.max_examples)
@given(SCRIBBLES)
def test_arbitrary_text_is_a_recipe_or_refused_with_a_recipe_error(text: str) -> None:
    with suppress(RecipeError):
        assert isinstance(Recipe.of(text), Recipe)


MONSTERS = {
    "deep brackets": "(" * 5000,
    "closed brackets": "(" * 150 + "1," + ")" * 150,
    "deep calls": "gather(" * 150 + ")" * 150,
    "deep lists": "[" * 150 + "]" * 150,
    "many minuses": "-" * 3000 + "1",
    "a long sum": "1+" * 20_000 + "1",
    "a sum that parses but is deep": "qsgd()+" * 2000 + "qsgd()",
    "a huge decimal": "qsgd(bits=" + "9" * 5000 + ")",
    "a huge hexadecimal": "qsgd(bits=0x" + "f" * 5000 + ")",
    "an integer beyond floats": "ternary(clip=1" + "0" * 400 + ")",
    "a negative one": "ternary(clip=-1" + "0" * 400 + ")",
    "null": "qsgd(\0)",
    "surrogate": "\ud800",
    "bad escape": "'\\d'",
    "nothing": "",
    "only blanks": " \n\t",
    "bytes": "qsgd(b'4')",
    "ellipsis": "qsgd(...)",
    "complex": "qsgd(4j)",
    "starred": "qsgd(*qsgd)",
    "mapping": "qsgd(**{'bits': 4})",
    "generator": "qsgd(x for x in y)",
    "attribute": "gossamer.qsgd()",
    "code": "__import__('os').system('true')",
    "a long word": "q" * 100_000,
}


@pytest.mark.parametrize("text", MONSTERS.values(), ids=MONSTERS.keys())
def test_monsters_are_refused_like_any_other_mistake(text: str) -> None:
    with pytest.raises(RecipeError, match=r"[a-z]+ "):
        Recipe.of(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qsdg(bits=4)", ["no part called 'qsdg'", "Did you mean 'qsgd'?", "Known:", "ternary"]),
        ("qsgd(bit=4)", ["qsgd has no argument 'bit'", "Did you mean 'bits'?", "bucket", "norm"]),
        ("qsgd(zzz=4)", ["no argument 'zzz'", "Known: bits, bucket, code, levels, norm"]),
        ("qsgd(4, bits=4)", ["'bits' is given twice"]),
        ("qsgd(bits=3, bits=4)", ["'bits' is given twice"]),
        ("qsgd(4, 512, 'max', 'fixed', 5, 1)", ["at most 5 arguments", "bits, bucket, norm, code, levels", "got 6"]),
        ("qsgd(bits='4')", ["bits must be a whole number", "got '4'"]),
        ("qsgd(bits=4.0)", ["bits must be a whole number", "got 4.0"]),
        ("qsgd(bits=True)", ["bits must be a whole number", "got True"]),
        ("ternary(clip=True)", ["clip must be a number", "got True"]),
        ("qsgd(norm='l1')", ["norm must be one of 'max', 'l2'", "got 'l1'"]),
        ("gossip(overlap=1)", ["overlap must be True or False", "got 1"]),
        ("diana(alpha='x')", ["alpha must be a number or None", "got 'x'"]),
        ("gather(ring())", ["codec must be a codec", "qsgd", "got ring()"]),
        ("gather()", ["gather needs codec", "gather(fp32())"]),
        ("slowmo()", ["slowmo needs every", "slowmo(8)"]),
        ("push_sum(topk())", ["topology must be a topology", "ring", "got topk()"]),
        ("gather(qsgd", ["cannot be read", "gather(qsgd(bits=4))"]),
        ("1 * 2", ["'1 * 2' is not allowed in a recipe"]),
        ("error_feedback(units=None)", ["units must be one of 'gradient', 'update'", "got None"]),
    ],
)
def test_refusals_name_what_is_wrong_and_what_would_be_right(text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    assert [w for w in words if w not in str(caught.value)] == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: QSGD(bits="4"),  # pyright: ignore
        lambda: QSGD(bits=4.0),  # pyright: ignore
        lambda: TopK(ratio="0.1"),  # pyright: ignore
        lambda: PowerSGD(rank=None),  # pyright: ignore
        lambda: Gather(QSGD),  # pyright: ignore
        lambda: Scatter("qsgd"),  # pyright: ignore
    ],
)
def test_wrong_types_are_refused_in_python_as_in_text(make: Any) -> None:
    with pytest.raises(RecipeError, match="must be"):
        make()


def test_a_whole_number_is_welcome_where_a_number_is_asked_for_and_prints_alike() -> None:
    assert repr(Ternary(clip=0)) == repr(parse("ternary(clip=0)")) == "ternary(clip=0.0)"
    assert type(Ternary(clip=0).clip) is float


def test_a_codec_of_the_wrong_sort_is_refused_by_the_exchange_with_the_fix() -> None:
    assert issubclass(QSGD, Codec)
    assert not issubclass(QSGD, LinearCodec)
    with pytest.raises(RecipeError, match=r"cannot be summed.*scatter\(qsgd\(\)\).*gather\(qsgd\(\)\)"):
        parse("allreduce(qsgd())")
    for word in ("gather", "scatter"):
        with pytest.raises(RecipeError, match=r"use allreduce\(powersgd\(\)\)"):
            parse(f"{word}(powersgd())")


def test_text_is_bound_by_signature_not_executed() -> None:
    assert parse("qsgd(2, 64)") == QSGD(2, 64)
    assert parse(" gather( qsgd( bits = 4 ) ) ") == Gather(QSGD(4))
    assert parse("qsgd") == QSGD()
    assert parse("gather(topk()) + error_feedback()") == (parse("gather(topk())"), parse("error_feedback()"))
    assert isinstance(parse("allreduce(fp32())"), AllReduced)
    assert isinstance(parse("allreduce(fp32())"), Exchange)


def test_names_that_are_presets_and_parts_are_presets_first_and_parts_later() -> None:
    names = {"twice": lambda n=2: ("preset", n), "qsgd": lambda bits=1: ("preset", bits)}
    assert parse("qsgd(3)", names) == ("preset", 3)
    assert parse("qsgd(bits=3, bucket=7)", names) == QSGD(3, 7)
    assert parse("twice + qsgd", names) == (("preset", 2), QSGD())
