"""Credentials of leases: signed by a fleet's coordinator, checked by a node without asking anybody.

A credential is `BASE64URL(payload).BASE64URL(signature)`, without padding. The payload is JSON with the lease's id, its
end, the SHA-256 of the node's certificate, and a role; the signature is Ed25519 (RFC 8032) over its bytes. A credential
for one node is worthless at another one, and a node, which has the public key alone, can make none.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from cloche.core.errors import BackendUnavailable
from cloche.core.record import dataclass
from cloche.core.remote import HiddenText

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Role = Literal["lease", "coordinator"]
ROLES: tuple[Role, ...] = ("lease", "coordinator")
MOST_CREDENTIAL = 2048  # characters
KEY_BYTES = 32
COORDINATOR_S = 60.0  # of a credential for a node's own verbs


class BadCredential(ValueError):
    """Report a credential that a node does not accept; the message has the reason, and no part of the credential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseClaim:
    """What a credential says: `until` is in seconds since 1970, `certificate` the SHA-256 of a node's, in hex."""

    lease: str
    until: float
    certificate: str
    role: Role = "lease"


class Signer:
    """Sign credentials with a private key, by default a new one."""

    def __init__(self, private_key: bytes | None = None):
        ed25519 = _ed25519()
        key: Ed25519PrivateKey = (
            ed25519.Ed25519PrivateKey.generate()
            if private_key is None
            else ed25519.Ed25519PrivateKey.from_private_bytes(private_key)
        )
        self._key = key

    @property
    def private_key(self) -> bytes:
        """Return the 32 bytes of the private key."""
        return self._key.private_bytes_raw()

    @property
    def public_key(self) -> str:
        """Return the public key as the text that `cloche node --public-key` takes."""
        return _encoded(self._key.public_key().public_bytes_raw())

    def credential(self, claim: LeaseClaim) -> HiddenText:
        """Return a signed credential."""
        fields = {"lease": claim.lease, "until": claim.until, "certificate": claim.certificate, "role": claim.role}
        payload = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
        return HiddenText(f"{_encoded(payload)}.{_encoded(self._key.sign(payload))}")


def own_credentials(signer: Signer, certificate: str, wall: Callable[[], float]) -> Callable[[], HiddenText]:
    """Return a function that returns a credential for a node's own verbs, the same for a while."""
    until, credential = 0.0, HiddenText()

    def fresh() -> HiddenText:
        nonlocal until, credential
        if until - wall() < COORDINATOR_S / 2:
            until = wall() + COORDINATOR_S
            claim = LeaseClaim(lease="coordinator", until=until, certificate=certificate, role="coordinator")
            credential = signer.credential(claim)
        return credential

    return fresh


class Verifier:
    """Check credentials at a node, by its coordinator's public key and its own certificate's SHA-256."""

    def __init__(self, public_key: str, certificate: str):
        self._key = _public_key(public_key)
        self._certificate = certificate

    def check(self, credential: object, *, now: float | None = None) -> LeaseClaim:
        """Return what a credential says. Raises BadCredential."""
        if not isinstance(credential, str) or not 0 < len(credential) <= MOST_CREDENTIAL:
            raise BadCredential("a call needs the credential of a lease, as text")
        payload, signature = (_decoded(part) for part in (*credential.split(".", 1), "")[:2])
        if not self._is_signed(payload, signature):
            raise BadCredential("the credential is not signed by this node's coordinator")
        claim = _claim(payload)
        if claim.certificate != self._certificate:
            raise BadCredential("the credential is for another node, or for this one before it started again")
        if not claim.until > (time.time() if now is None else now):
            raise BadCredential("the credential is over by this machine's clock")
        return claim

    def _is_signed(self, payload: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, payload)
        except InvalidSignature:
            return False
        return True


def _public_key(text: str) -> Ed25519PublicKey:
    key = _decoded(text)
    if len(key) != KEY_BYTES:
        raise BackendUnavailable(
            f"the public key of a coordinator has {KEY_BYTES} bytes in base64url, and this text has {len(key)}.",
            remedy="An engine passes it to each node that it starts; by hand, give public_key of the fleet's Signer.",
        )
    public_key: Ed25519PublicKey = _ed25519().Ed25519PublicKey.from_public_bytes(key)
    return public_key


def _claim(payload: bytes) -> LeaseClaim:
    """Return the claim of a payload whose signature is valid. Raises BadCredential."""
    try:
        fields = json.loads(payload)
        claim = LeaseClaim(
            lease=str(fields["lease"]),
            until=float(fields["until"]),
            certificate=fields["certificate"],
            role=fields["role"],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise BadCredential("the credential has no lease") from error
    if not claim.lease or claim.role not in ROLES:
        raise BadCredential("the credential has no lease, or a role that this version does not have")
    return claim


def _ed25519() -> Any:  # noqa: ANN401 - a module
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BackendUnavailable(
            "the package cryptography, which signs leases, is not installed.",
            remedy='Install the extra that brings it: "pip install cloche[node]".',
        ) from error
    return ed25519


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    """Return the bytes of base64url without padding, empty for any other text."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
