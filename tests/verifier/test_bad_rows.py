"""One session of a full batch whose rows are bad, huge or many: the others decode as if it were not there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_driver import GREEDY, SAMPLED, CoreDriver
from ngram_lm import NgramLM
from numpy.typing import NDArray

from outrider.lm.runner import PackedLM
from outrider.wire.codec import CommittedCode
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.params import SamplingParams
from speculative.stop import FinishReason
from tests.lm.families import model_of
from verifier_service.engine.messages import InFlight, Observe, Offers, Sources
from verifier_service.engine.session import Session
from verifier_service.sessions.request import SourceSet

OTHERS = 31
NEW = 6
FAR = SourceSet(("far",), frozenset(), frozenset({1}))
TOP_P = SamplingParams(temperature=0.7, top_p=0.9)
PARAMS = (GREEDY, SAMPLED, TOP_P)


class Broken(NgramLM):
    """Its rows after the id 9 are as a test wants."""

    row: NDArray[np.float32] | None = None

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        if self.row is not None and context[-1] == 9:
            return self.row
        row = super().logits(context).copy()
        row[9] = -100.0  # no other session comes there by itself
        return row


def prompts() -> list[tuple[int, ...]]:
    return [(1 + at % 7, 10 + at % 5, 16 + at % 8) for at in range(OTHERS)]


def opened(driver: CoreDriver) -> list[Session]:
    return [
        driver.open(prompt, NEW, PARAMS[at % 3], seed=at, node_limit=8) for at, prompt in enumerate(prompts())
    ]


def alone(make: Any = Broken) -> list[list[int]]:
    driver = CoreDriver(make(), most_running=64)
    sessions = opened(driver)
    driver.run()
    return [driver.generated(session) for session in sessions]


NAN = np.full(32, np.nan, np.float32)
ONE_NAN = np.where(np.arange(32) == 31, np.float32(np.nan), np.float32(1.0))
NOTHING = np.full(32, -np.inf, np.float32)
INFINITE = np.where(np.arange(32) == 3, np.float32(np.inf), np.float32(0.0))


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "top-p"])
@pytest.mark.parametrize("row", [NAN, ONE_NAN, NOTHING, INFINITE], ids=["NaN", "one NaN", "all -inf", "inf"])
def test_a_session_whose_logits_are_no_numbers_ends_alone(
    row: NDArray[np.float32], params: SamplingParams
) -> None:
    target = Broken()
    target.row = row
    driver = CoreDriver(target, most_running=64)
    bad = driver.open((2, 9), NEW, params)
    sessions = opened(driver)
    driver.run()
    assert [driver.generated(session) for session in sessions] == alone()
    assert len(driver.passes[0].parts) == OTHERS + 1
    finish = driver.finish_of(bad)
    assert (finish.reason, finish.code) == (FinishReason.ERROR, CommittedCode.BUG)
    assert "EmptySupport" in finish.message
    assert all(driver.finish_of(session).reason is FinishReason.LENGTH for session in sessions)


@pytest.mark.parametrize("row", [NAN, NOTHING], ids=["NaN", "all -inf"])
def test_a_bad_row_that_only_a_draft_reaches_ends_nothing(row: NDArray[np.float32]) -> None:
    target = Broken()
    target.row = row
    driver = CoreDriver(target)
    session = driver.open((1, 2, 3), NEW, GREEDY)
    driver.core.apply(Sources(session.handle, FAR), driver.now)
    driver.core.apply(Observe(session.handle, 1, 4), driver.now)
    while driver.step():
        fragment = Fragment(1, 1, len(session.ids), prefix_hash(session.ids), (9, 4), (-1, 0), (0.9, 0.8))
        driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(put=1)), driver.now)
    plain = CoreDriver(Broken())
    expected = plain.open((1, 2, 3), NEW, GREEDY)
    plain.run()
    assert driver.generated(session) == plain.generated(expected)
    assert driver.finish_of(session).reason is FinishReason.LENGTH


def decoded_by_a_model_of_a_bad_embedding(
    bad: int, prompt: tuple[int, ...], params: SamplingParams, *, drafts: bool
) -> tuple[list[int], FinishReason, int]:
    """Ids, how the session ended, and the number of passes, with the id of no numbers as each draft."""
    model = model_of("llama", max_position_embeddings=128, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    driver = CoreDriver(PackedLM(model))
    session = driver.open(prompt, NEW, params, remote=("far",))
    while driver.step():
        if drafts:
            fragment = Fragment(
                1, 1, len(session.ids), prefix_hash(session.ids), (bad, 4), (-1, -1), (0.9, 0.8)
            )
            driver.core.apply(Offers(((session.handle, fragment),), driver.now, InFlight(put=1)), driver.now)
    driver.core.kv.check()
    return driver.generated(session), driver.finish_of(session).reason, len(driver.passes)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafted_token_whose_keys_are_no_numbers_spoils_no_row_beside_it(params: SamplingParams) -> None:
    prompt = (1, 2, 3)
    usual, _, _ = decoded_by_a_model_of_a_bad_embedding(60, prompt, params, drafts=False)
    bad = next(id_ for id_ in range(60) if id_ not in (*usual, *prompt))
    ids, reason, passes = decoded_by_a_model_of_a_bad_embedding(bad, prompt, params, drafts=True)
    assert (ids, reason) == (usual, FinishReason.LENGTH)
    assert passes == NEW + 1, "one pass was in vain, and no further draft was listened to"


def test_a_text_that_has_such_a_token_ends_with_drafts_as_without() -> None:
    ends = [
        decoded_by_a_model_of_a_bad_embedding(9, (1, 9, 3), GREEDY, drafts=drafts) for drafts in (False, True)
    ]
    assert ends == 2 * [([], FinishReason.ERROR, 1)]


def test_256_nodes_of_one_session_beside_31_others_change_no_id() -> None:
    driver = CoreDriver(Broken(), most_running=64)
    wide = driver.open((1, 2, 3), NEW, SAMPLED, seed=77, node_limit=256)
    driver.core.apply(Sources(wide.handle, FAR), driver.now)
    driver.core.apply(Observe(wide.handle, 1, 32), driver.now)
    sessions = opened(driver)
    offered = 0
    while driver.step():
        offered += 1
        base = prefix_hash(wide.ids)
        tokens = tuple(range(16)) * 15
        parents = tuple([-1] * 16 + [at // 16 for at in range(224)])
        survival = tuple([0.9] * 16 + [0.5] * 224)
        # A draft has at most 255 nodes, so a second one brings roots of its own, more than still fit.
        first = Fragment(1, 1, len(wide.ids), base, tokens, parents, survival)
        roots = tuple(range(16, 32))
        second = Fragment(1, 1, len(wide.ids), base, (*roots, 0, 1), (*[-1] * 16, 0, 0), (0.4,) * 18)
        offers = tuple((wide.handle, each) for each in (first, second))
        driver.core.apply(Offers(offers, driver.now, InFlight(put=1)), driver.now)
    assert max(len(begun.parts[0][1].tree) for begun in driver.passes) == 256
    assert [driver.generated(session) for session in sessions] == alone()
    plain = CoreDriver(Broken())
    expected = plain.open((1, 2, 3), NEW, SAMPLED, seed=77)
    plain.run()
    assert driver.generated(wide) == plain.generated(expected)


def test_a_vocabulary_of_262_144_decodes_with_and_without_drafts_alike() -> None:
    def decoded(sources: tuple[str, ...]) -> list[list[int]]:
        driver = CoreDriver(NgramLM(262_144), most_running=64)
        sessions = [
            driver.open((1, 2, 262_143), NEW, params, seed=at, sources=sources)
            for at, params in enumerate(PARAMS)
        ]
        driver.run()
        return [driver.generated(session) for session in sessions]

    assert decoded(("lookup",)) == decoded(())
