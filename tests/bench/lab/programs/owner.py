"""The owner of a lab of stubborn processes, to be killed. Needs no torch."""

import sys
from pathlib import Path

STUBBORN = "trap '' TERM; setsid sleep 60 & sleep 60 & echo ready; wait"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4] / "src"))
    from gossamer.bench.lab import run_lab

    command = sys.argv[1] if len(sys.argv) > 1 else STUBBORN
    result = run_lab(2, "100mbit", ["sh", "-c", command], grace=0.2, kill_after=0.3)
    print("end", result.exit_code, flush=True)
    sys.exit(result.exit_code)
