"""Attached DistributedDataParallel models: the recipe averages, and DDP only calls the module."""

from contextlib import nullcontext
from typing import Any, final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer.core.errors import AttachError

FLAG = "require_backward_grad_sync"  # set by DDP's no_sync(), or by training loops directly


def refuse_options(wrapper: DistributedDataParallel) -> None:
    """Refuse options of DDP that a recipe does not support."""
    if wrapper._comm_hooks:
        raise AttachError(
            "the DDP model has a communication hook, which would never run once it is attached; make the DDP model again"
        )
    if wrapper.mixed_precision is not None:
        raise AttachError(
            "the DDP model has mixed_precision=, which an attached model does not support: leave it out, and use torch.autocast"
        )
    ignored = sorted(wrapper.parameters_to_ignore)
    if ignored:
        raise AttachError(
            f"DDP ignores {ignored[0]!r}, but an attached model is averaged whole: freeze parameters that should not train, with "
            "requires_grad_(False)"
        )


def syncs(model: nn.Module) -> bool:
    """False under DDP's no_sync(). Called for every gradient, so it bypasses nn.Module's slow `__getattr__`."""
    return model.__dict__.get(FLAG, True)


@final
class Passing:
    """Replaces DDP's forward by one that prepares no average; DDP's no_sync() and its flag keep their meaning."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper
        # An earlier forward without a backward has prepared an average, which DDP would run at the next backward.
        wrapper._has_rebuilt_buckets = False
        wrapper.reducer._reset_state()
        vars(wrapper)["forward"], vars(wrapper)["join"] = self, self._join

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        wrapper = self.wrapper
        if wrapper.device_ids:
            (inputs, *_), (kwargs, *_) = wrapper.to_kwargs(inputs, kwargs, wrapper.device_ids[0])
        return wrapper.module(*inputs, **kwargs)

    def _join(self, divide_by_initial_world_size: bool = True, enable: bool = True, *_: Any, **__: Any) -> Any:
        """Refuse uneven inputs: a rank without any would wait for averages of DDP, and all others for its gradients."""
        group = self.wrapper.process_group
        if enable and group is not None and group.size() > 1:
            raise AttachError(
                "join() of an attached DDP model lets ranks take different numbers of steps, and a recipe needs the same number on all "
                "ranks: leave it out, and give all ranks equally many batches, as gossamer.data.Order does"
            )
        return nullcontext()

    def remove(self) -> None:
        """Restore DDP's forward, so that DDP averages again."""
        for name in ("forward", "join"):
            vars(self.wrapper).pop(name, None)
