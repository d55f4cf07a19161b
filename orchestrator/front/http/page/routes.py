"""Routes of the pages for browsers, and of what the first page shows beside answers."""

import asyncio
import hashlib
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse
from google.protobuf.json_format import MessageToDict

from orchestrator.fleet.fleet import Fleet
from orchestrator.front.admission import owned_session
from orchestrator.front.explain import explain
from orchestrator.front.http.field_faults import FieldRefused, quoted
from orchestrator.front.http.middleware import caller_of
from orchestrator.front.http.page.reference_page import reference_page
from outrider.v1 import explain_pb2
from outrider.wire.codec import SessionKey, epoch_to_text, finish_from_wire

PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_routes(app: FastAPI, fleet: Fleet, *, with_page: bool) -> APIRouter:
    """The description of the API, rounds, the fleet, and the page at / unless it is off."""
    router = APIRouter()

    @cache
    def described() -> str:
        return reference_page(app.openapi())

    @router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> HTMLResponse:
        """The description of this API for readers."""
        return HTMLResponse(described())

    @router.get("/fleet")
    async def workers() -> dict[str, Any]:
        """How many workers are there, and which sources draft for each model."""
        return fleet_state(fleet)

    @router.get("/explain/{session}")
    async def rounds(request: Request, session: str) -> dict[str, Any]:
        """The last rounds of a session with their trees; the session of an answer is its id and -0.

        The query's `choice` picks one of several answers; default 0.
        """
        choice = request.query_params.get("choice", "0")
        if not re.fullmatch("[0-9]{1,4}", choice):
            raise FieldRefused("choice", f"choice is {quoted(choice)}; give the number of an answer, from 0")
        caller = caller_of(request)
        key = SessionKey(caller.tenant(), owned_session(session, caller.owner), int(choice))
        explanation = await explain(fleet, key, nodes=True)
        return await asyncio.to_thread(_as_object, explanation)

    if with_page:
        router.add_api_route("/", _page(), response_class=HTMLResponse, include_in_schema=False)
    return router


def fleet_state(fleet: Fleet) -> dict[str, Any]:
    """Counts of workers, without their addresses: clients may read them."""
    links, probes = list(fleet.verifiers.values()), list(fleet.sources.values())
    return {
        "models": [
            {"id": target.name, "sources": list(fleet.source_names(target))} for target in fleet.served()
        ],
        "verifiers": {
            "known": len(links),
            "reachable": sum(link.reachable for link in links),
            "draining": sum(link.draining for link in links),
        },
        "sources": {"known": len(probes), "reachable": sum(probe.reachable for probe in probes)},
    }


def _page() -> Callable[[], Any]:
    """Serves the page with a policy that lets it load nothing and run no other script."""
    text = PAGE.read_text(encoding="utf-8")
    headers = {"content-security-policy": policy_of(text), "cache-control": "no-cache"}

    async def page() -> HTMLResponse:
        """A page that shows which source drafted each token."""
        return HTMLResponse(text, headers=headers)

    return page


def policy_of(page: str) -> str:
    """The Content-Security-Policy that lets a page's own inline script and style run, and nothing else."""
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(page):
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        allowed[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {' '.join(allowed['script'])}; "
        f"style-src {' '.join(allowed['style'])}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _as_object(explanation: explain_pb2.ExplainResponse) -> dict[str, Any]:
    """Rounds as JSON, in the contract's field names; the verifiers' addresses are left out."""
    found = []
    for one in explanation.incarnations:
        finished = finish_from_wire(one.finished)
        fields = MessageToDict(
            one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        fields |= {
            "epoch": epoch_to_text(one.epoch),
            "finished": None if finished is None else finished.value,
        }
        del fields["verifier"]
        found.append(fields)
    return {"incarnations": found}
