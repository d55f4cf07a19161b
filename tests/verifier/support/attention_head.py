"""A batched proposer with a layer of attention of its own, of random weights, its keys and values in planes.

It computes in float32 on the CPU, so that what it drafts can be held against the same layer without planes.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from outrider.lm.features import LAST
from verifier_service.proposers.batched import (
    DraftAsk,
    DraftLevel,
    ProposedSession,
    ProposerNeeds,
    SeenPass,
)

LAYERS = (1, LAST)
HEADS, WIDTH = 2, 8
DEPTH = 3
BRANCHES = 2
LONGEST = 128

Ids = tuple[int, ...]
Said = list[tuple[int, ...]]
"""The ids that the layer finds likeliest, level by level."""


class AttentionLayer:
    """One layer of attention over (hidden states of position i - 1, token i), as a drafting head has it."""

    def __init__(self, vocabulary: int, hidden: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) / rows**0.5

        size = self.size = len(LAYERS) * hidden
        self._tokens = torch.randn(vocabulary, size, generator=generator)
        self._places = torch.randn(LONGEST, size, generator=generator)
        self._states = weights(size, size)
        self._queries, self._keys, self._values = (weights(size, HEADS * WIDTH) for _ in range(3))
        self._mixed = 4 * weights(HEADS * WIDTH, size)
        self._logits = weights(size, vocabulary)

    def pairs(self, before: Tensor, tokens: Sequence[int], first: int) -> Tensor:
        """The pairs of the positions from `first` on, [rows, size]; `before` has a row for each."""
        places = self._places[first : first + len(tokens)]
        return before @ self._states + self._tokens[list(tokens)] + places

    def keys_values(self, pairs: Tensor) -> list[Tensor]:
        """Keys and values of pairs, [heads, rows, width]."""
        return [self._by_head(pairs @ weights) for weights in (self._keys, self._values)]

    def after(self, pair: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The hidden states that the layer expects at the position of a pair that sees these."""
        query = self._by_head(pair[None] @ self._queries)
        seen = torch.softmax(query @ keys.transpose(1, 2) / WIDTH**0.5, -1) @ values
        return torch.tanh(pair + seen.transpose(0, 1).flatten(1)[0] @ self._mixed)

    def grow(self, before: Tensor, token: int, place: int, keys: Tensor, values: Tensor) -> Iterator[Ids]:
        """Ids after `token` at `place`, level by level; the likeliest of each is continued."""
        for depth in range(DEPTH):
            pair = self.pairs(before[None], [token], place + depth)
            more_keys, more_values = self.keys_values(pair)
            keys, values = torch.cat([keys, more_keys], 1), torch.cat([values, more_values], 1)
            before = self.after(pair[0], keys, values)
            likeliest = tuple((before @ self._logits).topk(BRANCHES).indices.tolist())
            token = likeliest[0]
            yield likeliest

    def fresh(self, ids: Sequence[int], features: Tensor) -> Said:
        """What the layer says after `ids`, without planes: `features` are those of all ids but the last."""
        states = features.transpose(0, 1).flatten(1)
        known = torch.cat([torch.zeros(1, self.size), states[:-1]])
        keys, values = self.keys_values(self.pairs(known, ids[:-1], 0))
        return list(self.grow(states[-1], ids[-1], len(ids) - 1, keys, values))

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), HEADS, WIDTH).transpose(0, 1)


class AttentionHead:
    """A BatchedProposer that drafts what its layer says, and beside it what `truth` says.

    Args:
        layer: its weights.
        truth: the token that follows these ids; drafted behind the layer's own, so that commits move rows.
    """

    needs = ProposerNeeds(layers=LAYERS, planes=((HEADS, WIDTH), (HEADS, WIDTH)))

    def __init__(self, layer: AttentionLayer, truth: Callable[[Ids], int | None] = lambda _: None) -> None:
        self._layer = layer
        self._truth = truth
        self._sessions: dict[int, ProposedSession] = {}
        self.said: list[tuple[Ids, Said]] = []
        """What the layer said, with the ids that it was said after."""
        self.written = 0
        """Number of pairs written."""

    def open(self, session: ProposedSession) -> None:
        assert session.planes is not None
        self._sessions[session.handle] = session

    def close(self, handle: int) -> None:
        del self._sessions[handle]

    @torch.inference_mode()
    def saw(self, seen: SeenPass) -> None:
        assert seen.features is not None
        for shown in seen.rounds:
            session = self._sessions[shown.handle]
            states = seen.features[:, list(shown.rows)].transpose(0, 1).flatten(1)
            assert (shown.before is None) == (shown.first == 0)
            before = torch.zeros(self._layer.size) if shown.before is None else shown.before.flatten()
            known = torch.cat([before[None], states[:-1]])
            tokens = session.ids[shown.first : shown.first + len(shown.rows)]
            assert session.planes is not None
            pairs = self._layer.pairs(known, tokens, shown.first)
            session.planes.write(shown.runs, self._layer.keys_values(pairs))
            self.written += len(tokens)

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftAsk]) -> Iterator[Sequence[DraftLevel | None]]:
        growing = [self._levels(ask) for ask in asks]
        for _ in range(DEPTH):
            yield [next(levels) for levels in growing]

    def _levels(self, ask: DraftAsk) -> Iterator[DraftLevel]:
        session = self._sessions[ask.handle]
        assert session.planes is not None
        assert ask.before is not None
        ids, said = tuple(session.ids), list[Ids]()
        self.said.append((ids, said))
        keys, values = session.planes.read(ask.runs)
        assert keys.shape == (HEADS, len(ids) - 1, WIDTH), "all tokens but the last are there"
        likeliest = self._layer.grow(ask.before.flatten(), ids[-1], len(ids) - 1, keys, values)
        own = true = -1
        count, path = 0, ids
        for level in likeliest:
            said.append(level)
            tokens, parents = list(level), [own] * BRANCHES
            right = self._truth(path)
            if right is not None and not (own == true and right in level):
                tokens, parents = [*level, right], [*parents, true]
            if right is not None:
                true = count + list(zip(tokens, parents, strict=True)).index((right, true))
                path = (*path, right)
            own = count
            count += len(tokens)
            yield DraftLevel(tuple(tokens), tuple(parents), (0.5 ** (1 + len(said)),) * len(tokens))
