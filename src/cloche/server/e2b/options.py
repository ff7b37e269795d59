"""The options of `cloche serve --e2b`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloche.core.record import dataclass

if TYPE_CHECKING:
    from .own_templates import OwnTemplates

PORT = 3000  # E2B's own, for its SDKs in debug mode
ENVD_VERSION = "0.6.4"  # decides which features SDKs use


@dataclass(frozen=True, slots=True, kw_only=True)
class E2BOptions:
    """Where E2B's protocol is served. With `domain`, ports have host names `PORT-ID.DOMAIN`, over TLS.

    It has TLS with `certificate`; with a domain and none, by an authority of its own (`tls.py`). `trusted_proxies` have
    it in place of this listener.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    domain: str | None = None
    certificate: str | None = None
    key: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    templates: OwnTemplates | None = None  # of the operator, beside the built-in ones
