"""Chooses the implementation of a kernel: Numba on CPUs, Triton on GPUs, plain torch operations elsewhere.

A kernel family is one module name (`ternary`, `sign`, ...) in up to three packages: `reference` (always complete),
`cpu` and `gpu`. A twin that does not exist falls back to the reference.
"""

import importlib
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Backend = Literal["torch", "numba", "triton"]
_PACKAGES: dict[Backend, str] = {"torch": "reference", "numba": "cpu", "triton": "gpu"}
_verdicts: dict[torch.device, bool] = {}  # where Triton was tried, and whether it runs there
_trying = Lock()
_forced: ContextVar[Backend | None] = ContextVar("gossamer_kernel_backend", default=None)


@lru_cache(maxsize=1)
def backends() -> tuple[Backend, ...]:
    """Backends that are installed here; always includes the torch reference."""
    optional: tuple[Backend, ...] = ("numba", "triton")
    return ("torch", *(name for name in optional if find_spec(name) is not None))


@contextmanager
def using(backend: Backend) -> Generator[None]:
    """Force one backend inside the `with` block, for tests and benchmarks."""
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
    if device.type == "cpu" and "numba" in backends() and numba_fault() is None:
        return "numba"
    if device.type == "cuda" and "triton" in backends() and triton_runs(device):
        return "triton"
    return "torch"


@lru_cache(maxsize=1)
def numba_fault() -> str | None:
    """Why the Numba that is installed cannot be used, of which it warns once; None if it can."""
    try:
        importlib.import_module(f"{__package__}.cpu.scales")
    except Exception as error:  # another numpy or Python than it was built for, or an llvmlite that does not load
        fault = _in_words(error)
        warnings.warn(
            f"Numba is installed and cannot be used ({fault}), so codecs run as plain torch operations on CPUs, which are "
            "slower; install one that fits this Python and this numpy: pip install --upgrade numba",
            RuntimeWarning,
            stacklevel=3,
        )
        return fault
    return None


def triton_runs(device: torch.device) -> bool:
    """True if Triton compiles and launches on a device; tries one kernel, and warns once if it fails."""
    with _trying:
        if device not in _verdicts:
            _verdicts[device] = _try_triton(device)
        return _verdicts[device]


def _try_triton(device: torch.device) -> bool:
    ones = torch.ones(4, device=device, dtype=torch.float32)
    try:
        found = _load("triton", "scales", "absmax")(ones, (0, 4))
        return bool(found == 1)
    except Exception as error:  # whatever it lacks: a C compiler, libcuda, a GPU that it knows
        warnings.warn(
            f"Triton does not run on {device} ({_in_words(error)}), so codecs run as plain torch operations "
            "there, which are slower; what it needs besides the driver is most often a C compiler (gcc or clang)",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def twin(family: str, function: str, device: torch.device) -> Callable[..., Any]:
    """The function of a kernel family for tensors on a device."""
    return _load(chosen(device), family, function)


@lru_cache(maxsize=256)
def _load(backend: Backend, family: str, function: str) -> Callable[..., Any]:
    found = _find(backend, family, function)
    return _where_it_lies(found) if backend == "triton" else found


def _find(backend: Backend, family: str, function: str) -> Callable[..., Any]:
    place = f"{__package__}.{_PACKAGES[backend]}"
    if backend != "torch":
        importlib.import_module(place)
        if find_spec(f"{place}.{family}") is None:
            return _find("torch", family, function)
    module = importlib.import_module(f"{place}.{family}")
    found: Callable[..., Any] | None = getattr(module, function, None)
    return _find("torch", family, function) if found is None else found


def _where_it_lies(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Make the tensors' device current, since Triton launches on the current device."""

    @wraps(launch)
    def there(x: Tensor | list[Tensor] | tuple[Tensor, ...], *rest: Any) -> Any:
        device = x[0].device if isinstance(x, list | tuple) else x.device
        if device.type != "cuda":
            return launch(x, *rest)
        with torch.cuda.device(device):
            return launch(x, *rest)

    return there
