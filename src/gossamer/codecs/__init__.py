"""Floor 2: how a block is written. One codec per file, one import line here."""

from gossamer.codecs.casts import BF16, FP16, FP32
from gossamer.codecs.count_sketch import CountSketch
from gossamer.codecs.powersgd import PowerSGD
from gossamer.codecs.qsgd import QSGD
from gossamer.codecs.ternary import Ternary
from gossamer.codecs.topk import TopK

__all__ = ["BF16", "FP16", "FP32", "QSGD", "CountSketch", "PowerSGD", "Ternary", "TopK"]
