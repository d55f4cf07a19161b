"""Settings of the orchestrator."""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from outrider.runtime.problems import Together
from outrider.runtime.settings import TLS, Address, File, Names, Peers, ServiceSettings

FRONT = Together(("front_cert", "front_key"), more=("front_client_ca",))
NOWHERE = "store is redis, but nobody says where: give --redis-url-file or --redis-url"
FOR_NOTHING = "a Redis URL is given, but store is memory; give --store redis, too"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
"""What a browser sends as a page's origin, without a path."""


class OrchestratorSettings(ServiceSettings):
    """Flags of `outrider serve orchestrator`, or OUTRIDER_ORCHESTRATOR__FIELD."""

    role: ClassVar[str] = "orchestrator"
    together: ClassVar[tuple[Together, ...]] = (TLS, FRONT)

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
    max_streams: Annotated[int, Field(ge=1)] = 256
    """The most requests at once; further ones are refused with a time to try again."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 128
    """Tokens to generate where a request names no limit; fewer where the context leaves fewer."""
    chat_max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same for chat over HTTP. Default: as many tokens as the context has room for."""
    generation_config: Literal["auto", "none"] = "auto"
    """How requests over HTTP sample where they do not say so: as the model's generation_config.json says
    (auto), or with temperature 1 and nothing else (none). Requests over gRPC always get the latter."""
    http_origins: Names = ()
    """Origins of web pages that may call the HTTP API from a browser, such as https://chat.example, separated
    by commas; * is any origin. Default: only pages of the API's own address."""
    silent_s: Annotated[float, Field(gt=0)] = 0.75
    """How long a verifier may show no sign of life, in seconds, until it is given up and its requests go on
    elsewhere; three times as long where no other verifier could take them."""
    stalled_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a verifier that answers may begin no step, in seconds, until it is given up. It has at least
    five times the announced duration of its step."""
    recover_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a request without a deadline that lost its verifier waits for another, in seconds."""

    def incomplete(self) -> Iterator[str]:
        """Messages about a store without its address, or an address without its store."""
        if (self.store == "redis") != (self.redis_url is not None):
            yield NOWHERE if self.store == "redis" else FOR_NOTHING

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
