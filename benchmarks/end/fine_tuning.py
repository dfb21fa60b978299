"""Does a model that was trained with fewer bytes take longer, or end worse, when it is trained on other data afterwards?

First a recipe trains `wiki-lm` to the end of a schedule. Then all ranks go on from the model on which they agree, with dense
averages: on Python's own source code, written in the tokens that the model knows.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from benchmarks.end.records import DENSE, FOLDER, Job, Run, Study
from benchmarks.end.training import trained
from numpy.typing import NDArray
from torch import nn

from gossamer.bench.workloads.python_source import sources
from gossamer.bench.workloads.quality import LanguageModel
from gossamer.bench.workloads.shards import Data
from gossamer.bench.workloads.wiki import WikiLm, pieces
from gossamer.bench.workloads.windows import as_data, cut, is_held

SHARE = 4  # of the steps before, one in four


@final
@dataclass(frozen=True, kw_only=True)
class PythonInPieces(LanguageModel):
    """The text of `lm` in the tokens of `wiki-lm`, for the network of `wiki-lm`."""

    name: ClassVar[str] = "lm"
    summary: ClassVar[str] = "language model of Python's own source code, in the tokens of wiki-lm"
    group: ClassVar[str] = "file"

    def load(self) -> Data:
        known, train, held = pieces(), list[NDArray[np.integer]](), list[NDArray[np.integer]]()
        for name, path in sources():
            (held if is_held(name) else train).append(np.array(known.encode(path.read_bytes())))
        return as_data(cut(train, held, self.length))

    def network(self) -> nn.Module:
        return WikiLm().network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return WikiLm().optimizer(model)


def run(study: Study, job: Job, commit: str = "", folder: Path = FOLDER) -> Run:
    """Train before, keep that record too, and go on densely; the bytes are those of what came before."""
    before, model = trained(replace(study, then=""), job, commit)
    before.write(folder)
    if model is None:
        return replace(before, study=study)
    after = Study(study.workload, study.steps // SHARE, study.plan, study.ranks)
    found, _ = trained(after, Job(DENSE, 1.0, job.seed), commit, PythonInPieces(seed=job.seed), model.state_dict())
    return replace(
        found,
        study=study,
        job=job,
        recipe=before.recipe,
        sent=before.sent,
        processor_seconds=before.processor_seconds + found.processor_seconds,
    )
