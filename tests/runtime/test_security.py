"""mTLS between services: peers without a certificate of the authority or of the right role are refused."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from outrider.runtime.children import ServiceFailed, ServiceProcess
from outrider.runtime.security import certificates, inside
from outrider.runtime.settings import ServiceSettings
from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2_grpc import (
    VerifierServicer,
    VerifierStub,
    add_VerifierServicer_to_server,
)
from outrider.wire.channel import open_channel, server_options
from outrider.wire.tls import Certificates, Files, server_credentials
from speculative.errors import InvalidRequest
from tests.certificates import Authority

DESCRIBE = verifier_pb2.VerifierDescribeRequest()


class VerifierLike(ServiceSettings):
    """Settings of a verifier."""

    role: ClassVar[str] = "verifier"


class OrchestratorLike(ServiceSettings):
    """Settings of an orchestrator."""

    role: ClassVar[str] = "orchestrator"


class Mirror(VerifierServicer):
    """Answers with the certificate that the caller showed."""

    async def Describe(self, request: Any, context: Any) -> verifier_pb2.VerifierDescription:
        (pem,) = context.auth_context()["x509_pem_cert"]
        return verifier_pb2.VerifierDescription(model=pem.decode())

    async def Watch(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.WatchResponse]:
        step = 0
        while True:
            step += 1
            yield verifier_pb2.WatchResponse(beat=verifier_pb2.Beat(step=step))
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(files: dict[str, Path], *, at_once: bool = False) -> AsyncIterator[str]:
    """A server with these files; `at_once` reads them for each connection, not once a second."""
    listening = inside(VerifierLike(**files))
    assert listening.credentials is not None
    if at_once:
        shown = Certificates(Files(*files.values(), own_ca=True), every_s=0.0)
        listening = replace(listening, credentials=server_credentials(shown, clients=True))
        assert listening.credentials is not None
    server = grpc.aio.server(interceptors=listening.interceptors, options=server_options())
    add_VerifierServicer_to_server(Mirror(), server)
    port = server.add_secure_port("127.0.0.1:0", listening.credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def describe(address: str, shown: Certificates | None, role: str = "verifier") -> str:
    async with open_channel(address, certificates=shown, role=role) as channel:
        said = await VerifierStub(channel).Describe(DESCRIBE, timeout=100)
        return str(said.model)


async def refused(address: str, shown: Certificates | None, role: str = "verifier") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await describe(address, shown, role)
    code = error.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def dialling(files: dict[str, Path]) -> Certificates:
    shown = certificates(OrchestratorLike(**files))
    assert shown is not None
    return shown


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "theirs")


async def test_roles_that_work_together_accept_each_other(ours: Authority) -> None:
    orchestrator = ours.role("orchestrator")
    async with serving(ours.role("verifier")) as address:
        assert await describe(address, dialling(orchestrator)) == orchestrator["tls_cert"].read_text()


async def test_a_certificate_may_carry_several_roles(ours: Authority) -> None:
    async with serving(ours.role("verifier", "source")) as address:
        for shown in (ours.role("drafter", "orchestrator"), ours.role("operator")):
            await describe(address, dialling(shown), role="source")


async def test_a_caller_without_a_certificate_of_our_authority_is_refused(
    ours: Authority, theirs: Authority
) -> None:
    stranger = theirs.role("orchestrator") | {"tls_ca": theirs.ca}
    async with serving(ours.role("verifier")) as address:
        assert await refused(address, None) is grpc.StatusCode.UNAVAILABLE
        assert await refused(address, Certificates(Files(ca=ours.ca))) is grpc.StatusCode.UNAVAILABLE
        cert, key = stranger["tls_cert"], stranger["tls_key"]
        shown = Certificates(Files(cert, key, ours.ca, server=False))
        assert await refused(address, shown) is grpc.StatusCode.UNAVAILABLE


async def test_a_dialled_peer_must_have_the_role_and_our_authority(
    ours: Authority, theirs: Authority
) -> None:
    orchestrator = dialling(ours.role("orchestrator"))
    async with serving(ours.role("drafter", "source")) as address:
        assert await refused(address, orchestrator) is grpc.StatusCode.UNAVAILABLE
    async with serving(theirs.role("verifier")) as address:
        assert await refused(address, orchestrator) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("role", ["drafter", "retrieval", "verifier", "somebody"])
async def test_a_role_that_may_not_call_is_refused_with_the_roles_that_may(
    ours: Authority, role: str
) -> None:
    shown = dialling(ours.role(role))
    async with serving(ours.role("verifier")) as address:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await describe(address, shown)
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "orchestrator.outrider.internal" in (error.value.details() or "")
        async with open_channel(address, certificates=shown, role="verifier") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await anext(aiter(VerifierStub(channel).Watch(timeout=100)))
        assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_new_calls_use_new_files_while_streams_continue(ours: Authority) -> None:
    orchestrator = ours.role("orchestrator")
    files = Files(*orchestrator.values(), server=False, own_ca=True)
    before = orchestrator["tls_cert"].read_text()
    async with (
        serving(ours.role("verifier")) as address,
        open_channel(address, certificates=Certificates(files, every_s=0.0), role="verifier") as channel,
    ):
        stub = VerifierStub(channel)
        held = stub.Watch(timeout=100)
        beats = aiter(held)
        await anext(beats)
        assert (await stub.Describe(DESCRIBE, timeout=100)).model == before
        ours.role("orchestrator")
        after = orchestrator["tls_cert"].read_text()
        assert after != before
        assert (await stub.Describe(DESCRIBE, timeout=100)).model == after
        for _ in range(20):
            await anext(beats)
        held.cancel()
        assert (await stub.Describe(DESCRIBE, timeout=100)).model == after
        orchestrator["tls_key"].write_bytes(b"rubbish")
        assert (await stub.Describe(DESCRIBE, timeout=100)).model == after


async def shown_by(address: str, files: dict[str, Path]) -> int:
    """Serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(files["tls_ca"]))
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname="verifier.outrider.internal"
    )
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return int(shown["serialNumber"], 16)


async def test_new_connections_are_shown_new_files(ours: Authority) -> None:
    orchestrator, verifier = ours.role("orchestrator"), ours.role("verifier")
    async with serving(verifier, at_once=True) as address:
        first = await shown_by(address, orchestrator)
        async with open_channel(address, certificates=dialling(orchestrator), role="verifier") as channel:
            beats = aiter(VerifierStub(channel).Watch(timeout=100))
            await anext(beats)
            ours.role("verifier")
            second = await shown_by(address, orchestrator)
            assert second != first
            verifier["tls_cert"].write_bytes(b"rubbish")
            assert await shown_by(address, orchestrator) == second
            for _ in range(5):
                await anext(beats)


@pytest.mark.parametrize("given", ["tls_cert", "tls_key", "tls_ca"])
def test_an_incomplete_set_of_tls_files_is_refused(ours: Authority, given: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{given} = .* is given without tls_\w+ and tls_\w+: give "):
        inside(VerifierLike(**{given: ours.role("verifier")[given]}))


def test_without_files_nothing_is_encrypted() -> None:
    assert inside(VerifierLike()).credentials is None


def flags(files: dict[str, Path]) -> list[str]:
    return [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", str(path))]


def test_a_process_serves_with_the_certificate_of_its_flags(
    start_toy: Callable[..., ServiceProcess], ours: Authority
) -> None:
    toy = start_toy(*flags(ours.role("drafter", "source")))
    asyncio.run(_toy_answers(toy.address, dialling(ours.role("orchestrator"))))


async def _toy_answers(address: str, shown: Certificates) -> None:
    from outrider.v1 import generation_pb2
    from outrider.v1.generation_pb2_grpc import GenerationStub

    async with open_channel(address, certificates=shown, role="source") as channel:
        said = await GenerationStub(channel).ListModels(generation_pb2.ListModelsRequest(), timeout=100)
        assert [model.name for model in said.models] == ["toy"]


def test_a_process_whose_certificate_is_none_does_not_start_and_says_which_file(
    start_toy: Callable[..., ServiceProcess], ours: Authority
) -> None:
    files = ours.role("drafter")
    files["tls_key"].write_text("rubbish")
    toy = start_toy(*flags(files), wait=False)
    with pytest.raises(ServiceFailed, match=r"tls_key: .*drafter\.key") as failed:
        toy.wait_ready(200)
    assert failed.value.code == "INVALID_ARGUMENT"
    assert "PRIVATE" not in json.dumps(str(failed.value))
