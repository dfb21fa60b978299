"""Tensors that say they lie on a CUDA device, and are computed by the CPU under CUDA's rules.

An operation on them
- fails where it mixes devices, as on a GPU (a CPU tensor of no dimension passes, as a number);
- is one launch on the current stream of the tensors' device, unless it is a view;
- reads its arguments and writes its results, and what it works on in place;
- makes the host wait where it needs a number to go on, and where it copies between host and device, unless the host's
  side is pinned and nobody asked to wait;
- multiplies by the reciprocal of a number of the host's, where it is to divide by it, as torch does on GPUs.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from tests.gpu.clocks import Stream, current_stream, default_stream, host_waits_for
from tests.gpu.diary import diary, lock, place
from tests.gpu.memory import Memory, Use, memory_of
from torch import Tensor

MAY_MIX = {"copy_", "_to_copy", "set_", "index", "index_put_", "_index_put_impl_", "_foreach_copy_"}
NEEDS_A_NUMBER = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "is_nonzero",
    "equal",
    "bincount",
    "_histogramdd_from_bin_cts",
}
TAKES_ONLY_THE_SHAPE = ("new_", "empty")  # and what ends in _like


class Host(torch.Tensor):
    """Pinned memory of the host: a tensor that backends can read, and whose use is watched."""

    plain: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, plain: Tensor, memory: Memory | None = None) -> "Host":
        made = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.memory = plain, memory or memory_of(plain, None)
        return made

    def __init__(self, plain: Tensor, memory: Memory | None = None) -> None: ...

    def is_pinned(self, *_: Any) -> bool:
        return True

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operation(func, args, kwargs or {}).run()


class Cuda(torch.Tensor):
    """A tensor of the pretended device."""

    inner: Tensor
    index: int
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, index: int) -> "Cuda":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.index = inner, index
        made.memory = memory_of(inner, current_stream(index))
        return made

    def __init__(self, inner: Tensor, index: int) -> None: ...

    device = property(lambda self: torch.device("cuda", self.index))  # pyright: ignore
    is_cuda = property(lambda self: True)  # pyright: ignore
    is_cpu = property(lambda self: False)  # pyright: ignore

    def get_device(self) -> int:
        return self.index

    def record_stream(self, stream: Stream) -> None:  # pyright: ignore
        with lock:
            self.memory.story.recorded.add(stream)

    def __repr__(self) -> str:  # pyright: ignore
        return f"Cuda({self.inner!r}, device='cuda:{self.index}')"

    def to_host(self, what: str) -> Tensor:
        """What the host sees once it has waited."""
        stream = current_stream(self.index)
        with lock:
            self.memory.read(Use(stream, stream.tick(), place()))
        host_waits_for(stream, what)
        return self.inner.detach()

    def tolist(self) -> Any:
        return self.to_host("tolist").tolist()

    def cpu(self) -> Tensor:  # pyright: ignore
        return self.to_host("copy to the host").clone()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operation(func, args, kwargs or {}).run()


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists, tuples and dictionaries, with everything in them changed."""
    if isinstance(value, list | tuple):
        made = [each(change, v) for v in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {k: each(change, v) for k, v in value.items()}
    return change(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)


def to_device(plain: Tensor, index: int) -> Cuda:
    """A new tensor of the device, written by the current stream."""
    made = Cuda(plain, index)
    stream = current_stream(index)
    with lock:
        made.memory.write(Use(stream, stream.tick(), place()))
    return made


class Operation:
    """One call of an operator, from the rules to the result."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func._schema.name.removeprefix("aten::")
        tensors = [*tensors_in((args, kwargs))]
        self.cudas = [t for t in tensors if isinstance(t, Cuda)]
        self.hosts = [t for t in tensors if isinstance(t, Host)]
        self.plain = [t for t in tensors if not isinstance(t, Cuda)]

    def run(self) -> Any:
        if not self.cudas:
            return self._run_on_host()
        if self.name in ("detach", "alias"):
            return Cuda(self.func(self.cudas[0].inner), self.cudas[0].index)
        self._refuse_mixed_devices()
        if self.name in ("copy_", "_foreach_copy_") and self.plain:
            return self._cross()
        stream = current_stream(self.cudas[0].index)
        diary.works_on(stream is default_stream(stream.device))
        use = self._launch(stream)
        out = self._compute()
        if self._needs_a_number():
            host_waits_for(stream, self.name)
        return each(lambda o: self._mine(o, use), out)

    def _refuse_mixed_devices(self) -> None:
        found = {str(t.device) for t in self.cudas}
        if self.name not in MAY_MIX:
            strict = self.name in ("cat", "stack")
            found |= {"cpu" for t in self.plain if t.dim() or strict}
            if len(found) > 1:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{' and '.join(sorted(found))}! (when checking {self.name}, at {place(3)})"
                )

    def _launch(self, stream: Stream) -> Use:
        """Put it on the stream, and note whom it touches."""
        with lock:
            use = Use(stream, stream.tick(), place())
            if self.func.is_view or self.name.startswith("empty") or self.name in ("new_empty", "empty_like"):
                return use
            diary.launches[use.place] += 1
            written = {id(t.memory): t.memory for t in self._written() if isinstance(t, Cuda)}
            if not (self.name.startswith(TAKES_ONLY_THE_SHAPE) or self.name.endswith("_like")):
                for t in self.cudas:
                    if id(t.memory) not in written:
                        t.memory.read(use)
            for memory in written.values():
                memory.write(use)
        return use

    def _written(self) -> Iterator[Tensor]:
        for name, where in _writes(self.func):
            value = self.kwargs.get(name) if where is None or where >= len(self.args) else self.args[where]
            yield from (v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, Tensor))

    def _needs_a_number(self) -> bool:
        if self.name in NEEDS_A_NUMBER:
            return True
        if self.name in ("index", "index_put_", "_index_put_impl_"):
            indices = [i for i in self.args[1] if isinstance(i, Tensor)]
            return any(i.dtype == torch.bool or (not isinstance(i, Cuda) and i.dim()) for i in indices)
        if self.name == "repeat_interleave":
            return self.kwargs.get("output_size") is None
        return False

    def _compute(self) -> Any:
        kwargs = dict(self.kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        args = each(_bare, self.args)
        if self.name in ("div", "div_", "true_divide") and not kwargs and self._divides_by_a_hosts_number():
            args = args[0], 1 / torch.as_tensor(args[1], dtype=args[0].dtype)
            return (args[0].mul_ if self.name == "div_" else args[0].mul)(args[1])
        return self.func(*args, **each(_bare, kwargs))

    def _divides_by_a_hosts_number(self) -> bool:
        x, by = self.args
        return isinstance(x, Cuda) and x.is_floating_point() and not isinstance(by, Cuda)

    def _mine(self, out: Any, use: Use) -> Any:
        """The result as a tensor of the device: what was given, where it was written in place."""
        if not isinstance(out, Tensor):
            return out
        for given in self.cudas:
            if given.inner is out:
                return given
        made = Cuda(out, use.stream.device.index)
        if not self.func.is_view and all(made.memory is not t.memory for t in self.cudas):
            with lock:
                made.memory.write(use)
        return made

    def _cross(self) -> Any:
        """A copy between host and device."""
        pairs = zip(*self.args[:2]) if self.name == "_foreach_copy_" else [self.args[:2]]
        non_blocking = self.kwargs.get("non_blocking") or (len(self.args) > 2 and self.args[2])
        for into, source in pairs:
            self._copy(into, source, bool(non_blocking))
        return self.args[0]

    def _copy(self, into: Tensor, source: Tensor, non_blocking: bool) -> None:
        device = into.index if isinstance(into, Cuda) else source.index  # pyright: ignore
        stream, ends = current_stream(device), (into, source)
        with lock:
            use = Use(stream, stream.tick(), place())
            diary.launches[use.place] += 1
            if isinstance(source, Cuda | Host):
                source.memory.read(use)
            if isinstance(into, Cuda | Host):
                into.memory.write(use)
        _bare(into).copy_(_bare(source))
        pageable = [t for t in ends if not isinstance(t, Cuda | Host)]
        if not (isinstance(into, Cuda) and isinstance(source, Cuda)) and not (non_blocking and not pageable):
            where = "to the host" if isinstance(source, Cuda) else "from the host"
            host_waits_for(stream, f"copy {where}")

    def _run_on_host(self) -> Any:
        """Pinned memory alone: the host's own work."""
        if self.name in ("detach", "alias") or self.func.is_view:
            out = self._compute()
            memory = self.hosts[0].memory
            return each(lambda o: Host(o, memory) if isinstance(o, Tensor) else o, out)
        with lock:
            written = {id(t.memory) for t in self._written() if isinstance(t, Host)}
            for t in self.hosts:
                t.memory.host_writes() if id(t.memory) in written else t.memory.host_reads()
        out = self._compute()
        given = {id(t.plain): t for t in self.hosts}
        return each(lambda o: given.get(id(o), o), out)


@cache
def _writes(func: Any) -> tuple[tuple[str, int | None], ...]:
    """The arguments that an operator writes to: their names, and their places where they have one."""
    arguments = func._schema.arguments
    return tuple(
        (a.name, None if a.kwarg_only else i)
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


def _bare(value: Any) -> Any:
    return value.inner if isinstance(value, Cuda) else value.plain if isinstance(value, Host) else value
