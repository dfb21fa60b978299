"""Launch options of all programs.

Where a product is not exact, fusing its addition would change the last bit. And left to itself the assembler keeps fewer
registers than a program needs, to have more programs at a time, and spills a few to memory; told a limit, it takes what
it needs. (What compiles for AMD's GPUs knows no such limit.)
"""

from __future__ import annotations

from typing import Any

import torch

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False} | ({} if torch.version.hip else {"maxnreg": 128})
