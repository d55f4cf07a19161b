"""A real verifier that describes itself as older ones do, without the fields that it knows."""

import pytest
from harness import serving
from ngram_lm import NgramLM

from outrider.client import AsyncClient
from outrider.v1 import verifier_pb2
from outrider.wire.incoming.request_fields import REQUEST_FIELDS
from speculative.errors import InvalidRequest
from tests.orchestrator.fronts import orchestrator
from verifier_service import loading

PROMPT = (1, 2, 3)


async def test_it_decodes_what_it_knows_and_is_spared_what_it_would_ignore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "REQUEST_FIELDS", ())
    async with (
        serving(NgramLM(24)) as verifier,
        orchestrator(bind="127.0.0.1:0", verifier=[verifier.address]) as announced,
        AsyncClient(announced["address"]) as client,
    ):
        plain = (await verifier.generate(PROMPT, new=20)).ids
        answer = await client.generate(ids=PROMPT, max_tokens=20, temperature=0)
        assert list(answer.ids) == list(plain)
        with pytest.raises(InvalidRequest, match=r"sampling\.contrast_strength.*too old"):
            await client.generate(ids=PROMPT, max_tokens=20, temperature=0, contrast_strength=0.5)


async def test_one_of_this_version_lists_every_field() -> None:
    async with serving(NgramLM(24)) as verifier:
        described = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
    assert tuple(described.request_fields) == REQUEST_FIELDS
