"""Layer 2: codecs, which encode a bucket as bytes. One codec per file, one import line here."""

from gossamer.codecs.adacomp import AdaComp
from gossamer.codecs.atomo import Atomo
from gossamer.codecs.atoms import DCT, Basis, EntryAtom, SharedBasis
from gossamer.codecs.bernoulli import Bernoulli
from gossamer.codecs.casts import BF16, FP16, FP32
from gossamer.codecs.count_sketch import CountSketch
from gossamer.codecs.dct_topk import DCTTopK
from gossamer.codecs.dropping import Dropping
from gossamer.codecs.eden import EDEN
from gossamer.codecs.fp4 import FP4
from gossamer.codecs.fp8 import FP8
from gossamer.codecs.gradiveq import GradiVeQ
from gossamer.codecs.int8 import Int8
from gossamer.codecs.natural import Natural
from gossamer.codecs.powersgd import PowerSGD
from gossamer.codecs.qsgd import QSGD
from gossamer.codecs.randk import RandK
from gossamer.codecs.sign import Sign
from gossamer.codecs.sign_columns import SignColumns
from gossamer.codecs.spectral import SVD
from gossamer.codecs.strom import Strom
from gossamer.codecs.ternary import Ternary
from gossamer.codecs.tile_topk import TileTopK
from gossamer.codecs.topk import TopK
from gossamer.codecs.vote import Vote

__all__ = [
    "BF16",
    "DCT",
    "EDEN",
    "FP4",
    "FP8",
    "FP16",
    "FP32",
    "QSGD",
    "SVD",
    "AdaComp",
    "Atomo",
    "Basis",
    "Bernoulli",
    "CountSketch",
    "DCTTopK",
    "Dropping",
    "EntryAtom",
    "GradiVeQ",
    "Int8",
    "Natural",
    "PowerSGD",
    "RandK",
    "SharedBasis",
    "Sign",
    "SignColumns",
    "Strom",
    "Ternary",
    "TileTopK",
    "TopK",
    "Vote",
]
