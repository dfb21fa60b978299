"""Imported first by the commands that tests start, and by their ranks, as it lies on their path.

An optimizer's first step imports torch's compiler, only to call what does nothing where nothing is compiled. That takes more
than a second of each rank's processor, a third of what a short run takes. Whoever asks for more of it gets the compiler itself.
"""

import gc
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class NothingCompiled(ModuleType):
    """What optimizers and process groups call of torch's compiler."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def graph_break() -> None: ...

    @staticmethod
    def disable(fn: Any, *args: Any, **options: Any) -> Any:
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # who looks through all modules asks for their files
        if sys.modules.get("torch._dynamo") is self:
            del sys.modules["torch._dynamo"]
        return getattr(importlib.import_module("torch._dynamo"), name)


sys.modules["torch._dynamo"] = NothingCompiled("torch._dynamo")
gc.set_threshold(10_000)  # as in the process of the tests; to look for garbage takes a tenth of the time to load torch
