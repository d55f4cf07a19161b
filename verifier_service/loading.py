"""The target that a verifier holds, and what it says of it to others."""

from outrider.lm.packed import PackedLM
from outrider.tokens import TokenTable
from outrider.v1 import verifier_pb2
from verifier_service.settings import VerifierSettings


def load_target(settings: VerifierSettings) -> PackedLM:
    """The settings' model, checked. Raises OutriderError.

    The deterministic profile computes on one thread unless the settings say otherwise, which is refused.
    """
    chosen = "threads" in settings.model_fields_set
    threads = settings.threads if chosen or not settings.deterministic else 1
    return PackedLM.load(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        threads=threads,
        kv_mb=settings.kv_mb,
        deterministic=settings.deterministic,
    )


def tokens_of(target: PackedLM) -> TokenTable | None:
    """None where the target came without a tokenizer."""
    return None if target.tokenizer_json is None else TokenTable.from_json(target.tokenizer_json)


def chat_to_wire(target: PackedLM) -> verifier_pb2.ChatTemplate | None:
    """None where the target came without a template."""
    chat = target.chat
    return None if chat is None else verifier_pb2.ChatTemplate(source=chat.source, tokens=chat.tokens)
