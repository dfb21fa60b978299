"""Parameter watch: detect parameters that were unfrozen, added, replaced or removed since attach."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gossamer.core.errors import AttachError
from gossamer.runtime import is_sharded


class ParamWatch:
    """Watches a model for parameters that are unfrozen, added, replaced or removed. A check takes about 20 us."""

    def __init__(self, model: nn.Module, trained: Mapping[str, Tensor]) -> None:
        self._model = model
        self._trained = dict(trained)
        self._write_down()

    def _write_down(self) -> None:
        modules = list(self._model.modules())
        self._known = dict(self._model.named_parameters())
        self._flags = [(p, p.requires_grad) for p in self._known.values()]
        # FSDP2 exchanges its parameters in every pass: those of its shards are looked at below, by their flags.
        own = [m for m in modules if not any(p is not None and is_sharded(p) for p in m._parameters.values())]
        held: list[dict[str, Any]] = [m._parameters for m in own] + [m._modules for m in modules]  # pyright: ignore
        self._lengths = [(d, len(d)) for d in held]
        self._places = [(d, name, thing) for d in held for name, thing in d.items()]

    def is_as_before(self) -> bool:
        """True if no parameter or module has changed since the last check."""
        return (
            all(p.requires_grad is flag for p, flag in self._flags)
            and all(len(d) == n for d, n in self._lengths)
            and all(d.get(name) is thing for d, name, thing in self._places)
        )

    def unfrozen(self) -> dict[str, Tensor]:
        """Return parameters that were unfrozen since the last check; any other change raises an error."""
        if self.is_as_before():
            return {}
        if any(map(is_sharded, self._trained.values())):
            raise AttachError(
                "a parameter or a module of a model that FSDP2 shards was unfrozen, added, replaced or removed after attach; detach() "
                "and attach again when the model is complete"
            )
        now: dict[str, Tensor] = dict(self._model.named_parameters())
        for name, parameter in self._trained.items():
            if now.get(name) is not parameter:
                raise AttachError(_gone(name, now.get(name)))
        new = {n: p for n, p in now.items() if p.requires_grad and n not in self._trained}
        for name, parameter in new.items():
            if self._known.get(name) is not parameter:
                raise AttachError(
                    f"parameter {name!r} was added to the model after attach, and would never be averaged; detach() and attach "
                    "again when the model is complete"
                )
        self._trained |= new
        self._write_down()
        return new


def _gone(name: str, now: Tensor | None) -> str:
    """Return the error text for a parameter that is no longer in the model."""
    if now is None:
        return f"parameter {name!r} was removed from the model after attach; detach() and attach again when the model is complete"
    if type(now).__name__ == "DTensor":
        return (
            f"parameter {name!r} was sharded after attach (fully_shard or tensor parallelism), which gossamer does not "
            "support yet: train the plain model"
        )
    return (
        f"parameter {name!r} was replaced after attach (by another layer, or by load_state_dict(assign=True)), and the "
        "new one would never be averaged; load without assign=True, or detach() and attach again when the model is complete"
    )
