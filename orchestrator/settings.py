"""What an orchestrator can be told."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from outrider.runtime.problems import Together
from outrider.runtime.settings import TLS, Address, File, Peers, ServiceSettings

FRONT = Together(("front_cert", "front_key"), more=("front_client_ca",))
NOWHERE = "store is redis, but nobody says where: give --redis-url-file or --redis-url"
FOR_NOTHING = "a Redis URL is given, but store is memory; give --store redis, too"


class OrchestratorSettings(ServiceSettings):
    """Flags of `outrider serve orchestrator`, or OUTRIDER_ORCHESTRATOR__FIELD."""

    role: ClassVar[str] = "orchestrator"
    together: ClassVar[tuple[Together, ...]] = (TLS, FRONT)

    registry_bind: Address | None = None
    """Where workers register, host:port; port 0 picks a free one. Who can call it can have prompts sent to
    them, so keep clients away from it. Default: nowhere, and only workers that are given are used."""
    verifier: Annotated[Peers, Field(validate_default=True)] = ()
    """Addresses of verifiers, host:port, separated by commas; a request goes to one that serves its model.
    dns:NAME:PORT is every address that the name resolves to, which may change while this runs."""
    drafter: Peers = ()
    """Addresses of sources that draft, host:port or dns:NAME:PORT, separated by commas; a session gets those
    that have its target's tokenizer."""
    retrieval: Peers = ()
    """Addresses of retrieval workers, likewise; each drafts under the names of its memories."""
    resolve_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """How often a name (dns:NAME:PORT) is resolved again, in seconds."""
    http_bind: Address | None = None
    """Where to serve OpenAI's HTTP API, host:port; port 0 picks a free one. Default: nowhere."""
    front_cert: File = None
    """The certificate that clients see, over gRPC and HTTP, in PEM with those that lead to its authority;
    read again when it changes. With it goes front_key. Default: clients talk in plain."""
    front_key: File = None
    """The key of that certificate, without a passphrase."""
    front_client_ca: File = None
    """Certificates of the authority of clients: only who shows one that it signed is let in."""
    api_keys_file: File = None
    """Who may ask, as which tenant and how much: a line of `outrider keys new` for each key; read again when
    it changes. Default: whoever can connect may, as the tenant that the request names."""
    max_streams_per_peer: Annotated[int, Field(ge=1)] | None = None
    """Calls at once from one address; a balancer or proxy is one. Default: no bound but max_streams."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Connections at once, of gRPC and of HTTP each; what comes beyond is closed."""
    store: Literal["memory", "redis"] = "memory"
    """Where sessions are recorded: in this process, or in a Redis server that all orchestrators share."""
    redis_url: SecretStr | None = None
    """That server: redis://, rediss:// or unix://, with its password where it has one."""
    max_streams: Annotated[int, Field(ge=1)] = 256
    """Requests at once; more are refused with a time to try again."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 128
    """Ids to generate where a request does not say, or what the context leaves where that is less."""
    silent_s: Annotated[float, Field(gt=0)] = 0.75
    """A verifier that shows no sign of life for this long is given up, in seconds, and its requests go on
    elsewhere; one without a peer is given three times as long."""
    stalled_s: Annotated[float, Field(gt=0)] = 60.0
    """One that answers, but begins no step for this long (or five times the announced duration), likewise."""
    recover_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a request without a deadline that lost its verifier waits for another, in seconds."""

    def incomplete(self) -> Iterator[str]:
        """See SecretFiles."""
        if (self.store == "redis") != (self.redis_url is not None):
            yield NOWHERE if self.store == "redis" else FOR_NOTHING

    @field_validator("verifier")
    @classmethod
    def _some(cls, given: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not given and info.data.get("registry_bind") is None:
            raise ValueError("give addresses of verifiers, or --registry-bind for those that register")
        return given
