"""A server that speaks Daytona's published wire over TLS on loopback, and whose sandboxes really run programs.

A sandbox of it is one of Cloche's own, of backend `local`, that lives and has a root inside. What clients were told is
taken from the models of the SDK's clients; a terminal behaves as that of Daytona's daemon does: a shell that is begun
when somebody connects, what it writes in binary messages, a client that does not read fast enough is dropped.

`faults` are done to requests that match, one after the other: see `Fault`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import MultipartWriter, WSMsgType, web

from cloche.backends.local.backend import LocalBackend
from cloche.core.errors import SandboxFileNotFound
from cloche.core.limits import GIB, MIB, Limits
from cloche.core.policy import Policy
from cloche.core.processes import ProcessRequest

KEY = "dtn_test_3f9a7c51d0b24e6f8a1c"
MOST_WAITING = 256  # messages for a client, as in the daemon
USER: str | None = "root"  # of the daemon, and so of terminals
SHELL: tuple[str, ...] = ("/bin/bash", "-i", "-l")
LIMITS = Limits(memory_bytes=3 * GIB, disk_bytes=512 * MIB, tmp_bytes=256 * MIB, pids=2000, cpus=4)
EXIT_CONTROL = "X-Daytona-Pty-Exit-Control"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Fault:
    """Do something to requests whose method and path match, so many times.

    `status`, `body`, `headers` answer in place of the server. `kind` is "answer", "drop" (the connection is closed),
    "half" (of the body is sent), "slow" (nothing is sent for `seconds`), or "late" (it is done, then nothing is sent).
    """

    path: str
    method: str = ""
    kind: str = "answer"
    status: int = 500
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    seconds: float = 0.0

    def matches(self, request: web.Request) -> bool:
        """Tell whether it is for a request."""
        is_method = self.method in ("", request.method)
        return self.times > 0 and is_method and re.search(self.path, request.path) is not None


@dataclass
class Box:
    """Hold one sandbox of the server."""

    id: str
    name: str
    wanted: dict[str, Any]
    opened: Any
    closing: contextlib.AsyncExitStack
    terminals: dict[str, dict[str, Any]] = field(default_factory=dict)
    sockets: list[web.WebSocketResponse] = field(default_factory=list)
    state: str = "started"


class DaytonaServer:
    """Serve in a thread of its own; everything that tests read and set is plain attributes."""

    def __init__(self, context: ssl.SSLContext | None, *, key: str = KEY):
        self.key, self.faults, self.boxes = key, list[Fault](), dict[str, Box]()
        self.requests: list[tuple[str, str, Mapping[str, str]]] = []
        self.states: list[str] = []  # that a new sandbox has before it has started
        self.created: list[dict[str, Any]] = []
        self.toolbox_url = self.origin = ""
        self.shell, self.user = SHELL, USER
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="daytona-server", daemon=True)

    def __enter__(self) -> DaytonaServer:
        self._thread.start()
        if not self._begun.wait(30):
            raise RuntimeError("the server does not start")
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    @property
    def url(self) -> str:
        """Return the address of the API."""
        return f"{self.origin}/api"

    def reset(self) -> None:
        """Be as new."""
        self.requests.clear()
        self.created.clear()
        self.faults.clear()
        self.states, self.shell, self.user = [], SHELL, USER

    def delete_all(self) -> None:
        """End all sandboxes, as somebody else of the same account may."""

        async def ended() -> None:
            for box in list(self.boxes.values()):
                await self._end(box)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(60)

    def drop_terminals(self) -> None:
        """Cut the connections of all terminals, without a word."""

        async def cut() -> None:
            for box in self.boxes.values():
                for socket in box.sockets:
                    transport = socket._req.transport if socket._req is not None else None
                    if transport is not None:
                        transport.abort()

        asyncio.run_coroutine_threadsafe(cut(), self._loop).result(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._begun.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._middle], client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/api/config", self._config),
                web.post("/api/sandbox", self._create),
                web.get("/api/sandbox", self._list),
                web.get("/api/sandbox/{id}", self._get),
                web.delete("/api/sandbox/{id}", self._delete),
                web.put("/api/sandbox/{id}/labels", self._label),
                web.get("/api/sandbox/{id}/toolbox-proxy-url", self._proxy_url),
                web.post("/toolbox/{id}/process/execute", self._execute),
                web.post("/toolbox/{id}/process/pty", self._create_terminal),
                web.delete("/toolbox/{id}/process/pty/{terminal}", self._delete_terminal),
                web.get("/toolbox/{id}/process/pty/create-connect", self._create_and_connect),
                web.get("/toolbox/{id}/process/pty/{terminal}/connect", self._connect),
                web.post("/toolbox/{id}/files/upload", self._upload),
                web.post("/toolbox/{id}/files/bulk-upload", self._upload),
                web.get("/toolbox/{id}/files/download", self._download),
                web.post("/toolbox/{id}/files/bulk-download", self._download_all),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._context)
        await site.start()
        port = self._runner.addresses[0][1]
        self.origin = f"{'https' if self._context is not None else 'http'}://127.0.0.1:{port}"
        self.toolbox_url = f"{self.origin}/toolbox"

    async def _stop(self) -> None:
        for box in list(self.boxes.values()):
            await self._end(box)
        await self._runner.cleanup()

    async def _end(self, box: Box) -> None:
        self.boxes.pop(box.id, None)
        for socket in box.sockets:
            await socket.close(code=1011, message=b'{"exitCode":137,"exitReason":"SIGKILL"}')
        await box.closing.aclose()

    @web.middleware
    async def _middle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path, dict(request.headers)))
        fault = next((one for one in self.faults if one.matches(request)), None)
        if fault is not None:
            fault.times -= 1
            if fault.kind == "late":
                await handler(request)
            return await self._do(fault, request)
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            return _refusal(401, "Invalid credentials")
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return _refusal(404, f"Cannot {request.method} {request.path}")
        except KeyError as error:
            return _refusal(404, f"Sandbox with ID or name {error} not found")

    async def _do(self, fault: Fault, request: web.Request) -> web.StreamResponse:
        if fault.kind in ("slow", "late"):
            await asyncio.sleep(fault.seconds)
        if fault.kind == "half":
            response = web.StreamResponse(status=200, headers={"Content-Type": "application/json"})
            response.content_length = 4096
            await response.prepare(request)
            await response.write(b'{"id": "')
        if fault.kind != "answer" and request.transport is not None:
            request.transport.close()
        headers = {"Content-Type": "application/json", **fault.headers}
        return web.Response(status=fault.status, text=fault.body, headers=headers)

    # The API.

    def _box(self, request: web.Request) -> Box:
        wanted = request.match_info["id"]
        found = next((one for one in self.boxes.values() if wanted in (one.id, one.name)), None)
        if found is None:
            raise KeyError(wanted)
        return found

    async def _config(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _create(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        self.created.append(wanted)
        identity = str(uuid.uuid4())
        closing = contextlib.AsyncExitStack()
        opened = await closing.enter_async_context(LocalBackend().open_live(Policy(users=True), LIMITS))
        box = Box(identity, str(wanted.get("name") or identity), wanted, opened, closing)
        self.boxes[identity] = box
        box.state = self.states[0] if self.states else "started"
        return web.json_response(self._shown(box))

    async def _get(self, request: web.Request) -> web.Response:
        box = self._box(request)
        if self.states:
            box.state = self.states.pop(0)
        elif box.state in ("creating", "pulling_snapshot", "starting"):
            box.state = "started"
        return web.json_response(self._shown(box))

    async def _delete(self, request: web.Request) -> web.Response:
        box = self._box(request)
        await self._end(box)
        return web.json_response({**self._shown(box), "state": "destroying"})

    async def _list(self, request: web.Request) -> web.Response:
        labels = json.loads(request.query.get("labels", "{}"))
        rows = [box for box in self.boxes.values() if labels.items() <= (box.wanted.get("labels") or {}).items()]
        begin, count = int(request.query.get("cursor") or 0), int(request.query.get("limit") or 100)
        more = str(begin + count) if begin + count < len(rows) else None
        return web.json_response(
            {"items": [self._shown(one) for one in rows[begin : begin + count]], "nextCursor": more}
        )

    async def _label(self, request: web.Request) -> web.Response:
        box = self._box(request)
        box.wanted["labels"] = (await request.json())["labels"]
        return web.json_response({"labels": box.wanted["labels"]})

    async def _proxy_url(self, request: web.Request) -> web.Response:
        self._box(request)
        return web.json_response({"url": self.toolbox_url})

    def _shown(self, box: Box) -> dict[str, Any]:
        wanted = box.wanted
        return {
            "id": box.id, "organizationId": "org-1", "name": box.name, "user": wanted.get("user") or "daytona",
            "env": wanted.get("env") or {}, "labels": wanted.get("labels") or {}, "public": bool(wanted.get("public")),
            "networkBlockAll": bool(wanted.get("networkBlockAll")), "kvm": False,
            "target": wanted.get("target") or "us",
            "snapshot": wanted.get("snapshot") or "daytonaio/sandbox", "cpu": 1, "gpu": 0, "memory": 1, "disk": 3,
            "state": box.state, "desiredState": "started", "sandboxClass": "container",
            "autoStopInterval": wanted.get("autoStopInterval", 15), "toolboxProxyUrl": self.toolbox_url,
            "createdAt": "2026-01-01T00:00:00.000Z", "updatedAt": "2026-01-01T00:00:00.000Z",
            **({"errorReason": "the runner has no room"} if box.state == "error" else {}),
        }  # fmt: skip

    # The toolbox.

    async def _execute(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        words = ("/bin/bash", "-c", f"exec 2>&1; {wanted['command']}")
        process = await self._box(request).opened.start_process(
            ProcessRequest(argv=words, user="root", cwd=wanted.get("cwd") or "/", has_input=False)
        )
        output = await process.stdout.read_all(1 << 20)
        result = await process.wait()
        return web.json_response({"exitCode": result.exit_code, "result": output.decode()})

    async def _create_terminal(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        box = self._box(request)
        if wanted["id"] in box.terminals:
            return web.json_response({"error": f"PTY session with ID '{wanted['id']}' already exists"}, status=409)
        box.terminals[wanted["id"]] = wanted
        return web.json_response({"sessionId": wanted["id"]}, status=201)

    async def _delete_terminal(self, request: web.Request) -> web.Response:
        self._box(request).terminals.pop(request.match_info["terminal"])
        return web.json_response({"message": "PTY session deleted"})

    async def _create_and_connect(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        wanted = {"id": query["id"], "cols": int(query["cols"]), "rows": int(query["rows"])}
        return await self._attach(request, wanted)

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        wanted = self._box(request).terminals.get(request.match_info["terminal"])
        return await self._attach(request, wanted)

    async def _attach(self, request: web.Request, wanted: dict[str, Any] | None) -> web.StreamResponse:
        box = self._box(request)
        socket = web.WebSocketResponse(max_msg_size=64 * 1024, protocols=(EXIT_CONTROL,))
        await socket.prepare(request)
        if wanted is None:
            why = "Failed to connect to PTY session: PTY session not found"
            await socket.send_json({"type": "control", "status": "error", "error": why})
            await socket.close()
            return socket
        box.sockets.append(socket)
        process = await box.opened.start_process(
            ProcessRequest(
                argv=self.shell, user=self.user, cwd=wanted.get("cwd") or "/",
                terminal=(wanted["rows"], wanted["cols"]), env={"TERM": "xterm-256color", **(wanted.get("envs") or {})},
            )
        )  # fmt: skip
        await socket.send_json({"type": "control", "status": "connected"})
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        tasks = [asyncio.create_task(_read(process, waiting, socket)), asyncio.create_task(_write(waiting, socket))]
        try:
            async for message in socket:
                if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
                    data = message.data if isinstance(message.data, bytes) else message.data.encode()
                    await process.write(data)
        finally:
            for task in tasks:
                task.cancel()
            box.sockets.remove(socket)
        return socket

    async def _upload(self, request: web.Request) -> web.Response:
        box, path = self._box(request), request.query.get("path", "")
        async for part in await request.multipart():
            name = getattr(part, "name", "") or ""
            data = bytes(await part.read(decode=False))  # type: ignore[union-attr]
            if name.endswith(".path"):
                path = data.decode()
            else:
                await box.opened.write_path(path, data)
        return web.json_response({})

    async def _download(self, request: web.Request) -> web.Response:
        try:
            data = await self._box(request).opened.read_path(request.query["path"], max_bytes=64 << 20)
        except SandboxFileNotFound:
            return _refusal(404, "file not found", source="DAYTONA_DAEMON", code="FILE_NOT_FOUND")
        return web.Response(body=data, content_type="application/octet-stream")

    async def _download_all(self, request: web.Request) -> web.StreamResponse:
        opened, writer = self._box(request).opened, MultipartWriter("form-data")
        for path in (await request.json())["paths"]:
            part = writer.append(await opened.read_path(path, max_bytes=64 << 20))
            part.set_content_disposition("form-data", quote_fields=False, name="file", filename=path)
        return web.Response(body=writer)


async def _read(process: Any, waiting: asyncio.Queue[bytes | None], socket: web.WebSocketResponse) -> None:
    """Take what a terminal writes; who reads too slowly is dropped, as by the daemon."""
    while data := await process.stdout.read(32 * 1024):
        try:
            waiting.put_nowait(data)
        except asyncio.QueueFull:
            await socket.close(code=1008, message=b"slow consumer")
            return
    await waiting.put(None)


async def _write(waiting: asyncio.Queue[bytes | None], socket: web.WebSocketResponse) -> None:
    while (data := await waiting.get()) is not None:
        await socket.send_bytes(data)
    await socket.close(code=1000, message=b'{"exitCode":0}')


def _refusal(status: int, message: str, **more: str) -> web.Response:
    said = {"statusCode": status, "message": message, "error": message, **more}
    return web.json_response(said, status=status)
