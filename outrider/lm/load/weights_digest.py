"""Digest of a model's files, which identifies the model whatever dtype and number of devices it runs on.

Reads a sample, because whole weights take a while: models of different training differ nearly everywhere.
"""

import hashlib
import json
from pathlib import Path

import huggingface_hub

from outrider.tokens import split_revision
from speculative.errors import InvalidRequest

SAMPLES = 64
"""Number of samples read from each file."""
SAMPLE_BYTES = 4096
"""Size of a sample in bytes."""
HEAD_BYTES = 65_536
"""Size of the part read from each file's beginning, where names and shapes stand, in bytes."""
DIGITS = 32
"""Length of a digest in hexadecimal digits."""
WEIGHTS = ("*.safetensors", "*.bin", "*_lm_head.pt")
"""Patterns of the names of weights' files. Other .pt files, as of an optimiser, are no weights."""
# Fields that say how a configuration was written or is used, not what the model computes.
_PASSING = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def weights_digest(path_or_id: str) -> str:
    """Hexadecimal digest of the configuration and a sample of the weights of a folder or cached id.

    An id may have a revision: ORG/NAME@REVISION.

    Empty where there are no such files, as for a model that was made in memory.
    """
    folder = _folder(path_or_id)
    if folder is None:
        return ""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    digest = hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_text())
        fields = {key: value for key, value in config.items() if key not in _PASSING}
        digest.update(json.dumps(fields, sort_keys=True).encode())
        for file in files:
            _sample(file, digest)
    except (OSError, ValueError, AttributeError):  # the last where the JSON is no object
        return ""
    return digest.hexdigest()[:DIGITS] if files else ""


def loaded_digest(flag: str, path_or_id: str) -> str:
    """Digest of weights that are loaded by now, which the flag named.

    Raises InvalidRequest where there is none: learnt weights have to be told from those of other weights.
    """
    digest = weights_digest(path_or_id)
    if not digest:
        raise InvalidRequest(
            f"--{flag} {path_or_id}: nothing tells these weights from others, as learnt weights need: their "
            f"folder lacks a config.json, or a file of weights ({', '.join(WEIGHTS)}); give a folder or id "
            "that has both, or drop --learn"
        )
    return digest


def _sample(file: Path, digest: "hashlib._Hash") -> None:
    size = file.stat().st_size
    digest.update(f"{size}\n".encode())
    with file.open("rb") as data:
        digest.update(data.read(HEAD_BYTES))
        for number in range(SAMPLES):
            data.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(data.read(SAMPLE_BYTES))


def _folder(path_or_id: str) -> Path | None:
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    name, revision = split_revision(path_or_id)
    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # what can be no id
        return None
    return Path(found).parent if isinstance(found, str) else None
