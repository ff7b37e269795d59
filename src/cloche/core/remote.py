"""What reaches a provider of sandboxes on other machines: whose account, where, and how much of it may be used.

An account comes from the caller's own configuration alone. Nothing here reads a file or the environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping

from .fleet_settings import FleetSettings
from .record import dataclass, field

DOMAINS: Mapping[str, str] = {"e2b": "e2b.app", "daytona": "app.daytona.io"}  # where an account names nothing else
LIFETIME_S = 3600.0
SILENCE_S, LEAST_SILENCE_S = 10.0, 1.0
NODE_SILENCE_S = 4.5  # after which a caller takes the node of a fleet for lost
LOST_S = 5.0  # from a node's last byte to the error that it is lost, the wait for a reason included
LEASE_S = 300.0  # how long a sandbox of a service lives on without its client
LOOKS = 5  # in the time after which a silent connection is lost
# Of the wire of a service, both ends.
SERVICE_WIRE = 2  # its version
MOST_MESSAGE = 1 << 20  # bytes of one web socket message
MOST_INLINE = 1 << 18  # bytes of JSON in one frame; more is sent on the stream for JSON
MOST_JSON = 64 << 20  # bytes of one result or event
MOST_FIELDS = 32 << 20  # bytes of JSON of one call
ANSWER_S, MOST_QUESTIONS = 60.0, 32  # for an answer about a host; unanswered ones of one sandbox
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class HiddenText(str):
    """Be text that `repr`, `str` and `format` hide; only `reveal` returns it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(hidden)" if len(self) else "none"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def reveal(self) -> str:
        """Return the text."""
        return "".join(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Bound the use of an account by all processes of this user; None is without a limit.

    A day is a UTC day. `money_per_day` is in the provider's currency, and counts where the provider reports prices.
    """

    runs_per_day: int | None = None
    seconds_per_day: float | None = None
    sandboxes_per_day: int | None = None
    sandboxes_at_once: int | None = None
    money_per_day: float | None = None


@dataclass(slots=True, kw_only=True)
class LeasedPlace:
    """Name a lease on a node of a fleet; `credential` is replaced when the lease is renewed.

    `why_lost` asks the fleet why the node was lost, for so many seconds; its answer is empty where it does not know.
    `is_over` asks it whether the lease is over, which takes some seconds where the node has just died.
    """

    engine: str
    node: str
    lease: str
    credential: HiddenText = field(repr=False)
    why_lost: Callable[[float], Awaitable[str]] | None = field(default=None, repr=False, compare=False)
    is_over: Callable[[], Awaitable[bool]] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAccount:
    """Hold the settings of one provider: `e2b`, `daytona`, `cloche`, another machine's service, or a fleet's engine.

    `url` is that of its API; `domain` and `sandbox_url` are E2B's, `organisation` and `region` Daytona's.
    `template` is what sandboxes are made from. `ca_file` is trusted in place of the system's certificates, and
    `certificate`, the SHA-256 of one in hex, in place of both. `place` is a lease on a node of a fleet: all leases
    on a node share its connections, so it does not count when accounts are compared. `fleet` has the settings of an
    engine's. The provider keeps a sandbox
    for at most `lifetime_s`. A connection that carries a call and has been silent for `silence_s` is lost; both
    sides send pings before that, and the other times of the wire are multiples of it. A result has at most `most_json`
    bytes. A live sandbox at `cloche`
    ends `lease_s` after its client is lost; with 0 a process of its own keeps it there. `quota_file` holds the
    counters; without one nothing is counted.
    """

    provider: str
    api_key: HiddenText = field(default=HiddenText(), repr=False)
    url: str = field(default="", repr=False)
    domain: str = ""
    sandbox_url: str = field(default="", repr=False)
    organisation: str = ""
    region: str = ""
    template: str = ""
    ca_file: str = ""
    lifetime_s: float = LIFETIME_S
    silence_s: float = SILENCE_S
    most_json: int = MOST_JSON
    lease_s: float = LEASE_S
    quota: Quota = Quota()
    quota_file: str | None = None
    certificate: str = ""
    place: LeasedPlace | None = field(default=None, repr=False, compare=False)
    fleet: FleetSettings = FleetSettings()

    @property
    def look_s(self) -> float:
        """Return how often a connection with calls is looked after, more often at a node of a fleet."""
        return (self.silence_s if self.place is None else min(self.silence_s, NODE_SILENCE_S)) / LOOKS

    @property
    def pong_s(self) -> float:
        """Return the time for an answer to a ping."""
        return self.silence_s / 2

    @property
    def cancel_s(self) -> float:
        """Return the time for the service to end a call that was cancelled."""
        return self.silence_s

    @property
    def open_s(self) -> float:
        """Return the time to connect and to be greeted."""
        return 2 * self.silence_s

    @property
    def stall_s(self) -> float:
        """Return the time for the service to take more of a call's fields."""
        return 6 * self.silence_s

    @property
    def id(self) -> str:
        """Name the account without its key: the provider, and the beginning of the key's SHA-256 if there is a key."""
        key = self.api_key.reveal()
        return f"{self.provider}:{hashlib.sha256(key.encode()).hexdigest()[:12]}" if key else self.provider

    def as_dict(self) -> dict[str, str]:
        """Return where the code goes and with which account, as results and the audit log say it."""
        place, host = self.place, self.host
        if place is not None or not host:  # a fleet: the coordinator's address, or that of the environment
            host = self.fleet.address or self.provider
        where = {"provider": self.provider, "account": self.id, "host": host}
        return where if place is None else {**where, "node": place.node, "lease": place.lease}

    @property
    def host(self) -> str:
        """Return where the code goes: host and port of the API, or the provider's domain."""
        from urllib.parse import urlsplit  # every run imports this module, and few go elsewhere

        address = urlsplit(self.url) if "//" in self.url else None
        if address is None:
            return self.domain or DOMAINS.get(self.provider, "")
        return address.netloc.rpartition("@")[2]


def why_no_address(text: str) -> str:
    """Return the fault of the address that a key is sent to, empty if there is none. The address is not repeated."""
    from urllib.parse import urlsplit  # every run imports this module, and few go elsewhere

    try:
        address = urlsplit(text)
        host, _ = address.hostname or "", address.port
    except ValueError:
        return "is not an address"
    if not host:
        return "is no whole address; write it with https://, or with http:// for this host"
    if "@" in address.netloc or address.query or address.fragment:
        return "has a user name, a password or a query; write the address alone"
    if address.scheme == "https" or (address.scheme == "http" and host in LOOPBACK):
        return ""
    return "is not https, but a key is sent there (http is allowed for this host only)"
