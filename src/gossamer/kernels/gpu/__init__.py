"""Triton kernels for GPUs, bit-equal to the reference; kernels missing here run as torch operations."""

from typing import Any

import torch

# Where a product is not exact, fusing its addition would change the last bit. And left to itself the assembler keeps fewer
# registers than a program needs, to have more programs at a time, and spills a few to memory; told a limit, it takes what
# it needs. (What compiles for AMD's GPUs knows no such limit.)
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False} | ({} if torch.version.hip else {"maxnreg": 128})
"""How all programs are launched."""
