"""One request of E2B's: its service, its caller and its sandbox; and the table of routes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from cloche.audit.log import act_for
from cloche.core.errors import InvalidRequest, NotFound
from cloche.core.letter_case import camel
from cloche.core.record import dataclass, field
from cloche.records.sandboxes import ENDED, SandboxFacts
from cloche.records.tables import DEFAULT_PROJECT
from cloche.records.workers import shared_key
from cloche.serving.http import SLOW_BODY
from cloche.wire.bodies import validated
from cloche.wire.callers import Caller
from cloche.wire.problems import Refused
from cloche.wire.uses import Use

from ..observe import CALLER
from ..service import Service
from . import states
from .errors import NOT_RUNNING, E2BError, PortError
from .log_lines import LogLines
from .options import E2BOptions
from .target import Target

KEY_HEADER, TOKEN_HEADER, TRAFFIC_HEADER = "x-api-key", "x-access-token", "e2b-traffic-access-token"
LEAST_AWAKE_S = 60  # of a sandbox that traffic has resumed
MOST_BODY = 4 << 20  # of a JSON body
FACTS = "cloche.e2b.facts"
SMALL_BODY = 64 << 10  # that the event loop reads itself
ROW_PREFIX = "sb_"  # of a row's id, which E2B's ids lack: they may have no other characters than a-z and 0-9


def wire_name(name: str) -> str:
    """Return E2B's name of a field, such as `templateID`."""
    return re.sub(r"Id$", "ID", camel(name))


class E2BModel(BaseModel):
    """Base of the models of E2B's bodies: names as on the wire. An unknown field is refused, never ignored."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, alias_generator=wire_name)


def row_id(sandbox_id: str) -> str:
    """Return the id of the row of a sandbox with E2B's id."""
    return ROW_PREFIX + sandbox_id


def is_own(caller: Caller, facts: SandboxFacts) -> bool:
    """Tell whether a caller may reach a sandbox: its own, or with scope admin any of the project."""
    return caller.has("admin") or facts.api_key == caller.key_id


def e2b_id(row: str) -> str:
    """Return E2B's id of a sandbox with a row's id."""
    return row.removeprefix(ROW_PREFIX)


@dataclass(slots=True, kw_only=True, eq=False)
class Readers:
    """Hold the open streams of one sandbox, which are cut when it is paused or ends."""

    cuts: set[asyncio.Future[str]] = field(default_factory=set)

    @contextmanager
    def reading(self) -> Iterator[asyncio.Future[str]]:
        """Yield a future that is done, with the reason, when the stream must be dropped."""
        cut: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cuts.add(cut)
        try:
            yield cut
        finally:
            self.cuts.discard(cut)

    def cut(self, why: str) -> None:
        """Have all streams dropped."""
        for cut in list(self.cuts):
            if not cut.done():
                cut.set_result(why)


class E2B:
    """Hold what all requests share: the service, the options, and the state of this worker about each sandbox."""

    def __init__(self, service: Service, options: E2BOptions, key: str):
        self.service, self.options, self._key = service, options, key.encode()
        self._readers: dict[str, Readers] = {}
        self.parts: dict[str, Any] = {}  # state of the modules of routes, by the module's name
        self.logs = LogLines()
        service.sandboxes.lives.listeners.append(self._note_life)

    def _note_life(self, row: str, what: str) -> None:
        """Drop the streams of a sandbox that was paused or has ended; without a request, too."""
        self.cut(e2b_id(row), what)
        if what == ENDED:
            self.logs.forget(e2b_id(row))
        else:
            self.logs.add(e2b_id(row), f"the sandbox was {what}")

    def access_token(self, sandbox_id: str) -> str:
        """Return the token for envd of a sandbox. All workers of the database derive the same one."""
        return self._token("envd", sandbox_id)

    def traffic_token(self, sandbox_id: str) -> str:
        """Return the token for the other ports of a sandbox."""
        return self._token("traffic", sandbox_id)

    def sign(self, kind: str, text: str) -> str:
        """Return the signature of a text, which all workers of the database make and check."""
        return self._token(f"signed {kind}", text)

    def _token(self, kind: str, sandbox_id: str) -> str:
        return hmac.new(self._key, f"e2b {kind} {sandbox_id}".encode(), hashlib.sha256).hexdigest()

    def readers(self, sandbox_id: str) -> Readers:
        """Return the open streams of a sandbox, by E2B's id."""
        return self._readers.setdefault(sandbox_id, Readers())

    def cut(self, sandbox_id: str, why: str) -> None:
        """Drop all streams of a sandbox, which was paused or has ended."""
        readers = self._readers.pop(sandbox_id, None)
        if readers is not None:
            readers.cut(why)

    def cut_all(self, why: str) -> None:
        """Drop all streams of all sandboxes."""
        for sandbox_id in list(self._readers):
            self.cut(sandbox_id, why)


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One request. `target` is the sandbox's port that it is meant for, None at the control plane."""

    e2b: E2B
    request: Request
    target: Target | None = None
    row: SandboxFacts | None = None  # of the target, once it was looked up

    @property
    def service(self) -> Service:
        """Return the service."""
        return self.e2b.service

    @property
    def path(self) -> dict[str, str]:
        """Return the parameters of the path."""
        parameters: dict[str, str] = self.request.path_params
        return parameters

    async def caller(self, scope: str = "run") -> Caller:
        """Return the owner of the key in `X-API-KEY` (or `Authorization: Bearer`), who must have a scope.

        Raises E2BError (401, 403).
        """
        text = self.request.headers.get(KEY_HEADER, "")
        kind, _, bearer = self.request.headers.get("authorization", "").partition(" ")
        if not text and kind.lower() == "bearer":
            text = bearer.strip()
        key = await self.service.identities.of_key(text) if text else None
        if key is None:
            raise E2BError(401, "this key is not valid: it is missing, wrong, revoked or expired")
        address = self.request.client.host if self.request.client else ""
        caller = Caller(project=key.project, scopes=key.scopes, key_id=key.id, address=address)
        self.request.scope[CALLER] = caller.name
        act_for(key=caller.name, address=caller.address)
        if not caller.has(scope):
            how = f"cloche keys create NAME --e2b --scope {scope}"
            raise E2BError(403, f"this needs a key with scope {scope}, which the operator makes with: {how}")
        return caller

    async def body(self, model: type[Any]) -> Any:  # noqa: ANN401 - of the model
        """Return the JSON body as a model of it. Raises E2BError (400, 413), InvalidFields."""
        data = bytearray()
        async for piece in self.request.stream():
            data += piece
            if len(data) > MOST_BODY:
                raise E2BError(413, f"the body has more than {MOST_BODY} bytes")
        if len(data) <= SMALL_BODY:
            return validated(model, read_json(bytes(data)) if data else {})
        return validated(model, await asyncio.to_thread(read_json, bytes(data)))

    async def facts(self, sandbox_id: str, project: str) -> SandboxFacts:
        """Return the row of a sandbox by E2B's id. Raises E2BError (404), also for one of another face."""
        if (known := self.request.scope.get(FACTS)) is not None and known.id == row_id(sandbox_id):
            facts: SandboxFacts = known  # of this request
            return facts
        try:
            facts = await self.service.sandboxes.look(row_id(sandbox_id), project)
        except (NotFound, InvalidRequest) as error:
            raise states.not_found(sandbox_id) from error
        if "e2b" not in facts.document:
            raise states.not_found(sandbox_id)
        if self.target is not None and states.state_of(facts) == states.RUNNING:
            self.request.scope[FACTS] = facts
        return facts

    async def sandbox(self, action: str, scope: str = "run") -> tuple[Caller, SandboxFacts]:
        """Return the caller, and the row of the path's sandbox, which is the caller's, if `action` is allowed now.

        `action` is a request of `states.TABLE`. A key below scope admin has the sandboxes alone that it created.
        Raises E2BError.
        """
        caller = await self.caller(scope)
        sandbox_id = self.path["sandbox_id"].partition("-")[0]  # older SDKs add the id of the client
        facts = await self.facts(sandbox_id, caller.project)
        if not is_own(caller, facts):
            raise states.not_found(sandbox_id)
        states.check(action, facts, sandbox_id)
        if not await self.service.sandboxes.is_alive(facts):  # which its row does not have yet
            raise states.not_found(sandbox_id)
        return caller, facts

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Use]:
        """Yield the sandbox of the target, held for the body. Raises PortError unless it runs.

        The caller was authenticated by the sandbox's own token, so the use is its owner's.
        """
        assert self.target is not None  # noqa: S101 - routes of ports have one
        sandbox_id = self.target.sandbox_id
        facts = await self.facts_of_port()
        owner = Caller(project=facts.project, scopes=("run", "read"), key_id=facts.api_key)
        act_for(key=owner.name, sandbox=facts.id)
        try:
            async with self.service.sandboxes.held_as(facts) as held:
                yield Use(caller=owner, service=self.service, held=held)
        except Refused as error:
            if error.kind in ("sandbox-ended", "sandbox-starting"):
                raise PortError(sandbox_id, NOT_RUNNING) from error
            raise

    async def facts_of_port(self) -> SandboxFacts:
        """Return the row of the target, which runs, or with `autoResume` is resumed for this. Raises PortError."""
        assert self.target is not None  # noqa: S101 - as above
        try:
            facts = await self.facts(self.target.sandbox_id, DEFAULT_PROJECT)
            if states.wakes(facts):
                left_s = max(LEAST_AWAKE_S, facts.document["e2b"]["timeout"])
                await self.service.sandboxes.change_life(
                    facts, "lifetime", left_s=left_s, only_extends=True, resumes=True
                )
                return facts
        except (E2BError, Refused) as error:
            raise PortError(self.target.sandbox_id, NOT_RUNNING) from error
        if states.state_of(facts) != states.RUNNING or not await self.service.sandboxes.is_alive(facts):
            raise PortError(self.target.sandbox_id, NOT_RUNNING)
        self.row = facts
        return facts

    def check_token(self) -> None:
        """Raise E2BError (401) unless the request has the access token of the target's envd."""
        assert self.target is not None  # noqa: S101 - as above
        sent = self.request.headers.get(TOKEN_HEADER, "")
        if not hmac.compare_digest(sent.encode(), self.e2b.access_token(self.target.sandbox_id).encode()):
            raise E2BError(401, "the access token of the sandbox is missing or wrong")
        self.request.scope[SLOW_BODY] = True


def read_json(data: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a JSON text. Blocks for large ones. Raises E2BError (400)."""
    import json

    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise E2BError(400, f"the body is not JSON: {error}") from error


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One route: its method, its path as Starlette writes it, and the function that answers."""

    method: str
    path: str
    handler: Handler


Rows = Sequence[Row]


def key_of(service: Service) -> str:
    """Return the secret from which the tokens of sandboxes are derived, the same for all workers. Blocks."""
    with service.database.writing() as session:
        return shared_key(session)
