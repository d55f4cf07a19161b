"""One followed session: where it stands, and what is sent of what was found."""

from collections.abc import Callable, Sequence

import pytest

from outrider.source.events import DecodingRequest, Follow
from outrider.source.followed import FollowedIds, SourceProfile
from outrider.wire.codec import SessionKey
from retrieval_service.joint_tree import FoundTrie
from retrieval_service.ranking import DraftShape
from retrieval_service.session import RetrievalSession
from retrieval_service.trie import counted
from retrieval_service.trust import TrustBook
from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash

SHAPE = DraftShape(nodes=8, depth=4, floor=0.01)


def found(*continuations: tuple[int, ...], memory: str = "corpus", match_length: int = 8) -> FoundTrie:
    trie = counted(continuations, match_length, 64)
    assert trie is not None
    return FoundTrie(memory, trie)


def session_of(request: DecodingRequest) -> RetrievalSession:
    ids = FollowedIds(request.ids, request.vocabulary_size, SourceProfile("retrieval", "retrieval"))
    follow = Follow(0, 1, SessionKey("t", "s"), request)
    return RetrievalSession(follow, ids, SHAPE, TrustBook().session("t"), None)


@pytest.fixture
def session(request_for: Callable[..., DecodingRequest]) -> RetrievalSession:
    return session_of(request_for([4, 5, 6]))


def only(fragments: Sequence[Fragment]) -> Fragment:
    (fragment,) = fragments
    return fragment


def grown(session: RetrievalSession, *tokens: int) -> None:
    ids = [*session.ids.array.tolist(), *tokens]
    session.commit(session.ids.extend(len(session.ids), tokens, prefix_hash(ids)))


def test_a_fragment_says_where_it_stands_and_whose_it_is(session: RetrievalSession) -> None:
    fragment = only(session.draft({2: found((7, 8))}))
    assert (fragment.source, fragment.epoch, fragment.base) == (2, 7, 3)
    assert fragment.prefix_hash == prefix_hash([4, 5, 6])
    assert fragment.tokens == (7, 8)


def test_the_verifier_accepts_what_is_drafted_after_progress(session: RetrievalSession) -> None:
    pool = DraftPool([4, 5, 6], epoch=7, vocabulary_size=1000, limit=500)
    assert pool.offer(only(session.draft({1: found((7, 8), (7, 9))}))).kept == 3
    grown(session, 7)
    pool.commit([7])
    offer = pool.offer(only(session.draft({1: found((8, 1), (9, 2))})))
    assert (offer.kept, offer.duplicate) == (2, 2)


def test_what_was_sent_already_is_not_sent_again(session: RetrievalSession) -> None:
    assert session.draft({1: found((7, 8, 9))})
    assert not session.draft({1: found((7, 8, 9))})
    assert session.draft({2: found((7, 8, 9))}), "under another name it is another offer"
    assert session.draft({1: found((7, 8, 9))})
    grown(session, 7)
    assert not session.draft({1: found((8, 9))}), "the rest of it is there"
    assert only(session.draft({1: found((8, 9, 10))})).tokens == (8, 9, 10)


def test_nothing_is_drafted_outside_the_vocabulary_or_past_the_limit(
    request_for: Callable[..., DecodingRequest],
) -> None:
    session = session_of(request_for([4, 5], limit=5, vocabulary_size=10))
    fragment = only(session.draft({1: found((6, 7, 8), (99, 7), (6, 50))}))
    assert fragment.tokens == (6, 7)
    grown(session, 6, 7)
    assert not session.wants_drafts
    assert not session_of(request_for([4], node_limit=0)).wants_drafts


def test_a_session_that_wants_few_nodes_gets_few(request_for: Callable[..., DecodingRequest]) -> None:
    session = session_of(request_for([4], node_limit=2))
    fragments = session.draft({1: found((5, 6, 7), (8, 9)), 2: found((8, 9), memory="past")})
    assert sum(map(len, fragments)) == 2


def test_memories_draft_one_tree_whose_nodes_count_for_one_of_them(session: RetrievalSession) -> None:
    fragments = session.draft(
        {1: found((7, 8, 1), match_length=3), 2: found((7, 8, 2), memory="past", match_length=9)}
    )
    nodes = sorted((fragment.source, token) for fragment in fragments for token in fragment.tokens)
    assert nodes == [(1, 1), (2, 2), (2, 7), (2, 8)], "the longer match has the larger part"
    pool = DraftPool([4, 5, 6], epoch=7, vocabulary_size=1000, limit=500)
    offers = [pool.offer(fragment) for fragment in fragments]
    assert sum(offer.kept for offer in offers) == 4
    assert not pool.unanchored
    tree = pool.best_tree(8)
    assert set(zip(tree.tokens, tree.parents, strict=True)) == {(7, -1), (8, 0), (2, 1), (1, 1)}


def test_memories_that_agree_promise_more_than_either(request_for: Callable[..., DecodingRequest]) -> None:
    def promised(*names: str) -> float:
        session = session_of(request_for([4, 5, 6]))
        drafted = {
            source: found((7,), memory=name, match_length=2) for source, name in enumerate(names, start=1)
        }
        return only(session.draft(drafted)).survival[0]

    assert promised("corpus", "past") > max(promised("corpus"), promised("past")) + 0.1


def test_what_the_session_says_itself_confirms_and_is_not_drafted(
    request_for: Callable[..., DecodingRequest],
) -> None:
    def promised(ids: list[int]) -> float:
        fragment = only(session_of(request_for(ids)).draft({1: found((7,), (9,), match_length=1)}))
        assert set(fragment.tokens) == {7, 9}
        return fragment.survival[fragment.tokens.index(7)]

    assert promised([5, 6, 7, 1, 5, 6]) > promised([1, 2, 3, 4, 5, 6])
    repeated = session_of(request_for([5, 6, 8, 1, 5, 6]))
    assert all(8 not in one.tokens for one in repeated.draft({1: found((7,), match_length=1)}))


def test_a_memory_that_is_wrong_in_a_session_gives_way(request_for: Callable[..., DecodingRequest]) -> None:
    session = session_of(request_for([4, 5, 6]))

    def promised() -> float:
        fragments = session.draft({1: found((7,), match_length=5), 2: found((8,), memory="past")})
        return next(one.survival[one.tokens.index(7)] for one in fragments if 7 in one.tokens)

    before = promised()
    for token in range(20, 40):
        grown(session, 8)
        grown(session, token)
        after = promised()
    assert after < before / 2
