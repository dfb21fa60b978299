"""Devices: find the device of a model, and refuse models on several devices, and parameters that cannot be averaged."""

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
    """Return the device of a model: CUDA if a trainable parameter is on it, else the CPU.

    If the model cannot train as it is placed, ranks can still tell each other so on this device.
    """
    return _place([p for p in model.parameters() if p.requires_grad])


def _place(parameters: Iterable[Tensor]) -> torch.device:
    return next((p.device for p in parameters if p.device.type == "cuda"), torch.device("cpu"))


def refuse_devices(named: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
    """Refuse a model whose trainable parameters and `shared` buffers are not all on one device."""
    device = _place(named.values())
    for name, p in named.items():
        if p.device.type not in KINDS:
            raise AttachError(
                f"parameter {name!r} is on {p.device}, and gossamer supports only CPUs and CUDA devices: move the model to "
                "one of them before its optimizer is made, then attach"
            )
        if p.device != device:
            first = next(n for n, q in named.items() if q.device == device)
            raise AttachError(
                f"parameter {first!r} is on {device} and {name!r} on {p.device}; all trainable parameters must be on one device: "
                f"call model.to('{device}') before the optimizer is made, then attach"
            )
    for name, b in shared.items():
        if b.device != device:
            raise AttachError(
                f"buffer {name!r} is on {b.device} and the parameters on {device}: call model.to('{device}'), or pass "
                "buffers='local' to keep each rank's own buffers"
            )


def refuse_dtypes(named: Mapping[str, Tensor]) -> None:
    """Refuse trainable parameters that are not real floating-point numbers."""
    for name, p in named.items():
        if not p.is_floating_point():
            raise AttachError(
                f"parameter {name!r} is {p.dtype}; only real floating-point parameters can be averaged: "
                "freeze it with requires_grad_(False), or store its real and imaginary parts as two parameters"
            )


def refuse_lengths(recipe: Recipe, device: torch.device) -> None:
    """Refuse codecs whose messages have no fixed length, on a GPU: the host would have to wait for each length. Those that a
    controller may put in force count as well.
    """
    if device.type != "cuda":
        return
    for codec in codecs_in([recipe, *recipe.reached]):
        if isinstance(codec, Codec) and codec.wire_bytes(Layout.of({"w": (1,)})) is None:
            raise AttachError(
                f"{codec} writes messages whose length depends on their content, so the host would have to wait for {device} at "
                "each message: use a codec with a fixed length, such as topk with index='int32'"
            )
