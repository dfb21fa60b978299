"""Floor 7: what a recipe does, message by message, with numbers that can be followed by hand."""

from gossamer.bench.explain.run import Explained, ExplainedStep, KeptTensor, Rank, explain
from gossamer.bench.explain.text import as_text

__all__ = ["Explained", "ExplainedStep", "KeptTensor", "Rank", "as_text", "explain"]
