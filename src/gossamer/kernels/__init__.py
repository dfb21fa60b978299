"""Kernels that encode, decode and select, with bit-equal results on CPU and GPU.

Each kernel exists as readable torch operations (`reference`), as a Numba loop (`cpu`) and, where it pays, as a Triton
program (`gpu`). The functions here check their arguments and pick the twin by the tensor's device.
"""

from gossamer.kernels.backends import backends, using
from gossamer.kernels.eden import eden_decode, eden_encode
from gossamer.kernels.follow import follow
from gossamer.kernels.indices import index_decode, index_encode
from gossamer.kernels.lanes import lane_count, lanes_pack, lanes_unpack
from gossamer.kernels.layout import CorruptWire
from gossamer.kernels.levels import levels_decode, levels_encode, levels_most
from gossamer.kernels.places import place_bytes, places_decode, places_encode
from gossamer.kernels.quantise import (
    bucket_norms,
    quantise_accumulate_each,
    quantise_bytes,
    quantise_decode,
    quantise_each,
    quantise_encode,
)
from gossamer.kernels.reference.hashing import mix3
from gossamer.kernels.scales import absmax, absmax_and_rms, absmax_and_std, divide
from gossamer.kernels.select import scatter_add, sparse_mean, topk, topk_each, within
from gossamer.kernels.sign import sign_bytes, sign_decode, sign_encode
from gossamer.kernels.sketch import sketch_encode, sketch_estimate
from gossamer.kernels.small import small_decode, small_encode
from gossamer.kernels.ternary import ternary_bytes, ternary_decode, ternary_encode, ternary_levels
from gossamer.kernels.warm import warmup

__all__ = [
    "CorruptWire",
    "absmax",
    "absmax_and_rms",
    "absmax_and_std",
    "backends",
    "bucket_norms",
    "divide",
    "eden_decode",
    "eden_encode",
    "follow",
    "index_decode",
    "index_encode",
    "lane_count",
    "lanes_pack",
    "lanes_unpack",
    "levels_decode",
    "levels_encode",
    "levels_most",
    "mix3",
    "place_bytes",
    "places_decode",
    "places_encode",
    "quantise_accumulate_each",
    "quantise_bytes",
    "quantise_decode",
    "quantise_each",
    "quantise_encode",
    "scatter_add",
    "sign_bytes",
    "sign_decode",
    "sign_encode",
    "sketch_encode",
    "sketch_estimate",
    "small_decode",
    "small_encode",
    "sparse_mean",
    "ternary_bytes",
    "ternary_decode",
    "ternary_encode",
    "ternary_levels",
    "topk",
    "topk_each",
    "using",
    "warmup",
    "within",
]
