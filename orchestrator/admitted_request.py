"""A request that can be decoded: the fronts make it for the relay.

Traces, metrics and store records describe it.

Pure. `front/admission.py` makes these from what clients send.
"""

from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from outrider.wire.codec import SessionKey
from outrider.wire.names import GRAMMAR, PREDICTION, REFERENCES
from speculative.acceptance.criterion import Criterion
from speculative.grammar import Grammar
from speculative.logprobs import Logprobs
from speculative.noise import derive
from speculative.params import SamplingParams

MARKED_TOKENS = 256
"""How many of the prompt's last tokens go into a request's mark: enough to tell requests apart, and quick to
hash for a prompt of any length."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The sources and the texts that a request asks to be drafted with."""

    enabled: bool
    sources: tuple[str, ...]
    """Names of the sources that may draft; empty: all sources."""
    node_limit: int | None
    """The most drafted nodes in a round; None: the verifier's own limit."""
    learn: bool = True
    """Whether sources may keep the output to draft from it, for the same tenant."""
    corpora: tuple[str, ...] = ()
    """Names of the corpora to draft from; empty: all corpora that the tenant may read."""
    prediction: tuple[int, ...] = ()
    """Token ids that the answer may resemble; empty: the client predicts nothing."""
    criterion: Criterion | None = None
    """How drafted tokens are accepted; None: by the path match."""
    references: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that the answer may copy from, text by text."""
    policy: str = ""
    """Name of the draft policy; empty: each source's own."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that passed every check."""

    key: SessionKey
    ids: tuple[int, ...]
    """Token ids of the prompt."""
    limit: int
    """The most tokens of prompt and answer together, an absolute position."""
    params: SamplingParams
    seed: int
    """Seed of choice 0; the seeds of the other choices derive from it."""
    stops: tuple[str, ...]
    speculation: Speculation
    choices: int = 1
    """Number of answers; each is a session of its own."""
    logprobs: Logprobs | None = None
    """Which log-probabilities the client wants of generated tokens; None: none."""
    have: tuple[tuple[int, ...], ...] | None = None
    """Generated token ids that the client already has, by choice; None: the request does not resume
    another."""
    seen_epoch: int = 0
    """The highest epoch that the client has seen of the session."""
    ended: frozenset[int] = frozenset()
    """Choices of a resumed request whose end the client already has."""
    resumable: bool = False
    """Whether the request stays resumable when its client disconnects."""
    grammar: Grammar | None = None
    """The grammar that the text has to match; None: any text."""
    score_prompt: bool = False
    """Whether the prompt's tokens, except the first, get log-probabilities too; needs `logprobs`."""
    device: bool = False
    """Whether the client's device drafts for the request, through this orchestrator."""
    shown_ids: frozenset[int] = frozenset()
    """Ids of special tokens whose names are part of the answer's text; other special tokens have no text."""
    message_interval_ms: int = 0
    """Least milliseconds between two deliveries of a choice's tokens; 0: one a round."""
    unpaid: int = 0
    """Number of tokens in `have` that no record shows as generated for this session."""

    @property
    def given(self) -> frozenset[str]:
        """Names of the sources inside verifiers that have a part of this request to draft from."""
        asked = self.speculation
        parts = {PREDICTION: asked.prediction, REFERENCES: asked.references, GRAMMAR: self.grammar}
        return frozenset(name for name, part in parts.items() if part)

    @property
    def tokens_read(self) -> int:
        """Number of tokens that the request costs its key when it is read: prompt, and unpaid `have`."""
        return len(self.ids) + self.unpaid

    @property
    def keys(self) -> tuple[SessionKey, ...]:
        """Session keys of all choices."""
        return tuple(self.key._replace(choice=choice) for choice in range(self.choices))

    @property
    def mark(self) -> int:
        """A 64-bit hash of seed and prompt, never 0.

        The same request has the same mark wherever and however often a client sends it; another request of
        the session hardly ever has it. Epochs cannot tell the two apart where clocks differ.
        """
        marked = (self.seed, len(self.ids), *self.ids[-MARKED_TOKENS:])
        return int.from_bytes(blake2b(pack(f"<{len(marked)}Q", *marked), digest_size=8).digest()) or 1

    def seed_of(self, choice: int) -> int:
        """The sampling seed of one choice."""
        return derive(self.seed, choice)
