"""What a grammar forces is drafted: for sure where one id is allowed, and likely where several write it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import serving
from ngram_lm import NgramLM

from outrider.lm.runner import PackedLM
from outrider.tokens import TokenTable
from outrider.v1 import common_pb2
from speculative.errors import DeadEnd
from speculative.grammar import Grammar, GrammarKind
from speculative.params import SamplingParams
from tests.conftest import writing_tokenizer
from verifier_service.grammar.forcing import forced_tokens
from verifier_service.grammar.library import MatcherFactory

REPOSITORY = Path(__file__).parents[3]
EOS, WIDTH = 1, 320
PROMPT = (40, 41, 42)
RECORD = {
    "type": "object",
    "properties": {"manufacturer": {"enum": ["inland", "abroad"]}, "quantity": {"type": "boolean"}},
    "required": ["manufacturer", "quantity"],
    "additionalProperties": False,
}
WORDS = TokenTable.from_json((REPOSITORY / "models/target/tokenizer.json").read_text())
"""The embedded target's tokenizer, which knows whole words."""
END = 0
LETTERS = TokenTable.from_json(writing_tokenizer().to_str())


@pytest.fixture(scope="module")
def factory() -> MatcherFactory:
    return MatcherFactory(WORDS, (END,), WORDS.size)


def text_of(tokens: Any) -> str:
    return b"".join(map(WORDS.token_bytes, tokens)).decode()


def schema(of: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(of))


def test_a_key_is_drafted_in_the_tokens_that_the_tokenizer_would_write(factory: MatcherFactory) -> None:
    matcher = factory.matcher(schema(RECORD), WORDS.encode('{"'))
    chain = matcher.forced(16)
    assert text_of(forced.token for forced in chain) == 'manufacturer":'
    assert [forced.token for forced in chain] == WORDS.encode('manufacturer":')
    assert len(matcher.forced(2)) == 2
    assert not matcher.forced(0)


def test_a_token_is_certain_only_where_the_grammar_allows_no_other(factory: MatcherFactory) -> None:
    matcher = factory.matcher(schema(RECORD), WORDS.encode('{"'))
    path: list[int] = []
    for token, only in matcher.forced(16):
        allowed = np.flatnonzero(factory.matcher(schema(RECORD), WORDS.encode('{"') + path).allowed(()))
        assert token in allowed
        assert only == (len(allowed) == 1)
        path.append(token)


def test_the_end_is_drafted_where_nothing_else_may_follow(factory: MatcherFactory) -> None:
    matcher = factory.matcher(Grammar(GrammarKind.REGEX, "yes|no"), WORDS.encode("ye"))
    assert [forced.token for forced in matcher.forced(8)] == [*WORDS.encode("s"), END]


def test_nothing_is_drafted_where_the_grammar_leaves_a_choice_of_bytes(factory: MatcherFactory) -> None:
    assert not factory.matcher(Grammar(GrammarKind.REGEX, "[ab]+"), ()).forced(8)


def test_what_was_drafted_changes_no_mask(factory: MatcherFactory) -> None:
    for at in range(len(ids := WORDS.encode('{"manufacturer":"inland","quantity":true}'))):
        asked, fresh = (factory.matcher(schema(RECORD), ids[:at]) for _ in range(2))
        asked.forced(16)
        for end in (at, min(at + 2, len(ids)), at):
            assert (asked.allowed(ids[at:end]) == fresh.allowed(ids[at:end])).all()


def test_a_token_beyond_the_forced_text_is_taken_only_if_all_others_begin_it() -> None:
    tokens = [b"", b'"', b'":', b'",', b"ab", b"a"]

    def drafted(*ids: int) -> list[tuple[int, bool]]:
        mask = np.zeros(len(tokens), np.bool_)
        mask[list(ids)] = True
        return [tuple(forced) for forced in forced_tokens(lambda _: mask, tokens, 1)]

    assert drafted(1, 2) == [(2, False)]
    assert drafted(1, 2, 3) == [(1, False)]
    assert drafted(4) == [(4, True)]
    assert drafted(4, 5) == [(4, False)]
    assert drafted(0, 5) == [], "the text may end here"
    assert drafted(4, 3) == []
    assert drafted(2, 3) == [], "both begin alike, and no token writes what they have in common"


def test_a_long_forced_text_takes_no_states_that_plain_decoding_has(factory: MatcherFactory) -> None:
    """Each of its bytes is a state of the lexer, and a session may have 50,000."""
    endless = Grammar(GrammarKind.REGEX, "a{100000}")
    drafted, plain = (factory.matcher(endless, ()) for _ in range(2))
    for token in WORDS.encode("a" * 400):
        assert len(drafted.forced(16)) == 16
        assert (drafted.allowed(()) == plain.allowed(())).all()
        drafted.commit([token])
        plain.commit([token])


def test_a_text_reaches_the_limit_on_states_where_it_does_in_plain_decoding(factory: MatcherFactory) -> None:
    """Drafting looks sixteen tokens ahead, which are states as well."""
    endless = Grammar(GrammarKind.REGEX, "a{100000}")
    (token,) = WORDS.encode("a")

    def length(drafts_from: int) -> int:
        matcher = factory.matcher(endless, ())
        for number in range(60_000):
            try:
                if number >= drafts_from:
                    matcher.forced(16)
                matcher.allowed(())
                matcher.commit([token])
            except DeadEnd:
                return number
        raise AssertionError("there is no limit")

    plain = length(drafts_from=60_000)
    assert length(drafts_from=plain - 40) == plain


def writer() -> NgramLM:
    target = NgramLM(WIDTH, eos_ids=(EOS,), seed=3)
    target.tokenizer_json = LETTERS.to_json()
    return target


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("make", [writer, lambda: PackedLM.load(REPOSITORY / "models/target")])
async def test_forced_drafts_save_rounds_and_change_no_id(make: Any, temperature: float) -> None:
    target = make()
    tokens = TokenTable.from_json(target.tokenizer_json)
    blank = [id_ for id_ in range(2, tokens.size) if not tokens.token_bytes(id_).strip()]
    params = SamplingParams(temperature=temperature, logit_bias=tuple((id_, -100.0) for id_ in blank))
    grammar = common_pb2.Grammar(json_schema=json.dumps(RECORD))
    async with serving(target, node_limit=12, budget="fixed") as verifier:
        for seed in range(2):
            asked: dict[str, Any] = {"params": params, "seed": seed, "grammar": grammar, "new": 90}
            plain = await verifier.generate(PROMPT, **asked)
            drafted = await verifier.generate(PROMPT, sources=[("grammar", "")], **asked)
            assert (drafted.ids, drafted.finished) == (plain.ids, plain.finished)
            assert plain.finished == common_pb2.FINISH_REASON_STOP
            assert drafted.usage.rounds < 0.8 * plain.usage.rounds
        assert verifier.nodes("grammar", "accepted") > 5


async def test_without_a_grammar_the_source_drafts_nothing() -> None:
    async with serving(writer()) as verifier:
        plain = await verifier.generate(PROMPT, new=20)
        asked = await verifier.generate(PROMPT, new=20, sources=[("grammar", "")])
    assert asked.ids == plain.ids
    assert not asked.usage.drafted_by_source
