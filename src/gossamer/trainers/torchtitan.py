"""torchtitan: a function for its seam after the optimizers are built.

torchtitan calls `post_optimizer_build_fn(optimizers, model_parts, parallel_dims)` of a model's specification when model and
optimizers are there and nothing has been loaded or trained. torchtitan itself is not imported here.
"""

from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.integrations.attach import attach as attach_model
from gossamer.integrations.communicator import Communicator
from gossamer.recipe import Recipe

PARALLEL = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}  # degrees that a recipe does not support


def attach(recipe: str | Recipe | None = None, **options: Any) -> "AfterOptimizers":
    """Return a function that attaches a recipe when torchtitan has built its optimizers.

    Other `options` are those of `gossamer.attach`. After the call the communicator is the function's attribute `comm`.

    >>> after = attach("topk")
    >>> after
    AfterOptimizers('topk')
    """
    return AfterOptimizers(recipe, options)


@final
class AfterOptimizers:
    """Called by torchtitan with its optimizers, the parts of the model, and the degrees of parallelism."""

    def __init__(self, recipe: str | Recipe | None, options: dict[str, Any]) -> None:
        self._recipe, self._options = recipe, options
        self._comm: Communicator | None = None

    def __repr__(self) -> str:
        return f"AfterOptimizers({str(self._recipe)!r})"

    def __call__(self, optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
        if self._comm is not None:
            raise AttachError(
                "this function has attached a model already: make one of each trainer, trainers.torchtitan.attach(recipe)"
            )
        _refuse_parts(model_parts)
        _refuse_degrees(parallel_dims)
        held = _optimizers_in(optimizers)
        self._comm = attach_model(model_parts[0], held, self._recipe, **self._options)

    @property
    def comm(self) -> Communicator:
        """The communicator, after torchtitan has called this function."""
        if self._comm is None:
            raise AttachError(
                "torchtitan has not built its optimizers yet, so nothing is attached: give this function to the model's "
                "specification as post_optimizer_build_fn, and read comm after the trainer is made"
            )
        return self._comm


def _optimizers_in(container: Any) -> list[Optimizer]:
    """The optimizers of torch in torchtitan's container, which steps all of them together."""
    held = getattr(container, "optimizers", None)
    if held is None:
        raise AttachError(
            f"post_optimizer_build_fn was called with a {type(container).__name__}, which has no attribute 'optimizers': this "
            "is not torchtitan's OptimizersContainer; attach its optimizers with gossamer.attach"
        )
    found = list(held)
    if found and not all(isinstance(each, Optimizer) for each in found):
        raise AttachError(
            f"torchtitan's container holds a {type(found[0]).__name__} that is not a torch.optim.Optimizer, such as optimizers "
            "that step in backward: build plain optimizers"
        )
    return found


def _refuse_parts(model_parts: list[nn.Module]) -> None:
    if len(model_parts) != 1:
        raise AttachError(
            f"the model is in {len(model_parts)} parts, as under pipeline parallelism, which a recipe does not support: set "
            "pipeline_parallel_degree = 1"
        )


def _refuse_degrees(parallel_dims: Any) -> None:
    for name, word in PARALLEL.items():
        degree = getattr(parallel_dims, name, 1)
        if degree > 1:
            raise AttachError(
                f"{word} parallelism is on ({name} = {degree}), which a recipe does not support: use data_parallel_replicate_degree "
                "and data_parallel_shard_degree only"
            )
