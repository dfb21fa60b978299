"""Images in ten classes: scikit-learn's digits for smoke tests, and all of Fashion-MNIST."""

import gzip
import tarfile
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossamer.bench.workloads import cache
from gossamer.bench.workloads.contract import workload
from gossamer.bench.workloads.errors import DataError, WorkloadError
from gossamer.bench.workloads.packages import deb, member, wheel
from gossamer.bench.workloads.quality import Classifier
from gossamer.bench.workloads.shards import Data
from gossamer.bench.workloads.vision import Cnn, ResNet20


@dataclass(frozen=True, kw_only=True)
class Images(Classifier):
    """Their groups are their labels."""

    group: ClassVar[str] = "label"

    batch_size: int = 16


@final
@workload("digits")
class Digits(Images):
    """1,797 handwritten digits of 8 x 8 pixels: done in seconds."""

    summary: ClassVar[str] = "digits, two-layer perceptron, 4.8 k parameters, 9 MB download"

    def load(self) -> Data:
        rows = torch.from_numpy(cache.arrays("digits-1", _digits)["rows"].astype(np.int64))
        pixels, labels = rows[:, :-1].float() / 16, rows[:, -1]
        held = torch.arange(len(rows)) % 5 == 0
        return Data((pixels[~held], labels[~held]), (pixels[held], labels[held]), labels[~held])

    def network(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@final
@workload("fashion")
class Fashion(Images):
    """Fashion-MNIST, 60,000 images, judged on the first 2,000 of its test set."""

    summary: ClassVar[str] = "Fashion-MNIST, small CNN, 0.2 M parameters, 31 MB download (Debian)"

    def load(self) -> Data:
        return _fashion(2000)

    def network(self) -> nn.Module:
        return Cnn()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def inputs(self, raw: Tensor) -> Tensor:
        return _pixels(raw)


@final
@workload("fashion-resnet")
class FashionResNet(Images):
    """Fashion-MNIST in the shape of CIFAR-10, judged on the first 500 of its test set.

    With `norm="batch"` the model has buffers, which ranks must agree on; with `norm="group"` it has none.
    """

    summary: ClassVar[str] = "Fashion-MNIST as 32 x 32 x 3, ResNet-20, 0.27 M parameters, 31 MB download (Debian)"

    norm: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in ("batch", "group"):
            raise WorkloadError(f"norm must be 'batch' or 'group', not {self.norm!r}")

    def load(self) -> Data:
        return _fashion(500)

    def network(self) -> nn.Module:
        return ResNet20(self.norm)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def inputs(self, raw: Tensor) -> Tensor:
        """Grey 28 x 28 images as 32 x 32 with three equal channels: same shapes and gradient sizes as CIFAR-10."""
        return _pixels(nn.functional.pad(raw, (2, 2, 2, 2))).expand(-1, 3, -1, -1)


def _digits() -> cache.Arrays:
    package = wheel(
        "scikit-learn",
        "1.9.1",
        "52a0703bbc07ad27f560fa63fa68e4c54dd735bfbbf65b4dd3c225dc7547b6df",
        # The same file everywhere: it is read, not run.
        *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64"),
        *("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"),
    )
    with package, gzip.open(package.open("sklearn/datasets/data/digits.csv.gz")) as file:
        return {"rows": np.loadtxt(file, delimiter=",").astype(np.uint8)}


def _fashion(held: int) -> Data:
    arrays = {key: torch.from_numpy(array) for key, array in cache.arrays("fashion-1", _unpack_fashion).items()}
    labels, judged = arrays["train-labels"].long(), arrays["t10k-labels"].long()
    return Data((arrays["train-images"], labels), (arrays["t10k-images"][:held], judged[:held]), labels)


def _pixels(images: Tensor) -> Tensor:
    """Numbers around 0 with a deviation of 1. The data stays bytes, a quarter of the memory of each rank."""
    return ((images / 255 - 0.286) / 0.353).unsqueeze(1)


def _unpack_fashion() -> cache.Arrays:
    read = partial(_read_idx, deb("dataset-fashion-mnist"))
    found = {f"{part}-{kind}": read(part, kind) for part in ("train", "t10k") for kind in ("images", "labels")}
    shapes = [array.shape for array in found.values()]
    if shapes != [(60000, 28, 28), (60000,), (10000, 28, 28), (10000,)]:
        raise DataError(f"the package dataset-fashion-mnist holds other images than expected: {shapes}")
    return found


def _read_idx(package: tarfile.TarFile, part: str, kind: str) -> NDArray[np.uint8]:
    """The IDX format: a magic number whose last byte says how many dimensions, then those, then the bytes."""
    depth = 3 if kind == "images" else 1
    name = f"./usr/share/datasets/fashion-mnist/{part}-{kind}-idx{depth}-ubyte.gz"
    content = gzip.decompress(member(package, name))
    shape = np.frombuffer(content, dtype=">i4", count=depth, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * depth).reshape(shape).copy()
