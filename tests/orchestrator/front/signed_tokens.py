"""JSON Web Tokens for tests: private keys, their public set, and tokens that they sign."""

import json
import time
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from orchestrator.front.web_tokens import TokenRules

jwt = pytest.importorskip("jwt")

RULES = TokenRules("https://app.example", "outrider", "tenant")
P256 = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
RSA = rsa.generate_private_key(65537, 2048)
PRIVATE: dict[str, tuple[Any, str]] = {"p256": (P256, "ES256"), "ed": (ED, "EdDSA"), "rsa": (RSA, "RS256")}


def entry(kid: str) -> dict[str, Any]:
    private, algorithm = PRIVATE[kid]
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(private.public_key(), as_dict=True)
    return {**made, "kid": kid, "use": "sig", "alg": algorithm}


def key_set(*kids: str) -> bytes:
    return json.dumps({"keys": [entry(kid) for kid in kids]}).encode()


def claims(**changed: Any) -> dict[str, Any]:
    made = {
        "iss": "https://app.example",
        "aud": "outrider",
        "sub": "somebody",
        "exp": int(time.time()) + 300,
        "tenant": "us",
        **changed,
    }
    return {name: value for name, value in made.items() if value is not None}


def token(kid: str = "p256", **changed: Any) -> str:
    private, algorithm = PRIVATE[kid]
    return jwt.encode(claims(**changed), private, algorithm, headers={"kid": kid})
