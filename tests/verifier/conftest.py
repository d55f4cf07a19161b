"""Puts these tests' helpers, tests/verifier/support, where they can import them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
