"""The target that a verifier holds, and what it says of it to others."""

from outrider.lm.packed import PackedLM
from outrider.tokens import TokenTable
from outrider.v1 import verifier_pb2
from outrider.wire.workers import WorkerState
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


def state_of(said: verifier_pb2.VerifierDescription, sessions: int, step_s: float) -> WorkerState:
    """What it announces of itself, with so many sessions running."""
    return WorkerState(
        model=said.model,
        weights_digest=said.weights_digest,
        tokenizer_digest=said.tokenizer_digest,
        numerics=said.numerics,
        capacity=said.max_sessions,
        sessions=sessions,
        step_s=step_s,
    )
