"""The law of served criteria, on real models: chi-square of the first two tokens over fixed seeds.

A drafter's worker and a verifier's core, over tiny models with different weights, are driven step by step, so
that the counts are the same on every machine of one numerics. Biases leave four ids, so that both models
spread over the same few tokens and the expected law is known exactly.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from drafter_service import drawing_session
from drafter_service.draft_tree import Growth
from drafter_service.drafters.causal_lm import CausalLMDrafter
from drafter_service.worker import DrafterWorker
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from outrider.source.events import DecodingRequest, Follow, Outgoing, Progress, SessionEnded
from outrider.source.followed import SourceProfile
from outrider.v1 import draft_source_pb2
from outrider.wire.codec import SessionKey, fragment_from_wire, fragment_to_wire
from speculative.acceptance import CRITERIA
from speculative.draft_law import DraftLaws, QuantisedLaw
from speculative.history import History
from speculative.implementations import load_implementation
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from speculative.stop import StopChecker
from verifier_service.engine.core import EngineCore, Idle, TargetPass
from verifier_service.engine.kv_cache import KVCache
from verifier_service.engine.messages import InFlight, Offers, Open
from verifier_service.engine.session import Session
from verifier_service.engine.stats import PassTimes
from verifier_service.engine.step import EngineLimits
from verifier_service.sessions.request import SessionRequest, SourceSet

PROMPT = (5, 9, 30)
FOUR = (7, 12, 19, 33)
PARAMS = SamplingParams(
    temperature=1.0, presence_penalty=0.7, logit_bias=tuple((token, 60.0) for token in FOUR)
)
NEW, AT_ONCE = 4, 50
SEEDS = 2000
"""Sessions of each criterion."""
BOUND = 44.3
"""Chi-square of 15 degrees of freedom exceeds this once in 10,000 sets of seeds."""


class Pair:
    """A drafter and a verifier without sockets and threads; what passes between them is the wire's bytes."""

    def __init__(self, target: PackedLM, drafter: PackedLM) -> None:
        self.target = target
        self._sent: list[tuple[int, bytes]] = []
        profile = SourceProfile("drafter", "tiny", max_length=target.max_length)
        self.worker = DrafterWorker(
            CausalLMDrafter(drafter), profile, self._publish, growth=Growth(), nodes_per_pass=64, chunk=512
        )
        limits = EngineLimits(wait_ms_most=0.0, adaptive=False, reuse_prefixes=False)
        self.core = EngineCore(KVCache(target.pool, False, limits.lease_s), limits)
        self.tokens: dict[int, list[int]] = {}
        self.accepted = 0

    def _publish(self, outgoing: dict[int, Outgoing]) -> None:
        for out in outgoing.values():
            self._sent += [
                (alias, fragment_to_wire(fragment, alias).SerializeToString())
                for alias, fragment in out.drafts
            ]

    def decode(self, criterion: Any, name: str, seeds: range) -> None:
        """Decodes a session for each seed, all of them in the same passes."""
        for seed in seeds:
            self._open(criterion, name, seed)
        while True:
            self._draft()
            begun = self.core.begin(float(self.core.totals.steps))
            if begun.report is not None:
                self._tell(begun.report.updates)
            if isinstance(begun, Idle):
                return
            assert isinstance(begun, TargetPass)
            self.core.finish(begun, self.target.forward(begun.sequences), PassTimes(0.0, 0.0))
            self._tell(self.core.collect().updates)

    def _open(self, criterion: Any, name: str, seed: int) -> None:
        key, limit = SessionKey("", f"{name}-{seed}"), len(PROMPT) + NEW
        request = SessionRequest(
            key, 1, PROMPT, len(PROMPT), limit, PARAMS, seed, (), None, 12, (), criterion=criterion
        )
        checker = StopChecker(frozenset(), limit, (), None, PROMPT, len(PROMPT))
        sources = SourceSet(("drafter",), frozenset(), frozenset({1}))
        self.tokens[seed] = []
        session = Session(seed, request, checker, self.target.vocabulary_size, sources)
        self.core.apply(Open(session), 0.0)
        width = self.target.vocabulary_size
        follow = DecodingRequest(
            1, PROMPT, len(PROMPT), limit, PARAMS, seed, 12, width, ("drafter",), criterion=name
        )
        self.worker.submit(Follow(0, seed, key, follow))

    def _draft(self) -> None:
        self.worker.take_in(wait=False)
        while self.worker.work():
            pass
        sent, self._sent = self._sent, []
        drafts = tuple(
            (alias, fragment_from_wire(draft_source_pb2.Draft.FromString(data), 1)) for alias, data in sent
        )
        if drafts:
            self.core.apply(Offers(drafts, 0.0, InFlight()), 0.0)

    def _tell(self, updates: Any) -> None:
        for update in updates:
            self.tokens[update.handle] += update.ids
            if update.finish is None:
                self.worker.submit(
                    Progress(0, update.handle, update.position, update.ids, update.prefix_hash)
                )
            else:
                self.accepted += update.finish.usage.accepted.get("drafter", 0)
                self.worker.submit(SessionEnded(0, update.handle))


def law_after(lm: PackedLM, path: tuple[int, ...]) -> NDArray[np.float64]:
    """The law of the token after the prompt and these tokens, as plain decoding has it."""
    table, ids = lm.table(16), [*PROMPT, *path]
    rows = lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), [len(ids) - 1])]).rows()
    lm.release(table)
    scores = process_logits(rows[0], PARAMS, History.of(ids, len(PROMPT)))
    weights = np.exp(scores - scores.max())
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def chi_square(pair: Pair) -> float:
    """Of the counts of the first two tokens, against plain decoding's law."""
    counts = Counter(tuple(tokens[:2]) for tokens in pair.tokens.values())
    total, found = len(pair.tokens), 0.0
    first = law_after(pair.target, ())
    for one in FOUR:
        second = law_after(pair.target, (one,))
        for other in FOUR:
            expected = total * float(first[one] * second[other])
            found += (counts.pop((one, other), 0) - expected) ** 2 / expected
    assert not counts, "no other token has a chance"
    return found


@pytest.fixture
def pair(tiny_llama: Path, tiny_llama_b: Path) -> Pair:
    return Pair(PackedLM.load(tiny_llama, threads=1), PackedLM.load(tiny_llama_b, threads=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ratio", "block", "multi_step", "k_seq", "without_replacement"])
def test_the_first_two_tokens_have_plain_decodings_law(pair: Pair, name: str) -> None:
    criterion = load_implementation(CRITERIA, name)()
    for start in range(0, SEEDS, AT_ONCE):
        pair.decode(criterion, name, range(start, start + AT_ONCE))
    assert all(len(tokens) == NEW for tokens in pair.tokens.values())
    assert pair.accepted > SEEDS // 2, "drafted tokens are accepted"
    assert chi_square(pair) < BOUND


class Lying(DraftLaws):
    """Draws from one law and says another: all weight but one part in 64 is moved to the likeliest id."""

    def after(self, logits: NDArray[np.float32], path: Any) -> QuantisedLaw:
        law = super().after(logits, path)
        sharp = np.full(len(law.ids), 1024)
        sharp[law.weights.argmax()] = 65_536 - 1024 * (len(law.ids) - 1)
        return _Drawn(law.ids, sharp) if len(law.ids) > 1 else law


class _Drawn(QuantisedLaw):
    """A sharp law to draw from that turns into an even one on the wire."""

    def draw(self, *args: Any, **others: Any) -> list[int]:
        drawn = QuantisedLaw.draw(self, *args, **others)
        even = np.full(len(self.ids), 65_536 // len(self.ids))
        even[0] += 65_536 - even.sum()
        object.__setattr__(self, "weights", even)
        return drawn


@pytest.mark.slow
def test_a_drafter_that_lies_about_q_is_seen_in_the_counts(pair: Pair, monkeypatch: Any) -> None:
    """What no verifier can see in one window: the law under such criteria rests on the drafter's honesty."""
    monkeypatch.setattr(drawing_session, "DraftLaws", Lying)
    for start in range(0, SEEDS // 4, AT_ONCE):
        pair.decode(load_implementation(CRITERIA, "ratio")(), "ratio", range(start, start + AT_ONCE))
    assert chi_square(pair) > 3 * BOUND
