"""One followed session: where it stands, and what is sent of what was found."""

from collections.abc import Callable

import pytest

from outrider.source.events import DecodingRequest, Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from retrieval_service.ranking import DraftShape
from retrieval_service.session import RetrievalSession
from retrieval_service.trie import CountedTrie, counted
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash

SHAPE = DraftShape(nodes=8, depth=4, floor=0.01)


def found(*continuations: tuple[int, ...]) -> CountedTrie:
    trie = counted(continuations, 8, 64)
    assert trie is not None
    return trie


def session_of(request: DecodingRequest) -> RetrievalSession:
    ids = FollowedIds(request.ids, request.vocabulary_size, SourceProfile("retrieval", "retrieval"))
    return RetrievalSession(Follow(0, 1, SessionKey("t", "s"), request), ids, SHAPE, None)


@pytest.fixture
def session(request_for: Callable[..., DecodingRequest]) -> RetrievalSession:
    return session_of(request_for([4, 5, 6]))


def sent(fragment: Fragment | None) -> Fragment:
    assert fragment is not None
    return fragment


def test_a_fragment_says_where_it_stands_and_whose_it_is(session: RetrievalSession) -> None:
    fragment = sent(session.draft(2, found((7, 8))))
    assert (fragment.source, fragment.epoch, fragment.base) == (2, 7, 3)
    assert fragment.prefix_hash == prefix_hash([4, 5, 6])
    assert fragment.tokens == (7, 8)


def test_the_verifier_accepts_what_is_drafted_after_progress(session: RetrievalSession) -> None:
    pool = DraftPool([4, 5, 6], epoch=7, vocabulary_size=1000, limit=500)
    assert pool.offer(sent(session.draft(1, found((7, 8), (7, 9))))).kept == 3
    assert session.ids.extend(3, [7], prefix_hash([4, 5, 6, 7]))
    pool.commit([7])
    offer = pool.offer(sent(session.draft(1, found((8, 1), (9, 2)))))
    assert (offer.kept, offer.duplicate) == (2, 2)


def test_what_was_sent_already_is_not_sent_again(session: RetrievalSession) -> None:
    trie = found((7, 8, 9))
    assert sent(session.draft(1, trie))
    assert session.draft(1, trie) is None
    assert sent(session.draft(2, trie)), "under another name it is another offer"
    session.ids.extend(3, [7], prefix_hash([4, 5, 6, 7]))
    assert session.draft(1, found((8, 9))) is None, "the rest of it is there"
    assert sent(session.draft(1, found((8, 9, 10)))).tokens == (8, 9, 10)


def test_nothing_is_drafted_outside_the_vocabulary_or_past_the_limit(
    request_for: Callable[..., DecodingRequest],
) -> None:
    session = session_of(request_for([4, 5], limit=5, vocabulary_size=10))
    fragment = sent(session.draft(1, found((6, 7, 8), (99, 7), (6, 50))))
    assert fragment.tokens == (6, 7)
    session.ids.extend(2, [6, 7], prefix_hash([4, 5, 6, 7]))
    assert not session.wants_drafts
    assert not session_of(request_for([4], node_limit=0)).wants_drafts


def test_a_session_that_wants_few_nodes_gets_few(request_for: Callable[..., DecodingRequest]) -> None:
    session = session_of(request_for([4], node_limit=2))
    assert len(sent(session.draft(1, found((5, 6, 7), (8, 9))))) == 2
