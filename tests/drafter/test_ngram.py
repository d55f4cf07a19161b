"""A drafter that counts n-grams: its probabilities, its bounds, and what it drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from drafter_service.draft_tree import Growth
from drafter_service.drafters import load
from drafter_service.drafters.ngram import NgramCache, NgramDrafter
from drafter_service.ngram_counts import NgramCounts
from drafter_service.session import PassRows
from drafter_service.settings import DrafterSettings
from outrider.tokens import TokenTable
from speculative.errors import InvalidRequest
from speculative.hashing import prefix_hash
from tests.conftest import writing_tokenizer
from tests.drafter.support.fake_drafter import make_request, report, session_of

TOKENS = TokenTable.from_json(writing_tokenizer().to_str())
TEXT = "the cat sat on the mat, the dog sat on the rug; " * 4
MIB = 2**20


def counted(ids: list[int], most_bytes: int = MIB, width: int = 10) -> NgramCounts:
    return NgramCounts(np.array(ids, dtype=np.uint32), width, most_bytes)


def test_probabilities_add_up_to_one_after_any_context() -> None:
    counts = counted([1, 2, 3, 1, 2, 4, 1, 2, 3, 5])
    for context in ([], [1], [1, 2], [9, 1, 2], [7, 7, 7], [2, 3, 1]):
        assert np.exp(counts.logprobs(context).astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_the_interpolation_is_that_of_witten_and_bell() -> None:
    """Worked by hand: after 1 came 2 three times; before, single tokens with one added to each count."""
    counts = counted([1, 2, 1, 2, 1, 2, 4])
    single = (3 + 1) / (7 + 10)
    assert np.exp(counts.logprobs([1])[2]) == pytest.approx(3 / 4 + 1 / 4 * single, rel=1e-5)
    assert np.exp(counts.logprobs([8])[2]) == pytest.approx(single, rel=1e-5)
    # After 2 came 1 twice and 4 once; after 1, 2 the same; after 2, 1, 2 each of them once.
    one = single
    for hits, total in ((2, 3), (2, 3), (1, 2)):
        one = hits / (total + 2) + 2 / (total + 2) * one
    assert np.exp(counts.logprobs([2, 1, 2])[1]) == pytest.approx(one, rel=1e-5)


def test_a_longer_context_decides_and_an_unseen_one_backs_off() -> None:
    counts = counted([1, 2, 3, 4, 2, 5, 4, 2, 5])
    assert counts.logprobs([1, 2]).argmax() == 3
    assert counts.logprobs([4, 2]).argmax() == 5
    assert counts.logprobs([9, 2]).argmax() == 5


def test_tables_keep_to_their_memory_and_lose_the_rarest_contexts_first() -> None:
    chance = np.random.default_rng(0)
    ids = [*chance.integers(10, 500, 4000).tolist(), *[1, 2, 3] * 50]
    for most_bytes in (600, 6000, 60_000):
        counts = counted(ids, most_bytes, 500)
        assert counts.nbytes <= most_bytes
        assert counts.logprobs([1]).argmax() == 2
    assert counted(ids, 60_000, 500).nbytes > 20_000


def test_a_text_shorter_than_a_context_is_counted_as_far_as_it_goes() -> None:
    assert counted([3]).logprobs([3]).argmax() == 3
    assert counted([3, 4]).logprobs([3]).argmax() == 4


def test_a_cache_follows_commits_as_a_models_does() -> None:
    cache = NgramCache()
    cache.add(PassRows([5, 6, 7], [-1, 0, 1], [2]))
    assert cache.commit([0, 1, 2]) == [-1, -1, -1]
    assert cache.add(PassRows([8, 9, 10, 11], [-1, -1, 0, 2], [])) == 0
    assert cache.context(3, 3) == [8, 10, 11]
    assert cache.context(1, 3) == [6, 7, 9]
    assert cache.commit([0]) == [-1, -1, 0, 1]
    assert cache.ids == [5, 6, 7, 8]
    assert cache.context(1, 4) == [7, 8, 10, 11]
    cache.length = 2
    cache.drop_nodes()
    assert (cache.ids, cache.context(-1, 3)) == ([5, 6], [5, 6])


def settings(tiny_writer: Path, *texts: Path) -> DrafterSettings:
    return DrafterSettings(model=str(tiny_writer), drafter="ngram", ngram_text=tuple(map(str, texts)))


def test_it_drafts_what_its_texts_say(
    tiny_writer: Path, tmp_path: Path, one_pass: Callable[..., int]
) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    drafter = load(settings(tiny_writer, tmp_path / "a.txt"))
    assert isinstance(drafter, NgramDrafter)
    ids = TOKENS.encode("the dog sat on the rug; the cat", add_special=False)
    request = make_request(ids[:20], vocabulary_size=TOKENS.size)
    growth = Growth(children=2, scale=0.65, floor=0.05, depth=6)
    session = session_of(request, drafter.open(0), drafter.abilities, growth)
    right = 0
    while len(session.ids) < len(ids):
        for _ in range(6):
            one_pass(drafter, session)
            session.take_fragments()
        best = max(session._tree.root.children.values(), key=lambda child: child.survival)
        right += best.token == ids[len(session.ids)]
        at = len(session.ids)
        report(session, at, ids[at : at + 1], prefix_hash(ids[: at + 1]))
    assert right >= len(ids) - 20 - 3
    assert drafter.cached_tokens >= 20
    drafter.close(session.cache)
    assert drafter.cached_tokens == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "give --ngram-text"), ("", "there is no text in"), (b"\xff\xfe", "cannot be read")],
)
def test_what_cannot_be_counted_is_refused(
    tiny_writer: Path, tmp_path: Path, text: str | bytes | None, says: str
) -> None:
    path = tmp_path / "a.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidRequest, match=says):
        load(settings(tiny_writer, *([] if text is None else [path])))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ngram_text": ("a.txt",)}, "ngram_text is only for drafter = ngram, but drafter is causal_lm"),
        ({"drafter": "ngram", "skip": ("3",)}, "skip cannot be used with drafter = ngram"),
        ({"drafter": "ngram", "exit_layer": 2}, "exit_layer cannot be used with drafter = ngram"),
    ],
)
def test_a_setting_of_another_kind_of_drafter_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        DrafterSettings(model="m", **given)


def test_what_is_held_can_be_counted_while_sessions_come(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = NgramDrafter("counts", TOKENS, counted([1, 2, 3]))
    drafter.open(0)
    monkeypatch.setattr(NgramCache, "length", property(lambda cache: len(drafter.open(0).ids)))
    assert drafter.cached_tokens == 0
