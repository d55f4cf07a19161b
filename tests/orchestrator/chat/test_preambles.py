"""A grammar of reasoning, as the front writes it for a target, lets the target reason, end it and answer."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.accumulator import Piece
from orchestrator.front.http.chat.chat_fields import ChatRequest
from orchestrator.front.http.chat.plan import ChatPlan
from orchestrator.front.http.chat.planning import Rendered, planned
from orchestrator.front.http.openai_format import ChatCompletionFormat
from orchestrator.front.http.templated.known_templates import response_template
from orchestrator.front.http.templated.special_marks import (
    can_reason_before_format,
    parsed_marks,
    special_marks,
)
from outrider.tokens import ChatTemplate, TokenTable
from speculative.grammar import Grammar
from tests.conftest import writing_tokenizer
from verifier_service.grammar.library import MatcherFactory

END = 1
NO_REASONING = json.dumps({"start_anchor": "a:", "fields": {"content": {}}})
GLM = "a:{# <think></think> <|assistant|><tool_call> <arg_key>a</arg_key>\n<arg_value>b</arg_value> #}"
CHOICE = {"structured_outputs": {"choice": [" yes", "no"]}}


def target_of(source: str, response: str = "") -> TargetModel:
    """A target whose marks around reasoning are special tokens."""
    tokenizer = writing_tokenizer()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    table = TokenTable(tokenizer)
    chat = ChatTemplate(source, {}, response)
    return TargetModel("toy", 99, table.size, "", table, (), chat, eos_ids=frozenset((END,)))


def plan_for(target: TargetModel, **form: Any) -> ChatPlan:
    assert target.chat is not None
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **form})
    source, response = target.chat.source, response_template(target.chat)
    prompt = source.partition("{#")[0]
    return planned(
        request, Rendered(prompt, source, response, special_marks(target), can_reason_before_format(target))
    )[1]


@pytest.mark.parametrize("response", ["", NO_REASONING])
@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("a:<think>\n{# </think> #}", "hm</think>\n\n yes"),
        ("a:{# <think></think> #}", "<think>hm</think> yes"),
        ("a:{# <think></think> #}", " yes"),
        (GLM, "\n<think>hm</think>\n yes"),
        (GLM, "<think>hm</think>\n yes"),
    ],
)
def test_reasoning_ends_where_its_marks_are_special_tokens(response: str, source: str, written: str) -> None:
    target = target_of(source, response)
    assert target.tokens is not None
    found = plan_for(target, **CHOICE)
    grammar = replace(Grammar.one_of([" yes", "no"]), preamble=found.preamble)
    ids = target.tokens.encode(written, add_special=False)
    matcher = MatcherFactory(target.tokens, (END,), target.vocabulary_size).matcher(grammar, ids)
    assert list(np.flatnonzero(matcher.allowed(()))) == [END]
    message = ChatCompletionFormat(None, plan=found).whole(Piece(0, written, finish="stop"))["message"]
    assert message["content"] == " yes"
    assert message.get("reasoning_content", "") == ("hm" if "hm" in written else "")


def test_the_marks_that_a_response_template_does_not_name_stay_hidden_from_its_parser() -> None:
    target = target_of("a:{# <think></think> #}", NO_REASONING)
    assert set(special_marks(target)) == {"<think>", "</think>"}
    assert not parsed_marks(target)


@pytest.mark.parametrize("source", ["a:<think>\n{# </think> #}", "a:{# <think></think> #}"])
@pytest.mark.parametrize("form", [CHOICE, {"response_format": {"type": "json_object"}}])
def test_no_reasoning_that_could_not_end_precedes_a_format(source: str, form: dict[str, Any]) -> None:
    target = target_of(source)
    assert plan_for(target, **form).preamble
    end = special_marks(target)["</think>"]
    assert not plan_for(replace(target, eos_ids=frozenset((END, end))), **form).preamble


def test_an_older_verifier_gets_no_preamble() -> None:
    target = target_of("a:<think>\n{# </think> #}")
    older = replace(target, request_fields=target.request_fields - {"grammar.preamble"})
    assert plan_for(target, **CHOICE).preamble
    assert plan_for(older, **CHOICE) == ChatPlan()
