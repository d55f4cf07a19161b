"""A session that names a criterion: what is accepted, what its usage says, what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.codec import SessionKey
from outrider.wire.criteria import criterion_of
from speculative.acceptance.blockwise import Blockwise
from speculative.acceptance.criterion import Criterion, Promise
from speculative.acceptance.specdec import SpecDec
from speculative.acceptance.typical import Typical
from speculative.digest import HostDigest
from speculative.errors import InvalidRequest
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.history import History
from speculative.params import SamplingParams
from speculative.sampling import process_logits
from speculative.stop import StopChecker
from verifier_service.engine.session import Session
from verifier_service.sessions.request import ServedModel, SessionRequest, SourceSet, request_from_wire

WIDTH, IDS = 16, (1, 2, 3)
SOURCES = SourceSet(("drafter",), proposers=frozenset(), remote=frozenset({1}))
SERVED = ServedModel("target", WIDTH, 64, 6)


def running(criterion: Criterion | None, params: SamplingParams, seed: int = 0) -> Session:
    """A session with a draft of the chain 4, 5, 6."""
    request = SessionRequest(
        key=SessionKey("", "s"),
        epoch=4,
        ids=IDS,
        prompt_length=len(IDS),
        limit=40,
        params=params,
        seed=seed,
        stops=(),
        time_left_s=None,
        node_limit=6,
        sources=(),
        criterion=criterion,
    )
    session = Session(1, request, StopChecker(frozenset(), 40, (), None, IDS, len(IDS)), WIDTH, SOURCES)
    session.offer(Fragment(1, 4, 3, prefix_hash(IDS), (4, 5, 6), (-1, 0, 1), (0.9, 0.8, 0.7)))
    return session


def rows_with(runner_up: float) -> np.ndarray:  # type: ignore[type-arg]
    """Logits of four rows: id 9 is the likeliest, the drafted id comes `runner_up` behind."""
    rows = np.full((4, WIDTH), -20.0, np.float32)
    rows[:, 9] = 0.0
    rows[range(3), [4, 5, 6]] = -runner_up
    return rows


def tokens_of(
    criterion: Criterion | None, params: SamplingParams, runner_up: float, seed: int = 0
) -> list[int]:
    session, rows = running(criterion, params, seed), rows_with(runner_up)
    step_rows = session.step_rows(3, 3)
    match = session.match(step_rows, session.target(lambda node: HostDigest(rows[node + 1])))
    session.commit(step_rows, match)
    usage = session.usage()
    assert usage.promise is (Promise.SAME_IDS if criterion is None else criterion.promise)
    assert usage.accepted == ({"drafter": len(match.path)} if match.path else {})
    return session.ids[len(IDS) :]


GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)


def test_a_relaxed_criterion_accepts_what_the_path_match_does_not() -> None:
    assert tokens_of(None, GREEDY, 0.5) == [9]
    assert tokens_of(SpecDec(beta=2, gap=1.0), GREEDY, 0.5) == [4, 5, 6, 9]
    assert tokens_of(SpecDec(beta=2, gap=1.0), GREEDY, 1.5) == [9]
    assert tokens_of(SpecDec(beta=1, gap=1.0), GREEDY, 0.5) == [9]
    assert tokens_of(Blockwise(top_k=2), GREEDY, 5.0) == [4, 5, 6, 9]


def test_typical_acceptance_judges_at_the_requests_temperature() -> None:
    """At temperature 0.5 the runner-up's share of 1.2 behind is 0.083: below epsilon, then above it."""
    kept = [tokens_of(Typical(epsilon=0.08, delta=1.0), SAMPLED, 1.2, seed)[:3] for seed in range(8)]
    assert kept == [[4, 5, 6]] * 8
    exact = [tokens_of(None, SAMPLED, 1.2, seed) for seed in range(8)]
    assert [tokens_of(Typical(epsilon=0.084, delta=1.0), SAMPLED, 1.2, seed) for seed in range(8)] == exact


def test_a_strict_criterion_gives_the_ids_of_the_path_match() -> None:
    """With sampling too: a criterion that accepts nothing of its own follows the target's own tokens."""
    for seed in range(20):
        plain = tokens_of(None, SAMPLED, 0.3, seed)
        assert tokens_of(Typical(epsilon=1.0, delta=1.0), SAMPLED, 0.3, seed) == plain


def test_penalties_count_the_path_to_each_node() -> None:
    params = SamplingParams(temperature=0.5, presence_penalty=1.0)
    session, rows = running(Typical(), params), rows_with(0.5)
    target = session.target(lambda node: HostDigest(rows[node + 1]))
    history = History.of([*IDS, 4], len(IDS))
    scores = process_logits(rows[1], params, history)
    weights = np.exp(scores - scores.max())
    assert target.probabilities(0, (4,)) == pytest.approx(weights / weights.sum())
    assert np.exp(target.log_probabilities(0, (4,))) == pytest.approx(weights / weights.sum())


def test_greedy_decoding_is_a_point_mass() -> None:
    target = running(None, GREEDY).target(lambda node: HostDigest(rows_with(0.5)[node + 1]))
    assert target.probabilities(-1, ())[9] == target.probabilities(-1, ()).sum() == 1


def opened(**changes: object) -> verifier_pb2.OpenRequest:
    message = verifier_pb2.OpenRequest(
        model="target",
        ids=IDS,
        prompt_length=3,
        limit=40,
        speculate=True,
        criterion=criterion_of({"typical": {}}),
    )
    message.key.session = "s"
    for name, value in changes.items():
        if isinstance(value, (bool, int)):
            setattr(message, name, value)
        else:
            getattr(message, name).CopyFrom(value)
    return message


def test_an_open_carries_its_criterion() -> None:
    assert request_from_wire(opened(), SERVED).criterion == Typical()
    plain = opened()
    plain.ClearField("criterion")
    request = request_from_wire(plain, SERVED)
    assert (request.criterion, request.promise) == (None, Promise.SAME_IDS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculate": False}, "the request takes none"),
        ({"node_limit": 0}, "the request takes none"),
        ({"grammar": common_pb2.Grammar(json_object=True)}, "beside a grammar"),
        ({"sampling": common_pb2.Sampling(temperature=0)}, "criterion.typical needs a temperature"),
        ({"criterion": common_pb2.Criterion()}, "criterion has no kind"),
        ({"criterion": criterion_of({"bild": {"rollback": -1}})}, "criterion.bild.rollback is -1; 0 to 100"),
    ],
)
def test_an_open_that_contradicts_its_criterion_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        request_from_wire(opened(**changes), SERVED)


def test_no_criterion_holds_where_the_ids_are_replayed() -> None:
    with pytest.raises(InvalidRequest, match="deterministic profile"):
        request_from_wire(opened(), replace(SERVED, replay_identical=True))
    with pytest.raises(InvalidRequest, match="deterministic profile"):
        request_from_wire(opened(recovered=True), replace(SERVED, replay_identical=True))
