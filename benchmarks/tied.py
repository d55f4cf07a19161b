"""Becomes another program that ends with its parent, even when that is killed.

Started by a benchmark as `python benchmarks/tied.py PARENT_PID PROGRAM ARGUMENT...`.
"""

import os
import sys

from outrider.runtime.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
