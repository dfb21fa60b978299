"""Tensors are made where they are used: whoever makes one says on which device, or stands here with a reason.

And nobody asks for the current device or stream of no device in particular: the device is that of the parameters.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.gpu.known import cases

import gossamer

SOURCE = Path(gossamer.__file__).parent
ON_THE_HOST = {"bench", "planning", "simulate.py"}  # by their nature
HOST_KERNELS = ("kernels/cpu/",)

MAKERS = {
    *("zeros", "ones", "empty", "full", "tensor", "arange", "linspace", "eye", "as_tensor", "frombuffer", "from_numpy"),
    *("rand", "randn", "randint", "randperm", "normal", "empty_strided"),
}

NUMBER = "a number that only the host reads"
EXCEPTIONS = {
    ("controllers/accordion.py", "_route"): NUMBER,
    ("controllers/regimes.py", "watch"): NUMBER,
    ("controllers/regimes.py", "_close"): NUMBER,
    ("controllers/regimes.py", "slowed"): NUMBER,
    ("controllers/dqsgd.py", "_plan"): NUMBER,
    ("controllers/dqsgd.py", "_rate"): NUMBER,
    ("controllers/forecast.py", "forecast"): NUMBER,
    ("controllers/dqsgd.py", "_averaged"): NUMBER,
    ("schedules/guard.py", "weights"): NUMBER,
    ("mixers/push_sum.py", "numerator"): NUMBER,
    ("mixers/symmetric.py", "push"): NUMBER,
    ("mixers/choco.py", "push"): NUMBER,
    ("mixers/choco.py", "heal"): NUMBER,
    ("mixers/healing.py", "keep_sources"): NUMBER,
    ("mixers/choco.py", "_wire"): NUMBER,
    ("core/schedule.py", "each"): NUMBER,
    ("memories/residual.py", "units_of"): NUMBER,
    ("memories/residual.py", "take_on"): NUMBER,
    ("codecs/adacomp.py", "_bins"): "host data; `on` moves it",
    ("codecs/powersgd.py", "_places"): "host data, moved in the same line",
    ("schedules/rounds.py", "slow_velocity"): NUMBER,
    ("schedules/pending_fragments.py", "keep"): NUMBER,
    ("schedules/recovery.py", "_take"): NUMBER,
    ("schedules/recovery.py", "agree"): "host data, moved in the same line",
    ("schedules/by_speed.py", "_tell"): "host data; moved before it is sent",
    ("schedules/by_speed.py", "_plan"): "numbers that the host was told, and goes on with",
    ("schedules/by_speed.py", "kept"): NUMBER,
    ("schedules/round_closer.py", "_tell"): "moved in the same function, with the lengths that it goes with",
    ("schedules/accelerated.py", "_moved"): NUMBER,
    ("schedules/divergence_bound.py", "_growth"): "looked into on the host, before training",
    ("schedules/divergence_bound.py", "_factor"): "looked into on the host, before training",
    ("schedules/divergence_bound.py", "_shares"): "looked into on the host, before training",
    ("controllers/switch_exchange.py", "decide"): NUMBER,
    ("codecs/gradiveq.py", "average"): NUMBER,
    ("controllers/adacomm.py", "_number"): NUMBER,
    ("controllers/adacomm.py", "decide"): NUMBER,
    ("controllers/adacomm.py", "_length"): NUMBER,
    ("controllers/adascale.py", "decide"): NUMBER,
    ("controllers/noise.py", "look"): NUMBER,
    ("controllers/noise_batch.py", "decide"): NUMBER,
    ("schedules/pair_server.py", "word"): "host data; moved before it is sent",
    ("schedules/merging.py", "take"): NUMBER,
    ("schedules/on_arrival.py", "consensus_share"): NUMBER,
    ("schedules/on_arrival.py", "step"): NUMBER,
    ("schedules/server.py", "add"): NUMBER,
    ("updates/zero_one_adam_update.py", "direction"): NUMBER,
    ("updates/momentum_step.py", "moments"): NUMBER,
    ("runtime/heterogeneity.py", "heterogeneity"): "host data; moved before it is sent",
    ("core/memory_pool.py", "uninitialised"): "the host's memory, where the host's was asked for",
    ("fabrics", "tear"): "a wire of gloo",
    ("fabrics/torch/gloo.py", "heap"): "wires of gloo",
    ("fabrics/torch/last_collective.py", "level"): "brought to the device before it is sent",
    ("fabrics/torch/session.py", "form"): "asks whether it would be refused, and is not sent",
    ("fabrics/torch/staged.py", "pinned"): "pinned memory is the host's",
    ("fabrics/torch/staged.py", "make"): "a wire of gloo that has no bytes",
    ("integrations/backward.py", "_ask_who_used"): "host data, moved in the next line",
    ("integrations/handshake.py", "tell"): "host data, moved in the same line",
    ("checkpoints/tree.py", "pack"): "a part of a file",
    ("schedules/mixing.py", "shares"): NUMBER,
    ("checkpoints/state.py", "_pending"): NUMBER,
    ("schedules/quorum.py", "offer"): "host data; moved before it is sent",
}
CURRENT = {"current_device", "current_stream", "default_stream", "Stream", "synchronize"}


def files() -> list[str]:
    found = (path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")))
    kept = [p.as_posix() for p in found if p.parts[0] not in ON_THE_HOST]
    return [p for p in kept if not p.startswith(HOST_KERNELS)]


def calls(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Call]]:
    """Every call, and the function it stands in."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef) else function
        if isinstance(node, ast.Call):
            yield inside, node
        yield from calls(node, inside)


@cache
def calls_of(file: str) -> tuple[tuple[str, ast.Call], ...]:
    return tuple(calls(ast.parse((SOURCE / file).read_text())))


def without_a_device(file: str) -> Iterator[tuple[str, ast.Call]]:
    for function, call in calls_of(file):
        named = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch"
        if named and call.func.attr in MAKERS and not any(k.arg == "device" for k in call.keywords):  # pyright: ignore
            yield function, call


@pytest.mark.parametrize("file", cases("test_whoever_makes_a_tensor_says_where", files()))
def test_whoever_makes_a_tensor_says_where(file: str) -> None:
    excused = {function for place, function in EXCEPTIONS if place in (file, file.split("/", maxsplit=1)[0])}
    found = [f"{file}:{c.lineno}: {ast.unparse(c)}" for f, c in without_a_device(file) if f not in excused]
    assert not found


@pytest.mark.parametrize("file", cases("test_nobody_asks_for_the_current_device", files()))
def test_nobody_asks_for_the_current_device(file: str) -> None:
    asked = [
        f"{file}:{c.lineno}: {ast.unparse(c)}"
        for _, c in calls_of(file)
        if isinstance(c.func, ast.Attribute)
        and ast.unparse(c.func.value) == "torch.cuda"
        and c.func.attr in CURRENT
        and not (c.args or any(k.arg == "device" for k in c.keywords))
    ]
    assert not asked


def test_the_list_of_exceptions_is_no_longer_than_it_must_be() -> None:
    used = {(file, f) for file in files() for f, _ in without_a_device(file)}
    used |= {(file.split("/")[0], f) for file, f in used}
    there = set(files()) | {file.split("/")[0] for file in files()}
    assert {e for e in EXCEPTIONS if e[0] in there} <= used
