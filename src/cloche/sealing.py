"""Texts that are encrypted for storage: AES-256-GCM, which also authenticates what a text is bound to."""

from __future__ import annotations

import hmac
import os

from cloche.core.errors import BackendUnavailable

KEY_BYTES, NONCE_BYTES = 32, 12


class SealingKey:
    """Encrypt and decrypt texts. `mark` tells the key from another one for the same `purpose`; `what` names it."""

    def __init__(self, key: bytes, what: str = "secrets_key", purpose: str = "secrets of a service"):
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise BackendUnavailable(
                f"{what}: the package 'cryptography' is missing.", remedy="pip install 'cloche[server,secrets]'"
            ) from None
        self._cipher = AESGCM(key)
        self.mark = hmac.new(key, f"cloche: {purpose}".encode(), "sha256").hexdigest()[:16]

    def seal(self, value: str, about: bytes) -> bytes:
        """Return a value encrypted, together with what it is bound to."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value.encode(), about)

    def open(self, sealed: bytes, about: bytes) -> str:
        """Return a value. Raises InvalidTag for one that is bound to something else."""
        return self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about).decode()
