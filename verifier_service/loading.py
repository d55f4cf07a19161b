"""Loads the target of a verifier, and describes the target to orchestrators and peers."""

import hashlib
import logging
from collections.abc import Iterable

import torch

from outrider.lm.autotune.threads import ThreadBounds
from outrider.lm.chains.fallback import trees_or_chains
from outrider.lm.device.placement import GpuOptions, kv_mb_of
from outrider.lm.load.weights_digest import weights_digest
from outrider.lm.runner import PackedLM
from outrider.runtime.threads import most_helped_threads, most_threads
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.channel import least_message_mb
from outrider.wire.codec import sampling_from_wire
from outrider.wire.criteria import SERVED_CRITERIA
from outrider.wire.incoming.request_fields import REQUEST_FIELDS
from outrider.wire.workers import CONTRACT, WorkerState
from speculative.acceptance import CRITERIA
from speculative.errors import InvalidRequest, ModelRefused, OutriderError
from speculative.implementations import load_implementation
from verifier_service.proposers import PROPOSERS
from verifier_service.proposers.batched import guest_room
from verifier_service.proposers.planning import plan_proposers
from verifier_service.sessions.manager import Capacity
from verifier_service.sessions.request import MAX_NODES, ServedModel
from verifier_service.settings import VerifierSettings

log = logging.getLogger(__name__)


def load_target(settings: VerifierSettings) -> PackedLM:
    """Loads and checks the settings' model. Raises OutriderError.

    The deterministic profile computes on one thread; settings that ask for more threads are refused.
    """
    guest = guest_room(plan_proposers(settings).values())

    def load(kind: type[PackedLM]) -> PackedLM:
        return kind.load(
            settings.model,
            device=settings.device,
            dtype=settings.dtype,
            threads=thread_bounds(settings),
            kv_mb=kv_mb_of(settings.kv_mb),
            deterministic=settings.deterministic,
            guest=guest,
            cache_dir=settings.cache_dir,
            gpu=gpu_options(settings),
            weight_dtype=settings.weight_dtype,
            int8_kv=settings.kv_dtype == "int8",
        )

    return trees_or_chains(settings.model, load)


def load_amateur(settings: VerifierSettings, target: PackedLM) -> PackedLM | None:
    """Loads the model against which requests may contrast; None where the settings name none.

    Raises InvalidRequest for a model of another tokenizer, and beside a target on a GPU or over ranks.
    """
    if not settings.amateur:
        return None
    if target.model.device.type != "cpu":
        raise InvalidRequest(
            f"amateur = {settings.amateur!r} beside a target on {target.model.device}: contrastive decoding "
            "runs on CPUs alone; leave amateur out"
        )
    if target.pool.chains_only:
        raise InvalidRequest(
            f"amateur = {settings.amateur!r} beside the target {settings.model!r}, which verifies chains: "
            "contrastive decoding takes targets that verify trees alone; leave amateur out"
        )
    if settings.ranks > 1:
        raise InvalidRequest(
            f"amateur = {settings.amateur!r} beside ranks = {settings.ranks}: contrastive decoding runs on "
            "one rank alone; leave one of the two out"
        )
    try:
        amateur = PackedLM.load(
            settings.amateur,
            dtype=str(target.model.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            kv_mb=kv_mb_of(settings.kv_mb),  # a bound for the check at load; storage follows the target's
            deterministic=settings.deterministic,
            cache_dir=settings.cache_dir,
        )
    except OutriderError as refusal:
        raise InvalidRequest(f"amateur = {settings.amateur!r} cannot be used: {refusal}") from None
    own, other = tokens_of(target), tokens_of(amateur)
    if (own and own.digest) != (other and other.digest):
        raise InvalidRequest(
            f"the amateur {settings.amateur!r} has another tokenizer than the target {settings.model!r}; "
            "give a model of the same vocabulary"
        )
    if unknown := [id_ for id_ in target.eos_ids if id_ >= amateur.vocabulary_size]:
        raise InvalidRequest(
            f"the amateur {settings.amateur!r} knows ids below {amateur.vocabulary_size}, and the target "
            f"ends texts with {unknown[0]}; give a model of the same vocabulary"
        )
    return amateur


def digest_of_weights(settings: VerifierSettings) -> str:
    """Digest of the weights that decide tokens: the target's, and the amateur's if there is one.

    Weights in another format are those of another model, and have another digest.
    """
    target = weights_digest(settings.model)
    if target and settings.weight_dtype != "auto":
        target = hashlib.sha256(f"{target} {settings.weight_dtype}".encode()).hexdigest()[: len(target)]
    if not settings.amateur or not target:
        return target
    both = f"{target} {weights_digest(settings.amateur)}"
    return hashlib.sha256(both.encode()).hexdigest()[: len(target)]


def gpu_options(settings: VerifierSettings) -> GpuOptions:
    """How the target's passes run on a GPU."""
    return GpuOptions(
        cuda_graphs=settings.cuda_graphs,
        memory_utilization=settings.gpu_memory_utilization,
        capture_s=settings.capture_s,
        compile_layers=settings.passes != "eager",
    )


def threads_of(settings: VerifierSettings) -> int:
    """Compute threads of one rank; under `auto` the most that a measurement may choose for eager passes."""
    if settings.threads != "auto":
        return settings.threads
    return 1 if settings.deterministic else max(1, most_threads() // settings.ranks)


def thread_bounds(settings: VerifierSettings) -> int | ThreadBounds:
    """Compute threads of a verifier of one rank; under `auto` the bounds of the measurement."""
    most = threads_of(settings)
    return ThreadBounds(most, most_helped_threads()) if settings.threads == "auto" else most


def tokens_of(target: PackedLM) -> TokenTable | None:
    """The token table of the target's tokenizer; None for a target without a tokenizer."""
    return None if target.tokenizer_json is None else TokenTable.from_json(target.tokenizer_json)


def served_model(
    settings: VerifierSettings,
    target: PackedLM,
    capacity: Capacity,
    batched: Iterable[str] = (),
    amateur: PackedLM | None = None,
) -> ServedModel:
    """The target as requests are checked against it; `batched` are the names of its batched proposers.

    Beside an amateur no session is longer than the amateur's context.

    Raises ModelRefused where `kv_mb` or `max_message_mb` is too small for it.
    """
    max_length = min(target.max_length, capacity.longest(MAX_NODES))
    if amateur is not None:
        max_length = min(max_length, amateur.max_length)
    if max_length < 2:
        raise ModelRefused(
            f"kv_mb = {settings.kv_mb} gives {capacity.slots} KV slots, too few for one session of "
            f"{target.model_type}; give more",
            target.model_type,
        )
    least_mb = least_message_mb(max_length, target.vocabulary_size)
    if settings.max_message_mb < least_mb:
        raise ModelRefused(
            f"max_message_mb = {settings.max_message_mb} is too small for a context of {max_length} tokens; "
            f"give {least_mb} or more, to every process of the deployment",
            target.model_type,
        )
    return ServedModel(
        settings.model_name or target.name,
        target.vocabulary_size,
        max_length,
        settings.node_limit,
        frozenset(target.eos_ids),
        settings.deterministic,
        tuple(sorted({*PROPOSERS, *settings.proposers, *batched})),
        settings.policy,
        0 if amateur is None else amateur.vocabulary_size,
        target.pool.chains_only,
    )


def _criteria_of(served: ServedModel) -> tuple[str, ...]:
    """Names of the criteria that requests may name."""
    if served.replay_identical:
        return ()
    if not served.chains_only:
        return SERVED_CRITERIA
    return tuple(name for name in SERVED_CRITERIA if not load_implementation(CRITERIA, name).needs_q)


def description_of(
    settings: VerifierSettings,
    target: PackedLM,
    served: ServedModel,
    tokenizer_digest: str,
    weights_digest: str,
    ranks: int,
) -> verifier_pb2.VerifierDescription:
    """The answer to Describe. `ranks` is the number of processes that the target is split over."""
    return verifier_pb2.VerifierDescription(
        model=served.model,
        max_length=served.max_length,
        vocabulary_size=target.vocabulary_size,
        eos_ids=target.eos_ids,
        tokenizer_digest=tokenizer_digest,
        local_sources=served.proposers,
        node_limit=MAX_NODES,
        max_sessions=settings.max_sessions,
        model_type=target.model_type,
        numerics=numerics_of(target, ranks),
        chat_template=_chat_to_wire(target),
        contract=CONTRACT,
        weights_digest=weights_digest,
        sampling_defaults=_defaults_to_wire(target),
        criteria=_criteria_of(served),
        request_fields=REQUEST_FIELDS,
    )


def numerics_of(target: PackedLM, ranks: int) -> str:
    """Numerics class of the target's passes now; compiled passes are a class beside eager ones."""
    return target.numerics if ranks == 1 else f"{target.numerics} {ranks} ranks"


def state_of(description: verifier_pb2.VerifierDescription, sessions: int, step_s: float) -> WorkerState:
    """The state that the worker announces while `sessions` sessions run and a step takes `step_s` seconds."""
    return WorkerState(
        model=description.model,
        weights_digest=description.weights_digest,
        tokenizer_digest=description.tokenizer_digest,
        numerics=description.numerics,
        capacity=description.max_sessions,
        sessions=sessions,
        step_s=step_s,
    )


def _defaults_to_wire(target: PackedLM) -> common_pb2.Sampling:
    """The generation config's sampling parameters, without those that no request could have."""
    message = common_pb2.Sampling()
    for name, value in target.sampling_defaults.items():
        given = common_pb2.Sampling()
        try:
            setattr(given, name, value)
            sampling_from_wire(given, target.vocabulary_size)
        except (InvalidRequest, TypeError, ValueError) as error:
            log.warning("generation_config ignored", extra={"fields": {"field": name, "why": str(error)}})
        else:
            message.MergeFrom(given)
    return message


def _chat_to_wire(target: PackedLM) -> verifier_pb2.ChatTemplate | None:
    chat = target.chat
    if chat is None:
        return None
    return verifier_pb2.ChatTemplate(source=chat.source, tokens=chat.tokens, response=chat.response)
