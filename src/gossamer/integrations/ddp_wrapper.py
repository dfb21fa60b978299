"""A model in DistributedDataParallel that is attached: the recipe takes the average over, and the wrapper passes on."""

from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.core.errors import AttachError

FLAG = "require_backward_grad_sync"  # what DDP's no_sync() sets, and loops that do without it


def wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The model, if it is one that DDP is around."""
    return model if isinstance(model, DistributedDataParallel) else None


def refuse_options(wrapper: DistributedDataParallel) -> None:
    """What DDP was told, and a recipe would not do."""
    if wrapper._comm_hooks:
        raise AttachError("this DDP model has a hook, which would never run once it is attached; make DDP anew")
    if wrapper.mixed_precision is not None:
        raise AttachError("DDP's mixed_precision= ends when it is attached: leave it out, and use torch.autocast")
    ignored = sorted(wrapper.parameters_to_ignore)
    if ignored:
        raise AttachError(
            f"DDP was told to ignore {ignored[0]!r}, and an attached model is averaged whole: freeze what shall not train with "
            "requires_grad_(False)"
        )


def syncs(model: nn.Module) -> bool:
    """Does its training loop let this backward pass be averaged? Asked for every gradient, so past nn.Module's look-up."""
    return model.__dict__.get(FLAG, True)


@final
class Passing:
    """DDP's forward without what prepares an average. Its no_sync() and its flag mean what they meant."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        vars(wrapper)["forward"] = self

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        wrapper = self.wrapper
        if wrapper.device_ids:
            (inputs, *_), (kwargs, *_) = wrapper.to_kwargs(inputs, kwargs, wrapper.device_ids[0])
        return wrapper.module(*inputs, **kwargs)

    def remove(self) -> None:
        """From here on DDP averages by itself again."""
        vars(self.wrapper).pop("forward", None)
