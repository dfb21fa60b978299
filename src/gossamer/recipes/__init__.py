"""Presets: one named recipe per paper. `gossamer.recipes.powersgd(rank=4)`, or the text "powersgd(rank=4)".

A family is a file here; `gossamer recipes` lists them in the order of these lines.
"""

from collections.abc import Callable

from gossamer.recipe import Recipe
from gossamer.recipe import presets as _presets

# isort: off
from gossamer.recipes.dense import allreduce, bf16, fp16
from gossamer.recipes.quantised import int8, fp8, natural, terngrad, qsgd, dqsgd, diana, dqgd
from gossamer.recipes.sparse import topk, local_gradients, dgc, sketched_sgd, fetchsgd
from gossamer.recipes.low_rank import powersgd, atomo
from gossamer.recipes.rounds import local_sgd, slowmo, overlap_local_sgd
from gossamer.recipes.gossip import slowmo_sgp, sgp, osgp
from gossamer.recipes.waiting import backup
from gossamer.recipes.adaptive import accordion, accordion_qsgd, accordion_topk, accordion_batch
# isort: on

__all__ = [
    "accordion",
    "accordion_batch",
    "accordion_qsgd",
    "accordion_topk",
    "allreduce",
    "atomo",
    "backup",
    "bf16",
    "dgc",
    "diana",
    "dqgd",
    "dqsgd",
    "fetchsgd",
    "fp8",
    "fp16",
    "int8",
    "local_gradients",
    "local_sgd",
    "natural",
    "osgp",
    "overlap_local_sgd",
    "powersgd",
    "presets",
    "qsgd",
    "sgp",
    "sketched_sgd",
    "slowmo",
    "slowmo_sgp",
    "terngrad",
    "topk",
]


def presets() -> dict[str, Callable[..., Recipe]]:
    """All presets, by name."""
    return dict(_presets)
