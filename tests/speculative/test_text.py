from hypothesis import example, given
from hypothesis import strategies as st

from speculative.stop import FinishReason, StopChecker, cut_at_stop
from speculative.text import TextStream

PIECES = [
    b"", b"a", b"b", b"ab", b"\n", b"</s", b">", "é".encode()[:1], "é".encode()[1:],
    "🙂".encode()[:2], "🙂".encode()[2:], b"\xff", b"\xed\xa0\x80", b"\xf0\x9f", b"hello ", "日本".encode(),
]  # fmt: skip
STOPS = [b"ab", b"b\n", b"</s>", "é".encode(), b"aab", "日本".encode(), b"hello hello"]


def stream(*stops: bytes) -> TextStream:
    return TextStream(PIECES.__getitem__, stops)


def test_half_a_character_waits_for_the_other_half() -> None:
    text = stream()
    assert text.push([1, 7]) == "a"
    assert text.push([8]) == "é"
    assert text.finish(FinishReason.LENGTH) == ""


def test_half_a_character_at_the_end_is_replaced() -> None:
    text = stream()
    assert text.push([1, 9]) == "a"
    assert text.finish(FinishReason.LENGTH) == "�"


def test_what_may_begin_a_stop_string_waits() -> None:
    text = stream(b"</s>")
    assert text.push([1, 5]) == "a"
    assert text.push([1]) == "</sa"
    assert text.push([5]) == ""
    assert text.finish(FinishReason.LENGTH) == "</s"


def test_a_stop_string_and_what_follows_it_are_left_out() -> None:
    text = stream(b"</s>")
    assert text.push([1, 5, 6, 1, 1]) == "a"
    assert text.push([1]) == ""
    assert text.finish(FinishReason.STOP) == ""


def test_of_stop_strings_completed_by_one_id_the_first_to_begin_is_cut() -> None:
    text = stream(b"llo ", b"hello")
    assert text.push([1, 14]) == "a"


def whole(ids: list[int], stops: list[bytes]) -> str:
    """The definition: the bytes up to the first completed stop string, decoded at once."""
    for count in range(1, len(ids) + 1):
        data = b"".join(PIECES[token] for token in ids[:count])
        starts = [data.find(stop) for stop in stops if stop in data]
        if starts:
            return data[: min(starts)].decode("utf-8", "replace")
    return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=14),
)
@example(ids=[13, 1], stops=[], cuts=[1, 1])
@example(ids=[9, 3, 10], stops=[b"ab"], cuts=[1, 1, 1])
@example(ids=[1, 1, 2], stops=[b"aab"], cuts=[1, 1, 1])
def test_any_chunking_reads_as_the_whole(ids: list[int], stops: list[bytes], cuts: list[int]) -> None:
    text = stream(*stops)
    pieces, start = [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(text.push(ids[start : start + size]))
        start += size
        assert "".join(pieces) == whole(ids, stops)[: len("".join(pieces))]
    assert "".join(pieces) + text.finish(FinishReason.LENGTH) == whole(ids, stops)


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=10),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
)
@example(ids=[1, 2, 4], stops=[b"ab", b"b\n"], min_tokens=3)
def test_stop_strings_completed_too_early_are_text(
    ids: list[int], stops: list[bytes], min_tokens: int
) -> None:
    """Where a request ends and what it reads as follow from the same rule, written out here."""

    def completed(count: int) -> list[int]:
        before, data = (b"".join(PIECES[token] for token in ids[:n]) for n in (count - 1, count))
        places = [
            (at, at + len(stop)) for stop in stops for at in range(len(data)) if data.startswith(stop, at)
        ]
        return [start for start, end in places if end > len(before)]

    ends = [count for count in range(max(1, min_tokens), len(ids) + 1) if completed(count)]
    whole = b"".join(PIECES[token] for token in ids)[: min(completed(ends[0])) if ends else None]
    stop_checker = StopChecker(frozenset(), 1000, tuple(stops), PIECES.__getitem__, (0,), 1, min_tokens)
    committed, reason = cut_at_stop(stop_checker, ids)
    assert (len(committed), reason) == ((ends[0], FinishReason.STOP) if ends else (len(ids), None))
    text = TextStream(PIECES.__getitem__, tuple(stops), min_tokens)
    assert text.push(committed) + text.finish() == whole.decode("utf-8", "replace")


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=14),
    stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
)
def test_text_and_commit_agree_about_stop_strings(ids: list[int], stops: list[bytes]) -> None:
    end = StopChecker(frozenset(), 1000, tuple(stops), PIECES.__getitem__, (0,), 1)
    committed, reason = cut_at_stop(end, ids)
    assert whole(list(committed), stops) == whole(ids, stops)
    assert (reason is FinishReason.STOP) == any(
        stop in b"".join(PIECES[token] for token in ids) for stop in stops
    )
