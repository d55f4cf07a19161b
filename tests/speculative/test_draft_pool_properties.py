"""The pool against a model that knows every prefix by its ids and looks everywhere."""

from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.draft_pool import DraftPool
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.tree import TokenTree

Path = tuple[int, ...]
TOKENS = 3
START: Path = (0, 1)


@dataclass(frozen=True)
class Sent:
    """A fragment and the prefix that its hash stands for."""

    prefix: Path
    fragment: Fragment

    def paths(self) -> list[tuple[Path, float]]:
        """Each node's whole path from position 0, and its survival given its parent."""
        found: list[tuple[Path, float]] = []
        f = self.fragment
        for token, parent, survival in zip(f.tokens, f.parents, f.survival, strict=True):
            above = self.prefix if parent < 0 else found[parent][0]
            before = 1.0 if parent < 0 else f.survival[parent]
            found.append(((*above, token), survival / before if survival < before else 1.0))
        return found


@st.composite
def sent(draw: st.DrawFn, truth: Path) -> Sent:
    """A fragment that leaves the truth anywhere, or nowhere."""
    kept = draw(st.integers(0, len(truth)))
    astray = draw(st.lists(st.integers(0, TOKENS - 1), max_size=2))
    prefix = (*truth[:kept], *astray)
    count = draw(st.integers(1, 5))
    follow = draw(st.booleans())
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    for node in range(count):
        parent = draw(st.integers(-1, node - 1)) if not follow else node - 1
        position = kept + node
        token = truth[position] if follow and not astray and position < len(truth) else None
        tokens.append(draw(st.integers(0, TOKENS - 1)) if token is None else token)
        parents.append(parent)
        before = 1.0 if parent < 0 else survival[parent]
        survival.append(round(before * draw(st.integers(0, 8)) / 8 * 255) / 255)
    source = draw(st.integers(1, 3))
    hash_ = prefix_hash(prefix)
    return Sent(
        prefix, Fragment(source, 1, len(prefix), hash_, tuple(tokens), tuple(parents), tuple(survival))
    )


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Path, list[Sent]]:
    truth = (*START, *draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=7)))
    return truth, draw(st.lists(sent(truth), max_size=8))


def expected_pending(committed: Path, limit: int, messages: list[Sent]) -> dict[Path, float]:
    """Paths beyond `committed` and their survival, by looking until nothing new is found."""
    known: dict[Path, float] = {}
    grown = True
    while grown:
        grown = False
        for message in messages:
            if message.prefix not in known and message.prefix != committed[: len(message.prefix)]:
                continue
            for path, given_parent in message.paths():
                if known.get(path, -1.0) < given_parent:
                    known[path] = given_parent
                    grown = True
    survival: dict[Path, float] = {}
    for path in sorted(known, key=len):
        below = path[: len(committed)] == committed and len(path) > len(committed)
        if below and len(path) < limit:
            survival[path] = known[path] * survival.get(path[:-1], 1.0)
    return survival


def tree_paths(committed: Path, tree: TokenTree) -> dict[Path, float]:
    return {
        (*committed, *(tree.tokens[n] for n in tree.path(node))): tree.survival[node]
        for node in range(len(tree))
    }


def play(truth: Path, messages: list[Sent], random: Random, limit: int, **caps: int) -> DraftPool:
    """Offers the messages in the given order with the commits of `truth` strewn in between."""
    pool = DraftPool(START, epoch=1, vocabulary_size=TOKENS, limit=limit, **caps)
    for message in messages:
        if random.random() < 0.5 and pool.length < len(truth):
            step = random.randint(1, len(truth) - pool.length)
            pool.commit(truth[pool.length : pool.length + step])
        offer = pool.offer(message.fragment)
        parts = (offer.kept, offer.stale, offer.unanchored, offer.duplicate, offer.refused)
        assert sum(parts) == len(message.fragment)
    pool.commit(truth[pool.length :])
    return pool


@settings(max_examples=400)
@given(sessions(), st.integers(0, 2**32), st.integers(0, 12))
def test_any_order_delay_and_duplication_gives_the_same_tree(
    session: tuple[Path, list[Sent]], seed: int, spare: int
) -> None:
    truth, messages = session
    limit = len(truth) + spare
    expected = expected_pending(truth, limit, messages)
    random = Random(seed)
    for _ in range(3):
        order = messages + random.sample(messages, random.randint(0, len(messages)))
        random.shuffle(order)
        pool = play(truth, order, random, limit)
        assert tree_paths(truth, pool.best_tree(1000)) == expected
        assert pool.drafted == len(expected)


@settings(max_examples=200)
@given(sessions(), st.integers(0, 2**32), st.integers(1, 10))
def test_the_best_n_nodes_are_the_n_of_largest_survival(
    session: tuple[Path, list[Sent]], seed: int, node_limit: int
) -> None:
    truth, messages = session
    expected = expected_pending(truth, 1000, messages)
    best = sorted(expected, key=lambda path: (-expected[path], len(path), prefix_hash(path)))[:node_limit]
    tree = play(truth, messages, Random(seed), 1000).best_tree(node_limit)
    assert set(tree_paths(truth, tree)) == set(best)
    for node, parent in enumerate(tree.parents):
        # Depth first: a node's subtree directly follows it, and likelier siblings come first.
        assert parent == node - 1 or parent in (-1, *tree.path(node - 1))
        earlier = [n for n in range(node) if tree.parents[n] == parent]
        assert all(tree.survival[n] >= tree.survival[node] for n in earlier)


@settings(max_examples=200)
@given(sessions(), st.integers(0, 2**32), st.integers(2, 6), st.integers(0, 2))
def test_bounds_hold_and_only_ever_lose_nodes(
    session: tuple[Path, list[Sent]], seed: int, node_cap: int, unanchored_cap: int
) -> None:
    truth, messages = session
    random = Random(seed)
    order = [message for message in messages * 2 if random.random() < 0.8]
    random.shuffle(order)
    pool = play(truth, order, random, 1000, node_cap=node_cap, unanchored_cap=unanchored_cap)
    found = tree_paths(truth, pool.best_tree(1000))
    assert set(found) <= set(expected_pending(truth, 1000, order))
    assert pool.drafted == len(found) <= node_cap
    assert pool.unanchored <= unanchored_cap * 3
