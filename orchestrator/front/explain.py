"""Asks all verifiers how a session's rounds went: a session that was recovered ran on several of them."""

import asyncio
import logging

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.verifier_link import VerifierLink
from outrider.tokens import TokenTable
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey
from outrider.wire.status import peer_text
from speculative.errors import OutriderError, Unavailable, UnknownSession

log = logging.getLogger(__name__)


async def explain(fleet: Fleet, key: SessionKey, *, nodes: bool) -> explain_pb2.ExplainResponse:
    """The session's incarnations, in the order of their epochs; with their rounds' trees if `nodes`.

    Raises UnknownSession where every verifier answers that it does not know the session, Unavailable where
    none knows it and some do not answer.
    """
    links = list(fleet.verifiers.values())
    answers = await asyncio.gather(*(_ask(link, key, nodes) for link in links))
    incarnations = [one for answer in answers if not isinstance(answer, str) for one in answer]
    if not incarnations:
        silent = [answer for answer in answers if isinstance(answer, str)]
        if silent or not links:
            log.info("verifiers do not explain", extra={"fields": {"why": "; ".join(silent)}})
            raise Unavailable(
                f"no verifier that answers knows session {key.session!r}; not answering: {len(silent)}"
            )
        choice = f"choice {key.choice} of " if key.choice else ""
        raise UnknownSession(
            f"no verifier knows {choice}session {key.session!r} of tenant {key.tenant!r}: rounds are kept "
            "while it runs and for a while after"
        )
    return explain_pb2.ExplainResponse(incarnations=sorted(incarnations, key=lambda one: one.epoch))


async def _ask(link: VerifierLink, key: SessionKey, nodes: bool) -> list[explain_pb2.Incarnation] | str:
    """The incarnations that one verifier knows, or why it does not answer."""
    try:
        incarnations = list((await link.explain(key, nodes=nodes)).incarnations)
    except OutriderError as error:
        return f"{link.address}: {peer_text(str(error))}"
    for one in incarnations:
        one.verifier = link.address
        if link.target is not None and link.target.tokens is not None:
            await _add_texts(one, link.target.tokens)
    return incarnations


async def _add_texts(one: explain_pb2.Incarnation, tokens: TokenTable) -> None:
    """Fills the texts of nodes and committed tokens, a round at a time."""
    for round_ in one.rounds:
        shown: list[explain_pb2.RoundNode | explain_pb2.RoundToken] = [*round_.nodes, *round_.tokens]
        for token in shown:
            token.text = tokens.token_bytes(token.id).decode(errors="replace")
        await asyncio.sleep(0)
