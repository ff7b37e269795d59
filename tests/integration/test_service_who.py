"""Who did what, as the audit log of a service has it; links and proxies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.harness.service import Service, serving

CLIENT = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve behind a proxy on this machine, which is trusted."""
    with serving(tmp_path_factory.mktemp("home"), "--trusted-proxy", "127.0.0.1") as found:
        yield found


def events(service: Service) -> list[dict[str, Any]]:
    """Return all events of the audit log."""
    paths = sorted(service.log.parent.glob("state/cloche/**/*.jsonl"))
    assert paths, "there is no audit log"
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


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
        assert [one["address"] for one in events(other) if one["kind"] == "key"] == ["127.0.0.1"]
