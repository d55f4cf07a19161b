"""The assistant's message, made of a model's output in OpenAI's fields. Pure."""

import secrets
from typing import Any

from orchestrator.front.http.chat.output_parser import OutputParser, Parsed
from orchestrator.front.http.chat.plan import ChatPlan, Thought

ID_DIGITS = 9
"""Digits of a call's id: Mistral's templates take ids of exactly nine characters."""


class ChatMessage:
    """The message of one choice, whole or as deltas.

    Args:
        plan: how to parse the output; with an empty plan, the whole output is content.
    """

    def __init__(self, plan: ChatPlan) -> None:
        self._named = plan.named
        self._plain = not plan.format and not plan.order and plan.thought is Thought.NONE
        self._parser = OutputParser(plan)
        self._called = 0

    def delta(self, text: str, *, last: bool, parsed: Parsed | None = None) -> dict[str, Any]:
        """The fields that a piece of output adds; none while the output may still become a call.

        Args:
            last: whether the output ends with this piece.
            parsed: what the piece adds, where it was parsed elsewhere.
        """
        if self._plain:
            return {"content": text} if text else {}
        parts = [parsed] if parsed is not None else [self._parser.feed(text)]
        if last and parsed is None:
            parts.append(self._parser.finish())
        found = self._fields(parts)
        for call in found.get("tool_calls", ()):
            call["index"] = self._called
            self._called += 1
        return found

    def whole(self, text: str, parsed: Parsed | None = None) -> dict[str, Any]:
        """The fields of the message for the whole output; no `content` where there are calls alone."""
        if self._plain:
            return {"content": text}
        found = self._fields([self._parser.feed(text), self._parser.finish()] if parsed is None else [parsed])
        self._called += len(found.get("tool_calls", ()))
        return found if self._called else {"content": ""} | found

    def finish(self, reason: str | None) -> str | None:
        """The finish reason: `tool_calls` for `stop` where the model chose to call; None before the end."""
        return "tool_calls" if reason == "stop" and self._called and not self._named else reason

    def _fields(self, parts: list[Parsed]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if reasoning := "".join(part.reasoning for part in parts):
            found["reasoning_content"] = reasoning
        if content := "".join(part.content for part in parts):
            found["content"] = content
        if calls := [call for part in parts for call in part.calls]:
            found["tool_calls"] = [
                {
                    "id": secrets.token_hex(ID_DIGITS)[:ID_DIGITS],
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return found
