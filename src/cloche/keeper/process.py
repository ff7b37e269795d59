"""The keeper of one sandbox: holds the descriptors that keep it alive, enforces its lifetime, and admits clients.

It is a fresh `python -I -S` in a new session. The caller that starts it sends one message with an order and the
descriptors in `DESCRIPTORS`, and then closes its own copies. When this process ends for any reason, the kernel closes
them, and the helper and init end the sandbox. Init enforces the time limits, too, since the keeper may be suspended.
"""

from __future__ import annotations

import _socket
import array
import errno
import marshal
import os
import time

from . import plain_json, relay
from .life import AT_END, ENDS, KEEPS_FILES, Life
from .relay import POLLIN, Client, FrameRelay, awake, now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_signal: Any = __import__("_signal")
# `folder` is where the socket is and the lock, which we hold by its descriptor. The last four may be missing:
# `claim` and `egress`, the link of a process that serves this network alone, are only held; `network` keeps the
# network, and lets clients into it.
DESCRIPTORS = ("init", "listening", "folder", "lock", "helper", "claim", "egress", "network")
MOST_ORDER_BYTES = 1 << 16
SCM_RIGHTS, INT_BYTES = 1, 4
FIRST_S = 10.0  # for the caller to come in
LAST_S, AGAIN_S = 10.0, 0.01  # for the helper to clear up
MOST_LINGER_S = 120.0  # for a client that saves what is in the sandbox
MOST_S = 366 * 24 * 3600.0
SUFFIXES = (".sock", ".json")
LOCK_SUFFIX = ".lock"
SPARE = "_spare-"  # how the names of spare sandboxes begin, as in `registry`


class Keeper:
    """Keep one sandbox; see `relay.RelayOwner`."""

    def __init__(self, order: dict[str, Any], fds: dict[str, int], wire: Any, json: Any):  # noqa: ANN401 - modules
        self.json, self.fds = json, fds
        self.said, self.groups = order["said"], order.get("groups") or []
        self.watching: set[tuple[Client, int]] = set()  # channels on which clients hear of changes of the life
        self.is_paused = False  # as init has confirmed it
        self._begin(order)
        self.ending: tuple[Client, int] | None = None  # the client that requested the end
        self.lingering: dict[tuple[Client, int], float] = {}  # channels of clients that end first, and for how long
        self.had_clients = False
        self.opener = 0  # the number of the first client
        self.told: tuple[object, ...] = ()
        self.relay = FrameRelay(wire, json, fds["init"], fds["listening"], self)
        helper, network = fds.get("helper", -1), fds.get("network", -1)
        if helper >= 0:
            os.set_blocking(helper, False)
            self.relay.watch(helper, POLLIN, self._hear_helper)
        self.stand_in = order.get("stand_in")
        if network >= 0:
            self.relay.watch(network, POLLIN, self._hear_network)
        self.note_clients()

    def _begin(self, order: dict[str, Any]) -> None:
        """Have the name and the times of an order from now on."""
        self.name = order["name"]
        self.keep_s: float | None = order["keep_s"]  # None: it ends with the client that opened it
        self.life = Life(now(), order["lifetime_s"], order.get("at_end", ENDS))
        self.idle_s: float | None = order["idle_s"]
        self.owner_s: float | None = order.get("owner_s")  # how long it goes on without its owner and any client
        self.owned_at = awake()
        self.left_at = now()

    # What the relay asks for.

    def greeting(self) -> dict[str, Any]:
        """Return the keeper's part of the greeting to a client."""
        return {"name": self.name, **self.said}

    def note_clients(self) -> None:
        """Measure the time without a client since the last one left, and update init's deadline."""
        clients = self._clients()
        if self.had_clients and not clients:
            self.left_at, self.owned_at = now(), awake()
        self.had_clients = clients > 0
        if not self.opener:
            self.opener = next((client.number for client in self.relay.clients.values() if client.counts), 0)
        elif self.keep_s is None and self.opener not in self.relay.clients:
            self.relay.ended = "the process that opened it has ended"
        self._set_clock()

    def _clients(self) -> int:
        return sum(client.counts for client in self.relay.clients.values())

    def _set_clock(self) -> None:
        """Set the deadline of the sandbox, here and in init. In a pause there is none."""
        ends = [] if self.life.ends_at is None else [self.life.ends_at]
        if not self.had_clients and not self.life.is_paused:
            keep_s = self.keep_s or 0.0
            ends.append(self.left_at + (keep_s if self.opener else max(keep_s, FIRST_S)))
        deadline = self.relay.deadline = min(ends, default=None)
        self._await_owner()
        idle_s, pauses = None if self.life.is_paused else self.idle_s, self.life.at_end != ENDS
        if self.told != (deadline, idle_s, pauses):
            self.told = deadline, idle_s, pauses
            seconds_left = None if deadline is None else max(0.0, deadline - now())
            self.relay.ask_init(lambda _: None, "limits", ends_in_s=seconds_left, idle_s=idle_s, pauses=pauses)

    def note_deadline(self) -> None:
        """End the sandbox, whose time is over, or pause it."""
        if self.life.at_end == ENDS:
            self.relay.ended = "its lifetime is over"
        else:
            self._halt(lambda _: None, memory=self.life.at_end != KEEPS_FILES)

    def _await_owner(self) -> None:
        """Set the time at which the sandbox ends unless its owner reports before then. Init does not know about it."""
        self.relay.deserted_at = None
        if self.owner_s is not None and not self.had_clients:
            self.relay.deserted_at = self.owned_at + (self.owner_s if self.opener else max(self.owner_s, FIRST_S))

    def answer(self, client: Client, channel: int, op: str, body: bytes) -> None:
        """Answer one of the keeper's operations."""
        if op == "info":
            self.relay.event(client, channel, event="info", **self._info())
            self.relay.close(client, channel)
        elif op == "end":
            self.ending = client, channel
            self.begin_end("it was ended")
        elif op == "linger":
            if (linger_s := self._read_time(client, channel, body, "linger_s")) is not None:
                self.lingering[client, channel] = min(linger_s, MOST_LINGER_S)
        elif op == "keep":
            self._keep(client, channel, body)
        elif op == "own":
            self._own(client, channel, body)
        elif op == "network":
            self._let_in(client, channel)
        elif op == "adopt":
            self._adopt(client, channel, body)
        elif op == "watch":
            self.watching.add((client, channel))
            self.relay.event(client, channel, event="life", **self._info())
        elif op == "lifetime":
            self._renew(client, channel, body)
        elif op == "pause" and self.json.read(body).get("life_goes_on") is True:
            self._have_init("pause", self._closing(client, channel), is_paused=True, memory=True)
        else:
            change = self._halt if op == "pause" else self._go_on
            change(self._closing(client, channel), memory=self.json.read(body).get("memory") is not False)

    def _keep(self, client: Client, channel: int, body: bytes) -> None:
        if (keep_s := self._read_time(client, channel, body, "keep_s")) is not None:
            self.keep_s = keep_s
            self._set_clock()
            self.relay.close(client, channel)

    def begin_end(self, reason: str) -> None:
        """End, or first let the clients finish that asked for it."""
        waiting = {key: linger_s for key, linger_s in self.lingering.items() if key[1] in key[0].channels}
        if not waiting:
            self.relay.ended = reason
        elif self.relay.linger is None:
            for client, channel in waiting:
                self.relay.event(client, channel, event="ending")
            until = now() + max(waiting.values())
            self.relay.linger = until, lambda: not any(channel in client.channels for client, channel in waiting)

    def _own(self, client: Client, channel: int, body: bytes) -> None:
        """Record that the owner is present, which it reports from time to time."""
        if (owner_s := self._read_time(client, channel, body, "owner_s")) is not None:
            self.owner_s, self.owned_at = owner_s, awake()
            self._await_owner()
            self.relay.event(client, channel, event="info", **self._info())
            self.relay.close(client, channel)

    def _adopt(self, client: Client, channel: int, body: bytes) -> None:
        """Keep a spare sandbox under the name in the order, which the client has claimed, as if it began now."""
        order, folder = self.json.read(body), self.fds["folder"]
        if not self.name.startswith(SPARE):
            self.relay.close(client, channel, kind="unknown", message="this sandbox has a name already")
            return
        try:
            for suffix in (SUFFIXES[0], LOCK_SUFFIX):  # over the lock of the client, which ends its claim
                os.rename(self.name + suffix, order["name"] + suffix, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            self.relay.ended = f"it could not get its name: {error}"
            return
        _unlink(self.name + SUFFIXES[1], folder)
        self._begin(order)
        self.told = ()
        self._set_clock()
        self.relay.close(client, channel)

    def _read_time(self, client: Client, channel: int, body: bytes, name: str) -> float | None:
        """Return the seconds in an operation; close its channel and return None if they are invalid."""
        seconds = self.json.read(body).get(name)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_S:
            self.relay.close(client, channel, kind="unknown", message=f"{name} is not a duration")
            return None
        return float(seconds)

    def _let_in(self, client: Client, channel: int) -> None:
        """Send a client a new link to the process that serves the network, together with an event."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        event = self.relay.wire.frame(self.relay.wire.EVENT, channel, b"{}")
        try:
            if client.unsent:
                raise BlockingIOError
            _pass_on(self.fds["network"], marshal.dumps(("caller", {})), ours)
            _pass_on(client.fd, event, theirs)
        except (KeyError, OSError):
            self.relay.close(client, channel, kind="unknown", message="it has no network")
        else:
            self.relay.close(client, channel)
        finally:
            ours.close()
            theirs.close()

    def _renew(self, client: Client, channel: int, body: bytes) -> None:
        """Set the time that is left, what happens at its end, or both; with `resumes`, end a pause as well."""
        order = self.json.read(body)
        left_s, at_end = order.get("left_s"), order.get("at_end", self.life.at_end)
        if at_end not in AT_END:
            self.relay.close(client, channel, kind="unknown", message=f"at_end is none of {', '.join(AT_END)}")
            return
        if left_s is not None:
            left_s = self._read_time(client, channel, body, "left_s")
            if left_s is None:
                return
            self.life.renew(now(), left_s, only_extends=order.get("only_extends") is True)
        self.life.at_end = at_end
        was_paused = self.life.is_paused or self.is_paused
        if was_paused and order.get("resumes") is True:
            memory = order.get("memory") is not False
            self._go_on(self._closing(client, channel, was_paused=was_paused), memory=memory)
        else:
            self._note_life()
            self._closing(client, channel, was_paused=was_paused)({})

    def _closing(self, client: Client, channel: int, **more: bool) -> Callable[[dict[str, Any]], None]:
        """Return a function that answers an operation on the life, when init has answered."""

        def close(message: dict[str, Any]) -> None:
            error = message.get("error")
            if not error:
                self.relay.event(client, channel, event="info", **self._info(), **more)
            self.relay.close(client, channel, **(error if isinstance(error, dict) else {}))

        return close

    def _halt(self, take: Callable[[dict[str, Any]], None], *, memory: bool) -> None:
        """Stop all processes and the clock of the life; without `memory`, end the processes."""
        self.life.pause(now(), has_memory=memory)
        self._set_clock()
        self._have_init("pause", take, is_paused=True, memory=memory)

    def _go_on(self, take: Callable[[dict[str, Any]], None], *, memory: bool) -> None:
        """Let the processes and the clock go on; without `memory`, end the processes first."""
        self.life.resume(now())
        self.left_at = now()
        self._set_clock()
        self._have_init("resume", take, is_paused=False, memory=memory)

    def _have_init(self, op: str, take: Callable[[dict[str, Any]], None], *, is_paused: bool, memory: bool) -> None:
        def note(message: dict[str, Any]) -> None:
            if not message.get("error"):
                self.is_paused = is_paused
            elif is_paused:
                self.life.resume(now())
            self._note_life()
            take(message)

        self.relay.ask_init(note, op, **({} if memory else {"memory": False}))

    def _note_life(self) -> None:
        """Set the clocks after a change of the life, and tell the clients that watch it."""
        self._set_clock()
        self.watching = {(client, channel) for client, channel in self.watching if channel in client.channels}
        for client, channel in self.watching:
            self.relay.event(client, channel, event="life", **self._info())

    def _info(self) -> dict[str, Any]:
        moment, life = now(), self.life
        return {
            "name": self.name, "clients": self._clients(), "is_paused": self.is_paused, "pid": os.getpid(),
            "paused_s": life.all_paused_s(moment), "has_memory": life.has_memory,
            "age_s": moment - life.began_at, "keep_s": self.keep_s, "lifetime_s": life.lifetime_s,
            "idle_s": self.idle_s, "owner_s": self.owner_s,
            "without_client_s": 0.0 if self.had_clients else moment - self.left_at,
            "left_s": life.left_s(moment), "at_end": life.at_end,
        }  # fmt: skip

    def _hear_network(self, _: int) -> None:
        """Start the stand-in, which answers network requests while no client is attached.

        The message is only a request for it, and carries no data.
        """
        if not _drain(self.fds["network"]):
            self.relay.ignore(self.fds["network"])
            return
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            _pass_on(self.fds["network"], marshal.dumps(("caller", {"stands_in": True})), ours)
            if self.stand_in is not None:
                _start(self.stand_in["command"], self.stand_in["env"], theirs.fileno())
        except OSError:
            pass  # whose link is closed then, which is a no
        finally:
            ours.close()
            theirs.close()

    def _hear_helper(self, _: int) -> None:
        if not _drain(self.fds["helper"]):
            self.relay.ended = "its helper has ended"

    # Its end.

    def end(self) -> None:
        """End the sandbox, wait until nothing of it is left, and remove the keeper's files."""
        for suffix in SUFFIXES:  # no client can connect any more; the lock still holds the name
            _unlink(self.name + suffix, self.fds["folder"])
        self.relay.ignore(self.relay.listening.fileno())
        self.relay.listening.close()
        self.relay.init.close()
        helper = self.fds.get("helper", -1)
        if helper >= 0:
            self.relay.ignore(helper)
        # An egress process of its own ends; another one closes this sandbox's network.
        network = self.fds.get("network", -1)
        self.relay.ignore(network)
        for link in (helper, self.fds.get("egress", network)):
            if link >= 0:
                _await_end(link)
        for path in self.groups:
            _remove_group(path)
        _unlink(self.name + LOCK_SUFFIX, self.fds["folder"])
        os.close(self.fds["lock"])
        self.fds["lock"] = -1
        if self.ending is not None:
            self.relay.close(*self.ending)
        for client in list(self.relay.clients.values()):
            if client.unsent:
                os.set_blocking(client.fd, False)
                client.send_more()
            client.close()


def _await_end(end: int) -> None:
    """Shut a link down and wait until its peer has closed it, at most `LAST_S`."""
    import select

    link = _socket.socket(fileno=end)
    try:
        link.shutdown(_socket.SHUT_WR)
    except OSError:
        return
    until, poll = now() + LAST_S, select.poll()
    poll.register(end, POLLIN)
    while (seconds_left := until - now()) > 0 and poll.poll(seconds_left * 1000):
        if not _drain(end):
            return


def _remove_group(path: str) -> None:
    """Remove a control group once it is empty. The helper has done so, unless it was killed."""
    until = now() + LAST_S
    while now() < until:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
            time.sleep(AGAIN_S)
        else:
            return


def _drain(link: int) -> bool:
    """Discard a helper's messages with their descriptors; tell whether the helper still exists."""
    end = _socket.socket(fileno=link)
    try:
        data, fds = _receive(end, MOST_ORDER_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        end.detach()
    for fd in fds:
        os.close(fd)
    return bool(data)


def _receive(link: _socket.socket, max_bytes: int) -> tuple[bytes, list[int]]:
    """Receive one message with its descriptors."""
    data, control, _, _ = link.recvmsg(max_bytes, _socket.CMSG_LEN(136 * INT_BYTES), _socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in control:
        if (level, kind) == (relay.SOL_SOCKET, SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % INT_BYTES])
    return data, list(fds)


def _pass_on(link: int, data: bytes, fd: _socket.socket) -> None:
    """Send a small message with a descriptor, without blocking. Raises OSError."""
    end = _socket.socket(fileno=link)
    try:
        rights = [(relay.SOL_SOCKET, SCM_RIGHTS, array.array("i", [fd.fileno()]))]
        end.sendmsg([data], rights, _socket.MSG_DONTWAIT)
    finally:
        end.detach()


def _start(command: list[str], env: dict[str, str], link: int) -> None:
    """Start a process with a link as its standard input and no other descriptor of the keeper. Raises OSError."""
    files = [(os.POSIX_SPAWN_DUP2, link, 0), *((os.POSIX_SPAWN_OPEN, fd, "/dev/null", os.O_WRONLY, 0) for fd in (1, 2))]
    signals = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGPIPE, _signal.SIGCHLD)
    os.posix_spawn(command[0], command, env, file_actions=files, setsid=True, setsigdef=signals)


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass  # another process has removed it meanwhile


def fork_keepers(fd: int) -> int:
    """Fork a keeper for each socket that comes at link `fd`; return that socket in the fork. Ends with the caller."""
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # forks that end leave nothing to wait for
    link = _socket.socket(fileno=fd)
    while True:
        data, fds = _receive(link, MOST_ORDER_BYTES)
        if not data:
            os._exit(0)
        try:
            is_fork = os.fork() == 0
        except OSError:  # the caller reads that its socket is closed
            is_fork = False
        if is_fork:
            link.close()
            os.setsid()
            return fds[0]
        for passed_fd in fds:
            os.close(passed_fd)


def main(fd: int) -> None:
    """Take over one sandbox from the caller at socket `fd`, and keep it until its end."""
    from . import load

    caller = _socket.socket(fileno=fd)
    data, fds = _receive(caller, MOST_ORDER_BYTES)
    if not data:
        os._exit(0)
    order = plain_json.read(data)
    wire = load("init.wire")
    for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGPIPE, _signal.SIGCHLD):
        _signal.signal(number, _signal.SIG_IGN)  # of the last the kernel takes note by itself then
    os.umask(0o077)
    keeper = Keeper(order, dict(zip(order["descriptors"], fds, strict=True)), wire, plain_json)
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    _signal.set_wakeup_fd(wake)

    def stop(_: int) -> None:
        if os.read(woken, 512):
            keeper.begin_end("the keeper was asked to end")

    _signal.signal(_signal.SIGTERM, lambda *_: None)
    keeper.relay.watch(woken, POLLIN, stop)
    caller.send(b"kept")
    if not caller.recv(16):  # it has given up meanwhile, and its name with it
        os._exit(0)
    caller.close()
    keeper.relay.serve()
    keeper.end()
    os._exit(0)
