"""E2B's templates, snapshots and forks over HTTP, as its SDKs call them, and as nobody should."""

from __future__ import annotations

import io
import signal
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import e2b

HASH = "a" * 64
START = "touch /tmp/begun; sleep 0.3; touch /tmp/ready; exec sleep 1000"


@dataclass
class Client:
    """Speak to the control plane with one key."""

    running: e2b.E2BService
    key: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = self.running.http(**{"X-API-KEY": self.key})

    def ask(self, method: str, path: str, status: int, **json: object) -> Any:
        """Send a request that must have this status; return its JSON."""
        answer = self.http.request(method, path, json=json or None)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def new_template(self, name: str, **fields: object) -> tuple[str, str]:
        """Ask for a build; return the ids of template and build."""
        made = self.ask("POST", "/v3/templates", 202, name=name, **fields)
        return made["templateID"], made["buildID"]

    def build(self, name: str, *steps: Mapping[str, object], template: str = "", **order: object) -> dict[str, Any]:
        """Build a template, and return the state in which the build ended."""
        template_id, build_id = self.new_template(name)
        start = {"fromImage": "e2bdev/base"} if "fromTemplate" not in order else {}
        self.ask("POST", f"/v2/templates/{template_id}/builds/{build_id}", 202, steps=steps, **start, **order)
        return self.ended(template_id, build_id)

    def ended(self, template_id: str, build_id: str) -> dict[str, Any]:
        """Wait for the end of a build."""
        state: dict[str, Any] = {"status": "waiting"}
        until = time.monotonic() + 60
        while state["status"] in ("waiting", "building") and time.monotonic() < until:
            state = self.ask("GET", f"/templates/{template_id}/builds/{build_id}/status", 200)
            time.sleep(0.05)
        return state

    def run(self, template: str, shell: str, **fields: object) -> str:
        """Run a line of shell in a new sandbox of a template; return its output."""
        made = self.ask("POST", "/v2/sandboxes", 201, templateID=template, timeout=60, **fields)
        return self.run_in(made["sandboxID"], shell)

    def run_in(self, sandbox_id: str, shell: str) -> str:
        """Run a line of shell in a sandbox, by Cloche's own interface."""
        with self.running.service.client() as client:
            answer = client.post(f"/api/sandboxes/sb_{sandbox_id}/exec", json={"shell": shell, "user": "root"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["stdout"])


def step(kind: str, *arguments: str, **fields: object) -> dict[str, object]:
    """Return a step of a build."""
    return {"type": kind, "args": list(arguments), "force": False, **fields}


def archive(**files: str) -> bytes:
    """Return a compressed tar archive, with a link `link` to the first file."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for name, text in files.items():
            member = tarfile.TarInfo(f"src/{name}.txt")
            member.size, member.mode = len(text), 0o640
            made.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("src/link")
        link.type, link.linkname = tarfile.SYMTYPE, f"{next(iter(files))}.txt"
        made.addfile(link)
    return data.getvalue()


def opened(client: Client) -> Iterator[Client]:
    """Yield a client, and close its connections."""
    with client.http:
        yield client


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[e2b.E2BService]:
    """Serve E2B's protocol."""
    home = tmp_path_factory.mktemp("templates")
    (home / "templates.yaml").write_text(
        "templates: {own: {env: {OWN: '1'}, options: {memory: 300m}}}\nimages: {'busybox:*': own}\n"
    )
    with e2b.serving(home, "--e2b-templates", str(home / "templates.yaml")) as serving:
        yield serving


@pytest.fixture(scope="module")
def owner(running: e2b.E2BService) -> Iterator[Client]:
    """Return a client that may do all."""
    yield from opened(Client(running, running.key))


@pytest.fixture(scope="module")
def other(running: e2b.E2BService) -> Iterator[Client]:
    """Return a client with a key of its own below scope admin."""
    yield from opened(Client(running, running.new_key("read", "run")))


@pytest.fixture(scope="module")
def third(running: e2b.E2BService) -> Iterator[Client]:
    """Return another such client."""
    yield from opened(Client(running, running.new_key("read", "run")))


def test_a_template_has_what_its_steps_made(other: Client) -> None:
    """Files with owners and modes, variables, user, working directory, and a start command that is ready."""
    template_id, build_id = other.new_template("whole", tags=["v1"])
    link = other.ask("GET", f"/templates/{template_id}/files/{HASH}", 201)
    assert link["present"] is False
    assert httpx.put(link["url"], content=archive(a="one", b="two")).status_code == 200
    assert other.ask("GET", f"/templates/{template_id}/files/{HASH}", 201)["present"] is True
    steps = [
        step("WORKDIR", "/home/user/app"), step("ENV", "WORD", "a b"), step("RUN", "echo $WORD > word; id -un"),
        step("COPY", "src", "data", "", "", filesHash=HASH),
        step("COPY", "src/a.txt", "/opt/", "root", "0755", filesHash=HASH),
        step("COPY", "src/*.txt", "many/", filesHash=HASH), step("USER", "root"), step("RUN", "id -un > /etc/maker"),
    ]  # fmt: skip
    order = {"steps": steps, "fromImage": "e2bdev/base", "startCmd": START, "readyCmd": "[ -f /tmp/ready ]"}
    other.ask("POST", f"/v2/templates/{template_id}/builds/{build_id}", 202, **order)
    state = other.ended(template_id, build_id)
    assert state["status"] == "ready", state
    assert "[stdout]: user" in [entry["message"] for entry in state["logEntries"]]
    told = other.run(
        "whole:v1",
        "cd /home/user/app; cat word /etc/maker; stat -c '%n %U %a' data/* /opt/a.txt many/*; readlink data/link; "
        "ls /tmp/begun /tmp/ready",
    )
    assert told == (
        "a b\nroot\ndata/a.txt user 640\ndata/b.txt user 640\ndata/link user 777\n/opt/a.txt root 755\n"
        "many/a.txt user 640\nmany/b.txt user 640\na.txt\n/tmp/begun\n/tmp/ready\n"
    )


def test_an_address_for_an_upload_holds_once_and_for_one_template(other: Client) -> None:
    """Used up, changed, or for another hash: refused, and nothing is stored."""
    template_id, _ = other.new_template("uploads")
    url = other.ask("GET", f"/templates/{template_id}/files/{'b' * 64}", 201)["url"]
    grant, _, signature = url.rpartition("/")[2].partition(".")
    forged = url.replace(grant, grant[:-4] + ("AAAA" if grant[-4:] != "AAAA" else "BBBB"))
    assert httpx.put(forged, content=b"x").status_code == 401
    assert httpx.put(url.replace(signature, "0" * 64), content=b"x").status_code == 401
    assert httpx.put(url, content=b"x", headers={"Content-Length": "1"}).status_code == 200
    assert httpx.put(url, content=b"y").status_code == 403
    other.ask("GET", f"/templates/{template_id}/files/..%2f..%2fetc", 404)
    other.ask("GET", f"/templates/{template_id}/files/zz", 400)


def test_a_failed_build_says_which_step_and_leaves_the_version_before(other: Client) -> None:
    """The reason has the number of the step; the tag names the build before; a hostile archive stays inside."""
    assert other.build("kept", step("RUN", "echo good > ~/version"))["status"] == "ready"
    state = other.build("kept", step("RUN", "true"), step("RUN", "echo oops >&2; exit 7"))
    assert (state["status"], state["reason"]["step"]) == ("error", "2")
    assert "exit status 7: oops" in state["reason"]["message"]
    assert other.build("kept", startCmd="exit 3", readyCmd="false")["reason"]["step"] == "finalize"
    assert other.build("kept", step("COPY", "src", "/x", filesHash="c" * 64))["status"] == "error"
    assert other.build("kept", step("COPY", "../up", "/x", filesHash="c" * 64))["status"] == "error"
    unknown = other.build("kept", fromTemplate="nothing-here")
    assert (unknown["status"], unknown["reason"]["step"]) == ("error", "base")
    assert other.run("kept", "cat ~user/version") == "good\n"


def test_the_same_steps_are_not_done_twice(other: Client) -> None:
    """Steps that a build has behind it are taken from it; a forced one is done again."""
    steps = [step("RUN", "date +%s%N > ~/first")]
    other.build("cached", *steps)
    first = other.run("cached", "cat ~user/first")
    state = other.build("cached", *steps, step("RUN", "echo 2 > ~/second"))
    assert any(entry["message"].startswith("CACHED [builder 1/2]") for entry in state["logEntries"])
    assert other.run("cached", "cat ~user/first ~user/second") == f"{first}2\n"
    other.build("cached", {**steps[0], "force": True})
    assert other.run("cached", "cat ~user/first") != first


def test_tags_names_and_isolation(other: Client, third: Client, owner: Client) -> None:
    """A key finds its own templates and published ones; a name of another key, or of the operator, is taken."""
    template_id = other.build("mine", step("RUN", "true"))["templateID"]
    assert other.ask("POST", "/templates/tags", 201, target="mine", tags=["prod"])["tags"] == ["prod"]
    assert [row["tag"] for row in other.ask("GET", "/templates/mine/tags", 200)] == ["default", "prod"]
    for method, path in (
        ("GET", "/templates/mine"), ("DELETE", "/templates/mine"), ("GET", "/templates/mine/tags"),
        ("GET", f"/templates/{template_id}/files/{HASH}"), ("PATCH", "/v2/templates/mine"),
    ):  # fmt: skip
        third.ask(method, path, 404)
    third.ask("POST", "/v2/sandboxes", 404, templateID="mine")
    third.ask("GET", "/templates/aliases/mine", 403)
    third.ask("POST", "/v3/templates", 403, name="mine")
    third.ask("POST", "/v3/templates", 403, name="base")
    third.ask("GET", "/templates/aliases/nothing", 404)
    other.ask("PATCH", "/v2/templates/mine", 200, public=True)
    assert third.run("mine:prod", "echo ok") == "ok\n"
    third.ask("DELETE", "/templates/mine", 403)
    assert owner.ask("GET", "/templates/mine", 200)["templateID"] == template_id
    assert other.http.request("DELETE", "/templates/tags", json={"name": "mine", "tags": ["prod"]}).status_code == 204
    other.ask("DELETE", "/templates/mine", 204)
    other.ask("DELETE", "/templates/mine", 404)


def test_templates_of_the_operator(other: Client) -> None:
    """They are found by name, and by an image that stands for them; other images fail the build with the reason."""
    assert other.ask("GET", "/templates/aliases/own", 200) == {"templateID": "own", "public": True}
    made = other.ask("POST", "/v2/sandboxes", 201, templateID="own", timeout=60)
    assert other.ask("GET", f"/sandboxes/{made['sandboxID']}", 200)["memoryMB"] == 300
    other.ask("DELETE", "/templates/own", 403)
    other.ask("POST", "/v2/sandboxes", 501, templateID="desktop")
    template_id, build_id = other.new_template("of-image")
    other.ask("POST", f"/v2/templates/{template_id}/builds/{build_id}", 202, fromImage="busybox:1", steps=[])
    assert other.ended(template_id, build_id)["status"] == "ready"
    template_id, build_id = other.new_template("of-image")
    other.ask("POST", f"/v2/templates/{template_id}/builds/{build_id}", 202, fromImage="alpine:3", steps=[])
    assert "no image is pulled" in other.ended(template_id, build_id)["reason"]["message"]


def test_snapshots_and_forks(other: Client, third: Client) -> None:
    """Files go on in others, with metadata and variables in forks; another key has none of them."""
    made = other.ask(
        "POST", "/v2/sandboxes", 201, templateID="base", timeout=60, metadata={"who": "me"}, envVars={"A": "1"}
    )
    source = made["sandboxID"]
    other.run_in(source, "echo data > ~user/data")
    first = other.ask("POST", f"/sandboxes/{source}/snapshots", 201, name="point", memory=True)
    assert first["names"] == ["point"]
    second = other.ask("POST", f"/sandboxes/{source}/snapshots", 201)
    assert [row["snapshotID"] for row in other.ask("GET", "/snapshots?limit=1", 200)] == [second["snapshotID"]]
    page = other.http.get("/snapshots?limit=1")
    following = other.ask("GET", f"/snapshots?nextToken={page.headers['x-next-token']}", 200)
    assert following[0] == first
    assert other.ask("GET", f"/snapshots?sandboxID={source}&name=point", 200) == [first]
    assert other.run(first["snapshotID"], "cat ~user/data") == other.run("point", "cat ~user/data") == "data\n"
    assert third.ask("GET", "/snapshots", 200) == []
    third.ask("POST", f"/sandboxes/{source}/snapshots", 404)
    third.ask("POST", f"/sandboxes/{source}/fork", 404)
    third.ask("DELETE", f"/templates/{first['snapshotID']}", 404)
    forks = other.ask("POST", f"/sandboxes/{source}/fork", 201, count=2, timeout=60)
    assert [list(fork) for fork in forks] == [["sandbox"], ["sandbox"]]
    fork = forks[0]["sandbox"]["sandboxID"]
    assert other.run_in(fork, "cat ~user/data") == "data\n"
    assert other.ask("GET", f"/sandboxes/{fork}", 200)["metadata"] == {"who": "me"}
    other.ask("POST", f"/sandboxes/{source}/fork", 400, count=21)
    other.ask("DELETE", f"/templates/{first['snapshotID']}", 204)
    other.ask("POST", "/v2/sandboxes", 404, templateID=first["snapshotID"])


def test_archives_go_with_their_rows(running: e2b.E2BService, other: Client) -> None:
    """The folder has one archive for each build that a tag names, and nothing else."""
    folder = Path(running.service.database).parent / "templates"
    other.build("short", step("RUN", "true"))
    before = set(folder.glob("*.tar"))
    other.build("short", step("RUN", "true # again"))
    assert len(set(folder.glob("*.tar"))) == len(before)
    other.ask("DELETE", "/templates/short", 204)
    assert len(set(folder.glob("*.tar"))) == len(before) - 1


@pytest.mark.soak
def test_a_build_ends_with_its_worker_and_so_does_its_sandbox(tmp_path: Path) -> None:
    """The service is killed during a step; the next one ends what the build has left."""
    first = e2b.start(tmp_path)
    client = Client(first, first.key)
    with client.http:
        template_id, build_id = client.new_template("long")
        order = {"fromImage": "e2bdev/base", "steps": [step("RUN", "sleep 600")]}
        client.ask("POST", f"/v2/templates/{template_id}/builds/{build_id}", 202, **order)
        while not _of_builds(first):
            time.sleep(0.05)
    first.service.end(signal.SIGKILL)
    with e2b.serving(tmp_path, key=first.key) as second:
        client = Client(second, first.key)
        with client.http:
            assert client.ended(template_id, build_id)["status"] == "error"
        assert _of_builds(second) == []


def _of_builds(running: e2b.E2BService) -> list[str]:
    with running.service.client() as client:
        rows = client.get("/api/sandboxes", params={"state": "running"}).json()["items"]
    return [row["id"] for row in rows if "build" in row["labels"]]
