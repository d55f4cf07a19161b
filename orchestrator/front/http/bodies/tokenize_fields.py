"""The fields of bodies of /tokenize and /detokenize, with their types."""

from orchestrator.front.http.chat.chat_fields import Messages
from orchestrator.front.http.fields import Fields, Ids, Name, Text


class TokenizeFields(Fields):
    """Fields of /tokenize apart from the text or the conversation."""

    model: Name | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens, as to a prompt; default true, but false with
    messages."""
    add_generation_prompt: bool | None = None
    """With messages: whether the prompt ends where an answer begins; default true."""
    return_token_strs: bool | None = None


class TokenizeRequest(TokenizeFields):
    """Body of /tokenize: either a text or a conversation."""

    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeFields(Fields):
    """Fields of /detokenize beside the tokens."""

    model: Name | None = None


class DetokenizeRequest(DetokenizeFields):
    """Body of /detokenize."""

    tokens: Ids
