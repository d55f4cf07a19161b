"""Asks the verifiers how a session's rounds went: all of them, as one that was recovered had several."""

import asyncio

from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.verifier_link import VerifierLink
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey
from outrider.wire.status import peer_text
from speculative.errors import OutriderError, Unavailable, UnknownSession


async def explained(fleet: Fleet, key: SessionKey) -> explain_pb2.ExplainResponse:
    """What is known of it, the latest epoch last.

    Raises UnknownSession where all verifiers say that they know nothing of it, Unavailable where some do not
    say so.
    """
    links = list(fleet.verifiers.values())
    answers = await asyncio.gather(*(_asked(link, key) for link in links))
    incarnations = [one for answer in answers if not isinstance(answer, str) for one in answer]
    if not incarnations:
        silent = [answer for answer in answers if isinstance(answer, str)]
        if silent or not links:
            raise Unavailable(f"no verifier that answers knows session {key.session!r}: {'; '.join(silent)}")
        raise UnknownSession(
            f"no verifier knows session {key.session!r} of tenant {key.tenant!r}: rounds are kept while it "
            "runs and for a while after"
        )
    return explain_pb2.ExplainResponse(incarnations=sorted(incarnations, key=lambda one: one.epoch))


async def _asked(link: VerifierLink, key: SessionKey) -> list[explain_pb2.Incarnation] | str:
    """What a verifier says, or why it says nothing."""
    try:
        incarnations = list((await link.explain(key)).incarnations)
    except OutriderError as error:
        return f"{link.address}: {peer_text(str(error))}"
    for one in incarnations:
        one.verifier = link.address
    return incarnations
