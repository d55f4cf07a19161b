"""Replaces itself by another program that ends with its parent, even when the parent is killed.

Started by a benchmark as `python -m benchmarks.shared.die_with_parent PARENT_PID PROGRAM ARGUMENT...`.
"""

import os
import sys

from outrider.runtime.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
