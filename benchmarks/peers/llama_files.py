"""A target's checkpoint as llama.cpp reads it: GGUF files that live as long as a benchmark."""

import contextlib
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

BFLOAT16 = "_bf16"
"""End of the names of the arms in which llama.cpp keeps weights in bfloat16, as the checkpoint does."""


def require_gguf(program: str) -> None:
    """Exits where models cannot be converted for this program of llama.cpp."""
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"{program} is there but the gguf package is not: pip install 'outrider[bench]'")


def stored_in_bfloat16(target: str) -> bool:
    """Whether the target's checkpoint says that its weights are in bfloat16."""
    config = json.loads((Path(target) / "config.json").read_text())
    return "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


@contextlib.contextmanager
def target_files(target: str) -> Iterator[dict[str, Path]]:
    """The target in float32, under "", and in bfloat16 where no weight is rounded, under `BFLOAT16`.

    Raises ValueError for a model that cannot be converted.
    """
    from benchmarks.peers.gguf_models import write_gguf

    with tempfile.TemporaryDirectory(prefix="outrider-gguf-") as folder:
        ends = ("", BFLOAT16) if stored_in_bfloat16(target) else ("",)
        files = {end: Path(folder) / f"target{end}.gguf" for end in ends}
        for end, file in files.items():
            write_gguf(Path(target), file, bfloat16=end == BFLOAT16)
        yield files
