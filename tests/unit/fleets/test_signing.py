"""Credentials of leases: what a node accepts, and what it refuses and why."""

import base64
import json

import pytest

from cloche.core.errors import BackendUnavailable
from cloche.fleets.signing import BadCredential, LeaseClaim, Signer, Verifier

HERE, ELSEWHERE = "a" * 64, "b" * 64
SIGNER = Signer()
NODE = Verifier(SIGNER.public_key, HERE)
CLAIM = LeaseClaim(lease="ls_1", until=2000.0, certificate=HERE)


def _signed_by_nobody(**changes: object) -> str:
    """Return a credential with a changed payload and the signature of the original one."""
    payload, signature = SIGNER.credential(CLAIM).reveal().split(".")
    fields = json.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = json.dumps({**fields, **changes}, separators=(",", ":")).encode()
    return f"{base64.urlsafe_b64encode(changed).decode().rstrip('=')}.{signature}"


def test_a_credential_says_what_was_signed() -> None:
    """A credential says what was signed, also by a signer that got the key."""
    assert NODE.check(SIGNER.credential(CLAIM).reveal(), now=1999.0) == CLAIM
    again = Signer(SIGNER.private_key)
    assert NODE.check(again.credential(CLAIM).reveal(), now=1999.0) == CLAIM


@pytest.mark.parametrize(
    ("credential", "reason"),
    [
        (SIGNER.credential(CLAIM).reveal(), "is over"),
        (SIGNER.credential(LeaseClaim(lease="ls_1", until=9e9, certificate=ELSEWHERE)).reveal(), "another node"),
        (Signer().credential(LeaseClaim(lease="ls_1", until=9e9, certificate=HERE)).reveal(), "not signed"),
        (_signed_by_nobody(until=9e9), "not signed"),
        (_signed_by_nobody(role="coordinator"), "not signed"),
        (SIGNER.credential(LeaseClaim(lease="", until=9e9, certificate=HERE)).reveal(), "no lease"),
        (None, "as text"),
        ("", "as text"),
        ("x" * 5000, "as text"),
        ("no-dot", "not signed"),
        ("é.ü", "not signed"),
        ("..", "not signed"),
    ],
)
def test_a_node_refuses(credential: object, reason: str) -> None:
    """A node refuses what is over, for another node, or not signed by its coordinator."""
    with pytest.raises(BadCredential, match=reason):
        NODE.check(credential, now=2001.0)


def test_a_public_key_of_another_size_is_named() -> None:
    """A public key of another size is an error that gives the size."""
    with pytest.raises(BackendUnavailable, match="32 bytes in base64url, and this text has 3"):
        Verifier("abcd", HERE)


def test_no_part_of_a_credential_is_shown() -> None:
    """A credential is hidden in text."""
    assert SIGNER.credential(CLAIM).reveal() not in f"{SIGNER.credential(CLAIM)!r} {SIGNER.credential(CLAIM)}"
