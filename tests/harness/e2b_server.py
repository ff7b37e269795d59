"""A server that speaks E2B's wire, as its own SDK does: the API of sandboxes, and the agent `envd` in each, over TLS.

It listens on loopback alone, in a thread with a loop of its own. A sandbox is a set of namespaces that bubblewrap
makes, in which programs really run, as root or as a user; nothing of it outlives the server. `faults` say what goes
wrong, and `requests` what was asked, with all headers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import struct
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit

from tests.harness.containers import make_certificates

KEY = "e2b_" + "5eed" * 10
HOSTS_OWN = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
# Of sandboxes: each has another id, as the kernel counts processes by it, over all servers of this machine.
FIRST_USER, USERS = 210_000 + os.getpid() % 2_000 * 500, 500
JSON = "application/json"
NOT_FOUND = "The sandbox was not found"


@dataclass
class Fault:
    """Say what goes wrong with requests whose method and path match: so many of them, once some have gone well.

    `kind` is a status, or one of `hang` (no first byte ever comes), `html` (a proxy's page), `half` (of a body),
    `junk`, `other` and `empty` (no JSON, another one, none), `drop` (nothing is answered), `lost` (it is done, and the
    answer lost), `cut` (a stream breaks off when the process has written `after` bytes) and `mute` (it then says
    nothing more); or a code of Connect's, which ends a stream that had begun with 200.
    """

    where: str
    kind: str
    times: int = 1
    skip: int = 0
    after: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = ""


@dataclass
class Asked:
    """Hold one request."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body or b"{}"))


class Refusal(Exception):
    """Be an answer that is an error: an HTTP status, or a word of Connect's."""

    def __init__(self, status: int, message: str, code: str | int | None = None):
        super().__init__(message)
        self.status, self.body = status, {"code": code if code is not None else status, "message": message}


class Hangup(Exception):
    """Close the connection without another word."""


class Sandbox:
    """Be a machine: namespaces of its own, with a root in memory."""

    def __init__(self, given: Mapping[str, Any], number: int, etc: Path):
        self.id, self.given = f"i{uuid.uuid4().hex[:19]}", given
        self.token, self.started = uuid.uuid4().hex, time.time() + number / 1000
        self.user = FIRST_USER + number % USERS
        self.processes: dict[int, Process] = {}
        self.streams: set[asyncio.StreamWriter] = set()
        self.is_gone = False
        self.timer: asyncio.TimerHandle | None = None
        with tempfile.NamedTemporaryFile("w", prefix="cloche-e2b-") as accounts:
            accounts.write(f"root:x:0:0::/root:/bin/sh\nuser:x:{self.user}:{self.user}::/home/user:/bin/sh\n")
            accounts.flush()
            os.chmod(accounts.name, 0o644)
            self.pid = self._start(accounts.name, etc)

    def _start(self, accounts: str, etc: Path) -> int:
        reading, writing = os.pipe()
        words = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--cap-add", "ALL"]
        for place in HOSTS_OWN:
            words += ["--ro-bind", place, place] if os.path.exists(place) else []
        # In a copy: as soon as a file of the host is replaced, the kernel takes away what is mounted over it.
        words += ["--ro-bind", str(etc), "/etc", "--ro-bind", accounts, "/etc/passwd"]
        words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        words += ["--dir", "/run", "--dir", "/root", "--dir", "/home/user", "--die-with-parent"]
        words += ["--info-fd", str(writing), "--", "/bin/sh", "-c", "echo up; exec sleep infinity"]
        self.holder = subprocess.Popen(words, pass_fds=[writing], stdout=subprocess.PIPE)
        os.close(writing)
        with open(reading) as said:
            pid = int(json.loads(said.read())["child-pid"])
        assert self.holder.stdout is not None
        self.holder.stdout.readline()  # its root is made
        return pid

    def end(self) -> None:
        """Kill it, and break off whatever comes from it."""
        self.is_gone = True
        if self.timer is not None:
            self.timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.holder.wait()
        if self.holder.stdout is not None:
            self.holder.stdout.close()
        for stream in self.streams:
            stream.transport.abort()

    def described(self) -> dict[str, Any]:
        moment = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started + more)) for more in (0, 3600)]
        return {
            "sandboxID": self.id, "templateID": self.given["templateID"], "clientID": "c", "state": "running",
            "startedAt": moment[0], "endAt": moment[1], "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024,
            "envdVersion": "0.6.4", "metadata": self.given.get("metadata", {}),
        }  # fmt: skip

    async def start(self, order: Mapping[str, Any], user: str) -> Process:
        """Run a program in it."""
        config = order["process"]
        words = ["nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-n"]
        if user != "root":
            words += ["--", "setpriv", "--reuid", str(self.user), "--regid", str(self.user), "--clear-groups"]
        words += ["--", config["cmd"], *config.get("args", [])]
        pipe = asyncio.subprocess.PIPE
        made = await asyncio.create_subprocess_exec(
            *words, stdin=pipe if order.get("stdin") else asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            env={"PATH": "/usr/bin:/bin:/usr/sbin", **config.get("envs", {})}, start_new_session=True,
        )  # fmt: skip
        process = Process(made, config["cmd"])
        self.processes[process.pid] = process
        return process


class Process:
    """Be a program that runs in a sandbox; its events are kept until they are taken."""

    def __init__(self, made: asyncio.subprocess.Process, command: str):
        self.made, self.pid, self.command = made, made.pid, command
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=16)
        self.task = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        await asyncio.gather(self._copy(self.made.stdout, "stdout"), self._copy(self.made.stderr, "stderr"))
        code = await self.made.wait()
        await self.events.put({"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}})
        await self.events.put(None)

    async def _copy(self, stream: asyncio.StreamReader | None, kind: str) -> None:
        while stream and (data := await stream.read(32_768)):
            await self.events.put({"data": {kind: base64.b64encode(data).decode()}})

    def kill(self) -> None:
        """Kill the program: what `nsenter` has forked, as it goes into a namespace of processes."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/task/{self.pid}/children") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)


class E2BServer:
    """Serve; `url` is that of the API, and of all sandboxes. Requests with another key are refused."""

    def __init__(self, folder: Path, *, key: str = KEY, certificate: Path | None = None):
        self.key, self.faults, self.requests = key, list[Fault](), list[Asked]()
        self.sandboxes: dict[str, Sandbox] = {}
        self.made = 0  # sandboxes, ever
        self._came = threading.Condition()
        self._etc = folder / "etc"
        if not self._etc.exists():
            shutil.copytree("/etc", self._etc, symlinks=True)
        place = certificate or folder / "server"
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(place / "cert.pem", place / "key.pem")
        self._tls.set_alpn_protocols(["http/1.1"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="e2b-server", daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.url = f"https://127.0.0.1:{self.port}"

    async def _listen(self) -> int:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """End all sandboxes and connections."""

        async def ended() -> None:
            self._server.close()
            for sandbox in list(self.sandboxes.values()):
                await self._end(sandbox)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _end(self, sandbox: Sandbox) -> None:
        self.sandboxes.pop(sandbox.id, None)
        await asyncio.to_thread(sandbox.end)
        await asyncio.gather(*(one.made.wait() for one in sandbox.processes.values()))
        for one in sandbox.processes.values():
            one.task.cancel()

    def wait_for(self, what: str) -> None:
        """Wait until a request has come whose method and path match."""
        with self._came:
            came = self._came.wait_for(
                lambda: any(re.search(what, f"{one.method} {one.path}") for one in self.requests), 30
            )
        assert came, f"nothing like {what} was asked"

    def end_all(self) -> None:
        """End the sandboxes, as when their time is up."""

        async def ended() -> None:
            for sandbox in list(self.sandboxes.values()):
                await self._end(sandbox)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(30)

    # Connections.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (asked := await read_request(reader)) is not None:
                with self._came:
                    self.requests.append(asked)
                    self._came.notify_all()
                await self._answer(asked, writer)
        except (Hangup, OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        fault = self._fault(f"{asked.method} {asked.path}")
        if fault is not None and fault.kind not in ("cut", "lost", "mute"):
            await spoil(fault, writer)
            return
        try:
            if sandbox_id := asked.headers.get("e2b-sandbox-id"):
                await self._agent(asked, sandbox_id, writer, fault)
                return
            if asked.headers.get("x-api-key") != self.key:
                raise Refusal(401, "Invalid API key, please visit the docs")
            status, body, headers = await self._control(asked)
            if fault is not None:
                raise Hangup
        except Refusal as refusal:
            status, body, headers = refusal.status, refusal.body, {}
        await respond(writer, status, body, headers)

    def _fault(self, what: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.where, what):
                if fault.skip > 0:
                    fault.skip -= 1
                    return None
                fault.times -= 1
                return fault
        return None

    # The API of sandboxes.

    async def _control(self, asked: Asked) -> tuple[int, Any, Mapping[str, str]]:
        parts = asked.path.strip("/").split("/")
        parts = parts[1:] if parts[0] == "v2" else parts
        if parts[0] != "sandboxes":
            raise Refusal(404, "no such route")
        if len(parts) == 1 and asked.method == "POST":
            return 201, await self._create(asked.json()), {}
        if len(parts) == 1:
            return self._list(asked.query())
        sandbox = self.sandboxes.get(parts[1])
        if sandbox is None:
            raise Refusal(404, f"sandbox {parts[1]} not found")
        if asked.method == "DELETE":
            await self._end(sandbox)
        elif parts[2:] == ["timeout"]:
            self._expire(sandbox, asked.json()["timeout"])
        elif parts[2:] == ["connect"]:
            return 200, self._connection(sandbox), {}
        else:
            return 200, sandbox.described(), {}
        return 204, None, {}

    async def _create(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        self.made += 1
        sandbox = await asyncio.to_thread(Sandbox, given, self.made, self._etc)
        self.sandboxes[sandbox.id] = sandbox
        self._expire(sandbox, given.get("timeout", 15))
        return self._connection(sandbox)

    def _expire(self, sandbox: Sandbox, seconds: float) -> None:
        if sandbox.timer is not None:
            sandbox.timer.cancel()
        sandbox.timer = self._loop.call_later(seconds, lambda: self._loop.create_task(self._end(sandbox)))

    def _connection(self, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "sandboxID": sandbox.id, "templateID": sandbox.given["templateID"], "clientID": "c",
            "envdVersion": "0.6.4", "envdAccessToken": sandbox.token,
        }  # fmt: skip

    def _list(self, query: Mapping[str, str]) -> tuple[int, Any, Mapping[str, str]]:
        wanted = [row.split("=") for row in unquote_plus(query.get("metadata", "")).split("&") if row]
        labels = {unquote_plus(name): unquote_plus(value) for name, value in wanted}
        found = [one for one in self.sandboxes.values() if labels.items() <= one.given.get("metadata", {}).items()]
        found.sort(key=lambda one: -one.started)
        first, limit = int(query.get("nextToken", 0)), int(query.get("limit", 100))
        more = {"x-next-token": str(first + limit)} if len(found) > first + limit else {}
        return 200, [one.described() for one in found[first : first + limit]], more

    # The agent in a sandbox.

    async def _agent(self, asked: Asked, name: str, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        sandbox = self.sandboxes.get(name)
        if sandbox is None:
            raise Refusal(502, NOT_FOUND)
        if asked.path == "/health":
            await respond(writer, 204, None)
            return
        if asked.headers.get("x-access-token") != sandbox.token:
            raise Refusal(401, "invalid access token", "unauthenticated")
        method = asked.path.removeprefix("/process.Process/")
        if method == "Start":
            await self._start(asked, sandbox, writer, fault)
            return
        if fault is not None:  # nothing more is heard of this sandbox, and yet it is done
            for stream in list(sandbox.streams):
                stream.transport.abort()
            await self._process(method, asked.json(), sandbox)
            raise Hangup
        await respond(writer, 200, await self._process(method, asked.json(), sandbox))

    async def _process(self, method: str, order: Mapping[str, Any], sandbox: Sandbox) -> Mapping[str, Any]:
        if method == "List":
            processes = sandbox.processes.values()
            return {"processes": [{"pid": one.pid, "config": {"cmd": one.command}} for one in processes]}
        process = sandbox.processes.get(order.get("process", {}).get("pid", 0))
        if process is None:
            raise Refusal(404, "process not found", "not_found")
        if method == "SendInput":
            stdin = process.made.stdin
            if stdin is None:
                raise Refusal(400, "it has no input", "failed_precondition")
            with contextlib.suppress(ConnectionError):
                stdin.write(base64.b64decode(order["input"]["stdin"]))
                await stdin.drain()
        elif method == "CloseStdin" and process.made.stdin is not None:
            process.made.stdin.close()
        elif method == "SendSignal":
            process.kill()
        else:
            raise Refusal(404, "no such method", "unimplemented")
        return {}

    async def _start(self, asked: Asked, sandbox: Sandbox, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        words = base64.b64decode(asked.headers.get("authorization", "Basic dXNlcjo=").split()[1]).decode()
        order = json.loads(asked.body[5 : 5 + struct.unpack(">I", asked.body[1:5])[0]])
        process = await sandbox.start(order, words.partition(":")[0])
        sandbox.streams.add(writer)
        try:
            await begin_stream(writer)
            await send_frame(writer, {"event": {"start": {"pid": process.pid}}})
            left = fault.after if fault is not None else None
            while True:
                try:
                    wait_s = float(asked.headers.get("keepalive-ping-interval", 50))
                    event = await asyncio.wait_for(process.events.get(), wait_s)
                except TimeoutError:
                    event = {"keepalive": {}}
                if event is None:
                    break
                if left is not None and "data" in event:
                    left -= sum(map(len, event["data"].values()))
                if fault is not None and left is not None and left < 0:
                    if fault.kind == "mute":
                        await asyncio.Event().wait()
                    raise Hangup
                await send_frame(writer, {"event": event})
            await send_frame(writer, {}, flags=2)
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            sandbox.streams.discard(writer)
            sandbox.processes.pop(process.pid, None) if process.made.returncode is not None else None


# HTTP.


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    """Return the next request of a connection; None when there is none."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = head[0].split(" ")
    rows = (line.partition(":") for line in head[1:] if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in rows}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif length := int(headers.get("content-length", 0)):
        body = await reader.readexactly(length)
    return Asked(method, target, headers, body)


async def respond(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None, kind: str = JSON
) -> None:
    """Send an answer."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    rows = {"content-type": kind, "content-length": str(len(data)), **(headers or {})}
    if status == HTTPStatus.NO_CONTENT:
        rows = {}
    writer.write(head_of(status, rows) + data)
    await writer.drain()


def head_of(status: int, rows: Mapping[str, str]) -> bytes:
    """Return the head of an answer."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in rows.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def begin_stream(writer: asyncio.StreamWriter) -> None:
    """Begin an answer that is a stream of messages."""
    writer.write(head_of(200, {"content-type": "application/connect+json", "transfer-encoding": "chunked"}))
    await writer.drain()


async def send_frame(writer: asyncio.StreamWriter, body: Mapping[str, Any], flags: int = 0) -> None:
    """Send one message of a stream, as a chunk."""
    text = json.dumps(body).encode()
    frame = struct.pack(">BI", flags, len(text)) + text
    writer.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
    await writer.drain()


async def spoil(fault: Fault, writer: asyncio.StreamWriter) -> None:
    """Answer wrongly."""
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "drop":
        raise Hangup
    if fault.kind.isdigit():
        body = {"code": int(fault.kind), "message": fault.message or f"said by the server with {KEY}"}
        await respond(writer, int(fault.kind), body, fault.headers)
    elif fault.kind == "html":
        await respond(writer, 502, b"<html><h1>502 Bad Gateway</h1></html>", kind="text/html")
    elif fault.kind == "half":
        writer.write(head_of(201, {"content-type": JSON, "content-length": "500"}) + b'{"sandboxID": "i')
        await writer.drain()
        raise Hangup
    elif fault.kind in ("permission_denied", "unauthenticated"):
        await begin_stream(writer)
        await send_frame(writer, {"error": {"code": fault.kind, "message": "said by the agent"}}, flags=2)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    else:
        body = {"junk": b'{"sandboxID": 7, "templateID"', "empty": b"", "other": b'{"a": 1}'}[fault.kind]
        await respond(writer, 201, body)


@contextmanager
def serving(folder: Path, **more: Any) -> Iterator[E2BServer]:
    """Serve for the body, with certificates that `folder` gets."""
    if not folder.exists():
        make_certificates(folder)
    server = E2BServer(folder, **more)
    try:
        yield server
    finally:
        server.close()
