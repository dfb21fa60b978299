"""Prints the speed of every kernel beside a memory copy: `python benchmarks/kernels.py [elements] [rounds]`."""

import sys

from gossamer.bench.kernels import measure

if __name__ == "__main__":
    for row in measure(*(int(word) for word in sys.argv[1:])):
        print(f"{row.kernel:20} {row.backend:7} {row.gb_per_s:8.2f} GB/s   {row.ratio_to_memcpy:6.2f} x memcpy")
