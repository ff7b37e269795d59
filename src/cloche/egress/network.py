"""One sandbox's network: its name server, its listening sockets, and each connection from its start to its end.

Theory of operation: the sockets come from pid 1 of the sandbox, before there is any guest. Their traffic is the
guest's, and hostile. A connection's local address identifies its name or address; without a namespace, each connection
comes by itself, with its target (`jail/network_calls.py`). `NetworkRules` decide; the first bytes must agree with the
name (`client_hello`, `http`); the name is resolved and its addresses are checked (`upstream`); then bytes are carried
both ways. New sockets mean another sandbox of the same rules: all names, connections and sockets of the one before are
dropped.

All that a guest can cause has a bound: concurrent connections, new ones and questions in a second, names, concurrent
lookups, buffered bytes, and the time until its target is known.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest
from cloche.core.hosts import parse_address
from cloche.core.network import HostDecision, NetworkRules, Rule
from cloche.core.refusals import not_allowed
from cloche.jail import messages

from . import dns
from .callers import MOST_CALLERS, Callers, EgressCaller, Questions
from .client_hello import NoServerName, read_server_name
from .connections import MOST_CONNECTIONS, GuestConnection, JailNetwork, most_connections
from .errors import Failed, Refused
from .explain import ADDRESS, answer, explain
from .first_bytes import NameIn, read_first, read_hello
from .host_ports import carry_to_host, is_host_port
from .http import relay
from .http_request import ANOTHER_HOST, EditHead, RequestHead
from .ledger import Ledger, Sum
from .names import Names
from .present_secrets import PresentSecrets
from .requests import NO_AUTHORITY, check_authority, checked_request, with_headers
from .sockets import Pace, accept_now, reset
from .stream import SocketStream, Turns, splice
from .upstream import Proxies, connect

if TYPE_CHECKING:
    from .opened import SandboxSecrets

DNS_PORT, HTTP_PORT, TLS_PORT = 53, 80, 443
MOST_LOOKUPS, MOST_NAME_STREAMS = 8, 64
# The kernel's buffers of a socket grow to megabytes, which are charged to us: those of the first few of a sandbox may.
FEW_CONNECTIONS, BUFFER_BYTES = 16, 64 << 10
NO_ROOM_S = 0.1  # until a connection may find a descriptor that this one did not
CONNECTIONS_PER_S, QUESTIONS_PER_S, AT_ONCE = 500.0, 500.0, 64
IDLE_S, NAME_STREAM_S = 900.0, 10.0
MOST_TOLD = 64  # refusals between two reports: what the caller has not read must never fill the link
MOST_DATAGRAM = 4096


_all_connections: set[GuestConnection] = set()  # of every sandbox


class GuestNetwork:
    """Serve the jails of one sandbox until its caller is gone; `on_end` is called then."""

    def __init__(self, body: Mapping[str, Any], jail_link: int, control: int, on_end: Callable[[GuestNetwork], None]):
        self._loop = asyncio.get_running_loop()
        self._rules = NetworkRules.parse(**body["rules"])
        self._proxies, self._asks = Proxies(body["proxies"]), bool(body["asks"])
        self._body = {**body, "secrets": ()}  # which has their values
        self._jail_link, self._control, self._on_end = jail_link, control, on_end
        self._callers = Callers(control, is_kept=bool(body["is_kept"]))
        self._questions = Questions(self._callers)
        self.present = PresentSecrets(functools.partial(self._callers.tell_one, control))
        self._ledger = Ledger(self._collect if self._callers.is_kept else None)
        self._jails: dict[int, JailNetwork] = {}
        self._connections: set[GuestConnection] = set()
        self._most_connections, self._most_of_all = most_connections()
        self._name_streams = 0
        self._lookups = asyncio.Semaphore(MOST_LOOKUPS)
        self._turns = Turns()
        self._connection_pace = Pace(CONNECTIONS_PER_S, MOST_CONNECTIONS)
        self._question_pace = Pace(QUESTIONS_PER_S, MOST_CONNECTIONS)
        self._told = 0  # refusals, since the last report
        self._is_ended = False
        os.set_blocking(jail_link, False)
        self._listen_to_jail()
        self._loop.add_reader(control, self._receive_from_caller, control)

    @property
    def _secrets(self) -> SandboxSecrets | None:
        return self.present.secrets

    def _renew_secrets(self, **told: Any) -> None:  # noqa: ANN401
        """Have another sandbox's secrets. What its jail has sent is taken first: a jail before it is gone."""
        while not self._is_ended and self._receive_from_jail():
            pass
        for task in [task for jail in self._jails.values() for task in jail.tasks]:
            task.cancel()
        self.present.renew(**told)

    # What the helper and the caller say.

    def _listen_to_jail(self) -> None:
        if not self._is_ended:
            self._loop.add_reader(self._jail_link, self._receive_from_jail)

    def _receive_from_jail(self) -> bool:
        """Take one message; False if there is none, or if the other end is gone."""
        try:
            tag, body, fds = messages.receive(self._jail_link)
        except BlockingIOError:
            return False
        except OSError:
            tag, body, fds = "", {}, []
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if not tag:  # nobody holds the other end: no further jail of this sandbox can come
            self._loop.remove_reader(self._jail_link)
        elif tag == "connection":
            self._take_connection(sockets, **body)
        else:
            self._change_jail(tag, body, sockets)
        return bool(tag)

    def _change_jail(self, tag: str, body: Mapping[str, Any], sockets: list[socket.socket]) -> None:
        """Serve a jail in place of the one with its number, or none."""
        self._drop(body["jail"])
        if tag == "begin":
            self._jails[body["jail"]] = JailNetwork([], body["names"])
        if tag != "sockets":
            return
        if len(sockets) == 2 + len(body["ports"]):
            self._serve_jail(body["jail"], sockets, body["ports"])
        else:  # there was no room for all of them, and nothing would be served
            self.end()

    def _serve_jail(self, number: int, sockets: list[socket.socket], ports: list[int]) -> None:
        jail = self._jails[number] = JailNetwork(sockets)
        names, streams, *served = sockets
        self._listen(names, functools.partial(self._answer_datagrams, jail))
        self._listen(streams, functools.partial(self._accept_name_stream, jail))
        for listener, port in zip(served, ports, strict=True):
            self._listen(listener, functools.partial(self._accept, jail, port))

    def _take_connection(self, sockets: list[socket.socket], jail: int, host: str, port: int) -> None:
        """Serve a connection that was made outside, as if it were accepted from a listener of that address and port."""
        known_jail = self._jails.get(jail)
        if known_jail is None or len(sockets) != 1:
            for listener in sockets:
                listener.close()
            return
        sockets[0].setblocking(False)
        if port == DNS_PORT:
            self._begin_name_stream(known_jail, sockets[0])
        else:
            self._begin_connection(known_jail, sockets[0], host, port)
        pause_s = self._connection_pace.wait_s(self._loop.time())
        if pause_s:
            self._loop.remove_reader(self._jail_link)
            self._loop.call_later(pause_s, self._listen_to_jail)

    def _listen(self, listener: socket.socket, take: Callable[[socket.socket], float]) -> None:
        """Call `take` whenever something arrives; for the seconds that it returns, not."""

        def arrived() -> None:
            pause_s = take(listener)
            if pause_s > 0 and listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                self._loop.call_later(pause_s, resume)

        def resume() -> None:
            if listener.fileno() >= 0:
                self._loop.add_reader(listener, arrived)

        listener.setblocking(False)
        resume()

    def _receive_from_caller(self, caller: int) -> bool:
        """Take one message; False if there is none, or if that caller is gone."""
        try:
            tag, body, fds = messages.receive(caller)
        except BlockingIOError:
            return False
        except OSError:
            tag, body, fds = "", {}, []
        if tag == "caller" and fds and caller == self._control and len(self._callers.by_end) < MOST_CALLERS:
            self._let_in(EgressCaller(fds.pop(), stands_in=bool(body.get("stands_in"))))
        if tag == "again" and len(fds) == 2 and caller == self._control:
            self._open_again(*fds)
            fds = []
        if tag == "secrets" and caller == self._control and self.present.opener is not None:
            self._renew_secrets(**body, fds=fds)
            return True
        for fd in fds:
            os.close(fd)
        if tag == "further":
            self._take_change(caller, body.pop("number"), self._rules.with_further, body)
        elif tag == "replace":
            self._take_change(caller, body.pop("number"), self._rules.replaced, body)
        elif tag == "report":
            self._report(caller, body["number"], ends=body["ends"])
        elif tag == "decides":
            self._questions.put_to(self._callers.by_end[caller])
        elif tag == "answer":
            self._questions.take_answer(caller, **body)
        elif not tag and caller == self._control:
            self.end()
        elif not tag:
            self._let_go(caller)
        return bool(tag)

    def _open_again(self, jail_link: int, control: int) -> None:
        """Serve another jail of the same sandbox, with the same secrets."""
        GuestNetwork(self._body, jail_link, control, self._on_end).present.secrets = self._secrets

    def _let_in(self, caller: EgressCaller) -> None:
        """Serve another caller; it first gets the rules in force and the traffic so far."""
        self._collect()
        self._callers.by_end[caller.end] = caller
        self._loop.add_reader(caller.end, self._receive_from_caller, caller.end)
        history = None if caller.stands_in else self._callers.history.as_wire()
        self._callers.tell_one(caller.end, "joined", {"rules": self._rules.as_wire(), "history": history})

    def _let_go(self, end: int) -> None:
        self._loop.remove_reader(end)
        caller = self._callers.by_end.pop(end)
        os.close(end)
        self._questions.lose(caller)

    def _take_change(
        self, caller: int, number: int, change: Callable[..., NetworkRules], body: Mapping[str, Any]
    ) -> None:
        """Change the rules in force, which other callers may have added to; send all callers the result."""
        error = ""
        try:
            rules = change(**body)
            check_authority(rules, is_there=self._secrets is not None)
            self._change(rules)
        except InvalidRequest as wrong:
            error = str(wrong)
        else:
            self._callers.tell("rules", {"rules": self._rules.as_wire()}, but=caller)
        message = {"rules": self._rules.as_wire(), "number": number, "error": error}
        self._callers.tell_one(caller, "rules", message)

    def _report(self, caller: int, number: int, *, ends: bool) -> None:
        """Send the traffic since the last report, once the connections of a run that `ends` are closed."""
        tasks = [task for jail in self._jails.values() for task in jail.tasks] if ends else []
        if not tasks:
            self._send_report(caller, number)
            return
        for task in tasks:
            task.cancel()
        closing = self._loop.create_task(_all_done(tasks))
        closing.add_done_callback(lambda _: self._send_report(caller, number))

    def _send_report(self, end: int, number: int) -> None:
        caller = self._callers.by_end.get(end)
        if caller is None:
            return
        self._told = 0
        message = self._take()
        if self._callers.is_kept:
            self._callers.add(message)
            message, caller.untold = caller.untold.as_wire(), Sum()
        self._callers.tell_one(end, "report", {"number": number, **message})

    def _take(self) -> dict[str, Any]:
        """Return the traffic since the last call."""
        for connection in self._connections:
            connection.count()
        return self._ledger.take({connection.row for connection in self._connections if connection.row is not None})

    def _collect(self) -> None:
        """Make room in the ledger, whose rows are kept for later callers."""
        self._callers.add(self._take())

    def _change(self, rules: NetworkRules) -> None:
        self._rules = rules
        for connection in list(self._connections):
            if connection.task is not None and not self._may_go_on(connection):
                connection.task.cancel()

    def _may_go_on(self, connection: GuestConnection) -> bool:
        """Tell whether the rules of now allow a connection, as far as it has come."""
        decision = self._rules.decide(connection.host, connection.port)
        is_approved = connection.is_approved and not self._rules.denies(connection.host, connection.port)
        must_be_read = _is_limited(decision) or (connection.port == TLS_PORT and self._is_opened(connection))
        if not (decision.is_allowed or is_approved) or (must_be_read and not connection.is_read):
            return False
        if connection.name:
            named = self._rules.decide(connection.name, connection.port)
            if not named.is_allowed or _is_limited(named):
                return False
        return connection.address is None or not self._rules.decide_address(
            decision.rule, connection.address, port=connection.port
        )

    # Ends.

    def end(self) -> None:
        """Close everything, for good."""
        if self._is_ended:
            return
        self._is_ended = True
        self.present.end()
        for number in list(self._jails):
            self._drop(number)
        for fd in (self._jail_link, *self._callers.by_end):
            self._loop.remove_reader(fd)
            os.close(fd)
        self._questions.end()
        self._on_end(self)

    def _drop(self, number: int) -> None:
        """Close all sockets and connections of a jail."""
        jail = self._jails.pop(number, None)
        if jail is None:
            return
        for listener in jail.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        for task in jail.tasks:
            task.cancel()

    # Names.

    def _answer(self, jail: JailNetwork, question: bytes, *, is_stream: bool) -> bytes | None:
        """Answer a DNS question, without a lookup: a name is resolved when a connection comes."""

        def address_of(name: str) -> str | None:
            is_known = jail.names.is_own(name) or self._asks or self._rules.knows(name)
            return jail.names.address_of(name) if is_known else None

        answer = dns.answer(question, address_of, is_stream=is_stream)
        if answer is None:
            return None
        if answer.name and not answer.is_known:
            decision = self._rules.decide(answer.name, TLS_PORT)
            why = decision.why.replace(f"{answer.name}:{TLS_PORT}", answer.name)  # whatever the connection is to be to
            too_many = not_allowed(answer.name, "too many names were looked up", "look up only names that are needed")
            self._note_refusal(answer.name, DNS_PORT, why if not decision.is_allowed else too_many)
        return answer.data

    def _answer_datagrams(self, jail: JailNetwork, names: socket.socket) -> float:
        for _ in range(AT_ONCE):
            try:
                question, sender = names.recvfrom(MOST_DATAGRAM)
                answer = self._answer(jail, question, is_stream=False)
                if answer is not None:
                    names.sendto(answer, sender)
            except BlockingIOError:
                return 0.0
            except OSError:
                continue  # who asked is gone
            pause_s = self._question_pace.wait_s(self._loop.time())
            if pause_s:
                return pause_s
        return 0.0

    def _accept_name_stream(self, jail: JailNetwork, listener: socket.socket) -> float:
        accepted = accept_now(listener)
        if accepted is None:
            return NO_ROOM_S
        self._begin_name_stream(jail, accepted)
        return self._connection_pace.wait_s(self._loop.time())

    def _begin_name_stream(self, jail: JailNetwork, guest_socket: socket.socket) -> None:
        if self._name_streams >= MOST_NAME_STREAMS:
            reset(guest_socket)
        else:
            self._name_streams += 1
            self._begin(jail, self._serve_name_stream(jail, guest_socket)).add_done_callback(self._end_name_stream)

    def _end_name_stream(self, _: asyncio.Task[None]) -> None:
        self._name_streams -= 1  # also of one that was cancelled before it began

    def _begin(self, jail: JailNetwork, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        jail.tasks.add(task)
        task.add_done_callback(jail.tasks.discard)
        return task

    async def _serve_name_stream(self, jail: JailNetwork, guest_socket: socket.socket) -> None:
        """Answer questions that come with their lengths."""
        try:
            async with asyncio.timeout(NAME_STREAM_S):
                buffer = bytearray()
                while more := await self._loop.sock_recv(guest_socket, MOST_DATAGRAM):
                    buffer += more
                    while (question := dns.take_message(buffer)) is not None:
                        answer = self._answer(jail, question, is_stream=True)
                        if answer is None:
                            return
                        await self._loop.sock_sendall(guest_socket, answer)
                        await asyncio.sleep(self._question_pace.wait_s(self._loop.time()))
        except (OSError, ValueError, TimeoutError):
            return  # it is gone, has said nothing that is understood, or takes too long
        finally:
            guest_socket.close()

    # Connections.

    def _accept(self, jail: JailNetwork, port: int, listener: socket.socket) -> float:
        accepted = accept_now(listener)
        if accepted is None:
            return NO_ROOM_S
        self._begin_connection(jail, accepted, accepted.getsockname()[0], port)
        return self._connection_pace.wait_s(self._loop.time())

    def _begin_connection(self, jail: JailNetwork, guest_socket: socket.socket, address: str, port: int) -> None:
        self._turns.note(self._loop.time())
        if self.present.opener is not None and not self._is_present(jail):
            reset(guest_socket)
            return
        host = jail.names.name_of(address) or address
        is_of_host = is_host_port(self._rules, address, port)
        if address.startswith("127.") and not is_of_host:  # for a server of the guest's own, which is not there
            reset(guest_socket)
        elif len(self._connections) >= self._most_connections or len(_all_connections) >= self._most_of_all:
            why = f"there are {len(self._connections)} connections, the maximum at once"
            self._note_refusal(host, port, not_allowed(f"{host}:{port}", why, "close some"))
            reset(guest_socket)
        else:
            is_many = len(self._connections) >= FEW_CONNECTIONS
            connection = GuestConnection(jail, host, port, BUFFER_BYTES if is_many else 0)
            connection.is_of_host = is_of_host
            self._connections.add(connection)
            _all_connections.add(connection)
            connection.task = self._begin(jail, self._serve(connection, guest_socket))
            connection.task.add_done_callback(lambda _: self._forget(connection))

    def _is_present(self, jail: JailNetwork) -> bool:
        """Take what the caller said before it started a guest, and tell whether that guest's jail is still there."""
        while not self._is_ended and self._receive_from_caller(self._control):
            pass
        return jail in self._jails.values()

    def _forget(self, connection: GuestConnection) -> None:
        self._connections.discard(connection)
        _all_connections.discard(connection)

    async def _serve(self, connection: GuestConnection, guest_socket: socket.socket) -> None:
        """Serve a connection to its end. A refused or failed one is reset, plain HTTP after an answer."""
        guest = connection.guest = SocketStream(guest_socket, self._turns, connection.buffer_bytes)
        try:
            if (connection.host, connection.port) == (ADDRESS, HTTP_PORT):
                questions = self._questions if self._asks else None
                await answer(guest, functools.partial(explain, self._rules, self._secrets, questions))
            elif connection.is_of_host:
                await carry_to_host(connection, guest, self._rules, self._ledger, self._turns, IDLE_S)
            elif connection.port == HTTP_PORT:
                await self._carry_http(connection, guest)
            else:
                await self._carry(connection, guest)
        except Refused as error:
            if not error.is_noted:
                self._note_refusal(connection.host, connection.port, error.reason)
            reset(guest_socket)
        except Failed as error:
            self._ledger.row(connection.host, connection.port, error.reason)
            reset(guest_socket)
        except (OSError, TimeoutError):  # of the one side or the other: both are closed
            reset(guest_socket)
        except Exception as error:  # a fault of ours: nothing is carried, and it does not go unsaid
            what = type(error).__name__ if self._secrets is not None else f"{type(error).__name__}: {error}"
            self._ledger.row(connection.host, connection.port, f"a fault of the egress process: {what}")
            reset(guest_socket)
        except BaseException:
            reset(guest_socket)
            raise
        finally:
            guest.close()
            connection.count()

    async def _decide(self, connection: GuestConnection) -> Rule | None:
        """Return the rule of the allow list for a connection, if there is one. Raises Refused."""
        if Names.is_ours(connection.host):
            where = f"{connection.host}:{connection.port}"
            raise Refused(not_allowed(where, "it belongs to no name of this sandbox", "look the name up again"))
        if self.present.are_awaited:
            where = f"{connection.host}:{connection.port}"
            raise Refused(not_allowed(where, "the secrets of this sandbox are not there yet", "try it again"))
        if self._secrets is not None:
            self._secrets.check(connection.host, connection.port)
        decision = self._rules.decide(connection.host, connection.port)
        if decision.is_allowed and _is_limited(decision) and self._secrets is None:
            raise Refused(f"{connection.host}:{connection.port} is not allowed; {NO_AUTHORITY}")
        if decision.is_allowed:
            return decision.rule
        if self._asks and not self._rules.denies(connection.host, connection.port):
            if why := self._why_never(connection):
                raise Refused(why)
            no = await self._questions.ask(connection.host, connection.port)
            if no is None:
                connection.is_approved = True
                return None
            raise Refused(f"{decision.why}; {no}" if no else decision.why)
        raise Refused(decision.why)

    def _why_never(self, connection: GuestConnection) -> str:
        """Say why a yes would not open an address; then the approver is not asked. Names are looked up after it."""
        address = parse_address(connection.host)
        return (
            ""
            if address is None
            else self._rules.decide_address(None, address, host=connection.host, port=connection.port)
        )

    async def _carry(self, connection: GuestConnection, guest: SocketStream) -> None:
        """Carry bytes both ways; where the guest's first ones are of TLS, they must name the host."""
        name_in = functools.partial(self._name_in, connection)
        try:
            rule = await self._decide(connection)
        except Refused as refused:
            if await self._tell_refusal(connection, guest, name_in, refused):
                return
            raise
        first = await read_hello(guest, connection, name_in) if connection.port == TLS_PORT else b""
        is_limited = rule is not None and bool(rule.requests)
        if self._secrets is not None and (is_limited or self._is_opened(connection)):
            connection.is_read = True
            await self._carry_opened(connection, self._secrets, guest, first)
            return
        upstream = await self._connect(connection, rule)
        try:
            if connection.port != TLS_PORT:
                first = await read_first(guest, upstream, name_in, IDLE_S)
            if first:
                await upstream.send(first)
            await splice(guest, upstream, idle_s=IDLE_S)
        finally:
            upstream.close()

    def _is_opened(self, connection: GuestConnection) -> bool:
        """Tell whether a connection is opened for a secret, or for headers."""
        has_headers = connection.port == TLS_PORT and bool(self._rules.headers_for(connection.host))
        return has_headers or (self._secrets is not None and self._secrets.opens(connection.host))

    async def _tell_refusal(
        self, connection: GuestConnection, guest: SocketStream, name_in: NameIn, refused: Refused
    ) -> bool:
        """Have a refused guest read why, where it trusts us; tell whether that was possible."""
        if self._secrets is None or connection.port != TLS_PORT or parse_address(connection.host) is not None:
            return False
        from .told_refusals import tell_refusal  # which needs the extra of secrets

        refused.is_noted = True  # before the guest has read it
        self._note_refusal(connection.host, connection.port, refused.reason)
        return await tell_refusal(self._secrets, connection, guest, name_in, refused.reason, self._turns)

    def _name_in(self, connection: GuestConnection, data: bytes) -> str | None:
        """Return the host's name from the first bytes, None while more are needed. Raises Refused, NotTls."""
        is_address = parse_address(connection.host) is not None
        try:
            server_name = read_server_name(data)
            name = server_name.removesuffix(".") if server_name is not None else None
        except NoServerName:
            if is_address:
                return connection.host
            raise
        if is_address and name is not None:  # a name in place of which its address was connected to
            decision = self._rules.decide(name, connection.port)
            if not decision.is_allowed:
                raise Refused(decision.why)
            if self._secrets is not None:
                self._secrets.check(name, connection.port, is_by_address=True)
            if _is_limited(decision):
                what, why = f"{name}:{connection.port}, by its address,", "the rules for this host are about requests"
                raise Refused(not_allowed(what, why, "connect to its name"))
            connection.name = name
        elif name is not None and name != connection.host:
            what = f"{connection.host}:{connection.port}: the server name {name} in TLS"
            raise Refused(not_allowed(what, "it is not the host of the connection", ANOTHER_HOST))
        return name

    async def _connect(self, connection: GuestConnection, rule: Rule | None) -> SocketStream:
        """Connect to the host. Raises Refused, Failed."""
        upstream_socket, connection.address = await connect(
            connection.host, connection.port, rules=self._rules, rule=rule, proxies=self._proxies, lookups=self._lookups
        )
        if not self._may_go_on(connection):
            upstream_socket.close()
            raise Refused(f"{connection.host}:{connection.port} is not allowed any more; the rules have changed")
        connection.row = self._ledger.row(connection.host, connection.port)
        return SocketStream(upstream_socket, self._turns, connection.buffer_bytes)

    async def _connect_for_http(self, connection: GuestConnection) -> SocketStream:
        try:
            return await self._connect(connection, await self._decide(connection))
        except Refused as error:
            self._note_refusal(connection.host, connection.port, error.reason)
            raise
        except Failed as error:
            self._ledger.row(connection.host, connection.port, error.reason)
            raise OSError(error.reason) from error

    async def _carry_opened(
        self, connection: GuestConnection, secrets: SandboxSecrets, guest: SocketStream, first: bytes
    ) -> None:
        """Carry the requests in a guest's TLS to a host with a secret."""
        edits = secrets.edits(connection.host, *self._edits(connection))
        refuse = functools.partial(self._refuse_request, connection)
        connect_to_host = functools.partial(self._connect_for_http, connection)
        await secrets.carry(
            guest, connection.host, first, connect_to_host, refuse, edits, idle_s=IDLE_S, turns=self._turns
        )

    def _edits(self, connection: GuestConnection) -> tuple[EditHead, Callable[[str], None]]:
        """Return what checks a request by the rules of then, and what notes a placeholder in one."""

        def check(head: RequestHead) -> RequestHead:
            checked = checked_request(head, self._rules, connection.host, connection.port)
            return with_headers(checked, self._rules.headers_for(connection.host))

        return check, functools.partial(self._note_left, connection)

    def _refuse_request(self, connection: GuestConnection, what: str) -> str:
        """Note a refused request, and return the sentence that the guest reads."""
        why = f"{connection.host}:{connection.port}: {what}"
        self._note_refusal(connection.host, connection.port, why)
        return why

    def _note_left(self, connection: GuestConnection, why: str) -> None:
        self._ledger.row(connection.host, connection.port, why)

    async def _carry_http(self, connection: GuestConnection, guest: SocketStream) -> None:
        """Carry plain HTTP, and decide about each request; the guest reads why one is refused."""
        connection.is_read = self._secrets is not None
        edits = None if self._secrets is None else self._secrets.watching(connection.host, *self._edits(connection))
        await relay(
            guest, connection.host, connection.port, lambda: self._connect_for_http(connection),
            functools.partial(self._refuse_request, connection), turns=self._turns, edits=edits,
            proxied=self._proxies.url_for(connection.host, connection.port) is not None,
        )  # fmt: skip

    def _note_refusal(self, host: str, port: int, why: str) -> None:
        row = self._ledger.row(host, port, why or "refused", is_allowed=False)
        if row.connections == 1 and self._told < MOST_TOLD:  # each reason is told once; the report counts
            self._told += 1
            self._callers.tell("refused", {"host": host, "port": port, "why": row.why})


def _is_limited(decision: HostDecision) -> bool:
    return decision.rule is not None and bool(decision.rule.requests)


async def _all_done(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
