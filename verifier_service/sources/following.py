"""A session as a source outside this worker has to know it, and how patient a link to one is."""

from dataclasses import dataclass

from outrider.runtime.security import certificates
from outrider.v1 import draft_source_pb2
from outrider.wire.channel import DEFAULT_MESSAGE_MB
from outrider.wire.codec import key_to_wire, sampling_to_wire
from outrider.wire.tls import Certificates
from speculative.fragment import MAX_FRAGMENT_NODES
from verifier_service.engine.source_policy import SourceActivity
from verifier_service.registry import Mirror
from verifier_service.settings import VerifierSettings

# Of one round's nodes, how many rounds' worth a source may keep in flight.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Times and bounds of a link."""

    dial_s: float = 2.0
    write_s: float = 2.0
    """A message that the stream does not take for so long resets the link."""
    redial_first_s: float = 0.1
    redial_most_s: float = 5.0
    mute_first_s: float = 1.0
    mute_most_s: float = 300.0
    strikes: int = 3
    """Sessions struck by something malformed before the whole link is muted."""
    inbox: int = 512
    """Drafts under way to the engine; more are dropped."""
    flood_pause_s: float = 0.005
    """How long a link that floods is not read."""
    max_message_mb: int = DEFAULT_MESSAGE_MB
    """The largest message taken from a source, in MiB."""
    certificates: Certificates | None = None
    """What to show them; None: links are plain."""


def limits_of_links(settings: VerifierSettings) -> LinkLimits:
    """As the process was told. Raises InvalidRequest where its certificate is none."""
    return LinkLimits(max_message_mb=settings.max_message_mb, certificates=certificates(settings))


@dataclass(frozen=True, slots=True)
class Following:
    """A session as a source has to know it."""

    mirror: Mirror
    credits: tuple[int, ...]
    """The source's credit indices in that session, one for each of its names there."""
    names: tuple[str, ...]
    """As the session calls them."""
    model: str
    tokenizer_digest: str
    vocabulary_size: int
    records: tuple[SourceActivity, ...]
    """Of what the source is worth to requests of this kind, under each of its names."""

    @property
    def name(self) -> str:
        """What is counted where it does not matter which of the names it is."""
        return self.names[0]

    def message(self, alias: int, drafts: bool = True) -> draft_source_pb2.Follow:
        """As it goes out, with the ids of this moment; without `drafts` there is only something to learn."""
        request = self.mirror.request
        return draft_source_pb2.Follow(
            alias=alias,
            key=key_to_wire(request.key),
            epoch=request.epoch,
            model=self.model,
            tokenizer_digest=self.tokenizer_digest,
            ids=self.mirror.ids,
            prompt_length=request.prompt_length,
            limit=request.limit,
            sampling=sampling_to_wire(request.params),
            seed=request.seed,
            node_limit=min(_AHEAD * request.node_limit, MAX_FRAGMENT_NODES) if drafts else 0,
            vocabulary_size=self.vocabulary_size,
            sources=self.names,
            learn=request.learn,
            corpora=request.corpora,
            traceparent=self.mirror.traceparent,
        )
