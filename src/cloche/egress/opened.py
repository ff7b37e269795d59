"""The secrets of one sandbox in the egress process: their values, its authority, and connections that are opened.

Theory of operation: a connection to a host with a secret is TLS to its guest, with a certificate of the sandbox's own
authority, and TLS to the host. Between them `http.relay`, or `http2.relay_http2`, carries requests one by one:
`HostCredentials` puts values in, `AnswerRedaction` takes them out of answers. Every other connection stays as it is,
unread. Placeholders that leave in a head that is read anyway, for a host where they have no value, are told.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from cloche.core.errors import InvalidRequest
from cloche.core.record import replace
from cloche.core.refusals import not_allowed
from cloche.core.secrets import LEFT, MOST_BYTES, PORT, capture_from_wire, check_value

from .aws import AwsCredentials, RequestSigning, has_aws_keys
from .captures import Captures, edit_of_answer
from .client_hello import read_protocols
from .credentials import Grant, HostCredentials, placeholders_in
from .errors import Failed, Refused
from .fields import HostFields, ReadBody
from .http import BodyEdit, Edits, relay
from .http2 import relay_http2
from .http_answer import AnswerEdit
from .http_request import EditHead, RequestHead
from .kept_logins import KeptLogins, finish_exchanges
from .placeholders import new_placeholder
from .redaction import AnswerRedaction, Pairs, StreamRedactor, pairs_of
from .renewal import Renewals, WatchedStatus, note_refusal
from .stream import SocketStream, Turns
from .tls import HTTP_1, HTTP_2, Authority, TlsStream
from .web_sockets import MessageRedaction, MessageWatch, WebSocketAnswer, is_web_socket, without_extensions

SHAKE_S, READ_S = 20.0, 60.0
MOST_FORMER = 32  # values
Note = Callable[[str], None]


async def read_grants(rows: Iterable[Mapping[str, Any]], fds: list[int]) -> list[Grant]:
    """Return the grants of a sandbox; the rows without a `value` have it in these descriptors, which are closed.

    Raises InvalidRequest for a wrong value, and for one that cannot be read.
    """
    grants = []
    try:
        for row in rows:
            if "url" in row:  # a capture
                continue
            data = row["value"] if row["value"] is not None else await _read(row["name"], fds.pop(0))
            grants.append(_grant(row, check_value(row["name"], data)))
    finally:
        for fd in fds:
            os.close(fd)
    return grants


async def _read(name: str, fd: int) -> bytes:
    """Read a file, or the output of a command until its end, in a thread: both may wait."""
    reading = asyncio.get_running_loop().run_in_executor(None, _read_all, fd)
    try:
        async with asyncio.timeout(READ_S):
            return await asyncio.shield(reading)
    except TimeoutError:
        raise InvalidRequest(f"secrets: the value of {name} did not come within {READ_S:.0f} s") from None
    except OSError as error:
        raise InvalidRequest(f"secrets: the value of {name} cannot be read: {error.strerror}") from None


def _read_all(fd: int) -> bytes:
    data = b""
    try:
        while len(data) <= MOST_BYTES and (piece := os.read(fd, MOST_BYTES)):
            data += piece
    finally:
        os.close(fd)
    return data


def _grant(row: Mapping[str, Any], value: str) -> Grant:
    placeholder = row["placeholder"] or new_placeholder(row["name"], value)
    return Grant(
        name=row["name"], placeholder=placeholder.encode(), value=value.encode(), hosts=frozenset(row["hosts"]),
        form=row["format"].encode(), is_foreign_allowed=row["is_foreign_allowed"], places=frozenset(row["places"]),
    )  # fmt: skip


class SecretsOpener:
    """Make the secrets of sandboxes, whose hosts are verified by a context."""

    def __init__(self, hosts_context: ssl.SSLContext):
        self._hosts_context = hosts_context

    def new_authority(self) -> Authority:
        """Return an authority for one sandbox."""
        return Authority()

    finish = staticmethod(finish_exchanges)

    async def open(self, rows: list[dict[str, Any]], fds: list[int], authority: Authority) -> SandboxSecrets:
        """Return the secrets of a sandbox with this authority. Raises as `read_grants` does."""
        captures = [row for row in rows if "url" in row]
        logins = fds.pop(0) if any(row["is_kept"] for row in captures) else -1
        renewals = Renewals(fds.pop(), rows) if any(row.get("renews") for row in rows) else None
        try:
            secrets = SandboxSecrets(await read_grants(rows, fds), self._hosts_context, authority, captures)
        except BaseException:
            if renewals is not None:
                renewals.close()
            if logins >= 0:
                os.close(logins)
            raise
        if renewals is not None:
            secrets.renew_by(renewals)
        if logins >= 0:
            secrets.keep_logins(logins, captures)
        return secrets


class SandboxSecrets:
    """Hold what a sandbox's secrets need here."""

    def __init__(
        self, grants: list[Grant], hosts_context: ssl.SSLContext, authority: Authority,
        captures: Iterable[Mapping[str, Any]] = (),
    ):  # fmt: skip
        self._grants, self._hosts_context = grants, hosts_context
        self._former: list[Grant] = []  # with values that were replaced
        self._renewals: Renewals | None = None
        self._logins: KeptLogins | None = None
        rows = [(row["name"], capture_from_wire(row)) for row in captures]
        self._captures = Captures(rows, grants, self._forget_grants)
        self._hosts = frozenset(host for grant in grants for host in grant.hosts) | self._captures.hosts
        self._reading: WeakSet[ReadBody] = WeakSet()
        self._signing: WeakSet[RequestSigning] = WeakSet()
        self._forget_grants(())
        self.authority = authority
        self.told_hosts: set[str] = set()  # whose refusals were told in TLS

    def renew_by(self, renewals: Renewals) -> None:
        """Have the values of commands fetched anew."""
        self._renewals = renewals
        renewals.begin(self._renew)

    def keep_logins(self, link: int, captures: Iterable[Mapping[str, Any]]) -> None:
        """Have logins that outlive this sandbox, whose files are at the other end of a link."""
        kept = [row for row in captures if row["is_kept"]]
        rows = [(row["name"], capture_from_wire(row)) for row in kept]
        takes_login = frozenset(row["name"] for row in kept if row["takes_login"])
        self._logins = KeptLogins(link, rows, takes_login, self._grants, self._forget_grants)

    def close(self) -> None:
        """Fetch no value any more."""
        if self._renewals is not None:
            self._renewals.close()
        if self._logins is not None:
            self._logins.close()

    def _renew(self, name: str, value: str) -> None:
        """Use another value from now on; the last ones are still taken out of answers. Raises InvalidRequest."""
        new_placeholder(name, value)  # which checks it
        for index, grant in enumerate(self._grants):
            if grant.name == name and not grant.login and grant.value != value.encode():
                self._grants[index] = replace(grant, value=value.encode())
                self._forget_grants([grant])

    def _forget_grants(self, grants: Sequence[Grant]) -> None:
        """Look for other values in answers from now on, and for these still: they may be good for a while."""
        self._former = [*self._former, *grants][-MOST_FORMER:]
        self._known_pairs: Pairs | None = None

    @property
    def _pairs(self) -> Pairs:
        """Return what is looked for in answers, which many a sandbox never gets."""
        if self._known_pairs is None:
            self._known_pairs = pairs_of([*self._former, *self._grants])
        return self._known_pairs

    def as_wire(self) -> dict[str, Any]:
        """Return what the sandbox gets: variables, and a certificate."""
        variables = {grant.name: grant.placeholder.decode("ascii") for grant in self._grants}
        return {"variables": variables, "authority": self.authority.certificate, "error": ""}

    def opens(self, host: str) -> bool:
        """Tell whether connections to a host are opened."""
        return host in self._hosts

    def check(self, host: str, port: int, *, is_by_address: bool = False) -> None:
        """Raise Refused for a connection to a host with a secret that could not be opened."""
        if self.opens(host) and (port != PORT or is_by_address):
            what = f"{host}:{port}, by its address," if is_by_address else f"{host}:{port}"
            raise Refused(not_allowed(what, "this host has a secret", f"connect to its name on port {PORT}"))

    async def carry(
        self, guest: SocketStream, host: str, first: bytes, connect: Callable[[], Awaitable[SocketStream]],
        refuse: Callable[[str], str], edits: Edits, *, idle_s: float, turns: Turns,
    ) -> None:  # fmt: skip
        """Carry the requests in a guest's TLS to a host with a secret; `first` are its first bytes. Raises Failed.

        The guest gets the version of HTTP that the host chose of those that the guest offers: so the host is connected
        to first where that may be another one than HTTP/1.1.
        """
        early = _Early(partial(self._open_host, host, connect, turns))
        if isinstance(edits, OpenedEdits):
            edits.connect = partial(self._open_host, host, connect, turns, [HTTP_1])
        offered = [protocol for protocol in read_protocols(first) if protocol in (HTTP_1, HTTP_2)]
        try:
            protocol = await early.open(offered) if HTTP_2 in offered else HTTP_1
            opened = await self.open_guest(guest, host, first, protocol, turns)
            if protocol == HTTP_2:
                upstream = await early.take()
                await relay_http2(opened, upstream, host, PORT, refuse, edits=edits, idle_s=idle_s, turns=turns)
            else:
                await relay(opened, host, PORT, early.take, refuse, idle_s=idle_s, turns=turns, edits=edits)
        finally:
            early.close()

    async def open_guest(self, guest: SocketStream, host: str, first: bytes, protocol: str, turns: Turns) -> TlsStream:
        """Return the guest's connection, opened. Raises Failed."""
        stream = TlsStream(guest, self.authority.guest_context(host, protocol), first=first, turns=turns)
        try:
            async with asyncio.timeout(SHAKE_S):
                await stream.shake_hands()
        except ssl.SSLError as error:
            why = (error.reason or "").replace("_", " ").lower()
            raise Failed(
                f"{host}:{PORT}: the program inside did not accept the certificate of its sandbox's authority ({why}); "
                "let it trust the file of SSL_CERT_FILE"
            ) from None
        return stream

    async def _open_host(
        self, host: str, connect: Callable[[], Awaitable[SocketStream]], turns: Turns, protocols: Sequence[str]
    ) -> TlsStream:
        """Return a connection to a host in TLS, verified. Raises OSError."""
        stream = TlsStream(await connect(), self._hosts_context, host=host, protocols=protocols, turns=turns)
        try:
            async with asyncio.timeout(SHAKE_S):
                await stream.shake_hands()
        except BaseException as error:
            stream.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise OSError(f"its certificate is not valid: {error.verify_message}") from None
            raise
        return stream

    def edits(self, host: str, check: EditHead, note: Note) -> OpenedEdits | WatchingEdits:
        """Return what is done with the requests and answers of an opened connection; `check` comes first."""
        if not self.opens(host):  # there are rules for its requests, and no secrets
            return WatchingEdits(check, partial(self._tell, host, note), is_tls=True)
        credentials = self._credentials(host)
        tell_text = partial(self._tell_text, host, note)
        fields = HostFields(host, self._grants, self._captures.rows, self._reading, tell_text)
        answer_edit = partial(self._answer_edit, host, note)
        clock = asyncio.get_running_loop().time
        most_bytes = max((len(grant.placeholder) for grant in self._grants), default=1)  # none before a login
        messages = partial(MessageRedaction, lambda: StreamRedactor(self._pairs), clock)
        watch = partial(MessageWatch, tell_text, most_bytes, clock)
        edits = OpenedEdits(check, credentials, fields, partial(self._tell, host, note), answer_edit, messages, watch)
        if self._logins is not None:
            edits.keep(self._logins, host, note)
        return edits

    def _credentials(self, host: str) -> HostCredentials | AwsCredentials:
        if has_aws_keys(host, self._grants):
            return AwsCredentials(host, self._grants, self._signing)
        return HostCredentials(host, self._grants)

    def _answer_edit(self, host: str, note: Note, head: RequestHead) -> AnswerEdit:
        edit = edit_of_answer(self._captures, host, partial(self._redaction, host), head)
        if self._renewals is None:
            return edit
        return WatchedStatus(edit, partial(note_refusal, self._renewals, self._grants, head, note))

    def _redaction(self, host: str) -> AnswerRedaction:
        """Return what takes the values out of an answer that there are by now."""
        has_cookies = any(grant.is_foreign_allowed for grant in self._grants if host in grant.hosts)
        return AnswerRedaction(StreamRedactor(self._pairs), has_cookies=has_cookies)

    def watching(self, host: str, check: EditHead, note: Note) -> WatchingEdits:
        """Return what is done with the requests of plain HTTP: they are checked, and placeholders in them are told."""
        return WatchingEdits(check, partial(self._tell, host, note))

    def _tell(self, host: str, note: Note, head: RequestHead) -> None:
        self._tell_text(host, note, head.text)

    def _tell_text(self, host: str, note: Note, text: bytes) -> None:
        for name in placeholders_in(text, self._grants):
            own = [grant for grant in self._grants if grant.name == name]
            hosts = sorted({of for grant in own for of in grant.hosts})
            places = sorted({place for grant in own for place in grant.places})
            use = f"{', '.join(hosts[:3])}{', ...' * (len(hosts) > 3)} on port {PORT}, in {', '.join(places)}"
            note(f"{LEFT}{name} stayed as it is in a request to {host}: its value is for {use}")


class _Early:
    """The connection to a host, which may be opened before there is a request; then a failure waits for the first."""

    def __init__(self, connect: Callable[[Sequence[str]], Awaitable[TlsStream]]):
        self._connect = connect
        self._stream: TlsStream | None = None
        self._error: OSError | Refused | None = None

    async def open(self, offered: Sequence[str]) -> str:
        """Connect, and return the protocol that the host chose; after a failure HTTP/1.1, in which it can be told."""
        try:
            self._stream = await self._connect(offered)
        except (OSError, Refused) as error:
            if HTTP_1 not in offered:
                raise
            self._error = error
            return HTTP_1
        return self._stream.protocol

    async def take(self) -> TlsStream:
        """Return the connection, which belongs to the caller then. Raises OSError, Refused."""
        if self._error is not None:
            raise self._error
        stream, self._stream = self._stream, None
        return stream or await self._connect([HTTP_1])

    def close(self) -> None:
        """Close the connection that nobody has taken."""
        if self._stream is not None:
            self._stream.close()


class WatchingEdits:
    """Check and look at requests, and change nothing in them but the form of their paths."""

    def __init__(self, check: EditHead, look: Callable[[RequestHead], None], *, is_tls: bool = False):
        self._check, self._look, self.is_tls = check, look, is_tls

    async def prepare(self) -> None:
        """Wait for nothing."""

    def edit(self, head: RequestHead) -> RequestHead:
        """Return a request's head. Raises Rejected."""
        checked = self._check(head)
        self._look(checked)
        return checked

    def body_edit(self, _: RequestHead) -> None:
        """Leave the body as it is."""

    def answer_edit(self, _: RequestHead) -> None:
        """Leave the answer as it is."""

    def message_edit(self, _: RequestHead) -> None:
        """Leave the guest's messages as they are."""


class OpenedEdits:
    """Put values into requests, and take them out of answers."""

    is_tls = True

    def __init__(
        self, check: EditHead, credentials: HostCredentials | AwsCredentials, fields: HostFields,
        look: Callable[[RequestHead], None], answer_edit: Callable[[RequestHead], AnswerEdit],
        redaction: Callable[[], MessageRedaction], watch: Callable[[], MessageWatch],
    ):  # fmt: skip
        self._check, self._credentials, self._fields, self._look = check, credentials, fields, look
        self._answer_edit, self._redaction, self._watch = answer_edit, redaction, watch
        self._logins: KeptLogins | None = None
        self.connect: Callable[[], Awaitable[TlsStream]]

    def keep(self, logins: KeptLogins, host: str, note: Note) -> None:
        """Use logins that are kept, whose tokens are exchanged by `connect`, on a connection of their own."""
        self._logins, self._host, self._note = logins, host, note

    async def prepare(self) -> None:
        """Use the values of now."""
        if self._logins is not None:
            await self._logins.look()

    def body_edit(self, head: RequestHead) -> BodyEdit | None:
        """Return what changes the body, or answers the request. Raises Rejected."""
        edit = self._fields.body_edit(head)
        if self._logins is None:
            return edit
        return self._logins.body_edit(self._host, head, edit, self.connect, self._note)

    def edit(self, head: RequestHead) -> RequestHead:
        """Return the head for the host. Raises Rejected."""
        edited = self._credentials.edit(self._fields.edit(self._check(without_extensions(head))))
        self._look(edited)
        return edited

    def answer_edit(self, head: RequestHead) -> AnswerEdit:
        """Return what takes values out of the answer, and out of the messages of a web socket."""
        edit = self._answer_edit(head)
        return WebSocketAnswer(edit, self._redaction()) if is_web_socket(head) else edit

    def message_edit(self, head: RequestHead) -> MessageWatch | None:
        """Return what looks at the guest's messages on a web socket."""
        return self._watch() if is_web_socket(head) else None
