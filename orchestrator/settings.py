"""Settings of the orchestrator."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from orchestrator.fleet.liveness import SILENT_S, STALLED_S
from outrider.runtime.problems import Together
from outrider.runtime.settings import TLS, Address, File, Names, Peers, Reached, ServiceSettings

FRONT = Together(("front_cert", "front_key"), more=("front_client_ca",))
NOWHERE = "store is redis, but nobody says where: give --redis-url-file or --redis-url"
REDIS = Together(("redis_cert", "redis_key"))
FOR_NOTHING = "a Redis URL is given, but store is memory; give --store redis, too"
NO_REDIS = "redis_ca or redis_cert is given, but store is memory; give --store redis and a Redis URL, too"
WITHOUT_TLS = "redis_ca or redis_cert is given, but the Redis URL has no TLS: begin it with rediss://"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
"""What a browser sends as a page's origin, without a path."""


class OrchestratorSettings(ServiceSettings):
    """Flags of `outrider serve orchestrator`, or OUTRIDER_ORCHESTRATOR__FIELD."""

    role: ClassVar[str] = "orchestrator"
    together: ClassVar[tuple[Together, ...]] = (TLS, FRONT, REDIS)

    registry_bind: Address | None = None
    """Where workers register, host:port; port 0 picks a free one. A process that can call it can have prompts
    sent to itself, so keep clients away from it. Default: nowhere, and only workers that are given are
    used."""
    verifier: Annotated[Peers, Field(validate_default=True)] = ()
    """Addresses of verifiers, host:port, separated by commas; a request goes to a verifier of its model.
    dns:NAME:PORT stands for every address that the name resolves to, which may change at any time."""
    drafter: Peers = ()
    """Addresses of drafters, host:port or dns:NAME:PORT, separated by commas; a session gets drafters that
    have its target's tokenizer."""
    retrieval: Peers = ()
    """Addresses of retrieval workers, host:port or dns:NAME:PORT, separated by commas; each drafts under the
    names of its memories."""
    resolve_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """How often a name (dns:NAME:PORT) is resolved again, in seconds."""
    http_bind: Address | None = None
    """Where to serve OpenAI's HTTP API, host:port; port 0 picks a free one. Default: nowhere."""
    front_cert: File = None
    """The certificate that clients see, over gRPC and HTTP, in PEM with the certificates that lead to its
    authority; read again when it changes. It needs front_key. Default: clients connect in plain."""
    front_key: File = None
    """The key of that certificate, without a passphrase."""
    front_client_ca: File = None
    """Certificates of the clients' authority: only clients with a certificate that it signed are let in."""
    api_keys_file: File = None
    """API keys with their tenants and quotas: a line of `outrider keys new` for each key; read again when it
    changes. Default: no key is needed, and each request names its tenant."""
    max_streams_per_peer: Annotated[int, Field(ge=1)] | None = None
    """The most calls at once from one address; a balancer or proxy is one address. Default: max_streams
    alone."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """The most connections at once, of gRPC and of HTTP each; further ones are closed."""
    store: Literal["memory", "redis"] = "memory"
    """Where sessions are recorded: in this process, or in a Redis server that all orchestrators share."""
    redis_url: SecretStr | None = None
    """URL of the Redis server: redis://, rediss:// or unix://, with its password where it has one."""
    redis_ca: File = None
    """PEM file with the certificates of the authority of the Redis server, for a rediss:// URL. Default: the
    authorities that the system trusts."""
    redis_cert: File = None
    """PEM file with the certificate to show a Redis server that asks for one; it needs redis_key. Default:
    none."""
    redis_key: File = None
    """PEM file with the key of redis_cert, without a passphrase."""
    max_streams: Annotated[int, Field(ge=1)] = 256
    """The most requests at once; further ones are refused with a time to try again."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens to generate where a request names no limit; fewer where the context leaves fewer."""
    chat_max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same for chat over HTTP. Default: as many tokens as the context has room for."""
    generation_config: Literal["auto", "none"] = "auto"
    """How requests over HTTP sample where they do not say so: as the model's generation_config.json says
    (auto), or with temperature 1 and nothing else (none). Requests over gRPC always get the latter."""
    page: bool = True
    """Whether the HTTP API has a page at / that shows speculation at work."""
    http_origins: Names = ()
    """Origins of web pages that may call the HTTP API from a browser, such as https://chat.example, separated
    by commas; * is any origin. Default: only pages of the API's own address."""
    jwt_keys_file: File = None
    """JSON Web Key Set (JWKS) with the public keys that verify the JSON Web Tokens of an app's users. The
    server accepts such a token in place of an API key. The file is read again when it changes. Default: no
    token is accepted."""
    jwt_keys_url: str = ""
    """URL of the JSON Web Key Set, in place of jwt_keys_file: https, or http on loopback. While tokens
    come, the server fetches the set again every five minutes. A token with an unknown key makes the server
    fetch the set at once, but at most twice a minute. If the URL does not answer, the keys fetched before
    stay in use."""
    jwt_issuer: str = ""
    """Issuer that a JSON Web Token must name in `iss`. Default: any issuer whose key is in the key set."""
    jwt_audience: Annotated[str, Field(min_length=1)] = "outrider"
    """Audience that a JSON Web Token must name in `aud`."""
    jwt_tenant_claim: Annotated[str, Field(min_length=1)] = "tenant"
    """Claim of a JSON Web Token that names the tenant."""
    edge_bind: Address | None = None
    """host:port at which verifiers fetch the drafts of clients' devices; port 0 picks a free port. Clients
    must not reach this port. Default: none, and the server refuses the drafts of devices."""
    edge_advertise: Reached | None = None
    """host:port that verifiers dial to reach edge_bind, if edge_bind is a wildcard or behind another name.
    Default: the bound address."""
    edge_drafters_file: File = None
    """JSON file that lists, by target, models that devices can download to draft with; see docs/http.md. The
    file is read again when it changes. Default: no model is listed."""
    edge_devices_per_tenant: Annotated[int, Field(ge=1)] = 1024
    """The most devices of one tenant that draft at once; further requests are decoded without their
    devices."""
    edge_nodes_per_s: Annotated[int, Field(ge=1, le=10**9)] = 20_000
    """Drafted tokens per second that the devices of one tenant together may send; further tokens are
    dropped."""
    edge_credits: Annotated[int, Field(ge=1, le=10**6)] = 256
    """Drafted tokens that a device may send before it has received a token of the answer."""
    edge_credits_per_token: Annotated[int, Field(ge=1, le=10**4)] = 32
    """Further drafted tokens that a device may send for each token of the answer that it receives."""
    edge_wait_ms: Annotated[int, Field(ge=0, le=10_000)] = 1000
    """The longest time in ms that a round may wait for the drafts of a device that asks for waiting; the
    verifier's source_wait_ms_max bounds the time as well. 0: rounds never wait."""
    silent_s: Annotated[float, Field(gt=0)] = SILENT_S
    """How long a verifier may show no sign of life, in seconds, until it is given up and its requests go on
    elsewhere; three times as long where no other verifier could take them."""
    stalled_s: Annotated[float, Field(gt=0)] = STALLED_S
    """How long a verifier that answers may begin no step, in seconds, until it is given up. It has at least
    five times the announced duration of its step."""
    recover_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a request without a deadline that lost its verifier waits for another, in seconds."""

    def incomplete(self) -> Iterator[str]:
        """Messages about a store without its address, an address without its store, or TLS for neither."""
        if (self.store == "redis") != (self.redis_url is not None):
            yield NOWHERE if self.store == "redis" else FOR_NOTHING
        if not (self.redis_ca or self.redis_cert):
            return
        if self.redis_url is None:
            yield from (NO_REDIS,) if self.store == "memory" else ()
        elif not self.redis_url.get_secret_value().startswith("rediss://"):
            yield WITHOUT_TLS

    @field_validator("http_origins")
    @classmethod
    def _origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin: give scheme, host and port, such as https://chat.example"
                )
        return given

    @field_validator("verifier")
    @classmethod
    def _some(cls, given: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not given and info.data.get("registry_bind") is None:
            raise ValueError("give addresses of verifiers, or --registry-bind for those that register")
        return given

    @field_validator("jwt_keys_url")
    @classmethod
    def _one_key_set(cls, given: str, info: ValidationInfo) -> str:
        if given and info.data.get("jwt_keys_file") is not None:
            raise ValueError("jwt_keys_file is given, too; give one of the two")
        return given

    @property
    def takes_tokens(self) -> bool:
        """Whether the server accepts JSON Web Tokens."""
        return self.jwt_keys_file is not None or bool(self.jwt_keys_url)
