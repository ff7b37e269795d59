"""The callers' side of keepers: start one and hand a sandbox over, connect as a client, query it.

The description of a sandbox for results is not sent over the wire. It is in the entry beside the socket, which only its
user can write. `as_entry` creates it, `read_entry` parses it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from cloche.core.changes import HomeFolder, HostFolder
from cloche.core.enforcement import Control, Enforcement, Level, Measure, State
from cloche.core.errors import BackendUnavailable, ClocheError, InvalidRequest, OutcomeUnknown, StartFailed
from cloche.core.limits import Limits, parse_duration
from cloche.core.policy import Policy
from cloche.core.record import asdict, dataclass, fields
from cloche.init import wire
from cloche.jail.setup import keepers

from . import registry
from .life import AT_END, ENDS

if TYPE_CHECKING:
    from cloche.core.secrets import GivenSecrets, HeldSecrets

log = logging.getLogger("cloche.live")
LIFETIME_S = 24 * 3600.0
HAND_OVER_S, VISIT_S, ADOPT_S = 30.0, 5.0, 2.0
CHUNK = 1 << 16
_started: list[subprocess.Popen[bytes]] = []  # keepers of this process, to be taken note of when they end


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The name under which a sandbox is kept, and for how long: `keep_s` without a client, `lifetime_s` in total.

    Without `keep_s` it ends with the client that opened it. `idle_s` bounds the time without a process and a call; None
    means no bound. `at_end` is what happens when one of the first two is over: see `life.AT_END`.
    """

    name: str
    keep_s: float | None = None
    lifetime_s: float = LIFETIME_S
    idle_s: float | None = None
    at_end: str = ENDS


def read_terms(
    name: object, *, keep: object = None, lifetime: object = None, idle: object = None, at_end: object = None
) -> Terms:
    """Return a caller's values as terms. Raises InvalidRequest."""
    return Terms(
        name=registry.check_name(name),
        keep_s=None if keep is None else parse_duration(keep, name="keep"),
        lifetime_s=LIFETIME_S if lifetime is None else parse_duration(lifetime, name="lifetime"),
        idle_s=None if idle is None else parse_duration(idle, name="idle"),
        at_end=ENDS if at_end is None else check_at_end(at_end),
    )


def check_at_end(value: object) -> str:
    """Return what happens at the end of a life. Raises InvalidRequest."""
    if value not in AT_END:
        raise InvalidRequest(f"at_end: {value!r} is not valid; give {', '.join(AT_END[:-1])} or {AT_END[-1]}")
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of sandboxes, described for their list. Without the owner they end after `absent_s`.

    The owner reports its presence by `visit(found, "own", owner_s=...)`. That is not needed while a client is attached.
    """

    about: Mapping[str, str]
    absent_s: float


_owner: ContextVar[Owner | None] = ContextVar("owner", default=None)


@contextmanager
def owned_by(owner: Owner) -> Iterator[None]:
    """Assign the sandboxes that the body opens under a name to an owner."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


class KeeperClaim:
    """Claim a name, and hand the sandbox opened under it over to a keeper; see `core.protocols.Keeping`.

    `stand_in` has the `command` and `env` of the process that the keeper starts to answer network requests while no
    client is attached.
    """

    def __init__(self, terms: Terms, entry: Mapping[str, Any], stand_in: Mapping[str, Any] | None = None):
        self._terms, self._entry, self._stand_in = terms, entry, stand_in
        self._owner = _owner.get()
        self.ends_with_caller = terms.keep_s is None
        self._claimed: registry.Claimed | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    async def begin(self) -> None:
        """Claim the name, and start the keeper. Raises InvalidRequest, BackendUnavailable, StartFailed."""
        _collect()
        self._claimed = await asyncio.to_thread(registry.claim, self._terms.name)
        try:
            self._process, self._link = keepers.start()
            log.debug("a keeper is started for sandbox %s", self._terms.name)
        except OSError as error:
            self.abandon()
            raise StartFailed(f"cannot start the keeper: {error}", step="keeper", errno=error.errno) from error

    def join_network(self) -> socket.socket:
        """Return a link to the process that serves the sandbox's network; see `core.protocols.Keeping`."""
        return join_network(self._terms.name)

    def abandon(self) -> None:
        """Give up: release the name. The keeper, which has no sandbox yet, ends by itself."""
        claimed, self._claimed = self._claimed, None
        if claimed is not None:
            claimed.give_up()
        self._let_go()

    def _let_go(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._process is not None:
            _started.append(self._process)
            self._process = None

    async def take(
        self, init: socket.socket, held: Mapping[str, int], groups: Sequence[str], said: Mapping[str, Any]
    ) -> socket.socket:
        """Hand over init's socket and the other descriptors of the sandbox; return a connection to the keeper.

        See `core.protocols.Keeping`. The caller closes its own descriptors. Raises StartFailed.
        """
        claimed, link = self._claimed, self._link
        if claimed is None or claimed.listening is None or link is None:
            raise InvalidRequest("this keeper was abandoned")
        fds = {
            "init": init.fileno(), "listening": claimed.listening.fileno(), "folder": claimed.folder,
            "lock": claimed.lock, **held,
        }  # fmt: skip
        order = {
            **self._order(), "said": {"boot": registry.boot_id()}, "descriptors": list(fds), "groups": list(groups),
            "stand_in": self._stand_in,
        }  # fmt: skip
        try:
            claimed.describe(self._described(said))
            await _send(link, json.dumps(order).encode(), list(fds.values()))
        except OSError as error:
            self.abandon()
            raise StartFailed(f"the keeper does not answer: {error}", step="keeper", errno=error.errno) from error
        link.send(b"go")  # before which all ends with us, and after which it is not ours to end
        self._claimed = None
        claimed.release()
        self._let_go()
        return await asyncio.to_thread(registry.find(self._terms.name).connect)

    def _order(self) -> dict[str, Any]:
        """Return the name and the times of the sandbox, for its keeper."""
        terms = self._terms
        return {
            "name": terms.name, "keep_s": terms.keep_s, "lifetime_s": terms.lifetime_s, "idle_s": terms.idle_s,
            "at_end": terms.at_end, "owner_s": None if self._owner is None else self._owner.absent_s,
        }  # fmt: skip

    def _described(self, said: Mapping[str, Any]) -> dict[str, Any]:
        owner = {} if self._owner is None else {"owner": dict(self._owner.about)}
        return {**self._entry, **owner, **said, "created": time.time()}

    async def adopt(self, spare: Adoptable) -> None:
        """Give the name and the times to a spare sandbox, in place of `begin` and `take`.

        Raises InvalidRequest if the name is in use; ClocheError or TimeoutError if the spare does not answer, whose end
        must then be awaited before `abandon`.
        """
        self._claimed = claimed = await asyncio.to_thread(registry.claim, self._terms.name, listens=False)
        claimed.describe(self._described(spare.described()))
        try:
            async with asyncio.timeout(ADOPT_S):
                await spare.adopt(self._order())
        except InvalidRequest as error:  # of the keeper: the caller's words were valid
            raise OutcomeUnknown(f"the keeper of a spare sandbox refused its name: {error}") from error
        self._claimed = None
        claimed.release()


class Adoptable(Protocol):
    """Be a spare sandbox: open, and kept under a name that no caller knows, until it gets one."""

    def described(self) -> Mapping[str, Any]:
        """Return the facts that later clients need, as plain data."""
        ...

    async def adopt(self, order: Mapping[str, Any]) -> None:
        """Have its keeper keep it under a name and for times. Raises ClocheError."""
        ...


async def _send(link: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send one message with descriptors, and wait for the answer."""
    link.setblocking(False)
    socket.send_fds(link, [data], fds)
    async with asyncio.timeout(HAND_OVER_S):
        if not await asyncio.get_running_loop().sock_recv(link, 16):
            raise ConnectionError("it has ended")


def _collect() -> None:
    """Reap keepers that have ended, which are children of this process."""
    _started[:] = [process for process in _started if process.poll() is None]


def _forget_after_fork() -> None:
    _started.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


# What is said of a sandbox.


def as_entry(backend: str, policy: Policy, limits: Limits) -> dict[str, Any]:
    """Return a sandbox's description for attaching, as plain data. The opener adds `enforcement`."""
    rules = {spec.name: _plain(getattr(policy, spec.name)) for spec in fields(policy)}
    if policy.host_folder is not None:
        rules["host_folder"] = policy.host_folder.as_dict()
    if policy.home is not None:
        rules["home"] = asdict(policy.home)
    if policy.secrets is not None:
        rules["secrets"] = dict(policy.secrets.hosts_by_name)  # the placeholders are in the environment
    return {"version": wire.VERSION, "backend": backend, "policy": rules, "limits": limits.as_dict()}


def _plain(value: object) -> object:
    if isinstance(value, Level):
        return str(value)
    return [item if isinstance(item, int) else str(item) for item in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Describe a kept sandbox: its backend, policy, limits, and enforcement."""

    backend: str
    policy: Policy
    limits: Limits
    enforcement: Enforcement


def read_entry(name: str, entry: Mapping[str, Any]) -> Kept:
    """Parse an entry of `as_entry`. Raises BackendUnavailable if another version of Cloche wrote it."""
    if entry.get("version") != wire.VERSION:
        raise BackendUnavailable(
            f"sandbox {name!r} is being made or ended, or is kept by another version of Cloche.",
            remedy=f"Try again, use that version, or end it: cloche sandbox kill {name}",
        )
    try:
        said_rules = entry["policy"].items()
        rules: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in said_rules}
        for rule in ("level", "require_level"):
            rules[rule] = Level.parse(rules[rule]) if rules.get(rule) is not None else None
        for rule in ("require_controls", "best_effort"):
            rules[rule] = tuple(Control(control) for control in rules[rule])
        if rules.get("host_folder") is not None:
            rules["host_folder"] = HostFolder.from_dict(rules["host_folder"])
        if rules.get("home") is not None:
            rules["home"] = HomeFolder.from_dict(rules["home"])
        if rules.get("secrets") is not None:
            rules["secrets"] = _held(rules["secrets"], entry["environment"])
        report = entry["enforcement"]
        controls = {
            Control(control): Measure(state=State(row["state"]), mechanism=row["mechanism"], reason=row["reason"])
            for control, row in report["controls"].items()
        }
        return Kept(
            backend=str(entry["backend"]),
            policy=Policy(**rules),
            limits=Limits(**entry["limits"]),
            enforcement=Enforcement(level=Level.parse(report["level"]), controls=controls),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BackendUnavailable(f"the state file of sandbox {name!r} is invalid: {error}") from error


def _held(hosts: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> HeldSecrets:
    from cloche.core.secrets import HeldSecrets  # needed by some sandboxes only

    return HeldSecrets(hosts_by_name=hosts, placeholders={name: environment[name] for name in hosts})


def find_kept(name: str, secrets: GivenSecrets | None = None) -> Kept:
    """Return the description of the sandbox with this name. Raises InvalidRequest, BackendUnavailable.

    Given `secrets` must be those of the sandbox, by name and hosts.
    """
    kept = read_entry(name, registry.find(name).entry)
    if secrets is not None:
        from cloche.core.secrets import check_same, read_secrets

        held = kept.policy.secrets.hosts_by_name if kept.policy.secrets is not None else {}
        check_same(name, held, read_secrets(secrets).hosts_by_name)
    return kept


async def connect(name: str) -> socket.socket:
    """Return a connection to the keeper with this name. Raises InvalidRequest, BackendUnavailable."""
    entry = await asyncio.to_thread(registry.find, name)
    try:
        return await asyncio.to_thread(entry.connect)
    except OSError as error:
        raise InvalidRequest(f"name: sandbox {name!r} has just ended ({error})") from error


def check_greeting(name: str, greeting: Mapping[str, Any]) -> None:
    """Check that the greeting is from the keeper of this name and boot. Raises OutcomeUnknown."""
    facts = greeting.get("keeper")
    if not isinstance(facts, Mapping) or facts.get("name") != name or facts.get("boot") != registry.boot_id():
        raise OutcomeUnknown(f"the process that answers for sandbox {name!r} is not its keeper")


# Without an event loop.


def visit(
    entry: registry.Found,
    op: str,
    *,
    timeout_s: float = VISIT_S,
    links: list[int] | None = None,
    **arguments: Any,  # noqa: ANN401 - any JSON
) -> dict[str, Any]:
    """Have a keeper do one of the keeper's operations, and return its event. This does not count as a client.

    Received descriptors are added to `links`. Raises OutcomeUnknown if the keeper is gone or does not answer.
    """
    until = monotonic() + timeout_s
    try:
        with entry.connect() as link:
            link.settimeout(timeout_s)
            link.sendall(wire.json_frame(wire.HELLO, 0, version=wire.VERSION, is_visit=True))
            return _ask(entry.name, link, until, wire.json_frame(wire.OPEN, 1, op=op, **arguments), links)
    except (OSError, wire.WireError) as error:
        raise OutcomeUnknown(f"the keeper of sandbox {entry.name!r} does not answer: {error}") from error


def join_network(name: str) -> socket.socket:
    """Return a new link to the process that serves a sandbox's network. Blocks. Raises OutcomeUnknown."""
    links: list[int] = []
    try:
        visit(registry.find(name), "network", links=links)
        return socket.socket(fileno=links.pop())
    except (ClocheError, IndexError) as error:
        raise OutcomeUnknown(f"the network of sandbox {name!r} is no longer served: {error}") from error
    finally:
        for link in links:
            os.close(link)


def _ask(name: str, link: socket.socket, until: float, order: bytes, links: list[int] | None) -> dict[str, Any]:
    """Check the greeting, send an order, and return the answer."""
    frames, event = wire.FrameBuffer(), {}
    while True:
        link.settimeout(max(0.01, until - monotonic()))
        if links is None:
            data = link.recv(CHUNK)
        else:
            data, fds, _, _ = socket.recv_fds(link, CHUNK, 1)
            links += fds
        if not data:
            raise ConnectionError("the connection was closed")
        for kind, channel, body in frames.feed(data):
            if kind == wire.HELLO:
                check_greeting(name, wire.read_object(body))
                link.sendall(order)
            elif channel == 1 and kind == wire.EVENT:
                event = wire.read_object(body)
            elif channel == 1 and kind == wire.CLOSE:
                error = wire.read_object(body).get("error")
                if error:
                    raise OutcomeUnknown(f"sandbox {name!r}: {error.get('message')}")
                return event
