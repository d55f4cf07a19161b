"""Answers /tokenize and /detokenize a piece at a time, as a whole context would keep others waiting."""

import asyncio
import codecs
from collections.abc import Sequence
from typing import Any

from fastapi.responses import Response
from starlette.types import Send

from orchestrator.fleet.target_model import TargetModel
from orchestrator.front.http.bodies.bounds import BodyKind
from orchestrator.front.http.bodies.memory import HeldMemory
from orchestrator.front.http.bodies.reading import ReadBody
from orchestrator.front.http.bodies.tokenize_fields import DetokenizeFields, TokenizeFields
from orchestrator.front.http.body_response import BodyResponse
from orchestrator.front.http.dialects.translated_fields import TranslatedFields
from orchestrator.front.http.field_faults import FieldRefused
from orchestrator.front.http.json_pieces import json_in_pieces
from orchestrator.front.reservation import Reservation
from outrider.tokens import TokenTable

PIECE = 2_048
"""Tokens that are looked up at once."""


class TokenizeResponse(BodyResponse):
    """The response to a body of /tokenize or /detokenize."""

    async def _work(
        self, data: bytearray, memory: HeldMemory, places: Reservation, send: Send
    ) -> Response | None:
        read = await self._service.intake.read(self._kind, data, self._asker.owner)
        data.clear()
        memory.release()
        match self._kind:
            case BodyKind.TOKENIZE:
                answer = await self._tokenized(read)
            case BodyKind.COUNT:
                answer = await self._counted(read)
            case _:
                answer = await self._text(read)
        return Response(await json_in_pieces(answer), media_type="application/json")

    async def _tokenized(self, read: ReadBody) -> dict[str, Any]:
        asked = read.fields
        assert isinstance(asked, TokenizeFields)
        target = self._service.target(asked.model)
        special = bool(asked.add_special_tokens) if read.rendered else asked.add_special_tokens is not False
        ids: Sequence[int] = ()
        if text := read.prompts[0]:
            ids = await self._service.token_ids(text, target, add_special=special)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": target.max_length, "tokens": ids}
        if asked.return_token_strs:
            answer["token_strs"] = await _names(ids, _tokens(target))
        return answer

    async def _counted(self, read: ReadBody) -> dict[str, Any]:
        asked, text = read.fields, read.prompts[0]
        assert isinstance(asked, TranslatedFields)
        ids = await self._service.token_ids(text, self._service.target(asked.model), add_special=False)
        return {"input_tokens": len(ids)}

    async def _text(self, read: ReadBody) -> dict[str, Any]:
        asked, ids = read.fields, read.prompts[0]
        assert isinstance(asked, DetokenizeFields)
        assert not isinstance(ids, str)
        target = self._service.target(asked.model)
        tokens = _tokens(target)
        decoder, pieces = codecs.getincrementaldecoder("utf-8")("replace"), []
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            _check(piece, start, target)
            pieces.append(decoder.decode(b"".join(map(tokens.token_bytes, piece))))
            await asyncio.sleep(0)
        return {"prompt": "".join([*pieces, decoder.decode(b"", final=True)])}


async def _names(ids: Sequence[int], tokens: TokenTable) -> list[str]:
    names: list[str] = []
    for start in range(0, len(ids), PIECE):
        names.extend(map(tokens.token, ids[start : start + PIECE]))
        await asyncio.sleep(0)
    return names


def _check(ids: Sequence[int], start: int, target: TargetModel) -> None:
    """Raises FieldRefused for an id that the vocabulary has not."""
    if max(ids) < target.vocabulary_size:
        return
    at, id_ = next((at, id_) for at, id_ in enumerate(ids, start) if id_ >= target.vocabulary_size)
    raise FieldRefused(f"tokens[{at}]", f"tokens[{at}] is {id_}; ids are below {target.vocabulary_size}")


def _tokens(target: TargetModel) -> TokenTable:
    if target.tokens is None:
        raise FieldRefused("model", f"model {target.name!r} has no tokenizer")
    return target.tokens
