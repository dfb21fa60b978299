"""Presets: one named recipe per paper. `gossamer.recipes.powersgd(rank=4)`, or the text "powersgd(rank=4)".

Each family has a file here; `gossamer recipes` lists the presets in the order of the imports below.
"""

from collections.abc import Callable

from gossamer.recipe import Recipe
from gossamer.recipe import presets as _presets

# isort: off
from gossamer.recipes.dense import allreduce, bf16, fp16
from gossamer.recipes.quantised import int8, fp8, natural, terngrad, qsgd, eden, drive, dqsgd, diana, dqgd
from gossamer.recipes.sparse import (
    topk,
    sparse_scatter,
    gtopk,
    randk,
    ef21,
    strom,
    adacomp,
    local_gradients,
    dgc,
    sketched_sgd,
    fetchsgd,
)
from gossamer.recipes.low_rank import powersgd, dion, gradiveq, atomo
from gossamer.recipes.rounds import (
    local_sgd,
    slowmo,
    overlap_local_sgd,
    bmuf,
    diloco,
    streaming_diloco,
    eager_diloco,
    async_diloco,
    decoupled_diloco,
    sparse_loco,
    lookahead,
    post_local,
    hierarchical,
    cocod,
    easgd,
    des_loc,
    edit,
    sparta,
)
from gossamer.recipes.minibatch import minibatch, accelerated, inner_outer
from gossamer.recipes.one_bit import (
    signsgd,
    distributed_lion,
    ef_signsgd,
    demo,
    onebit_sgd,
    onebit_adam,
    zero_one_adam,
    onebit_lamb,
)
from gossamer.recipes.gossip import slowmo_sgp, sgp, osgp, gossip_pga, d_psgd, ad_psgd, choco_sgd, noloco
from gossamer.recipes.waiting import async_sgd, backup
from gossamer.recipes.adaptive import accordion, accordion_qsgd, accordion_topk, accordion_batch, auto
# isort: on

__all__ = [
    "accelerated",
    "accordion",
    "accordion_batch",
    "accordion_qsgd",
    "accordion_topk",
    "ad_psgd",
    "adacomp",
    "allreduce",
    "async_diloco",
    "async_sgd",
    "atomo",
    "auto",
    "backup",
    "bf16",
    "bmuf",
    "choco_sgd",
    "cocod",
    "d_psgd",
    "decoupled_diloco",
    "demo",
    "des_loc",
    "dgc",
    "diana",
    "diloco",
    "dion",
    "distributed_lion",
    "dqgd",
    "dqsgd",
    "drive",
    "eager_diloco",
    "easgd",
    "eden",
    "edit",
    "ef21",
    "ef_signsgd",
    "fetchsgd",
    "fp8",
    "fp16",
    "gossip_pga",
    "gradiveq",
    "gtopk",
    "hierarchical",
    "inner_outer",
    "int8",
    "local_gradients",
    "local_sgd",
    "lookahead",
    "minibatch",
    "natural",
    "noloco",
    "onebit_adam",
    "onebit_lamb",
    "onebit_sgd",
    "osgp",
    "overlap_local_sgd",
    "post_local",
    "powersgd",
    "presets",
    "qsgd",
    "randk",
    "sgp",
    "signsgd",
    "sketched_sgd",
    "slowmo",
    "slowmo_sgp",
    "sparse_loco",
    "sparse_scatter",
    "sparta",
    "streaming_diloco",
    "strom",
    "terngrad",
    "topk",
    "zero_one_adam",
]


def presets() -> dict[str, Callable[..., Recipe]]:
    """All presets, by name."""
    return dict(_presets)
