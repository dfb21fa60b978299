"""Floor 6: what there is to say about presets and parts, for the command line, the documentation and the tests.

Words come from docstrings; what is refused is found by trying.
"""

from gossamer.bench.catalogue.docstrings import Docs, formulas, one_line, read, signature
from gossamer.bench.catalogue.refusals import Refusal, pairs, refused_with, wrong_values
from gossamer.bench.catalogue.samples import KINDS, carried, defaults, example, of, parts_of, sample, showing, users

__all__ = [
    "KINDS",
    "Docs",
    "Refusal",
    "carried",
    "defaults",
    "example",
    "formulas",
    "of",
    "one_line",
    "pairs",
    "parts_of",
    "read",
    "refused_with",
    "sample",
    "showing",
    "signature",
    "users",
    "wrong_values",
]
