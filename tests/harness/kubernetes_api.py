"""A small API server of Kubernetes on loopback: lists, watches, guarded patches, roles, and its faults on demand.

It plays the controllers, too: a Deployment's pods are made anew when one is claimed or deleted, and what an owner had
is deleted with it. A pod is an entry alone, which is ready at once, or a `cloche node` of this machine (`NodePods`).
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import re
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from aiohttp import web

from cloche.core.fleet_settings import FleetSettings
from cloche.fleets.kubernetes import manifests
from cloche.fleets.kubernetes.pods import CONTAINER, READY, STATE, stamp
from cloche.fleets.signing import Signer

from .commands import imported_once
from .node import MODULES, Node

WAIT_S = 30.0
MOST_PODS = 1_000
TOKEN = "a-token"
CUT, CUT_AFTER = 0, 1  # in place of a status
EXCEEDED = (
    'pods "cloche-default-x" is forbidden: exceeded quota: cloche-node, requested: pods=1, used: pods={used}, '
    "limited: pods={limit}"
)
Json = dict[str, Any]


def path_of(manifest: Mapping[str, Any]) -> str:
    """Return the path of the collection of an object."""
    version, kind, meta = manifest["apiVersion"], manifest["kind"], manifest["metadata"]
    plural = {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    return f"{root}/namespaces/{meta['namespace']}/{plural}" if "namespace" in meta else f"{root}/{plural}"


class Cluster:
    """The objects of a cluster with one fleet, its API server, and its controllers."""

    def __init__(self, settings: FleetSettings, *, version: str, pods: int = 0):
        self.settings, self.version = settings, version
        self.objects: dict[str, dict[str, Json]] = {}
        self.log: list[tuple[int, str, str, Json]] = []  # version, path, kind of the event, object
        self.forgotten = 0  # versions up to this one
        self.requests: Counter[str] = Counter()
        self.claims: list[tuple[str, str]] = []
        self.faults: list[tuple[str, str, int, dict[str, str]]] = []
        self.rules: list[Json] | None = manifests.rules(settings.mode)
        self.repeats_events = False
        self.token = TOKEN
        self.logs: dict[str, str | Callable[[], str]] = {}
        self.quota = MOST_PODS  # at once, as a ResourceQuota bounds them
        self.start_pod: Callable[[str], object] = self.serve
        self.end_pod: Callable[[str], object] = lambda _: None
        self.admits: Callable[[str, Json], str] = lambda *_: ""  # why an object is refused
        self.created: Callable[[str, Json], None] = lambda *_: None  # told of each object that is created
        self._numbers, self._versions = itertools.count(1), itertools.count(100)
        self._lock = threading.RLock()
        self._changed: asyncio.Condition
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._watches: set[asyncio.Task[Any]] = set()
        self.forwards: set[asyncio.Task[Any]] = set()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.on_loop(self._serve())
        self.apply_fleet()
        self.fill(pods)

    # Its life

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run work in the server's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _serve(self) -> None:
        self._changed = asyncio.Condition()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def _stop(self) -> None:
        for task in (*self._watches, *self.forwards):
            task.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let the API server refuse connections during the body."""
        self.on_loop(self._stop())
        yield
        self.on_loop(self._serve())

    def close(self) -> None:
        """End the server and all pods."""
        for path, pods in self.objects.items():
            for name in pods if path.endswith("/pods") else ():
                self.end_pod(name)
        self.on_loop(self._stop())
        self.on_loop(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def kubeconfig(self, folder: Path) -> str:
        """Write a kubeconfig, and return its path."""
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }  # fmt: skip
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return str(file)

    # What is in it

    @property
    def pods_path(self) -> str:
        """Return the path of the fleet's pods."""
        return f"/api/v1/namespaces/{self.settings.namespace}/pods"

    @property
    def pods(self) -> dict[str, Json]:
        """Return the pods by name."""
        return self.objects.get(self.pods_path, {})

    def held_by(self, state: str) -> list[str]:
        """Return the names of the pods of a state."""
        return [name for name, row in list(self.pods.items()) if row["metadata"]["labels"].get(STATE) == state]

    @property
    def signer(self) -> Signer:
        """Return the signer with the fleet's key."""
        secret = self.objects[f"/api/v1/namespaces/{self.settings.namespace}/secrets"][manifests.OBJECT]
        return Signer(base64.b64decode(secret["data"]["privateKey"]))

    def apply_fleet(self) -> None:
        """Make the fleet's objects, as an operator does."""
        signer = Signer()
        data = {"publicKey": signer.public_key, "version": self.version}
        key = base64.b64encode(signer.private_key).decode()
        for row in (*manifests.manifests(self.settings, data=data), manifests.secret_object(self.settings, key)):
            self.put(path_of(row), row)

    def put(self, path: str, row: Json, kind: str = "") -> Json:
        """Store an object with a new version, and tell the watches."""
        with self._lock:
            known = self.objects.setdefault(path, {})
            kind = kind or ("MODIFIED" if row["metadata"]["name"] in known else "ADDED")
            row["metadata"].setdefault("uid", str(uuid.uuid4()))
            row["metadata"]["resourceVersion"] = str(next(self._versions))
            if kind == "DELETED":
                known.pop(row["metadata"]["name"], None)
            else:
                known[row["metadata"]["name"]] = row
            self.log.append((int(row["metadata"]["resourceVersion"]), path, kind, copy.deepcopy(row)))
        self._tell()
        return row

    def _tell(self) -> None:
        async def tell() -> None:
            async with self._changed:
                self._changed.notify_all()

        asyncio.run_coroutine_threadsafe(tell(), self._loop)

    def fill(self, number: int) -> None:
        """Bring the Deployment to a number of ready pods."""
        deployment = self.objects[f"/apis/apps/v1/namespaces/{self.settings.namespace}/deployments"]
        deployment[f"cloche-{self.settings.template}"]["spec"]["replicas"] = number
        self._reconcile()

    def _reconcile(self) -> None:
        with self._lock:
            path = f"/apis/apps/v1/namespaces/{self.settings.namespace}/deployments"
            deployment = self.objects.get(path, {}).get(f"cloche-{self.settings.template}")
            if deployment is None:
                return
            missing = deployment["spec"]["replicas"] - len(self.held_by(READY))
            room = self.quota - len(self.pods)
            for _ in range(min(missing, room)):
                self.make_pod(deployment["metadata"]["name"], deployment["spec"]["template"])
            message = EXCEEDED.format(used=len(self.pods), limit=self.quota)
            failure = {"type": "ReplicaFailure", "status": "True", "message": message}
            deployment["status"] = {"conditions": [failure]} if missing > room else {}

    def make_pod(self, pool: str, template: Json) -> None:
        """Make a ready pod of a template, as a controller and a kubelet do."""
        number = next(self._numbers)
        name = f"{pool}-{number:04}"
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": True}
        container = {"name": CONTAINER, "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
        row = {
            "metadata": {
                "name": name, "namespace": self.settings.namespace, "labels": dict(template["metadata"]["labels"]),
                "ownerReferences": [owner],
            },
            "spec": copy.deepcopy(template["spec"]) | {"nodeName": "machine-1"},
            "status": {
                "phase": "Pending", "hostIP": "10.9.9.9", "startTime": stamp(time.time()),
                "containerStatuses": [container],
            },
        }  # fmt: skip
        self.put(self.pods_path, row)
        self.start_pod(name)

    def serve(self, name: str, facts: Mapping[str, Any] | None = None) -> None:
        """Let a pod be ready, whose server has printed such facts."""
        number = int(name[-4:])
        made = {"address": f"https://127.0.0.1:{8000 + number}", "certificate": f"{number:064x}", "boot": "b"}
        facts = facts or {**made, "version": self.version}
        with self._lock:
            if name not in self.pods:
                return
            self.logs[name] = json.dumps(facts)
            running = {"name": CONTAINER, "containerID": f"c://{name}-0", "restartCount": 0, "state": {"running": {}}}
            self.change_pod(
                name, phase="Running", podIP=urlsplit(facts["address"]).hostname, containerStatuses=[running],
                conditions=[{"type": "Ready", "status": "True"}],
            )  # fmt: skip

    def change_pod(self, name: str, *, spec: Json | None = None, **status: Any) -> None:
        """Change the status of a pod, as its kubelet does."""
        with self._lock:
            row = copy.deepcopy(self.pods[name])
            row["status"] = row.get("status", {}) | status
            row["spec"] |= spec or {}
            self.put(self.pods_path, row)

    def restart(self, name: str, reason: str = "OOMKilled") -> None:
        """Let the container of a pod start again in place."""
        container = copy.deepcopy(self.pods[name]["status"]["containerStatuses"][0])
        number = container["restartCount"] + 1
        container |= {
            "restartCount": number, "containerID": f"c://{name}-{number}", "state": {"running": {}},
            "lastState": {"terminated": {"reason": reason, "exitCode": 137}},
        }  # fmt: skip
        self.change_pod(name, containerStatuses=[container])

    # Faults

    def fail(self, verb: str, path: str, status: int, times: int = 1, **headers: str) -> None:
        """Answer the next requests of a verb whose path matches with a status, or cut their connections."""
        self.faults += [(verb, path, status, headers)] * times

    def cut_watches(self) -> None:
        """Cut the connections of all watches."""
        self._cancel(self._watches)

    def cut_forwards(self) -> None:
        """Cut all streams to ports of pods."""
        self._cancel(self.forwards)

    def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        async def cancel() -> None:
            for task in list(tasks):
                task.cancel()

        self.on_loop(cancel())

    def forget(self) -> None:
        """Forget all events, so that watches from before are answered with 410."""
        with self._lock:
            self.forgotten = next(self._versions)
            self.log.clear()

    # Requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, query = "/" + request.match_info["path"], request.query
        parts = self._parts(path)
        verb = self._verb(request, has_name=bool(parts[1]))
        resource = parts[0].rpartition("/")[2] + (f"/{parts[2]}" if parts[2] else "")
        self.requests[f"{verb} {resource}"] += 1
        if (fault := self._fault(verb, path)) is not None:
            status, headers = fault
            if status == CUT_AFTER:  # the request has its effect, and its answer is lost
                self._answer(verb, parts, query, await request.json(), request.content_type)
            if status in (CUT, CUT_AFTER):
                request.transport.close()  # type: ignore[union-attr]
            return _status(max(status, 500) if status < 400 else status, "on purpose", headers=headers)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if path == "/version":
            return web.json_response({"major": "1", "minor": "20+", "gitVersion": "v1.20.2"})
        if path.endswith("/selfsubjectrulesreviews"):
            every = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
            return web.json_response({"status": {"resourceRules": every if self.rules is None else self.rules}})
        if not self._is_allowed(verb, resource, parts[1]):
            return _status(403, f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}"', "Forbidden")
        if parts[2] == "portforward":
            may_create = self._is_allowed("create", resource, parts[1])
            return await self._forward(request, parts[1]) if may_create else _status(403, "no create", "Forbidden")
        if verb == "watch":
            return await self._watch(request, parts[0])
        if query.get("follow"):
            await self._printed(parts[1])
        body = await request.json() if request.can_read_body else {}
        return self._answer(verb, parts, query, body, request.content_type)

    @staticmethod
    def _parts(path: str) -> tuple[str, str, str]:
        """Return the path of the collection, the name and the part of the object."""
        match = re.fullmatch(r"(/apis?/[^/]+(?:/v[^/]+)?/namespaces/[^/]+/[^/]+)(?:/([^/]+))?(?:/([^/]+))?", path)
        if match is None:
            match = re.fullmatch(r"(/apis?/[^/]+(?:/v[^/]+)?/[^/]+)(?:/([^/]+))?(?:/([^/]+))?", path)
        return (match[1], match[2] or "", match[3] or "") if match else (path, "", "")

    @staticmethod
    def _verb(request: web.Request, *, has_name: bool) -> str:
        if request.method == "GET":
            return "get" if has_name else "watch" if request.query.get("watch") else "list"
        names = {"POST": "create", "PATCH": "patch", "DELETE": "delete" if has_name else "deletecollection"}
        return names[request.method]

    def _fault(self, verb: str, path: str) -> tuple[int, dict[str, str]] | None:
        for at, (of_verb, pattern, status, headers) in enumerate(self.faults):
            if of_verb == verb and re.search(pattern, path):
                del self.faults[at]
                return status, headers
        return None

    def _is_allowed(self, verb: str, resource: str, name: str) -> bool:
        if self.rules is None:
            return True
        rows = [row for row in self.rules if resource in row["resources"] and verb in row["verbs"]]
        return any(name in row.get("resourceNames", [name]) for row in rows)

    async def _printed(self, name: str) -> None:
        """Wait until a pod's log has the facts of its server, or the pod is gone."""
        while name in self.pods and '"boot"' not in self._log_of(name):  # noqa: ASYNC110 - a moment
            await asyncio.sleep(0.02)

    def _log_of(self, name: str) -> str:
        text = self.logs[name]
        return text if isinstance(text, str) else text()

    def _answer(
        self, verb: str, parts: tuple[str, str, str], query: Mapping[str, str], body: Json, content_type: str
    ) -> web.Response:
        path, name, part = parts
        with self._lock:
            known = self.objects.setdefault(path, {})
            if verb == "list":
                rows = [row for row in known.values() if _selects(query.get("labelSelector", ""), row)]
                if query.get("fieldSelector") == "spec.unschedulable=true":
                    rows = [row for row in rows if row["spec"].get("unschedulable")]
                return web.json_response({"items": rows, "metadata": {"resourceVersion": str(next(self._versions))}})
            if verb == "create":
                if body["metadata"]["name"] in known:
                    return _status(409, "it exists", "AlreadyExists")
                if refusal := self.admits(path, body):
                    return _status(403, refusal, "Forbidden")
                made = self.put(path, body)
                self.created(path, copy.deepcopy(made))
                return web.json_response(made, status=201)
            if verb == "deletecollection":
                for each in [key for key, row in known.items() if _selects(query.get("labelSelector", ""), row)]:
                    self.remove(path, each)
                return web.json_response({})
            if verb == "patch" and content_type == "application/apply-patch+yaml":
                return self._apply(path, name, query, body)
            if name not in known:
                return _status(404, f"{name} not found", "NotFound")
            if part == "log":
                return web.Response(text=f"2026-01-01 a line of the node\n{self._log_of(name)}\n")
            if verb == "patch":
                return self._patch(path, known[name], body)
            if verb == "delete":
                if (
                    body.get("preconditions", {}).get("uid", known[name]["metadata"]["uid"])
                    != known[name]["metadata"]["uid"]
                ):
                    return _status(409, "another uid", "Conflict")
                self.remove(path, name)
                return web.json_response({})
            return web.json_response(known[name])

    def _patch(self, path: str, row: Json, body: Json) -> web.Response:
        meta = body.get("metadata", {})
        if meta.get("resourceVersion", row["metadata"]["resourceVersion"]) != row["metadata"]["resourceVersion"]:
            return _status(
                409, "the object has been modified; please apply your changes to the latest version", "Conflict"
            )
        if meta.get("uid", row["metadata"]["uid"]) != row["metadata"]["uid"]:
            return _status(409, "another uid", "Conflict")
        before, deadline = row["spec"].get("activeDeadlineSeconds"), body.get("spec", {}).get("activeDeadlineSeconds")
        if before is not None and deadline is not None and deadline > before:
            return _status(422, "activeDeadlineSeconds: must be less than or equal to previous value", "Invalid")
        merged = _merged(row, body)
        if merged["metadata"].get("labels", {}).get(STATE) != row["metadata"].get("labels", {}).get(STATE):
            self.claims.append((row["metadata"]["name"], merged["metadata"]["labels"]["cloche/holder"]))
        self.put(path, merged)
        self._loop.call_soon(self._reconcile)
        return web.json_response(merged)

    def _apply(self, path: str, name: str, query: Mapping[str, str], body: Json) -> web.Response:
        before = self.objects.setdefault(path, {}).get(name)
        made = _merged(before or {}, body)
        if query.get("dryRun") == "All":
            return web.json_response(made)
        answer = web.json_response(self.put(path, made))
        self._loop.call_soon(self._reconcile)
        return answer

    def remove(self, path: str, name: str) -> None:
        """Delete an object, and what it owned."""
        row = self.objects[path][name]
        self.put(path, row, "DELETED")
        if path == self.pods_path:
            self.end_pod(name)
            self._loop.call_soon_threadsafe(self._reconcile)
        owned = [
            (other, each) for other, rows in self.objects.items() for each, owned in rows.items()
            if any(owner["uid"] == row["metadata"]["uid"] for owner in owned["metadata"].get("ownerReferences", ()))
        ]  # fmt: skip
        for other, each in owned:
            self.remove(other, each)

    def _events(self, path: str, version: int) -> list[tuple[int, str, str, Json]]:
        with self._lock:
            return [row for row in self.log if row[0] > version and row[1] == path]

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        version, wait_s = int(request.query["resourceVersion"]), float(request.query.get("timeoutSeconds", WAIT_S))
        name = request.query.get("fieldSelector", "").partition("metadata.name=")[2]
        try:
            if version < self.forgotten:
                gone = {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}}
                await response.write(json.dumps(gone).encode() + b"\n")
                return response
            while True:
                events = self._events(path, version)
                for version, _, kind, row in events:  # noqa: B007
                    if name not in ("", row["metadata"]["name"]):
                        continue
                    line = json.dumps({"type": kind, "object": row}).encode() + b"\n"
                    await response.write(line * (1 + self.repeats_events))
                async with self._changed:
                    if not self._events(path, version):
                        await asyncio.wait_for(self._changed.wait(), min(wait_s, WAIT_S))
        except (TimeoutError, ConnectionError):
            return response
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self._watches.discard(task)

    async def _forward(self, request: web.Request, pod: str) -> web.StreamResponse:
        """Pass bytes to a port of a pod, as its kubelet does: it connects to loopback in the pod."""
        if pod not in self.pods:
            return _status(404, f"{pod} not found", "NotFound")
        port, task = int(request.query["ports"]), asyncio.current_task()
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        assert task is not None
        self.forwards.add(task)
        try:
            for channel in (b"\0", b"\1"):
                await socket.send_bytes(channel + port.to_bytes(2, "little"))
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                await socket.send_bytes(b"\1" + f"failed to dial {port}: connection refused: {error}".encode())
                return socket
            outward = asyncio.ensure_future(_outward(reader, socket))
            try:
                async for message in socket:
                    assert message.data[:1] == b"\0"
                    writer.write(message.data[1:])
                    await writer.drain()
            finally:
                outward.cancel()
                writer.close()
        except asyncio.CancelledError:
            request.transport.abort()  # type: ignore[union-attr]
        finally:
            self.forwards.discard(task)
        return socket


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _outward(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    while data := await reader.read(1 << 16):
        await socket.send_bytes(b"\0" + data)
    await socket.close()


def _selects(selector: str, row: Json) -> bool:
    labels = row["metadata"].get("labels", {})
    key, _, value = selector.partition("=")
    return not key or (key in labels and value in ("", labels[key]))


def _merged(row: Any, patch: Any) -> Any:
    """Return an object with a merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(row) if isinstance(row, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return copy.deepcopy(merged)


def _status(code: int, message: str, reason: str = "", *, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "message": message, "reason": reason, "code": code}
    return web.json_response(body, status=code, headers=headers)


class NodePods:
    """Let each pod of a cluster be a `cloche node` of this machine, which starts beside the API server.

    Pods seem to be at `address`.
    """

    def __init__(self, cluster: Cluster, home: Path):
        self._cluster, self._home, self.address = cluster, home, "127.0.0.1"
        self._started: dict[str, Future[Node]] = {}
        self._starting = ThreadPoolExecutor()
        imported_once(*MODULES)  # for all of them
        cluster.start_pod = self._start
        cluster.end_pod = lambda name: self._starting.submit(self.kill, name)

    def _start(self, name: str) -> None:
        self._started[name] = self._starting.submit(Node, self._home, "--waits", signer=self._cluster.signer)
        self._started[name].add_done_callback(lambda started: self._serves(name, started.result().facts))

    def _serves(self, name: str, facts: Mapping[str, Any]) -> None:
        self._cluster.serve(name, {**facts, "address": facts["address"].replace("127.0.0.1", self.address)})

    def kill(self, name: str) -> None:
        """End the server of a pod by SIGKILL."""
        if (started := self._started.pop(name, None)) is not None:
            started.result().end(signal.SIGKILL)

    def close(self) -> None:
        """End all servers."""
        self._cluster.start_pod = self._cluster.end_pod = lambda _: None
        for name in list(self._started):
            self.kill(name)
        self._starting.shutdown()
