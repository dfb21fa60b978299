"""Devices: a model lies on one, and there its gradients are averaged."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gossamer.codecs.warm import codecs_in
from gossamer.core.bucket import Layout
from gossamer.core.contracts import Codec
from gossamer.core.errors import AttachError
from gossamer.recipe import Recipe

KINDS = ("cpu", "cuda")


def device_of(model: nn.Module) -> torch.device:
    """Where a model trains. Of one that cannot be trained as it lies, where its ranks can tell one another so."""
    return _place([p for p in model.parameters() if p.requires_grad])


def _place(parameters: Iterable[Tensor]) -> torch.device:
    return next((p.device for p in parameters if p.device.type == "cuda"), torch.device("cpu"))


def refuse_devices(named: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """A model in several places: what trains, and the buffers that are `shared`, must be together."""
    device = _place(named.values())
    for name, p in named.items():
        if p.device.type not in KINDS:
            raise AttachError(
                f"parameter {name!r} is on {p.device}, and gossamer trains on CPUs and on CUDA devices: move the model to "
                "one of them before its optimizer is made, and attach then"
            )
        if p.device != device:
            first = next(n for n, q in named.items() if q.device == device)
            raise AttachError(
                f"parameter {first!r} is on {device} and {name!r} on {p.device}; all that trains must be on one device: "
                f"call model.to('{device}') before the optimizer is made, and attach then"
            )
    for name, b in shared.items():
        if b.device != device:
            raise AttachError(
                f"buffer {name!r} is on {b.device} and the parameters on {device}: call model.to('{device}'), or keep each "
                "rank's buffers as they are with buffers='local'"
            )


def refuse_lengths(recipe: Recipe, device: torch.device) -> None:
    """Who sends must know how much, and of what a GPU has just written the host does not."""
    if device.type != "cuda":
        return
    for codec in codecs_in(recipe):
        if isinstance(codec, Codec) and codec.wire_bytes(Layout.of({"w": (1,)})) is None:
            raise AttachError(
                f"{codec} writes messages whose length depends on what is in them, so that the host would have to wait for "
                f"{device} at each of them: use one of a known length, such as topk with index='int32'"
            )


def shared_buffers(model: nn.Module, policy: str) -> dict[str, Tensor]:
    """The buffers that ranks average or copy, by name."""
    if policy == "local":
        return {}
    return {n: b for n, b in model.named_buffers() if b.is_floating_point() and b.numel()}
