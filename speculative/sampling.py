"""From the logits at one position to the target's token; knows nothing of models or trees (`target_sampler`).

The order is bias, repetition, presence and frequency penalty, masks (the grammar's and that of min_tokens),
temperature, top-k, top-p, min-p. Cuts order tokens by (logprob descending, id ascending) and sum in float64.
Ties go to the lowest id. The fast paths compute the same float64 numbers as the long path.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from speculative.errors import EmptySupport
from speculative.history import History
from speculative.logprobs import TokenLogprob
from speculative.params import SamplingParams

Logits = NDArray[np.float32] | NDArray[np.float64]
Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]
Ids = NDArray[np.int64]


def process_logits(
    logits: Logits, params: SamplingParams, history: History, allowed: Mask | None = None
) -> NDArray[np.float64]:
    """Logits processed by the request's parameters: float64[V], log-probabilities up to a constant.

    Dropped ids are -inf. Greedy parameters apply bias, penalties and masks only.

    Args:
        logits: float32[V] or float64[V]; not changed.
        params: sampling parameters of the request.
        history: ids before the token to choose; read only where `params.reads_history`.
        allowed: bool[V], the ids that the request's grammar allows here; None: the request has no grammar.
            Where the grammar allows only ids that min_tokens holds back, these stay.

    Raises:
        EmptySupport: NaN or +inf among the logits, or no id left.
    """
    scores = logits.astype(np.float64)
    adjust(scores, params, history)
    held = holds_back(params, history)
    if allowed is not None:
        scores[~masked(allowed, params, held)] = -np.inf
    elif held:
        scores[id_array(params.stop_ids)] = -np.inf
    if not params.greedy:
        scores /= params.temperature
    highest = float(scores.max())
    _check_highest(highest)
    if params.has_cuts and not params.greedy:
        _cut(scores, highest, params)
    return scores


def sample_token(
    logits: Logits,
    params: SamplingParams,
    history: History,
    noise_row: NDArray[np.float64] | None,
    allowed: Mask | None = None,
) -> int:
    """The target's token: the argmax of `process_logits` plus noise, ties to the lowest id.

    Args:
        logits, params, history, allowed: as for `process_logits`.
        noise_row: noise of the token's position, float64[V]; not read when greedy.

    Raises:
        EmptySupport: as for `process_logits`.
    """
    plain = params.plain_logits and allowed is None
    if params.greedy:
        scores = logits if plain else process_logits(logits, params, history, allowed)
    else:
        assert noise_row is not None, f"temperature {params.temperature} needs the noise of the position"
        if plain and not params.has_cuts:
            scores = np.divide(logits, params.temperature, dtype=np.float64)
        else:
            scores = process_logits(logits, params, history, allowed)
        scores += noise_row
    # NumPy's argmax returns the first NaN where there is one, and the first of equals.
    token = int(scores.argmax())
    _check_highest(float(scores[token]))
    return token


def token_logprob(scores: Logits, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of `token` and of the `top` likeliest ids under the softmax of `scores`.

    `scores` are float32[V] or float64[V]. Ids at -inf have no probability and are never among the likeliest.
    """
    logprobs = scores.astype(np.float64)
    logprobs -= logprobs.max()
    logprobs -= math.log(float(np.exp(logprobs).sum()))
    top_ids: list[int] = []
    if top:
        # NumPy's partition takes a hundred times as long where many numbers are equal, as those cut are.
        finite = np.isfinite(logprobs)
        left = logprobs[finite]
        level = np.partition(left, -top)[-top] if top < len(left) else -np.inf
        among = np.flatnonzero(finite & (logprobs >= level))
        # A stable sort keeps equals in order of id.
        top_ids = among[np.argsort(-logprobs[among], kind="stable")[:top]].tolist()
    return TokenLogprob.of(float(logprobs[token]), top_ids, logprobs[top_ids].tolist())


def _check_highest(highest: float) -> None:
    if math.isfinite(highest):
        return
    if highest == -math.inf:
        raise EmptySupport("every logit is -inf, so there is no token to choose")
    raise EmptySupport(f"the logits hold {highest}; the model's numbers overflowed or its weights are broken")


def changed_ids(params: SamplingParams, history: History) -> list[Ids]:
    """The ids whose scores `adjust` changes, in several arrays that may repeat ids."""
    changed = [_bias_arrays(params.logit_bias)[0]] if params.logit_bias else []
    if params.repetition_penalty != 1:
        changed.append(history.seen())
    elif params.penalised:
        changed.append(history.generated()[0])
    return changed


def adjust(scores: Scores, params: SamplingParams, history: History, ids: Ids | None = None) -> None:
    """Adds the bias to `scores` and applies the penalties, in place.

    Args:
        scores: scores of all ids, or of `ids`.
        ids: ascending, with all of `changed_ids` among them.
    """
    if params.logit_bias:
        biased, biases = _bias_arrays(params.logit_bias)
        scores[_places(biased, ids)] += biases
    if params.repetition_penalty != 1:
        seen = _places(history.seen(), ids)
        before = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = np.where(before > 0, before / penalty, before * penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        generated, counts = history.generated()
        places = _places(generated, ids)
        scores[places] = (scores[places] - params.presence_penalty) - params.frequency_penalty * counts


def holds_back(params: SamplingParams, history: History) -> bool:
    """Whether `min_tokens` drops the ids that end the request at this place."""
    return params.holds_back and history.generated_count < params.min_tokens


def masked(allowed: Mask, params: SamplingParams, held: bool) -> Mask:
    """The grammar's ids that min_tokens does not hold back; all of the grammar's ids where there are none."""
    if not held:
        return allowed
    left = allowed.copy()
    left[id_array(params.stop_ids)] = False
    return left if left.any() else allowed


@lru_cache(maxsize=64)
def id_array(ids: tuple[int, ...]) -> Ids:
    """The ids as int64[n], made once."""
    return np.array(ids, dtype=np.int64)


@lru_cache(maxsize=64)
def _bias_arrays(logit_bias: tuple[tuple[int, float], ...]) -> tuple[Ids, Scores]:
    ids = np.array([token for token, _ in logit_bias], dtype=np.int64)
    return ids, np.array([bias for _, bias in logit_bias], dtype=np.float64)


def _places(wanted: Ids, ids: Ids | None) -> Ids:
    return wanted if ids is None else ids.searchsorted(wanted)


def trim(descending: Scores, highest: float, params: SamplingParams) -> Scores:
    """What top-p and min-p leave of the scores that top-k left: a beginning of `descending`."""
    if params.top_p < 1:
        mass = params.top_p * float(np.exp(descending - highest).sum())
        descending = _reach(mass, highest, (descending,))
    if params.min_p > 0:
        descending = descending[np.exp(descending - highest) >= params.min_p]
    return descending


def _cut(scores: Scores, highest: float, params: SamplingParams) -> None:
    """Sets the scores that top-k, top-p and min-p drop to -inf; each cut sees what the previous cut left."""
    if 0 < params.top_k < len(scores):
        left = next(first for first in _likeliest(scores, highest) if len(first) >= params.top_k)
        _keep(scores, trim(left[: params.top_k], highest, params))
        return
    if params.top_p < 1:
        mass = params.top_p * float(np.exp(scores - highest).sum())
        left = _reach(mass, highest, _likeliest(scores, highest))
        if params.min_p > 0:
            # The likeliest token is never cut, so shares of it are the same before and after renormalisation.
            left = left[np.exp(left - highest) >= params.min_p]
        _keep(scores, left)
    elif params.min_p > 0:
        scores[np.exp(scores - highest) < params.min_p] = -np.inf


def _likeliest(scores: Scores, highest: float) -> Iterator[Scores]:
    """The highest scores in descending order: longer and longer beginnings, at last all scores.

    A cut mostly keeps a few tokens, and sorting a few is far cheaper than sorting a vocabulary.
    """
    for band in (3.0, 6.0, 12.0):
        yield np.sort(scores[scores >= highest - band])[::-1]
    yield np.sort(scores)[::-1]


def _reach(mass: float, highest: float, beginnings: Iterable[Scores]) -> Scores:
    """The shortest beginning whose probability mass reaches `mass`; the token that crosses it stays."""
    for descending in beginnings:
        sums = np.cumsum(np.exp(descending - highest))
        if sums[-1] >= mass:
            break
    return descending[: np.searchsorted(sums, mass) + 1]


def _keep(scores: Scores, left: Scores) -> None:
    """Drops all ids but those of the scores in `left`; among equals of the lowest score, low ids stay."""
    kept = scores > left[-1]
    level = np.flatnonzero(scores == left[-1])
    kept[level[: len(left) - int(np.count_nonzero(kept))]] = True
    scores[~kept] = -np.inf
