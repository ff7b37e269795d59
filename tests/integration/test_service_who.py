"""Who did what, as the audit log of a service has it; links and proxies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from cloche.audit.chain import sha256_of
from tests.harness.service import Service, end_sandboxes, serving
from tests.harness.wire_client import CallFailed, wired

CLIENT = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve behind a proxy on this machine, which is trusted."""
    home = tmp_path_factory.mktemp("home")
    (home / "shop").mkdir()
    with serving(home, "--trusted-proxy", "127.0.0.1", "--workspace-root", f"{home}/shop:rw") as found:
        yield found


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    """Be a client behind the proxy."""
    with service.client() as one:
        one.headers.update(CLIENT)
        yield one


def events(service: Service) -> list[dict[str, Any]]:
    """Return all events of the audit log."""
    paths = sorted(service.log.parent.glob("state/cloche/**/*.jsonl"))
    assert paths, "there is no audit log"
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def told(service: Service, **fields: object) -> list[dict[str, Any]]:
    """Return the events that have these values."""
    return [one for one in events(service) if fields.items() <= one.items()]


def test_the_audit_says_who(service: Service) -> None:
    """Runs, sandboxes, uploads, keys and links carry key and the client's address; a run the service's own id."""
    with service.client() as client:
        client.headers.update(CLIENT)
        run = client.post("/api/code/exec", json={"code": "print(1)", "language": "python"}).json()["id"]
        sandbox = client.post("/api/sandboxes", json={}).json()["id"]
        client.put(f"/api/sandboxes/{sandbox}/files/content", params={"path": "/workspace/a"}, content=b"1")
        client.post(f"/api/sandboxes/{sandbox}/exec", json={"argv": ["true"]}).raise_for_status()
        client.delete(f"/api/sandboxes/{sandbox}").raise_for_status()
        key = client.post("/api/keys", json={"name": "one"}).json()["id"]
        turned = client.post(f"/api/keys/{key}/rotate").json()["id"]
        client.delete(f"/api/keys/{turned}").raise_for_status()
        own = client.get("/api/keys").json()["items"][0]["id"]
    found = [one for one in events(service) if one.get("address") == "192.0.2.7"]
    assert {one["key"] for one in found} == {own}
    assert [one["kind"] for one in found if one.get("api_run") == run] == ["start", "execution"]
    told = [(one["kind"], one.get("what")) for one in found if one.get("sandbox") == sandbox]
    assert told == [
        ("sandbox", "opened"), ("sandbox", "upload"), ("start", "exec"), ("execution", "exec"), ("sandbox", "ended"),
    ]  # fmt: skip
    keys = [(one["what"], one["id"]) for one in found if one["kind"] == "key"]
    assert keys == [("made", key), ("rotated", key), ("revoked", turned)]


def test_an_admin_makes_a_link_for_another_browser(service: Service) -> None:
    """It leads in once; behind TLS its cookie is sent by TLS alone."""
    with service.client(service.new_key("run")) as client:
        assert client.post("/api/login-links").status_code == 403
    with service.client() as client:
        path = client.post("/api/login-links").json()["path"]
    with service.client("") as browser:
        browser.headers.update(CLIENT)
        code = urlsplit(path).query.partition("=")[2]
        answer = browser.post("/login", data={"code": code})
        assert answer.status_code == 303
        assert "secure" in answer.headers["set-cookie"].lower()
        assert browser.post("/login", data={"code": code}).status_code == 403


def test_an_untrusted_client_names_no_address(tmp_path: Path) -> None:
    """Without a proxy that is named, headers say nothing of where a request came from."""
    with serving(tmp_path) as other, other.client() as client:
        client.post("/api/keys", json={"name": "one"}, headers=CLIENT).raise_for_status()
        assert [one["address"] for one in told(other, kind="key", name="one")] == ["127.0.0.1"]


def test_what_is_refused_is_told_once(service: Service) -> None:
    """By the rules of the service, by those of the library, and for a scope that a key has not: over REST and wire."""
    runner, reader = service.new_key("run", "read"), service.new_key("read")
    codes = {name: f"print({name!r})" for name in ("much", "strange", "wire", "reader", "fields")}

    def run(key: str, name: str, **more: object) -> int:
        with service.client(key) as one:
            one.headers.update(CLIENT)
            return one.post("/api/code/exec", json={"code": codes[name], **more}).status_code

    async def run_by_wire() -> None:
        async with wired(service.address, runner) as wire:
            with pytest.raises(CallFailed, match="memory"):
                await wire.do("code.exec", code=codes["wire"], language="python", memoryLimit="64g")

    assert run(runner, "much", memoryLimit="64g") == 403
    assert run(runner, "strange", language="csharp") == 403
    assert run(reader, "reader") == 403
    assert run(runner, "fields", nothing=1) == 422  # is no refusal
    asyncio.run(run_by_wire())
    for name, by in (("much", "service"), ("strange", "policy"), ("wire", "service")):
        (denial,) = told(service, code_sha256=sha256_of(codes[name]))
        assert (denial["kind"], denial["by"], denial["key"][:4]) == ("denial", by, "key_"), denial
    (denial,) = told(service, what="POST /api/code/exec", http=403)
    assert "scope run" in denial["reason"]
    assert denial["address"] == CLIENT["X-Forwarded-For"]
    assert told(service, kind="denial", http=422) == []


def test_a_sandbox_that_ends_by_itself_is_told_of(service: Service, client: httpx.Client) -> None:
    """Whose it was, once, whoever finds that; who ends one that has ended ends nothing."""
    made = client.post("/api/sandboxes", json={}).json()
    end_sandboxes(service.log.parent)
    with service.client() as finder:
        for _ in range(2):
            found = {one["id"]: one["state"] for one in finder.get("/api/sandboxes").json()["items"]}
            assert found[made["id"]] == "ended"
        finder.delete(f"/api/sandboxes/{made['id']}").raise_for_status()
    (event,) = told(service, sandbox=made["id"], what="ended")
    assert (event["owner"], event.get("key"), event.get("address")) == (made["apiKey"], None, None)


def test_every_way_to_make_a_key_or_a_link_is_told(service: Service) -> None:
    """The first key, and those of the command line; the link that is printed at the start."""
    (first,) = told(service, kind="key", name="first")
    assert (first["what"], first["scopes"]) == ("made", ["run", "read", "approve", "admin"])
    assert told(service, kind="login", what="link")

    def keys(*words: str) -> str:
        argv = [sys.executable, "-m", "cloche", "keys", *words, "--database", str(service.database)]
        return subprocess.run(argv, env=service.environ, check=True, capture_output=True, text=True).stdout

    made = json.loads(keys("create", "by-hand", "--json"))["id"]
    turned = json.loads(keys("rotate", made, "--json", "--yes"))["id"]
    keys("revoke", turned, "--yes")
    keys("revoke", turned, "--yes")
    found = [(one["what"], one["id"], one["door"]) for one in told(service, kind="key", name="by-hand")]
    assert found == [("made", made, "cli"), ("rotated", made, "cli"), ("revoked", turned, "cli")]


def test_uploads_by_the_wire_are_told(service: Service) -> None:
    """Into a sandbox, a session of it, and a workspace; with where to, before it is written."""
    key = service.new_key("run", "read")

    async def upload() -> str:
        async with wired(service.address, key) as wire:
            sandbox = (await wire.do("sandbox.open"))["id"]
            session = (await wire.do("session.open", sandbox=sandbox))["id"]
            opening = await wire.begin("workspace.open")
            workspace = (await opening.event())[1]["id"]
            for verb, ids in (
                ("file.write", {"sandbox": sandbox}), ("session.writeFile", {"sandbox": sandbox, "session": session}),
                ("workspace.write", {"workspace": workspace}),
            ):  # fmt: skip
                call = await wire.begin(verb, path=f"{verb}.txt", **ids)
                await call.send(b"content")
                await call.result
            await opening.cancel()
            await wire.do("sandbox.end", sandbox=sandbox)
            return str(sandbox)

    sandbox = asyncio.run(upload())
    uploads = {one["path"]: one for one in told(service, what="upload") if one["path"].endswith(".txt")}
    assert list(uploads) == ["file.write.txt", "session.writeFile.txt", "workspace.write.txt"]
    assert [one.get("sandbox") for one in uploads.values()] == [sandbox, sandbox, None]
    assert len({one["key"] for one in uploads.values()}) == 1


def test_what_is_written_to_the_host_says_who(service: Service, client: httpx.Client) -> None:
    """A commit of a sandbox's changes, a snapshot that is restored, a script that sets variables; and cells."""
    shop = service.log.parent / "shop"
    (shop / "old").write_text("old")
    sandbox = client.post("/api/sandboxes", json={"workspace": {"path": str(shop)}}).json()["id"]
    session = client.post(f"/api/sandboxes/{sandbox}/sessions", json={}).json()["id"]
    cell = {"code": "open('new', 'w').write('new')"}
    client.post(f"/api/sandboxes/{sandbox}/sessions/{session}/run", json=cell).raise_for_status()
    shown = client.get(f"/api/sandboxes/{sandbox}/diff").json()["id"]
    client.post(f"/api/sandboxes/{sandbox}/commit", json={"id": shown}).raise_for_status()
    client.delete(f"/api/sandboxes/{sandbox}").raise_for_status()
    at = {"workspacePath": str(shop)}
    files = client.post("/api/workspace/snapshots", json={**at, "contents": True}).json()["id"]
    client.post(f"/api/workspace/snapshots/{files}/restore", json=at).raise_for_status()
    environment = client.post("/api/sandbox/snapshots", json=at).json()["id"]
    client.post(f"/api/sandbox/snapshots/{environment}/replicate", json=at).raise_for_status()
    own = client.get("/api/keys").json()["items"][0]["id"]
    who = {"key": own, "address": CLIENT["X-Forwarded-For"]}
    assert told(service, kind="commit", sandbox=sandbox, **who)
    assert [one["kind"] for one in told(service, code_sha256=sha256_of(cell["code"]), **who)] == ["start", "execution"]
    assert told(service, kind="restore", snapshot=files, path=str(shop), **who)
    assert told(service, kind="replicate", snapshot=environment, path=str(shop), **who)


def test_logins_are_told(tmp_path: Path) -> None:
    """Who came in; who had no link, at once, and then from time to time with how many there were."""
    with serving(tmp_path) as other, other.client("") as browser:
        code = urlsplit(other.link).query.partition("=")[2]
        assert browser.post("/login", data={"code": code}).status_code == 303
        for _ in range(20):
            assert browser.post("/login", data={"code": code}).status_code == 403
        found = [(one["what"], one.get("address")) for one in told(other, kind="login")]
        assert found[:3] == [("link", None), ("used", "127.0.0.1"), ("refused", "127.0.0.1")]
        assert sum(one["count"] for one in told(other, what="refused")) <= 20
        assert len(found) < 20
