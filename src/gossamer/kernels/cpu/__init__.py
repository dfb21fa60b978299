"""Numba loops for CPUs: one thread, no global interpreter lock, compiled once and cached on disk."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def _ensure_cache() -> None:
    """Numba caches beside the source or in the user's cache; where neither can be written, a private folder will do."""
    if "NUMBA_CACHE_DIR" in os.environ or "numba" in sys.modules:
        return
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return
    if not os.access(Path.home(), os.W_OK):
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="gossamer-numba-")


_ensure_cache()
