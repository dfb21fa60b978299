"""Buckets: cuts a model into buckets, each with its own exchange, memory and state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.codecs.mixed import levelled, mixed
from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import ARREARS, Exchange, Memory
from gossamer.core.errors import AttachError
from gossamer.core.stream_events import record_stream_use
from gossamer.recipe import Recipe
from gossamer.runtime.optimizers import Optimizing, rate_of
from gossamer.runtime.params import Param, Sharded

LONGEST = 2**31 - 1  # elements of a bucket that cannot be cut: indices have 32 bits
LEAST = 4 * 2**20  # bytes of a bucket that is worth messages of its own
ROLES = ("memory", "exchange", "schedule", "mixer", "update")


@dataclass(eq=False)
class BucketState:
    """A bucket's parameters, their exchange and memory, and all state that is kept for them."""

    layout: Layout
    params: tuple[Param, ...]
    exchange: Exchange
    memory: Memory
    shift: float
    fragment: int = 0  # the schedule's fragment of the model
    group: int = 0  # the optimizer's parameter group, for parts that use its learning rate
    owned_by: int = 1  # the number of ranks that own its chunks
    states: dict[str, State] = field(default_factory=lambda: {role: {} for role in ROLES})

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def names(self) -> list[str]:
        return [s.name for s in self.layout.segments]

    @property
    def narrow(self) -> bool:
        """True if parameters have fewer bits than the bucket, so that writing them rounds."""
        return any(param.dtype != self.layout.dtype for param in self.params)

    def read(self) -> Tensor:
        """The parameters' values as one new flat tensor, in the bucket's precision."""
        return self.gather([param.values for param in self.params])

    def gather(self, tensors: "list[Tensor]") -> Tensor:
        """Copy tensors into one flat tensor, in the bucket's precision."""
        return torch.cat([t.detach().reshape(-1).to(self.layout.dtype) for t in tensors], out=self._new())

    def gradients(self) -> Tensor:
        """The parameters' gradients as one new flat tensor, in the bucket's precision; zero where there is none."""
        pairs = [(param, param.gradient) for param in self.params]
        return self.gather([torch.zeros_like(param.values) if grad is None else grad for param, grad in pairs])

    def write(self, flat: Tensor) -> None:
        """Copy a flat tensor into the parameters."""
        with torch.no_grad():
            for param, (_, view) in zip(self.params, Bucket(flat, self.layout).tensors(), strict=True):
                param.write(view)

    def pieces(self) -> list[Tensor]:
        """The parameters themselves, flat and in the bucket's order.

        Empty where their memory layout differs from the bucket's, and on a GPU, which gains nothing by small passes.
        """
        values = [param.values for param in self.params]
        if (
            self.narrow
            or self.device.type != "cpu"
            or any(isinstance(param, Sharded) for param in self.params)
            or not all(v.is_contiguous() for v in values)
        ):
            return []
        return [v.view(-1) for v in values]

    def put_gradient(self, mean: Tensor) -> None:
        """Give the optimizer views of the agreed gradient; copies only where the parameter's dtype or memory layout differs.

        The views are new at each step; a view that outlives its step was kept by user code.
        """
        for param, (_, view) in zip(self.params, Bucket(mean, self.layout).tensors(), strict=True):
            if param.trains:
                param.put_gradient(view)

    def rate(self, optimizer: Optimizing) -> float:
        return rate_of(optimizer.param_groups[self.group])

    def empty(self) -> Tensor:
        return self._new().zero_()

    def _new(self) -> Tensor:
        """An uninitialised flat tensor of the bucket's length."""
        length = self.layout.numel * self.layout.dtype.itemsize
        return self.layout.buffers.of(length, self.device).view(self.layout.dtype)


def build(
    recipe: Recipe,
    params: Mapping[str, Param],
    groups: Mapping[str, int],
    size: int,
    model: Mapping[str, Param] | None = None,
) -> list[BucketState]:
    """Cut a model into buckets in backward order, each with one exchange and memory, one of `groups`, one fragment and a size limit.

    `size` is that of the world, which some memories depend on; `model` is the whole model, if these params are a part of it.
    """
    fragments = recipe.schedule.fragment_of({name: param.whole_shape for name, param in (model or params).items()})
    limit = _size_limit(recipe, model or params, size)
    together = "whole" in recipe.schedule.traits  # one message ends the step, whatever the rates
    finished = list[list[str]]()
    filling = dict[object, list[str]]()
    for name in reversed(list(params)):
        param = params[name]
        exchange, memory = recipe.way(name, param.whole_shape)
        if not recipe.controller.cuts and recipe.is_routed(name, param.whole_shape):
            exchange = recipe.exchange
        dtype = _block_dtype(param)
        group = 0 if together else groups[name]
        key = exchange, memory, dtype, group, param.device, fragments[name]
        bucket = filling.setdefault(key, [])
        if not bucket:
            finished.append(bucket)
        bucket.append(name)
        if not (together or exchange.whole) and sum(params[n].extent for n in bucket) * dtype.itemsize >= limit:
            del filling[key]
    # A bucket can be sent once its last gradient is ready, so buckets are sent in the order in which they fill.
    position = {n: i for i, n in enumerate(reversed(list(params)))}
    finished.sort(key=lambda names: position[names[-1]])
    return [
        _bucket(recipe, {n: params[n] for n in names}, groups[names[0]], fragments[names[0]], size)
        for names in finished
    ]


def _size_limit(recipe: Recipe, model: Mapping[str, Param], size: int) -> int:
    """The size in bytes at which a bucket takes no more parameters."""
    said = int(recipe.bucket_mb * 2**20)
    if recipe.bucket is not None:
        return said
    length = sum(param.extent * _block_dtype(param).itemsize for param in model.values())
    return min(said, max(length // recipe.exchange.least_blocks(size), LEAST))


def _block_dtype(param: Param) -> torch.dtype:
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def are_cut_alike(some: Sequence[BucketState], others: Sequence[BucketState]) -> bool:
    """True if both lists of buckets hold the same parameters in the same order."""
    return [bucket.names for bucket in some] == [bucket.names for bucket in others]


def choose_codecs(recipe: Recipe, buckets: Sequence[BucketState], size: int) -> None:
    """Apply a controller's choice of codecs to the same buckets, where it does not change the cut."""
    for bucket in buckets:
        shapes = {name: param.whole_shape for name, param in zip(bucket.names, bucket.params, strict=True)}
        exchange, layout = _exchange_and_layout(recipe, shapes, bucket.layout)
        if layout is not bucket.layout:
            settle_or_owe(bucket, size)
        bucket.exchange, bucket.layout = exchange, layout
        bucket.shift = bucket.memory.follow(bucket.exchange.omega(bucket.layout, size))


def settle_or_owe(bucket: BucketState, size: int) -> None:
    """Move the residuals of chunk owners into their memories; where those keep none, the next average adds them."""
    state, exchange = bucket.states["memory"], bucket.states["exchange"]
    for key in bucket.exchange.owned(exchange):
        owed = exchange.pop(key)
        if not bucket.memory.inherit(state, owed, size):
            state[ARREARS] = torch.add(state.get(ARREARS, torch.zeros_like(owed)), owed, alpha=size)
        record_stream_use([owed])  # a comm thread made it, and it is released here


def settle_owners(bucket: BucketState, size: int) -> None:
    """Move the residuals of chunks that had other owners until now into the memory, with the weight of those owners."""
    if bucket.owned_by != size:
        for key in bucket.exchange.owned(bucket.states["exchange"]):
            bucket.memory.inherit(bucket.states["memory"], bucket.states["exchange"].pop(key), bucket.owned_by)
        bucket.owned_by = size


def _exchange_and_layout(
    recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], layout: Layout
) -> tuple[Exchange, Layout]:
    """The exchange of a bucket, and its layout with the controller's codec for each parameter, if it chose any."""
    first = next(iter(shapes))
    ruled = any(rule.holds_for(first, shapes[first]) for rule in recipe.rules)
    if recipe.controller.cuts or ruled or recipe.routes.keys().isdisjoint(shapes):
        return recipe.way(first, shapes[first])[0], layout.turned(())
    exchanges = [recipe.routes.get(name, recipe.exchange) for name in shapes]
    codecs = {id(exchange): levelled(exchange) for exchange in {id(e): e for e in exchanges}.values()}
    knobs = tuple(codecs[id(exchange)] for exchange in exchanges)
    return mixed(recipe.exchange), layout.turned(
        knobs, tuple(1 if codec is None else 1 + codec.steps.bit_length() for codec in knobs)
    )


def _bucket(recipe: Recipe, members: Mapping[str, Param], group: int, fragment: int, size: int) -> BucketState:
    first = next(iter(members))
    dtype = _block_dtype(members[first])
    shapes = {n: param.whole_shape for n, param in members.items()}  # rules go by whole parameters
    exchange, layout = _exchange_and_layout(
        recipe, shapes, Layout.of({n: param.shape for n, param in members.items()}, dtype)
    )
    memory = recipe.way(first, shapes[first])[1]
    whole = exchange.whole or "whole" in recipe.schedule.traits
    if whole and layout.numel > LONGEST:
        raise AttachError(
            f"{exchange} would send {layout.numel:,} elements as one, from {first!r} on, and at most {LONGEST:,} can be: use an "
            "exchange that works on smaller buckets, such as gather(topk())"
        )
    shift = memory.follow(exchange.omega(layout, size))
    return BucketState(layout, tuple(members.values()), exchange, memory, shift, fragment, group, size)
