"""Counting continuations gives what counting every node and keeping the most counted gives."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from retrieval_service.trie import counted

Path = tuple[int, ...]
FEW = st.lists(st.lists(st.integers(0, 3), max_size=6).map(tuple), max_size=40)


def most_counted(rows: list[Path], limit: int) -> list[tuple[Path, int]]:
    """Paths and counts, the most counted first; ties by length, the parent's place, the id."""
    counts = Counter(row[:end] for row in rows for end in range(1, len(row) + 1))
    chosen: list[Path] = []
    while len(chosen) < min(limit, len(counts)):
        waiting = [path for path in counts if path not in chosen and path[:-1] in [*chosen, ()]]
        chosen.append(min(waiting, key=lambda p: (-counts[p], len(p), place(p[:-1], chosen), p[-1])))
    return [(path, counts[path]) for path in chosen]


def place(path: Path, chosen: list[Path]) -> int:
    return chosen.index(path) if path else -1


@given(FEW, st.integers(-1, 30))
def test_the_most_counted_nodes_are_given_in_order(rows: list[Path], limit: int) -> None:
    found = counted(rows, 3, limit)
    expected = most_counted(rows, limit)
    if found is None:
        assert not expected
        return
    paths: list[Path] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert list(zip(paths, found.counts, strict=True)) == expected
    assert (found.occurrences, found.match_length) == (len(rows), 3)


@given(FEW, st.randoms(use_true_random=False))
def test_the_order_of_continuations_does_not_matter(rows: list[Path], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert counted(rows, 1, 12) == counted(shuffled, 1, 12)
