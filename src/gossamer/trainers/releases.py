"""Releases of the libraries that adapters were written for."""

import re
from typing import NamedTuple


class Served(NamedTuple):
    """The releases of a package that an adapter serves: from `first` on, and below `end`; the extra that installs one."""

    package: str
    first: tuple[int, ...]
    end: tuple[int, ...]
    extra: str

    def __str__(self) -> str:
        first, end = (".".join(map(str, numbers)) for numbers in (self.first, self.end))
        return f"the package {self.package}, version {first} or a later one below {end}: pip install '.[{self.extra}]' in the clone"


ACCELERATE = Served("accelerate", (1, 15), (2,), "accelerate")
TRANSFORMERS = Served("transformers", (5, 24), (6,), "hf")
LIGHTNING = Served("lightning", (2, 6), (3,), "lightning")


def refuse_release(module: str, version: str, served: Served) -> None:
    """Raise an ImportError for a release that a module was not written for.

    >>> refuse_release("gossamer.trainers.hf", "5.24.0", TRANSFORMERS)
    >>> refuse_release("gossamer.trainers.hf", "4.57.1", TRANSFORMERS)
    Traceback (most recent call last):
        ...
    ImportError: transformers 4.57.1 is installed, but gossamer.trainers.hf needs the package transformers, version 5.24 or a later one ...
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not served.first <= numbers < served.end:
        raise ImportError(f"{served.package} {version} is installed, but {module} needs {served}")
