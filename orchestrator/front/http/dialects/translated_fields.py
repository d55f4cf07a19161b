"""The fields of a chat completion that stands for a body of another API, as the front gets them."""

from typing import Any

from orchestrator.front.http.chat.chat_fields import ChatFields


class TranslatedFields(ChatFields):
    """Fields of the chat completion, and what the answer repeats of the client's body."""

    about: dict[str, Any]
