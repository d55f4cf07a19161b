"""Events of the Responses and the Messages API, made of the deltas of a chat completion."""

from typing import Any

from orchestrator.front.http.chat.plan import Thought
from orchestrator.front.http.chat.reasoning_count import ReasoningCount
from orchestrator.front.http.dialects.answer_events import AnswerEnd, AnswerEvents, AnswerHead
from orchestrator.front.http.dialects.messages_events import MessageEvents
from orchestrator.front.http.dialects.responses_events import ResponseEvents
from outrider.tokens import TokenTable

ABOUT = {
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "skipped_tools": [],
    "effort": None,
    "tools": [],
    "tool_choice": "auto",
}
HEAD = AnswerHead("a", 0, "toy", 10, 1.0, 1.0, None, ABOUT)
USAGE: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
USAGE["completion_tokens_details"] = {"reasoning_tokens": 2}
CACHED = USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "reasoning_content": "h"},
    {"reasoning_content": "m", "content": "a"},
    {"content": "b"},
    {"tool_calls": [CALL]},
    {"content": "c"},
]


def played(events: AnswerEvents, deltas: list[dict[str, Any]], end: AnswerEnd) -> list[dict[str, Any]]:
    made = list(events.begin())
    for delta in deltas:
        made += events.add(delta)
    return [*made, *events.end(end)]


def test_a_response_has_an_item_for_reasoning_text_and_each_call() -> None:
    answer = ResponseEvents(HEAD)
    events = played(answer, DELTAS, AnswerEnd("tool_calls", CACHED))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    reasoning, text, call, last = answer.whole()["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert text["content"][0]["text"] == "ab"
    assert (call["call_id"], call["name"], call["arguments"]) == ("1", "f", '{"x": 1}')
    assert last["content"][0]["text"] == "c"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == answer.whole()["output"]
    assert [event["output_index"] for event in events if "output_index" in event] == sorted(
        event["output_index"] for event in events if "output_index" in event
    )
    assert answer.whole()["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert answer.whole()["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert events[-1] == {
        "type": "response.completed",
        "sequence_number": len(events) - 1,
        "response": answer.whole(),
    }


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    answer = ResponseEvents(HEAD)
    events = played(answer, [{"content": "a"}], AnswerEnd("length", USAGE))
    assert events[-1]["type"] == "response.incomplete"
    assert answer.whole()["output"][0]["status"] == "incomplete"


def test_an_answer_without_text_has_an_empty_message() -> None:
    answer = ResponseEvents(HEAD)
    played(answer, [], AnswerEnd("stop", USAGE))
    assert answer.whole()["output"][0]["content"][0]["text"] == ""
    message = MessageEvents(HEAD)
    played(message, [], AnswerEnd("stop", USAGE))
    assert message.whole()["content"] == []


def test_a_message_has_a_block_for_thinking_text_and_each_call() -> None:
    answer = MessageEvents(HEAD)
    events = played(answer, DELTAS, AnswerEnd("tool_calls", CACHED))
    assert answer.whole()["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
        {"type": "text", "text": "c"},
    ]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]
    assert answer.whole()["stop_reason"] == "tool_use"
    usage = answer.whole()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 4)
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}


def test_an_error_after_the_beginning_is_an_event() -> None:
    error = {"message": "gone", "type": "x", "param": None, "code": "unavailable"}
    failed, raised = ResponseEvents(HEAD).failed(error, 503)
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert (raised["type"], raised["message"], raised["error"]) == ("error", "gone", error)
    (said,) = MessageEvents(HEAD).failed(error, 503)
    assert said == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


def counted(ids: list[int], tokens: TokenTable | None, thought: Thought) -> int:
    """The reasoning of an answer that came token by token."""
    count = ReasoningCount(tokens, thought)
    for id_ in ids:
        count.add([id_])
    whole = ReasoningCount(tokens, thought)
    whole.add(ids)
    assert count.count == whole.count
    return count.count


def test_tokens_count_as_reasoning_up_to_the_end_mark(table: TokenTable) -> None:
    ids: list[int] = table.encode(" <think>ab</think>cd<think>")
    end = len(table.encode(" <think>ab</think>"))
    assert counted(ids, table, Thought.POSSIBLE) == end
    behind_begin: list[int] = table.encode("ab</think>cd")
    assert counted(behind_begin, table, Thought.OPEN) == len(table.encode("ab</think>"))
    assert counted(ids[: end - 1], table, Thought.POSSIBLE) == end - 1


def test_an_answer_without_reasoning_counts_none(table: TokenTable) -> None:
    ids: list[int] = table.encode("<think>ab</think>cd")
    assert counted(table.encode("cd</think>"), table, Thought.POSSIBLE) == 0
    assert counted(table.encode("<thin"), table, Thought.POSSIBLE) == 0
    assert counted(ids, table, Thought.NONE) == 0
    assert counted(ids, None, Thought.POSSIBLE) == 0
