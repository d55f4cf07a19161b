"""JSON Web Tokens (RFC 7519) of an app's users, checked with public keys of a JSON Web Key Set (RFC 7517).

An app's own server signs a token for each of its users, for minutes or hours, so no lasting key is in the
app. The token names the tenant, and may have the quotas of a line of the key file.
"""

import hashlib
import importlib.util
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.front.quota import Quota
from outrider.wire.codec import checked_tenant
from outrider.wire.reloading import EVERY_S, Reloaded
from speculative.errors import InvalidRequest, Unauthenticated

if TYPE_CHECKING:
    from jwt import PyJWK

SETTING = "jwt_keys_file"
ALGORITHMS = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""Signatures that a public key can check; a secret shared with signers has no place in this process."""
LEEWAY_S = 30
"""How far the clocks of signer and checker may be apart, in seconds."""
Count = Annotated[int, Field(ge=1, le=10**12)]


class _Claims(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    sub: Annotated[str, Field(min_length=1, max_length=1024)]
    exp: float
    streams: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must contain."""

    issuer: str
    """Issuer that `iss` must name; empty: any issuer whose key is in the set."""
    audience: str
    """Audience that `aud` must name."""
    tenant_claim: str
    """The claim that names its tenant."""


@dataclass(frozen=True, slots=True)
class TokenUser:
    """The user that a token names."""

    id: str
    """Stands for tenant and user; logs may name it."""
    tenant: str
    quota: Quota
    left_s: float
    """Seconds until the token expires."""


class SigningKeys:
    """The keys of a set, by their ids.

    Args:
        keys: with the algorithm of each.
        unknown: called for a token whose key is not in the set; may raise Unavailable.
    """

    def __init__(self, keys: Mapping[str, "PyJWK"], unknown: Callable[[], None] = lambda: None) -> None:
        self._keys = dict(keys)
        self._unknown = unknown

    def user(self, token: str, rules: TokenRules) -> TokenUser:
        """The user that a token speaks of.

        Raises Unauthenticated, without the token, or Unavailable while the token's key may be on its way.
        """
        import jwt

        try:
            key = self._key(str(jwt.get_unverified_header(token).get("kid", "")))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=rules.audience,
                issuer=rules.issuer or None,
                leeway=LEEWAY_S,
                options={"require": ["exp", "sub", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise Unauthenticated(f"the token is not valid here: {error}") from None
        return _user(claims, rules)

    def _key(self, kid: str) -> "PyJWK":
        if not kid and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if (key := self._keys.get(kid)) is None:
            self._unknown()
            raise Unauthenticated("no key of this server has the token's `kid`; get a new token")
        return key


class KeySource(Protocol):
    """Where the present keys come from: a file, or a URL."""

    def current(self) -> SigningKeys:
        """The present keys; never blocks for long."""


def is_token(key: str) -> bool:
    """Whether what a caller shows has the form of a JSON Web Token."""
    return key.count(".") == 2


def read_signing_keys(contents: Mapping[str, bytes]) -> SigningKeys:
    """The keys of a JSON Web Key Set. Raises InvalidRequest where the file is none."""
    return parse_key_set(contents[SETTING], SETTING)


def parse_key_set(data: bytes, setting: str, unknown: Callable[[], None] = lambda: None) -> SigningKeys:
    """The keys of a JSON Web Key Set.

    Args:
        data: the set as JSON.
        setting: name of the setting that says where the set is; errors begin with the name.
        unknown: see `SigningKeys`.

    Raises:
        InvalidRequest: `data` is no set of public keys for signatures, or PyJWT is not installed.
    """
    require_jwt(setting)
    from jwt import PyJWK, PyJWTError

    try:
        listed = json.loads(data)["keys"]
        found = [(str(entry.get("kid", "")), PyJWK(entry)) for entry in listed if _signs(entry)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InvalidRequest(f'{setting}: it is no JSON Web Key Set such as {{"keys": [...]}}') from None
    except PyJWTError as error:
        raise InvalidRequest(f"{setting}: {error}") from None
    for kid, key in found:
        if key.algorithm_name not in ALGORITHMS:
            raise InvalidRequest(
                f"{setting}: key {kid!r} is for {key.algorithm_name}; give public keys of "
                f"{', '.join(sorted(ALGORITHMS))}"
            )
    keys = dict(found)
    if not found:
        raise InvalidRequest(f"{setting}: it has no key for signatures")
    if len(keys) < len(found):
        raise InvalidRequest(f"{setting}: two of its keys have the same `kid`, or none")
    return SigningKeys(keys, unknown)


def require_jwt(setting: str) -> None:
    """Raises InvalidRequest where PyJWT, which checks tokens, is not installed."""
    if importlib.util.find_spec("jwt") is None:
        raise InvalidRequest(f"{setting} is set, but PyJWT is not installed here: install it")


def watched_signing_keys(path: Path, *, every_s: float = EVERY_S) -> Reloaded[SigningKeys]:
    """The keys of the file, which is read again when it changes. Raises InvalidRequest."""
    return Reloaded({SETTING: path}, read_signing_keys, every_s=every_s)


def _signs(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("use", "sig") == "sig")


def _user(claims: Mapping[str, Any], rules: TokenRules) -> TokenUser:
    tenant = claims.get(rules.tenant_claim)
    try:
        known = _Claims.model_validate(claims)
        if not isinstance(tenant, str) or not tenant:
            raise InvalidRequest(f"the token's claim {rules.tenant_claim!r} names no tenant")
        checked_tenant(tenant)
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors(include_input=False)]
        raise Unauthenticated(f"the token is not valid here: {'; '.join(faults)}") from None
    except InvalidRequest as error:
        raise Unauthenticated(f"the token is not valid here: {error}") from None
    quota = Quota(known.streams, known.requests_per_minute, known.tokens_per_minute)
    user = hashlib.sha256(f"{tenant}\0{known.sub}".encode()).hexdigest()[:24]
    return TokenUser(f"jwt-{user}", tenant, quota, known.exp + LEEWAY_S - time.time())
