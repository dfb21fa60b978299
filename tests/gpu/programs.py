"""Triton programs on the pretended device: one launch each, computed by the reference."""

import importlib
import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from tests.gpu.clocks import current_device, current_stream
from tests.gpu.diary import diary, lock, place
from tests.gpu.memory import Use
from tests.gpu.tensors import Cuda, each, tensors_in, to_device
from torch import Tensor

backends: Any = importlib.import_module("gossamer.kernels.backends")  # the package has a function of this name
find = backends._find


def pretended(backend: Any, family: str, function: str) -> Callable[..., Any]:
    """Stands for `backends._find`."""
    real = find(backend, family, function)
    if backend != "triton" or not real.__module__.startswith("gossamer.kernels.gpu"):
        return real
    reference = find("torch", family, function)

    def launch(*args: Any, **kwargs: Any) -> Any:
        given = [a for a in tensors_in((args, kwargs)) if isinstance(a, Cuda)]
        _refuse(f"{family}.{function}", given)
        before = [t.inner._version for t in given]
        out = reference(*each(_bare, args), **each(_bare, kwargs))
        stream = current_stream(given[0].index)
        with lock:
            use = Use(stream, stream.tick(), place())
            diary.launches[f"triton {family}.{function}"] += 1
            for tensor, version in zip(given, before):
                tensor.memory.write(use) if tensor.inner._version != version else tensor.memory.read(use)
        mine = {id(t.inner): t for t in given}
        return each(lambda o: _wrapped(o, mine, given[0].index), out)

    return launch


def load_all() -> None:
    """Before processes are forked, so that each need not."""
    for package in ("reference", "gpu"):
        place = importlib.import_module(f"gossamer.kernels.{package}")
        for module in pkgutil.iter_modules(place.__path__):
            importlib.import_module(f"{place.__name__}.{module.name}")


def _refuse(name: str, given: list[Cuda]) -> None:
    """Triton launches on the current device, and reads only what lies there."""
    for tensor in given:
        if tensor.index != current_device():
            raise ValueError(
                f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name} on cuda:{current_device()}, "
                f"the tensor on cuda:{tensor.index}, at {place(3)}"
            )


def _bare(value: Any) -> Any:
    return value.inner if isinstance(value, Cuda) else value


def _wrapped(value: Any, given: dict[int, Cuda], index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return given.get(id(value)) or to_device(value, index)


@contextmanager
def without_triton() -> Generator[None]:
    """As where Triton is not installed."""
    real = backends.chosen
    backends.chosen = lambda device: "torch" if device.type == "cuda" else real(device)
    try:
        yield
    finally:
        backends.chosen = real
