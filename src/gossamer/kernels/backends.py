"""Which twin of a kernel runs: Numba on CPUs, Triton on GPUs, plain torch operations everywhere else.

A kernel family is one module name (`ternary`, `sign`, ...) in up to three packages: `reference` (always complete),
`cpu` and `gpu`. A twin that does not exist falls back to the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch

Backend = Literal["torch", "numba", "triton"]
_PACKAGES: dict[Backend, str] = {"torch": "reference", "numba": "cpu", "triton": "gpu"}
_forced: ContextVar[Backend | None] = ContextVar("gossamer_kernel_backend", default=None)


@lru_cache(maxsize=1)
def backends() -> tuple[Backend, ...]:
    """Backends that this installation can run; the torch reference is always there."""
    optional: tuple[Backend, ...] = ("numba", "triton")
    return ("torch", *(name for name in optional if find_spec(name) is not None))


@contextmanager
def using(backend: Backend) -> Generator[None]:
    """Forces one backend inside the `with` block, for tests and benchmarks."""
    if backend not in get_args(Backend):
        raise ValueError(f"unknown kernel backend {backend!r}; there are {', '.join(get_args(Backend))}")
    if backend not in backends():
        raise RuntimeError(f"kernel backend {backend!r} is not installed; here are {', '.join(backends())}")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def chosen(device: torch.device) -> Backend:
    """The backend for tensors on a device."""
    forced = _forced.get()
    if forced is not None:
        return forced
    best: Backend = "numba" if device.type == "cpu" else "triton"
    return best if best in backends() and device.type in ("cpu", "cuda") else "torch"


def twin(family: str, function: str, device: torch.device) -> Callable[..., Any]:
    """The function of that family for tensors on that device."""
    return _load(chosen(device), family, function)


@lru_cache(maxsize=256)
def _load(backend: Backend, family: str, function: str) -> Callable[..., Any]:
    place = f"{__package__}.{_PACKAGES[backend]}"
    if backend != "torch":
        importlib.import_module(place)
        if find_spec(f"{place}.{family}") is None:
            return _load("torch", family, function)
    module = importlib.import_module(f"{place}.{family}")
    found: Callable[..., Any] | None = getattr(module, function, None)
    return found if found is not None else _load("torch", family, function)


def warmup() -> None:
    """Compiles every CPU kernel (or loads it from the cache), so that the first training step does not wait."""
    if "numba" in backends():
        importlib.import_module(f"{__package__}.cpu.warm").run()
