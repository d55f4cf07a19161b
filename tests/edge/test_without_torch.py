"""Devices need no torch: everything but the torch backend loads without torch and transformers."""

import subprocess
import sys

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "safetensors", "triton"}:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Blocked())

import importlib, pkgutil
import outrider
import outrider.edge

names = [
    module.name
    for module in pkgutil.walk_packages(outrider.edge.__path__, "outrider.edge.")
    if module.name != "outrider.edge.backends.torch_model"
]
for name in names:
    importlib.import_module(name)
assert outrider.EdgeDrafter and outrider.AsyncEdgeDrafter
from outrider.edge.backends import open_model
try:
    open_model(".")
except ImportError as error:
    assert "torch" in str(error) or "transformers" in str(error), error
else:
    raise AssertionError("the torch backend was opened without torch")
print(len(names))
"""


def test_the_edge_loads_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
