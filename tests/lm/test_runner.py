"""The packed pass against transformers' own forward on every path.

Over random trees, commits and batch mates.
"""

import random
from collections.abc import Iterator

import pytest
import torch

from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.errors import Overloaded
from tests.lm.families import LENGTH, VOCABULARY, branched, eager_logits, logits_of, model_of, twin_of


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[PackedLM, torch.nn.Module]]:
    """A packed model and its untouched twin: plain, with sliding windows, and with attention written out."""
    model = model_of(request.param)
    twin = twin_of(model)
    lm = PackedLM(model)
    if request.param != "llama":
        lm.pack()
    yield lm, twin
    lm.pool.check_integrity()
    assert lm.pool.used_slots == 0


@pytest.fixture(scope="module")
def lm() -> PackedLM:
    return PackedLM(model_of("llama"))


class Driven:
    """A session driven at random, which knows the ids that every row stands for."""

    def __init__(self, lm: PackedLM, dice: random.Random) -> None:
        self._lm = lm
        self.table = lm.table()
        self.committed: list[int] = []
        self.nodes: list[int] = []
        self._dice = dice

    def sequence_rows(self, most: int) -> tuple[SequenceRows, list[list[int]]]:
        """Random rows below random nodes, and the ids up to each wanted row."""
        count = self._dice.randint(1, most)
        kept = self.table.nodes
        tokens = [self._dice.randrange(VOCABULARY) for _ in range(count)]
        if self._dice.random() < 0.3:
            parents = [kept + row - 1 for row in range(count)]
        else:
            parents = [self._dice.randrange(-1, kept + row) for row in range(count)]
        want = sorted(self._dice.sample(range(count), self._dice.randint(0, count)))
        self.nodes += tokens
        every = self.table.parents + parents
        paths = [self.committed + [self.nodes[at] for at in way(every, kept + row)] for row in want]
        return SequenceRows(self.table, tokens, parents, want), paths

    def branch(self) -> "Driven":
        """Another session with the same committed ids, which goes its own way."""
        other = Driven(self._lm, self._dice)
        other.table = branched(self._lm, self.table, self.committed)
        other.committed = list(self.committed)
        return other

    def commit(self) -> None:
        """Commits a random path, or nothing; sometimes drops what is left."""
        if self.table.nodes and self._dice.random() < 0.8:
            path = way(self.table.parents, self._dice.randrange(self.table.nodes))
            self.committed += [self.nodes[at] for at in path]
            renumbered = self.table.commit(path)
            self.nodes = [token for token, new in zip(self.nodes, renumbered, strict=True) if new >= 0]
        if self._dice.random() < 0.2:
            self.table.drop_nodes()
            self.nodes = []


def way(parents: list[int], node: int) -> list[int]:
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_see_what_their_own_paths_say(
    pair: tuple[PackedLM, torch.nn.Module], seed: int
) -> None:
    lm, twin = pair
    dice = random.Random(seed)
    sessions = [Driven(lm, dice) for _ in range(3)]
    others: list[list[int]] = []
    for turn in range(9):
        chosen = dice.sample(sessions, dice.randint(1, len(sessions)))
        sequences, paths = zip(*(session.sequence_rows(9 if turn else 20) for session in chosen), strict=True)
        found = logits_of(lm, sequences)
        expected = [eager_logits(twin, ids)[-1] for wanted in paths for ids in wanted]
        assert found.shape == (len(expected), VOCABULARY)
        if expected:
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
        for session in sessions:
            session.commit()
        if turn in (3, 5):
            sessions.append(dice.choice(sessions).branch())
        # Somebody takes the blocks behind, so that sessions grow in pieces.
        others += [lm.pool.take(1, session.table.blocks[-1]) for session in sessions if session.table.blocks]
        lm.pool.check_integrity([*others, *(session.table.blocks for session in sessions)])
    for session in sessions:
        lm.release(session.table)
    for blocks in others:
        lm.pool.blocks.give(blocks)


def in_pieces(lm: PackedLM, ids: list[int]) -> tuple[SlotTable, list[list[int]]]:
    """A table of these ids of which no two blocks lie together, and the blocks in between."""
    table = lm.table()
    between = []
    for low in range(0, len(ids), BLOCK):
        part = ids[low : low + BLOCK]
        lm.forward([SequenceRows(table, part, range(-1, len(part) - 1), [])])
        table.commit(range(len(part)))
        between.append(lm.pool.take(1, table.blocks[-1]))
    assert len(table.runs(0, len(ids))) == -(-len(ids) // BLOCK)
    return table, between


TREE = (-1, -1, 0, 0, 1, 2)


def test_a_session_in_pieces_one_that_adopted_them_and_a_branch_see_the_same(
    pair: tuple[PackedLM, torch.nn.Module],
) -> None:
    lm, twin = pair
    dice = random.Random(5)
    ids = [dice.randrange(VOCABULARY) for _ in range(3 * BLOCK + 7)]
    drafted = [dice.randrange(VOCABULARY) for _ in TREE]
    table, between = in_pieces(lm, ids)
    adopted = lm.table()
    adopted.adopt(table.blocks[:3])
    tables = [table, branched(lm, table, ids), adopted]
    rest = ids[3 * BLOCK :]
    sequences = [SequenceRows(each, drafted, TREE, range(len(TREE))) for each in tables[:2]]
    below = [parent if parent < 0 else parent + len(rest) for parent in TREE]
    parents = [*range(-1, len(rest) - 1), *(len(rest) - 1 if at < 0 else at for at in below)]
    want = range(len(rest), len(rest) + len(TREE))
    sequences.append(SequenceRows(adopted, [*rest, *drafted], parents, want))
    found = logits_of(lm, sequences).view(3, len(TREE), -1)
    for node in range(len(TREE)):
        path = [drafted[at] for at in way(list(TREE), node)]
        expected = eager_logits(twin, ids + path)[-1]
        for each in range(3):
            torch.testing.assert_close(found[each, node], expected, rtol=1e-4, atol=1e-4)
    for each in tables:
        lm.release(each)
    for blocks in between:
        lm.pool.blocks.give(blocks)


def prefilled(lm: PackedLM, ids: list[int]) -> SlotTable:
    table = lm.table()
    lm.forward([SequenceRows(table, ids, range(-1, len(ids) - 1), ())])
    table.commit(range(len(ids)))
    return table


def test_any_number_of_sessions_is_one_call_of_the_model(lm: PackedLM) -> None:
    tables = [prefilled(lm, [1, 2, 3]) for _ in range(5)]
    calls, rows = lm.forward_calls, lm.rows

    lm.forward([SequenceRows(table, [4, 5], [-1, 0], [1]) for table in tables])

    assert (lm.forward_calls - calls, lm.rows - rows) == (1, 10)
    for table in tables:
        lm.release(table)


def test_logits_are_float32_in_the_order_of_sequences_and_wanted_rows(lm: PackedLM) -> None:
    one, two = prefilled(lm, [1, 2]), prefilled(lm, [3])
    both = logits_of(lm, [SequenceRows(one, [4, 5], [-1, -1], [1, 0]), SequenceRows(two, [6], [-1], [0])])
    one.drop_nodes()
    two.drop_nodes()

    alone = [
        logits_of(lm, [SequenceRows(one, [5], [-1], [0])]),
        logits_of(lm, [SequenceRows(two, [6], [-1], [0])]),
    ]

    assert both.dtype is torch.float32
    torch.testing.assert_close(both[[0, 2]], torch.cat(alone), rtol=1e-5, atol=1e-5)
    for table in (one, two):
        lm.release(table)


def test_a_pass_from_which_nothing_is_wanted_gives_no_logits_and_keeps_its_rows(lm: PackedLM) -> None:
    table = lm.table()

    assert logits_of(lm, [SequenceRows(table, [1, 2, 3], [-1, 0, 1], [])]).shape == (0, VOCABULARY)
    assert table.nodes == 3
    lm.release(table)


def test_a_table_may_be_the_last_of_its_model_up_to_the_last_position(lm: PackedLM) -> None:
    table = prefilled(lm, [7] * (LENGTH - 1))

    assert logits_of(lm, [SequenceRows(table, [1], [-1], [0])]).isfinite().all()
    with pytest.raises(ValueError, match=f"position {LENGTH} is past the model's {LENGTH}"):
        lm.forward([SequenceRows(table, [1], [0], [0])])
    lm.release(table)


@pytest.mark.parametrize(
    ("tokens", "parents", "want", "message"),
    [
        ([], [], [], "0 tokens and 0 parents"),
        ([1, 2], [-1], [], "2 tokens and 1 parents"),
        ([1, 2], [1, -1], [], "row 0 has parent 1"),
        ([1], [-2], [], "row 0 has parent -2"),
        ([VOCABULARY], [-1], [], f"outside the vocabulary of {VOCABULARY}"),
        ([-1], [-1], [], "outside the vocabulary"),
        ([1], [-1], [1], "not one of the 1 rows"),
    ],
)
def test_a_sequence_that_contradicts_itself_is_refused_and_changes_nothing(
    lm: PackedLM, tokens: list[int], parents: list[int], want: list[int], message: str
) -> None:
    table = lm.table()
    calls = lm.forward_calls

    with pytest.raises(ValueError, match=message):
        lm.forward([SequenceRows(table, tokens, parents, want)])

    assert (table.nodes, lm.forward_calls) == (0, calls)
    lm.release(table)


def test_a_pass_without_sequences_is_refused(lm: PackedLM) -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        lm.forward([])


def test_a_table_twice_in_a_pass_is_refused(lm: PackedLM) -> None:
    table = lm.table()
    with pytest.raises(ValueError, match="twice"):
        lm.forward([SequenceRows(table, [1], [-1], []), SequenceRows(table, [2], [-1], [])])
    lm.release(table)


def test_room_is_refused_before_anything_has_changed() -> None:
    # A token's keys and values take 4 layers * 2 * 2 heads * 8 floats = 512 bytes: 2,048 fit a MiB.
    small = PackedLM(model_of("llama", max_position_embeddings=4096), kv_mb=1)
    table = small.table(reserve=2000)
    other = small.table()

    with pytest.raises(Overloaded):
        small.table(reserve=2000)
    with pytest.raises(Overloaded):
        small.forward([SequenceRows(table, [1], [-1], []), SequenceRows(other, [1] * 100, range(-1, 99), [])])

    assert (table.nodes, other.nodes, small.forward_calls) == (0, 0, 0)
    small.release(table)
    assert logits_of(small, [SequenceRows(other, [1] * 100, range(-1, 99), [99])]).isfinite().all()
    small.release(other)
    small.pool.check_integrity()
    assert small.pool.used_slots == 0


def test_a_model_that_was_taken_over_runs_packed_passes_only(lm: PackedLM) -> None:
    with pytest.raises(RuntimeError, match="packed passes only"):
        lm.model(input_ids=torch.tensor([[1]]))
