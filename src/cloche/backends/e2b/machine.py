"""One sandbox at E2B: its plan (a pure decision), the programs of its template, and processes in it.

Besides the provider's id, a sandbox has a name chosen here. If the answer to a creation was lost, that name is looked
up and the sandbox, if there is one, is ended.
"""

from __future__ import annotations

import asyncio
import binascii
import functools
import json
import logging
import math
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from importlib.resources import files
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.record import dataclass
from cloche.core.suppressed import suppress_logged
from cloche.jail.setup.seccomp import first_process_filter

from ..containers.container import ARGUMENTS, OUTPUT
from ..containers.machines import LookedInto
from ..containers.program import ENVIRONMENT, IMAGE_PATH, LOOK, PROGRAMS, REAPERS, ULIMITS
from ..garbage_collection import Background
from ..remote.failures import Failure, RemoteUnavailable
from ..remote.quota import SandboxTicket, counter_for
from .sdk import CREATE_S, END_S, PROVIDER, Provider, call
from .wire import ProcessWire

log = logging.getLogger("cloche.remote")
OURS, OWNER_LABEL, NAME_LABEL = "cloche", "cloche-owner", "cloche-name"
TEMPLATE = "base"
NOBODY = 65_534
START_S, CLOSE_S = 30.0, 5.0
LOOK_S, LIST_S = 60.0, 120.0  # total time, independent of keepalives
MOST_LOOKED_BYTES = 1 << 20
MOST_PAGES, PAGE = 100, 100
PATIENCE_S, TRIES = 5.0, 3  # maximum Retry-After that is waited for, and attempts
MACHINES = ("x86_64", "aarch64")
WEB_PORTS = (80, 443)
LENGTH_DIGITS = 9
T = TypeVar("T")
background = Background("cloche-e2b-end", 2 * END_S)
_UNPACK = "import binascii, zlib\nexec(compile(zlib.decompress(binascii.a2b_base64('{text}')), '<cloche>', 'exec'))\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class E2BPlan:
    """Settings of one sandbox and of the containers in it."""

    template: str
    lifetime_s: int
    has_network: bool
    allowed: tuple[str, ...]  # allowed hosts; () allows all
    settings: Mapping[str, Any]  # for the launcher

    def creation(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of the package's `create`, except those about the account."""
        only = {"allow_out": list(self.allowed), "deny_out": ["0.0.0.0/0"]} if self.allowed else {}
        return {
            "template": self.template,
            "timeout": self.lifetime_s,
            "metadata": dict(labels),
            "secure": True,
            "allow_internet_access": self.has_network,
            # With public traffic, everyone who knows the sandbox's id could connect to its ports.
            "network": {"allow_public_traffic": False, **only},
        }

    def launching(self, *, makes_workspace: bool) -> bytes:
        """Return the launcher as a message: its length in nine digits, then the program."""
        settings = json.dumps({**self.settings, "makes_workspace": makes_workspace})
        text = files("cloche.backends.e2b").joinpath("launcher.py").read_text(encoding="utf-8")
        program = f"{text}\nimport json\nmain(json.loads({settings!r}))\n".encode()
        return f"{len(program):0{LENGTH_DIGITS}d}".encode() + program


def plan_sandbox(
    policy: Policy, limits: Limits, *, template: str, lifetime_s: float, is_live: bool = False,
    homes: Sequence[str] = (),
) -> E2BPlan:  # fmt: skip
    """Return the plan of one sandbox. Raises BackendUnavailable for a network rule that E2B cannot express."""
    has_network = policy.network != "off"
    return E2BPlan(
        template=template or TEMPLATE,
        lifetime_s=max(1, math.ceil(lifetime_s)),
        has_network=has_network,
        allowed=allowed_hosts(policy),
        settings={
            "user": NOBODY if policy.user == "nobody" else 0,  # 0: the template's user
            "homes": list(homes),
            "disk_bytes": limits.disk_bytes,
            "tmp_bytes": limits.tmp_bytes,
            "inodes": limits.inodes,
            "is_tmp_writable": "/tmp" in policy.writable_paths,
            "has_network": has_network,
            "ulimits": {**ULIMITS, "nproc": limits.pids + REAPERS},
            "filters": {name: first_process_filter(name).hex() for name in MACHINES} if is_live else {},
            "arguments": list(ARGUMENTS),
            "env": {"PATH": IMAGE_PATH, **ENVIRONMENT},
        },
    )


def allowed_hosts(policy: Policy) -> tuple[str, ...]:
    """Return the policy's hosts in the notation of E2B's rules.

    Raises BackendUnavailable for one they cannot express.
    """
    if policy.network_deny:
        raise _inexpressible("a rule that denies a host", policy.network_deny[0])
    if policy.network != "allowlist":
        if policy.network_ports:
            raise _inexpressible("a choice of ports", str(policy.network_ports[0]))
        return ()
    fields = []
    for rule in policy.network_rules().allow:
        if rule.requests:
            raise _inexpressible("methods and paths", rule.text)
        if rule.is_address:
            fields.append(rule.host)
            if set(rule.ports) != set(WEB_PORTS):
                raise _inexpressible("a choice of ports", rule.text)
            continue
        if rule.networks:
            raise _inexpressible("a name that may be a private address", rule.text)
        if not set(rule.ports) <= set(WEB_PORTS):
            raise _inexpressible("a port besides 80 and 443", rule.text)
        fields.append(f"*.{rule.host}" if rule.is_wildcard else rule.host)
    if not fields:
        raise _inexpressible("an empty list", "network_allow")
    return tuple(fields)


def _inexpressible(feature: str, text: str) -> BackendUnavailable:
    return BackendUnavailable(
        f'backend "e2b": its network rules cannot express {feature} ({text}).',
        remedy='Name only hosts, for ports 80 and 443; or use network "open" or "off", or another backend.',
    )


@functools.lru_cache(8)
def packed(boot: bytes) -> bytes:
    """Return a shorter message (length, program) with the same effect as the boot message `boot`."""
    text = binascii.b2a_base64(zlib.compress(boot[LENGTH_DIGITS:], 9), newline=False).decode()
    program = _UNPACK.format(text=text).encode()
    return f"{len(program):0{LENGTH_DIGITS}d}".encode() + program


class E2BMachine:
    """One sandbox at the provider. It ends by `end`, at the end of its lifetime, or by `cloche gc`.

    All methods block and are thread-safe. `end` also cancels the pending requests for this sandbox.
    """

    def __init__(self, provider: Provider, plan: E2BPlan, owner: str):
        self.provider, self.plan, self._owner = provider, plan, owner
        self.is_lost = self.has_workspace = False
        self.id = ""
        self.template: LookedInto | None = None
        self._ours = uuid.uuid4().hex
        self._making, self._turn = threading.Lock(), threading.Lock()
        self._asked: set[Future[Any]] = set()
        self._wires: weakref.WeakSet[ProcessWire] = weakref.WeakSet()
        self._sandbox: Any = None
        self._client: Any = None
        self._ticket: SandboxTicket | None = None
        self._has_ended = threading.Event()

    def another(self) -> E2BMachine:
        """Return a machine with the same plan that is not created yet."""
        return E2BMachine(self.provider, self.plan, self._owner)

    def create(self) -> LookedInto:
        """Create the sandbox on the first call and list its template's programs.

        Raises BackendUnavailable or StartFailed; nothing is left then.
        """
        with self._making:
            self._check()
            if self.template is None:
                self._make()
                self.template = self._look()
            return self.template

    def _check(self) -> None:
        if self.is_lost:
            raise StartFailed("the workspace is gone with its sandbox at E2B; open another one", step="create")

    def _make(self) -> None:
        counter = counter_for(self.provider.account)
        ticket = counter.open_sandbox(self.plan.lifetime_s) if counter is not None else None
        try:
            sandbox = self._created()
        except BaseException:
            if ticket is not None:
                ticket.refund()
            raise
        try:
            self.id = self.provider.check_name(sandbox.sandbox_id)
            with self._turn:
                self._check()
                self._sandbox, self._ticket = sandbox, ticket
            if ticket is not None:
                ticket.note_id(self.id)
            self._client = self.provider.process_client(sandbox)
        except BaseException:
            with self._turn:
                self._sandbox, self._ticket = sandbox, ticket
            self.end_soon()
            raise

    def _ask(self, make: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """Return the result of a call. Raises BackendUnavailable, or StartFailed if `end` is called meanwhile."""
        with self._turn:
            self._check()
            future = call.begin(make, timeout_s)
            self._asked.add(future)
        try:
            return call.result_of(future, timeout_s)
        except CancelledError:
            raise StartFailed("it was closed before its sandbox at E2B was ready", step="create") from None
        except Exception as error:
            raise self.provider.explain(error) from error
        finally:
            with self._turn:
                self._asked.discard(future)

    def _created(self) -> Any:
        labels = {OURS: "1", OWNER_LABEL: self._owner, NAME_LABEL: self._ours}
        arguments = {**self.plan.creation(labels), **self.provider.options(), "request_timeout": CREATE_S}
        for attempt in range(TRIES):
            try:
                return self._ask(lambda: self.provider.package.top.AsyncSandbox.create(**arguments), CREATE_S)
            except RemoteUnavailable as error:
                wait_s = error.retry_after_s
                if error.failure in (Failure.TIMEOUT, Failure.BAD_ANSWER, Failure.SERVER):
                    background.begin(self._end_unknown)
                can_wait = error.failure is Failure.RATE_LIMITED and wait_s is not None and wait_s <= PATIENCE_S
                if not can_wait or attempt + 1 == TRIES:
                    raise
                self._has_ended.wait(wait_s)
            except StartFailed:
                background.begin(self._end_unknown)
                raise
        raise AssertionError("unreachable")

    def _end_unknown(self) -> None:
        """End the sandbox with this machine's name, if one was created and the answer was lost."""
        with suppress_logged(log, "a sandbox may have been created; it ends after its lifetime", Exception):
            for name, _ in list_sandboxes(self.provider, {NAME_LABEL: self._ours}):
                kill_sandbox(self.provider, name)

    def _look(self) -> LookedInto:
        output = self._run(["/bin/sh", "-c", LOOK, "look", *PROGRAMS])
        name = self.plan.template
        contents = LookedInto.of(
            name, output.decode("utf-8", "replace"), shown=f"template {name!r} of E2B",
            remedy="Name one that has: e2b.template.",
        )  # fmt: skip
        if "python3" not in contents.programs:
            raise BackendUnavailable(
                f"template {contents.name!r} of E2B has no python3, which serves runs there.",
                remedy="Name one that has Python 3.11 or later: e2b.template.",
            )
        return contents

    def _run(self, arguments: Sequence[str]) -> bytes:
        """Run a program to its end and return its standard output. Raises BackendUnavailable or StartFailed."""
        wire = self.start(arguments, user="", sends=False)
        output = b""
        late = threading.Timer(LOOK_S, wire.fail, (TimeoutError("it did not end in time"),))
        late.daemon = True
        late.start()
        try:
            for stream, piece in wire.pieces():
                output += piece if stream == OUTPUT else b""
                if len(output) > MOST_LOOKED_BYTES:
                    raise StartFailed("a sandbox at E2B sends more than was requested", step="look")
        except OSError as error:
            raise StartFailed(f"a sandbox at E2B is gone: {error}", step="look") from error
        finally:
            late.cancel()
            wire.close()
        return output

    def launch(self, boot: bytes) -> ProcessWire:
        """Start the launcher, which makes a container, and send it `boot`. Raises BackendUnavailable or OSError."""
        wire = self.start(["/bin/sh", "-c", 'exec python3 "$@"', "python3", *ARGUMENTS], user="root", sends=True)
        wire.send(self.plan.launching(makes_workspace=not self.has_workspace) + packed(boot))
        self.has_workspace = True
        return wire

    def start(self, arguments: Sequence[str], *, user: str, sends: bool) -> ProcessWire:
        """Start a process. Raises BackendUnavailable."""
        open_wire = functools.partial(ProcessWire.opened, self.provider, self._client, arguments, user, sends=sends)
        wire = self._ask(open_wire, START_S)
        self._wires.add(wire)
        return wire

    def end(self) -> None:
        """Kill the sandbox and release its ticket. Later calls wait for the first."""
        with self._turn:
            is_first, self.is_lost = not self.is_lost, True
            for future in self._asked:
                future.cancel()
            sandbox, self._sandbox = self._sandbox, None
            ticket, self._ticket = self._ticket, None
        for wire in list(self._wires):
            wire.fail(ConnectionError("the sandbox at E2B was ended"))
        if sandbox is not None:
            with suppress_logged(log, "a sandbox at E2B may remain until the end of its lifetime", Exception):
                kill_sandbox(self.provider, self.provider.check_name(sandbox.sandbox_id))
        if ticket is not None:
            with suppress_logged(log, "the end of a sandbox could not be counted", BackendUnavailable):
                ticket.close()
        if is_first or sandbox is not None:
            self._has_ended.set()
        self._has_ended.wait(END_S)

    def end_soon(self) -> None:
        """Call `end` in the background."""
        background.begin(self.end)

    async def close(self) -> None:
        """End the sandbox and wait a bounded time; after that the end continues in the background."""
        self.end_soon()
        await finish(asyncio.to_thread(self._has_ended.wait, CLOSE_S))

    def notes(self) -> dict[str, Any]:
        """Return the entries for `meta` of results."""
        return {
            "backend": PROVIDER,
            "level_source": "claimed",
            "image": self.plan.template,
            "engine": "E2B",
            "remote": {**self.provider.account.as_dict(), "sandbox": self.id},
        }


def kill_sandbox(provider: Provider, name: str) -> bool:
    """End a sandbox by the provider's id; return whether it existed. Raises BackendUnavailable."""
    try:
        kill = functools.partial(provider.package.top.AsyncSandbox.kill, name, **provider.options())
        provider.ask(kill, END_S)
    except RemoteUnavailable as error:
        if error.failure is not Failure.NOT_FOUND:
            raise
        return False
    return True


def list_sandboxes(provider: Provider, labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (id, owner) of all sandboxes with these labels. Raises BackendUnavailable."""
    top = provider.package.top
    pages = top.AsyncSandbox.list(query=top.SandboxQuery(metadata=dict(labels)), limit=PAGE, **provider.options())
    sandboxes, ends = [], time.monotonic() + LIST_S
    for _ in range(MOST_PAGES):
        if time.monotonic() > ends:
            raise provider.failure(Failure.TIMEOUT)
        for sandbox in provider.ask(pages.next_items)[: 10 * PAGE]:
            metadata = sandbox.metadata or {}
            if all(metadata.get(name) == value for name, value in labels.items()):
                sandboxes.append((provider.check_name(sandbox.sandbox_id), str(metadata.get(OWNER_LABEL, ""))))
        if not pages.has_next:
            break
    return sandboxes
