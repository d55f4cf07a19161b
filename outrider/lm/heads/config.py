"""The configuration of a head's checkpoint: its folder, its config.json, and errors that name the head."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from transformers import LlamaConfig

from outrider.lm.heads.target_parts import TargetPart, TargetShape
from outrider.lm.load.source import ModelSource, first_line
from speculative.errors import InvalidRequest, ModelRefused, OutriderError

_FILES = ("*.json", "*.safetensors", "*.pt", "*.bin")


class HeadNeeds(NamedTuple):
    """What a head needs of its target and of the target's pool, known before its weights are loaded."""

    reads: tuple[int, ...]
    """Layers whose outputs the head reads: 0 is the first layer, -1 the last norm."""
    planes: tuple[tuple[int, int], ...] = ()
    """(heads, width) of the keys and of the values of the head's own layer."""
    parts: tuple[TargetPart, ...] = ("embed", "lm_head")
    """Layers of the target that the head may compute with."""

    @classmethod
    def of_layer(
        cls,
        reads: tuple[int, ...],
        layer: LlamaConfig,
        parts: tuple[TargetPart, ...] = ("embed", "lm_head"),
    ) -> "HeadNeeds":
        """The needs of a head of one layer of attention."""
        head_dim = int(layer.head_dim or layer.hidden_size // layer.num_attention_heads)
        plane = (int(layer.num_key_value_heads or layer.num_attention_heads), head_dim)
        return cls(reads, (plane, plane), parts)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The configuration of one checkpoint, as published."""

    text: str
    """The folder or id that the user named."""
    folder: Path
    raw: Mapping[str, Any]
    """Contents of config.json."""

    @classmethod
    def read(cls, text: str) -> "HeadConfig":
        """Reads the config.json of a folder or id; downloads an id that is not there yet.

        Raises InvalidRequest if config.json is missing or unreadable.
        """
        source = ModelSource.of(text)
        folder = Path(source.name) if source.is_folder else _downloaded(source)
        path = folder / "config.json"
        if not path.is_file():
            raise InvalidRequest(f"{text!r} is not a head: it has no config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"head {text!r}: config.json cannot be read: {first_line(error)}") from error
        if not isinstance(raw, dict):
            raise InvalidRequest(f"head {text!r}: config.json holds no object")
        return cls(text, folder, raw)

    def refusal(self, kind: str, why: str) -> ModelRefused:
        """The error for a head that cannot draft for the target."""
        return ModelRefused(f"{kind} head {self.text!r} is refused: {why}", kind)

    @contextmanager
    def describing(self) -> Iterator[None]:
        """Raises InvalidRequest where the code inside fails, as on odd values in config.json."""
        try:
            yield
        except OutriderError:
            raise
        except Exception as error:  # of this code, of torch, or of transformers
            raise InvalidRequest(
                f"head {self.text!r}: config.json describes no head: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number of config.json. Raises InvalidRequest where it is missing or out of range."""
        value = self.raw.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidRequest(
                f"head {self.text!r}: {name} is {value!r} in config.json; it may be {least} to {most}"
            )
        return value

    def layer(self) -> LlamaConfig:
        """Sizes of the head's decoder layer. Raises InvalidRequest for sizes that make no layer."""
        raw = self.raw.get("transformer_layer_config", self.raw)
        known = set(LlamaConfig().to_dict()) | {"rope_theta", "rope_scaling"}
        given = {name: value for name, value in raw.items() if name in known and value is not None}
        try:
            config = LlamaConfig(**{name: given[name] for name in given if name not in _NOT_OF_A_LAYER})
            if config.num_attention_heads % int(config.num_key_value_heads or 1):
                raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
        except Exception as error:  # the library's checks raise errors of many classes
            raise InvalidRequest(
                f"head {self.text!r}: config.json describes no layer: {first_line(error)}"
            ) from error
        return config

    def check_layer(self, kind: str, config: LlamaConfig, shape: TargetShape) -> None:
        """Raises ModelRefused for a head of several layers, or with another vocabulary than the target's."""
        if config.num_hidden_layers != 1:
            raise self.refusal(kind, f"it has {config.num_hidden_layers} layers; only one is served")
        self.check_vocabulary(kind, config, shape)

    def check_vocabulary(self, kind: str, config: LlamaConfig, shape: TargetShape) -> None:
        """Raises ModelRefused for a head whose vocabulary is not the target's."""
        if config.vocab_size != shape.vocabulary_size:
            raise self.refusal(
                kind, f"its vocabulary has {config.vocab_size} ids, the target's {shape.vocabulary_size}"
            )

    def check_width(self, kind: str, config: LlamaConfig, shape: TargetShape) -> None:
        """Raises ModelRefused for a head whose layer is not as wide as the target's hidden states."""
        if config.hidden_size != shape.width:
            raise self.refusal(kind, f"its width is {config.hidden_size}, the target's {shape.width}")


_NOT_OF_A_LAYER = frozenset(
    {"architectures", "dtype", "transformers_version", "_name_or_path", "model_type", "auto_map"}
)


def _downloaded(source: ModelSource) -> Path:
    """The folder of an id's files, downloaded at need."""
    try:
        return Path(snapshot_download(source.name, revision=source.revision, allow_patterns=list(_FILES)))
    except Exception as error:  # of the network, the hub, or the cache
        raise InvalidRequest(source.missing(error)) from error
