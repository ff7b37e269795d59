"""The caller's side of the egress process: start it, open a sandbox's network in it, ask for its traffic.

Each process that has sandboxes with a network has one egress process; all its threads and event loops share it. It ends
with its caller. Sandboxes that are kept have another one together, up to `MOST_KEPT`: that ends with the last of their
keepers. One that is kept with secrets has one by itself, which ends with its keeper. Without the egress process, no
socket of a sandbox is served any more, and the next sandbox starts another one.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import importlib.util
import itertools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cloche.core.loops import become_task, is_single_call_loop, until_readable
from cloche.core.other_systems import system_name
from cloche.core.record import dataclass
from cloche.jail import messages
from cloche.jail.setup.launch import RESET_SIGNALS
from cloche.jail.setup.seccomp import egress_filter

from .ledger import KEPT_ROWS, Sum

if TYPE_CHECKING:
    from cloche.core.network import NetworkRules

# Its end of the link is standard input, which has a number of its own whatever the caller has closed. The paths stand
# behind those of the standard library: they hold whatever somebody has installed.
log = logging.getLogger("cloche.egress")
BOOT = "import sys; sys.path += {paths!r}; from cloche.egress.process import main; main(0)"
OPENING = ("cryptography", "h2")
USES = {
    "h11": "which reads HTTP",
    "h2": 'which secrets and rules with methods and paths need for HTTP/2; pip install "cloche[secrets]"',
    "cryptography": (
        'which secrets and rules with methods and paths need for certificates; pip install "cloche[secrets]"'
    ),
}
REPORT_S, END_S, SECRETS_S = 10.0, 5.0, 90.0
FINISHES_S = 70.0  # of one with secrets, which may exchange tokens: they would be lost
MOST_KEPT = 32  # sandboxes of one process: as many as may have all their connections at once
AT_ONCE_S = 0.005  # for values that need not be read first
OnMessage = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Hold the carried and refused connections of a sandbox's network since the last report.

    A row has `host`, `port`, `is_allowed`, `why` (empty where allowed), `connections`, and the bytes that the guest
    `sent` and `received`. `unlisted` counts refusals beyond the room for rows; carried connections beyond it are in the
    row of `(more hosts)`. `is_lost`: the egress process is gone, and the traffic is unknown.
    """

    rows: tuple[Mapping[str, Any], ...] = ()
    unlisted: int = 0
    is_lost: bool = False

    @property
    def refused(self) -> int:
        """Count the refused connections."""
        return self.unlisted + sum(int(row["connections"]) for row in self.rows if not row["is_allowed"])

    def notes(self, *, is_shared: bool = False) -> dict[str, Any]:
        """Return the entry for a result's `meta`; empty without traffic.

        `is_shared`: other runs may have used the same network meanwhile.
        """
        notes: dict[str, Any] = {"network": [dict(row) for row in self.rows]} if self.rows else {}
        if is_shared and self.rows:
            notes["network_shared"] = True
        if self.unlisted:
            notes["network_unlisted"] = self.unlisted
        if self.is_lost:
            notes["network_lost"] = (
                "the egress process has ended; the record of the network's traffic is lost, and so are secrets: a "
                "sandbox that had some must be opened anew"
            )
        return notes


class SandboxNetwork:
    """Be one sandbox's network in the egress process: the target of pid 1's sockets, requests and reports.

    `jail_end` is the descriptor for the helper, which keeps a copy. Use from one event loop at a time.
    """

    def __init__(self, jail_end: socket.socket, control: socket.socket):
        self._jail_end, self._control, self._owner = jail_end, control, os.getpid()
        self._numbers = itertools.count(1)
        self._next_authority = ""
        self.on_message: OnMessage | None = None
        self.siblings: weakref.WeakSet[SandboxNetwork] = weakref.WeakSet()  # that its egress process serves, with it

    @property
    def jail_end(self) -> int:
        return self._jail_end.fileno()

    def fileno(self) -> int:
        """Return the descriptor for messages that the egress process sends without a request."""
        return self._control.fileno()

    def again(self) -> SandboxNetwork:
        """Return another network with the same secrets, placeholders and rules as this one had. Raises OSError."""
        return _requested(self.fileno(), "again", {}).join(self.siblings)

    def join(self, siblings: weakref.WeakSet[SandboxNetwork]) -> SandboxNetwork:
        """Become one of those that an egress process serves."""
        self.siblings = siblings
        siblings.add(self)
        return self

    def ask_change(self, number: int, *, allow: Sequence[str], deny: Sequence[str]) -> None:
        """Add rules, and close what they do not allow; the rules in force come with this number. Raises OSError."""
        messages.send(self.fileno(), "further", {"number": number, "allow": list(allow), "deny": list(deny)})

    def ask_replacement(
        self, number: int, *, mode: str, allow: Sequence[str], deny: Sequence[str],
        headers: Mapping[str, Mapping[str, str]],
    ) -> None:  # fmt: skip
        """As `ask_change`, with rules that replace all others. Raises OSError."""
        rules = {"mode": mode, "allow": list(allow), "deny": list(deny), "headers": headers}
        messages.send(self.fileno(), "replace", {"number": number, **rules})

    def offer_to_decide(self) -> None:
        """Receive the questions about hosts without a rule, as `ask`, from now on. Raises OSError."""
        messages.send(self.fileno(), "decides")

    def answer(self, number: int, **answer: Any) -> None:  # noqa: ANN401
        """Answer a question that came as `ask` with the fields of a `windows.HostAnswer`. Raises OSError."""
        messages.send(self.fileno(), "answer", {"number": number, **answer})

    async def report(self, *, ends: bool) -> Traffic:
        """Return the traffic since the last report; where a run `ends`, close all its connections before."""
        number = next(self._numbers)
        try:
            self.ask_report(number, ends=ends)
            async with asyncio.timeout(REPORT_S):
                return await self._await_report(number)
        except (OSError, TimeoutError):
            return Traffic(is_lost=True)

    def ask_report(self, number: int, *, ends: bool) -> None:
        """Ask for a report, which comes as a message with this number. Raises OSError."""
        messages.send(self.fileno(), "report", {"number": number, "ends": ends})

    def give_secrets(
        self,
        secrets: Sequence[Mapping[str, Any]] | None = None,
        values: Sequence[int] = (),
        *,
        is_answered: bool = False,
    ) -> int:
        """Give the network the secrets of its next sandbox, in place of all before; with None it carries nothing.

        They are those of `open_network_with_secrets`, which opened it. What `is_answered` is a number for
        `await_secrets`. Raises OSError.
        """
        number = next(self._numbers)
        rows = None if secrets is None else list(map(dict, secrets))
        messages.send(self.fileno(), "secrets", {"number": number, "rows": rows, "is_answered": is_answered}, values)
        return number

    async def next_authority(self) -> str:
        """Return the certificate of the authority that the next sandbox gets, once. Raises OSError."""
        while not self._next_authority:
            self._tell(*await self._receive_soon())
        authority, self._next_authority = self._next_authority, ""
        return authority

    async def await_secrets(self, number: int = 0) -> dict[str, Any]:
        """Return the `variables` with placeholders and the `authority` that the guest gets, or an `error`.

        Raises OSError, of which TimeoutError is a kind.
        """
        while True:
            tag, body = await self._receive_soon()
            if tag == "secrets" and body["number"] == number:
                return body
            self._tell(tag, body)

    async def _receive_soon(self) -> tuple[str, dict[str, Any]]:
        """Return a message that comes within SECRETS_S, at best at once. Raises OSError."""
        if is_single_call_loop(asyncio.get_running_loop()):
            _wait_for(self.fileno(), AT_ONCE_S)
        with suppress(BlockingIOError):
            return self._receive_now()
        await become_task()
        async with asyncio.timeout(SECRETS_S):
            return await self._receive()

    async def _await_report(self, number: int) -> Traffic:
        while True:
            tag, body = await self._receive()
            if tag == "report" and body["number"] == number:
                refused = sum(row["connections"] for row in body["rows"] if not row["is_allowed"])
                log.debug("a network's report: %d hosts, %d connections refused", len(body["rows"]), refused)
                return Traffic(rows=tuple(body["rows"]), unlisted=body["unlisted"])
            self._tell(tag, body)

    async def _receive(self) -> tuple[str, dict[str, Any]]:
        while True:
            try:
                return self._receive_now()
            except BlockingIOError:
                await until_readable(self.fileno())

    def _receive_now(self) -> tuple[str, dict[str, Any]]:
        tag, body, fds = messages.receive(self.fileno())
        for fd in fds:
            os.close(fd)
        if not tag:
            raise ConnectionResetError("the egress process is gone")
        return tag, body

    def take_messages(self) -> bool:
        """Hand on the messages of the egress process; False when it is gone."""
        try:
            while True:
                self._tell(*self._receive_now())
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _tell(self, tag: str, body: dict[str, Any]) -> None:
        if tag == "authority":
            self._next_authority = body["certificate"]
        if self.on_message is not None:
            self.on_message(tag, body)

    def close(self) -> None:
        """Let the egress process close all that is this sandbox's, also where a fork of this process has copies."""
        if self._owner == os.getpid() and self.fileno() >= 0:
            with suppress(OSError):  # the egress process is gone
                self._control.shutdown(socket.SHUT_RDWR)
        self.release()

    def release(self) -> None:
        """Close our copies only: another process has them, too."""
        self._jail_end.close()
        self._control.close()
        self.siblings.discard(self)


def _requested(link: int, tag: str, body: dict[str, Any], values: Sequence[int] = ()) -> SandboxNetwork:
    """Return a network that the egress process is to serve, by one of its links. Raises OSError."""
    ours, jail_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    network = SandboxNetwork(jail_end, control)
    control.setblocking(False)
    try:
        with ours, theirs:
            messages.send(link, tag, body, [ours.fileno(), theirs.fileno(), *values])
    except BaseException:
        network.close()
        raise
    return network


def _wait_for(fd: int, seconds: float) -> bool:
    """Wait until there is something to read, and tell whether there is. Blocks."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


class _Process:
    """Be the egress process. Raises OSError where it cannot be started.

    One that `has_secrets` opens connections, and verifies hosts by the `authorities`, a text in PEM; without one by
    those of this machine. One that `outlives_caller` serves the sandboxes of keepers until the last of them has ended.
    """

    def __init__(
        self, *, has_secrets: bool = False, authorities: str = "", outlives_caller: bool = False
    ) -> None:  # fmt: skip
        self._serving = 0  # sandboxes, of one that outlives its caller
        self._end_s = FINISHES_S if has_secrets else END_S
        self.networks: weakref.WeakSet[SandboxNetwork] = weakref.WeakSet()  # that are open
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, f"it needs Linux, and this is {system_name(sys.platform)}")
        paths = module_paths("h11", *(OPENING if has_secrets else ()))
        boot, program = RESET_SIGNALS + BOOT.format(paths=paths), egress_filter(os.uname().machine)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setblocking(False)  # one that reads nothing is an error, and holds nobody up
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", boot],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={},
                    start_new_session=True,
                )
                settings = {
                    "program": program, "has_secrets": has_secrets, "authorities": authorities,
                    "outlives_caller": outlives_caller,
                }  # fmt: skip
                messages.send(self.link.fileno(), "filter", settings)
            except BaseException:
                self.link.close()
                raise

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def open(
        self,
        rules: NetworkRules,
        proxies: Mapping[str, str],
        *,
        asks: bool,
        is_kept: bool = False,
        secrets: Sequence[Mapping[str, Any]] | None = (),
        values: Sequence[int] = (),
    ) -> SandboxNetwork:
        body = {
            "rules": rules.as_wire(), "proxies": dict(proxies), "asks": asks, "is_kept": is_kept,
            "secrets": None if secrets is None else list(map(dict, secrets)),
        }  # fmt: skip
        network = _requested(self.link.fileno(), "open", body, values)
        self._serving += 1
        log.debug("process %d opens a second network beside %d", self.process.pid, len(self.networks))
        return network.join(self.networks)

    @property
    def is_full(self) -> bool:
        """Tell whether it serves as many sandboxes of keepers as it may."""
        with suppress(BlockingIOError):
            while self._serving and messages.receive(self.link.fileno())[0] == "closed":
                self._serving -= 1
        return self._serving >= MOST_KEPT

    def leave(self) -> None:
        """Leave it to those who use it."""
        self.link.close()
        _released.append(self)

    def end(self) -> None:
        self.link.close()
        try:
            self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def module_paths(*names: str) -> list[str]:
    """Return where the egress process finds this package, and the others that it needs. Raises OSError without one."""
    folders = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    for name in names:
        module_spec = importlib.util.find_spec(name)
        if module_spec is None or not module_spec.origin:
            raise FileNotFoundError(errno.ENOENT, f"the package {name} is not installed, {USES[name]}")
        folders.append(os.path.dirname(os.path.dirname(module_spec.origin)))
    return list(dict.fromkeys(folders))


class KeptNetwork:
    """Be a network that is handed over to a keeper, in an egress process for several of them. Raises OSError."""

    def __init__(self, rules: NetworkRules, *, proxies: Mapping[str, str], asks: bool = False):
        self.network = _open_kept(rules, proxies, asks=asks)

    @property
    def held(self) -> dict[str, int]:
        """Return the descriptors that keep it, by name: it ends with the last copy of either."""
        return {"network": self.network.fileno()}

    def release(self) -> None:
        """Leave it to who has copies of those."""
        self.network.release()

    def end(self) -> None:
        """End it; no keeper has taken it. Blocks."""
        self.network.close()


class OwnNetwork(KeptNetwork):
    """Be a network with a separate egress process, as one with secrets must have. Raises OSError.

    `secrets`, `values` and `authorities` are those of `open_network_with_secrets`.
    """

    def __init__(
        self,
        rules: NetworkRules,
        *,
        proxies: Mapping[str, str],
        asks: bool = False,
        secrets: Sequence[Mapping[str, Any]] = (),
        values: Sequence[int] = (),
        authorities: str = "",
    ):
        _forget_ended()
        with _lock:
            self._process = _Process(has_secrets=True, authorities=authorities)
            _to_hand_over.add(self._process)
        try:
            self.network = self._process.open(rules, proxies, asks=asks, is_kept=True, secrets=secrets, values=values)
        except BaseException:
            self._end_process()
            raise

    @property
    def held(self) -> dict[str, int]:
        return {"egress": self._process.link.fileno(), **super().held}

    def release(self) -> None:
        _to_hand_over.discard(self._process)
        super().release()
        self._process.leave()

    def end(self) -> None:
        super().end()
        self._end_process()

    def _end_process(self) -> None:
        _to_hand_over.discard(self._process)
        self._process.end()


def join_network(control: socket.socket) -> tuple[SandboxNetwork, dict[str, Any], Sum]:
    """Return the network of a sandbox that is kept, by a link to its egress process.

    With it come the rules in force, and the traffic so far. Blocks. Raises OSError.
    """
    if not _wait_for(control.fileno(), REPORT_S):
        raise TimeoutError("the egress process does not answer")
    tag, body, fds = messages.receive(control.fileno())
    for fd in fds:
        os.close(fd)
    if tag != "joined":
        raise ConnectionResetError("the egress process is gone")
    control.setblocking(False)
    nobody, jail_end = socket.socketpair()
    nobody.close()
    so_far = Sum(KEPT_ROWS)
    if body["history"] is not None:
        so_far.add(body["history"])
    return SandboxNetwork(jail_end, control), body["rules"], so_far


_process: _Process | None = None
_process_with_secrets: _Process | None = None  # apart, so that no other sandbox's bytes are read where values are
_process_of_kept: _Process | None = None  # for the next sandboxes that are kept
_to_hand_over: set[_Process] = set()
_released: list[_Process] = []  # children of this process, to be taken note of when they end
# Held also while this process is forked: a child from the midst of a start would hold the link, or keep the start
# waiting, for as long as it lives. A handler of signals may fork there.
_lock = threading.RLock()


def open_network(
    rules: NetworkRules, *, proxies: Mapping[str, str] | None = None, asks: bool = False
) -> SandboxNetwork:
    """Open a network with these rules, and start the egress process where it is not there.

    `proxies` are upstream ones, by `http`, `https` and `no`, as the variables of the same names have them. It `asks`
    where the caller wants to decide about each host that is not listed. Raises OSError.
    """
    global _process
    with _lock:
        if _process is not None:
            try:
                if _process.is_alive:
                    return _process.open(rules, proxies or {}, asks=asks)
            except (BrokenPipeError, ConnectionResetError):
                pass  # it was killed just now
            _process.end()
        _process = _Process()
        return _process.open(rules, proxies or {}, asks=asks)


def _open_kept(rules: NetworkRules, proxies: Mapping[str, str], *, asks: bool) -> SandboxNetwork:
    """Open a network for a keeper, in the process that others have, or in a new one if that is full or gone."""
    global _process_of_kept
    _forget_ended()
    with _lock:
        process = _process_of_kept
        try:
            if process is not None and process.is_alive and not process.is_full:
                return process.open(rules, proxies, asks=asks, is_kept=True)
        except OSError:
            pass  # it was killed just now
        if process is not None:
            process.leave()
        _process_of_kept = process = _Process(outlives_caller=True)
        return process.open(rules, proxies, asks=asks, is_kept=True)


def _forget_ended() -> None:
    _released[:] = [process for process in _released if process.is_alive]


def open_network_with_secrets(
    rules: NetworkRules,
    secrets: Sequence[Mapping[str, Any]] | None = None,
    values: Sequence[int] = (),
    *,
    authorities: str,
    proxies: Mapping[str, str],
    asks: bool = False,
) -> SandboxNetwork:
    """Open a network with secrets; `await_secrets` says what its guest gets. With None it waits, and carries nothing.

    `secrets` are rows of `core.secrets.as_wire` with a `value` as bytes, or None: those stand in the descriptors
    `values`, one after the other. `authorities` verify the hosts, those of this machine if it is empty; they count when
    the process is started. Raises OSError.
    """
    global _process_with_secrets
    with _lock:
        if _process_with_secrets is not None and not _process_with_secrets.is_alive:
            _process_with_secrets.end()
            _process_with_secrets = None
        if _process_with_secrets is None:
            _process_with_secrets = _Process(has_secrets=True, authorities=authorities)
        return _process_with_secrets.open(rules, proxies, asks=asks, secrets=secrets, values=values)


def operator_proxies() -> dict[str, str]:
    """Return the upstream proxies that this process's environment names, by `http`, `https` and `no`.

    `http_proxy` counts in lower case only, as in curl: a CGI server sets `HTTP_PROXY` from a request's header.
    """
    proxies = {
        "https": os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY", ""),
        "http": os.environ.get("http_proxy", ""),
        "no": os.environ.get("no_proxy") or os.environ.get("NO_PROXY", ""),
    }
    return {name: value for name, value in proxies.items() if value} if proxies["https"] or proxies["http"] else {}


def rest() -> None:
    """End the egress process where no sandbox has a network in it; the next one starts another."""
    _end_processes(lambda process: not process.networks)


def process_id(*, has_secrets: bool = False) -> int | None:
    """Return the pid of the egress process that is there."""
    process = _process_with_secrets if has_secrets else _process
    return process.process.pid if process is not None and process.is_alive else None


def end_process() -> None:
    """End the egress process, where there is one, and leave that of keepers to them; the next network starts others."""
    _end_processes(lambda _: True)


def _end_processes(is_over: Callable[[_Process], bool]) -> None:
    global _process, _process_with_secrets, _process_of_kept
    with _lock:
        if _process_of_kept is not None:
            _process_of_kept.leave()
            _process_of_kept = None
        ended = [process for process in (_process, _process_with_secrets) if process is not None and is_over(process)]
        _process = None if _process in ended else _process
        _process_with_secrets = None if _process_with_secrets in ended else _process_with_secrets
    for process in ended:
        process.end()


def _forget_after_fork() -> None:
    global _lock, _process, _process_with_secrets, _process_of_kept
    _lock = threading.RLock()
    own = filter(None, (_process, _process_with_secrets, _process_of_kept))
    for process in (*_to_hand_over, *_released, *own):
        process.link.close()
        process.process.returncode = 0  # nobody's child here
    _to_hand_over.clear()
    _released.clear()
    _process = _process_with_secrets = _process_of_kept = None


def _wait_for_start() -> None:
    _lock.acquire()


def _go_on() -> None:
    _lock.release()


def _leave() -> None:
    end_process()
    for process in _released:
        if process.is_alive:
            process.process.returncode = 0  # it goes on without us


os.register_at_fork(before=_wait_for_start, after_in_parent=_go_on, after_in_child=_forget_after_fork)
atexit.register(_leave)
