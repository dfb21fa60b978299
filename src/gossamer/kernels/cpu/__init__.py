"""Numba loops for CPUs: one thread, no global interpreter lock, compiled once and cached on disk."""

import os
import sys
import tempfile
from pathlib import Path


def _ensure_cache() -> None:
    """Set a temporary cache folder for Numba if neither the source folder nor the user's cache can be written."""
    if "NUMBA_CACHE_DIR" in os.environ or "numba" in sys.modules:
        return
    beside = Path(__file__).parent / "__pycache__"
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return
    if not os.access(os.path.expanduser("~"), os.W_OK):  # stays "~" for a user without a home, as in some containers
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="gossamer-numba-")


_ensure_cache()
