"""The pretended device, put in place: afterwards this process believes that it has eight GPUs.

For processes of their own: nothing here can be taken back.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
from tests.gpu import clocks, gloo, programs
from tests.gpu.diary import diary
from tests.gpu.rules import Rules
from tests.gpu.tensors import Host

from gossamer.fabrics.torch import staged

COUNT = 8


def install() -> None:
    _replace_cuda()
    _rule_all_threads()
    gloo.watch()
    programs.backends._find = programs.pretended
    programs.backends._load.cache_clear()
    _replace_pinned()
    # Module.to makes new parameters; it would else put a tensor of the device under the name of one of the CPU.
    torch.__future__.set_overwrite_module_params_on_conversion(True)


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda._lazy_init = cuda.init = lambda: None
    cuda.device_count = lambda: COUNT
    cuda.get_device_name = lambda device=None: "a pretended GPU"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid=f"GPU-{clocks.index_of(device)}")
    cuda.current_device, cuda.set_device, cuda.device = clocks.current_device, clocks.set_device, clocks.device_guard
    cuda.current_stream, cuda.default_stream = clocks.current_stream, clocks.default_stream
    cuda.is_current_stream_capturing = lambda: False
    cuda.set_sync_debug_mode = diary.set_debug_mode
    cuda.stream, cuda.set_stream = clocks.on, clocks.set_current
    cuda.Stream, cuda.Event, cuda.synchronize = clocks.Stream, clocks.Event, clocks.synchronize


def _rule_all_threads() -> None:
    """This one excepted, where processes are forked."""
    run = threading.Thread.run

    def ruled(thread: threading.Thread) -> None:
        with Rules():
            run(thread)

    threading.Thread.run = ruled


def _replace_pinned() -> None:
    staged.pinned = lambda length: Host(torch.empty(length, dtype=torch.uint8))
