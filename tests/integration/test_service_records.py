"""Snapshots, manifests and reproductions over HTTP, on host folders that the operator opened, and on no others.

All of it with records in SQLite's file, and with those in PostgreSQL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from cloche.records.database import Database
from tests.harness.postgres import postgres
from tests.harness.service import Service, serving

SNAPSHOTS, WORKSPACES = "/api/sandbox/snapshots", "/api/workspace/snapshots"
ENVIRONMENTS, REPRODUCTIONS = "/api/sandbox/dev-env", "/api/sandbox/bug-repro"


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.soak)])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of a new database, or nothing for the service's file."""
    if request.param == "sqlite":
        yield ""
        return
    with postgres() as server:
        yield server.new_database()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, database: str) -> Path:
    """Return a folder with a root to write to, one to read, and one that is no root."""
    home = tmp_path_factory.mktemp("service_records")
    for name in ("open/shop", "read/shop", "closed"):
        (home / name).mkdir(parents=True)
    (home / "closed/secret").write_text("secret")
    (home / "open/out").symlink_to(home / "closed")
    return home


@pytest.fixture(scope="module")
def service(home: Path, database: str) -> Iterator[Service]:
    """Serve for all tests of this module."""
    where = ("--database", database) if database else ()
    with serving(home, *where, "--workspace-root", f"{home}/open:rw", "--workspace-root", f"{home}/read") as one:
        yield one


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    """Be a client that may run and read."""
    with service.client(service.new_key("run", "read")) as one:
        yield one


def test_an_environment_is_recorded_compared_and_replicated(client: httpx.Client, home: Path) -> None:
    """Masked everywhere; what changed is told; the script sets the rest in a real shell."""
    shop = home / "open/shop"
    (shop / "requirements.txt").write_text("rich==13.9.3\n")
    env = {"A": "one", "X_TOKEN": "hush"}
    asked = {"workspacePath": str(shop), "env": env, "sessionId": "agent-7", "label": "before"}
    first = client.post(SNAPSHOTS, json=asked).json()
    assert (first["env"], first["maskedKeys"]) == ({"A": "one", "X_TOKEN": "***"}, ["X_TOKEN"])
    (shop / "requirements.txt").write_text("rich==13.9.4\n")
    second = client.post(SNAPSHOTS, json={**asked, "env": {"A": "two", "X_TOKEN": "hush"}}).json()
    found = client.get(f"{SNAPSHOTS}/compare", params={"id1": first["id"], "id2": second["id"]}).json()
    assert found["env"]["changed"] == {"A": ["one", "two"]}
    assert found["dependencies"]["changed"][0]["to"] == "13.9.4"
    assert [one["id"] for one in client.get(SNAPSHOTS, params={"limit": 1}).json()["items"]] == [second["id"]]
    made = client.post(f"{SNAPSHOTS}/{first['id']}/replicate", json={"workspacePath": str(shop)})
    assert made.json()["placeholders"] == ["X_TOKEN"], made.text
    again = client.post(f"{SNAPSHOTS}/{first['id']}/replicate", json={"workspacePath": str(shop)})
    assert (again.status_code, again.json()["type"].rpartition("/")[2]) == (409, "conflict")
    script = f". {shop}/{made.json()['path']}; echo $A-$X_TOKEN"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == "one-\n"
    assert client.delete(f"{SNAPSHOTS}/{first['id']}").status_code == 204
    assert client.get(f"{SNAPSHOTS}/{first['id']}").status_code == 404


def test_the_services_own_environment_takes_an_admin(client: httpx.Client, service: Service, home: Path) -> None:
    """What the service was started with is nobody else's."""
    asked = {"workspacePath": str(home / "open/shop"), "ownEnvironment": True}
    assert client.post(SNAPSHOTS, json=asked).status_code == 403
    with service.client() as admin:
        assert admin.post(SNAPSHOTS, json=asked).json()["env"]["LANG"] == "C.UTF-8"


def test_a_workspace_is_recorded_compared_and_restored(client: httpx.Client, home: Path) -> None:
    """What was changed and removed comes back; what came later stays unless it is pruned."""
    shop = home / "open/kept"
    shop.mkdir()
    (shop / "a.py").write_text("1")
    (shop / "b.py").write_text("2")
    asked = {"workspacePath": str(shop), "contents": True}
    first = client.post(WORKSPACES, json=asked).json()
    (shop / "a.py").write_text("changed")
    (shop / "b.py").unlink()
    (shop / "new").write_text("3")
    second = client.post(WORKSPACES, json=asked).json()
    found = client.get(f"{WORKSPACES}/diff", params={"id1": first["id"], "id2": second["id"]}).json()
    assert (found["added"], found["removed"], found["modified"][0]["path"]) == (["new"], ["b.py"], "a.py")
    assert {"name": "run_code", "risk": "high"} in first["tools"]["offered"]
    done = client.post(f"{WORKSPACES}/{first['id']}/restore", json={"workspacePath": str(shop)}).json()
    assert {"path": "b.py", "result": "restored"} in done["results"]
    assert ((shop / "a.py").read_text(), (shop / "new").exists()) == ("1", True)


def test_a_manifest_is_made_stored_and_provisioned(client: httpx.Client, home: Path, service: Service) -> None:
    """Detected without running anything; a sandbox comes of it, and a manager that is missing is named."""
    shop = home / "open/env"
    shop.mkdir()
    (shop / "go.mod").write_text("module shop\n\ngo 1.22\n")
    where = {"workspacePath": str(shop)}
    made = client.post(f"{ENVIRONMENTS}/generate", json=where).json()
    assert [one["name"] for one in made["languages"]] == ["go"]
    assert client.put(f"{ENVIRONMENTS}/manifest", json={**where, "manifest": {**made, "odd": 1}}).status_code == 422
    setup = [{"run": ["true"]}, {"run": ["no-such-manager", "install"]}]
    changed = {**made, "setup": setup}
    assert client.put(f"{ENVIRONMENTS}/manifest", json={**where, "manifest": changed}).status_code == 200
    assert client.get(f"{ENVIRONMENTS}/manifest", params=where).json()["setup"][0]["run"] == ["true"]
    assert client.get(f"{ENVIRONMENTS}/list").json()["items"][0]["name"] == made["name"]
    done = client.post(f"{ENVIRONMENTS}/provision", json=where)
    assert done.status_code == 201, done.text
    try:
        steps = done.json()["steps"]
        assert [one["status"] for one in steps] == ["ok", "error"]
        assert "no-such-manager" in steps[1]["error"]
    finally:
        words = [sys.executable, "-m", "cloche", "sandbox", "kill", "--yes", done.json()["sandbox"].replace("_", "-")]
        subprocess.run(words, check=True, capture_output=True, env=service.environ)


def test_an_agent_gives_its_memory_and_its_tools(client: httpx.Client, home: Path) -> None:
    """They are kept as they were given, and nothing else is taken for them."""
    memory = {"files": [{"path": "notes.md", "size": 3, "sha256": "x"}], "sessions": [{"id": "s", "variables": ["a"]}]}
    tools = {"offered": [{"name": "grep", "risk": "low"}], "pendingApprovals": [], "remembered": [{"tool": "grep"}]}
    asked = {"workspacePath": str(home / "open/shop"), "memory": memory, "tools": tools}
    made = client.post(WORKSPACES, json=asked)
    assert made.status_code == 201, made.text
    found = client.get(f"{WORKSPACES}/{made.json()['id']}").json()
    assert (found["memory"], found["tools"]) == (memory, tools)
    wrong = client.post(WORKSPACES, json={**asked, "tools": {"offers": []}})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "tools.offers")


def test_a_label_with_a_nul_is_refused_everywhere(client: httpx.Client, home: Path) -> None:
    """Some databases take none: no route hands one to any."""
    folder, label = {"workspacePath": str(home / "open/shop")}, {"sessionId": "a\0b"}
    made = {SNAPSHOTS: folder, WORKSPACES: folder, REPRODUCTIONS: {"title": "t", "code": "1"}}
    answers = [client.post(route, json={**asked, **label}) for route, asked in made.items()]
    answers.append(client.post("/api/code/exec", json={"code": "1", **label}))
    answers += [client.get(route, params=label) for route in (*made, "/api/runs")]
    assert [(one.status_code, one.json()["field"]) for one in answers] == [(422, "sessionId")] * len(answers)


def test_a_reproduction_goes_from_queued_to_its_end(client: httpx.Client) -> None:
    """Passed, failed, and an error where it could not be run."""
    wanted = {"print(1)": "passed", "raise SystemExit(3)": "failed"}
    for code, status in wanted.items():
        made = client.post(REPRODUCTIONS, json={"title": "t", "code": code}).json()
        assert made["status"] == "queued"
        assert client.post(f"{REPRODUCTIONS}/{made['id']}/run").json()["status"] == "running"
        assert _ended(client, made["id"])["status"] == status
    weak = client.post(f"{REPRODUCTIONS}/{made['id']}/run", json={"backend": "subprocess"})
    assert weak.status_code == 202, weak.text
    assert _ended(client, made["id"])["status"] == "error"
    assert client.get(REPRODUCTIONS, params={"status": "error"}).json()["items"][0]["id"] == made["id"]


@pytest.mark.parametrize(
    "path",
    ["closed", "open/out", "open/../closed", "open/shop/../../closed", "open/missing", "open/shop/\0", "", "relative"],
)
@pytest.mark.parametrize("route", [SNAPSHOTS, WORKSPACES, f"{ENVIRONMENTS}/generate"])
def test_no_other_folder_is_reached(client: httpx.Client, home: Path, route: str, path: str) -> None:
    """Neither by its path, nor by dots, nor through a link: which a plain `open` follows."""
    named = f"{home}/{path}" if path not in ("", "relative") else path
    if path == "open/out":
        assert os.listdir(named) == ["secret"]
    answer = client.post(route, json={"workspacePath": named})
    assert answer.status_code in (403, 422), answer.text
    assert "secret" not in answer.text


def test_a_root_to_read_is_not_written_to(client: httpx.Client, home: Path) -> None:
    """Each route that writes is refused there."""
    folder = {"workspacePath": str(home / "read/shop")}
    taken = client.post(SNAPSHOTS, json=folder).json()["id"]
    files = client.post(WORKSPACES, json=folder).json()["id"]
    manifest = client.post(f"{ENVIRONMENTS}/generate", json=folder).json()
    for answer in (
        client.post(f"{SNAPSHOTS}/{taken}/replicate", json=folder),
        client.post(f"{WORKSPACES}/{files}/restore", json=folder),
        client.put(f"{ENVIRONMENTS}/manifest", json={**folder, "manifest": manifest}),
    ):
        assert answer.status_code == 403
    assert os.listdir(home / "read/shop") == []


def _ended(client: httpx.Client, repro_id: str) -> dict[str, object]:
    ends = time.monotonic() + 60
    while (found := client.get(f"{REPRODUCTIONS}/{repro_id}").json())["status"] == "running":
        assert time.monotonic() < ends
        time.sleep(0.05)
    return dict(found)


def test_a_database_that_cannot_be_written_to_is_not_ready(
    service: Service, client: httpx.Client, database: str
) -> None:
    """Where every run would fail, so does the probe, and soon; then it is ready again."""
    other = Database(database or service.database)
    try:
        with other.writing() as session:
            session.execute(text("SELECT 1"))
            refused = client.get("/ready")
    finally:
        other.close()
    assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (503, "records-failed")
    assert client.get("/ready").json() == {"status": "ok"}
