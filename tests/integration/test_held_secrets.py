"""Secrets that a service or a node holds and callers name: from `cloche secrets set` to a host, and nowhere else."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cloche
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.secrets import Secret
from cloche.records.database import Database
from cloche.records.secrets import read_key, store_secret
from tests.harness.node import POD, Node
from tests.harness.service import Service, serving, start
from tests.harness.world import NAMES, PUBLIC, World, open_world

HOST = "api.openai.com"
VALUE = "sk-proj-RealValue0123456789abcdefXYZ"
FILED = "0123456789abcdefFILED"
TABLE = {**NAMES, HOST: [[PUBLIC]]}
ASKS = """
import os, urllib.request
def ask(name, host):
    asked = urllib.request.Request(f"https://{host}/plain", headers={"Authorization": "Bearer " + os.environ[name]})
    return urllib.request.urlopen(asked, timeout=10).read().decode()
print(os.path.exists("PLACE"), os.environ["OPENAI_API_KEY"])
print(ask("OPENAI_API_KEY", "api.openai.com"), ask("FILED_KEY", "good.example"))
"""
# Serve, store a secret by the command, use it from a client, and look for its value wherever it should not be.
SERVES = r"""
import os, re, subprocess, sys, time
place = ARGUMENT["place"]
os.chdir(place)
os.environ.update(HOME=place, XDG_STATE_HOME=place + "/state", XDG_CONFIG_HOME=place, XDG_CACHE_HOME=place + "/cache")
program = [sys.executable, "-m", "cloche"]
log = open("log", "wb")
words = ["serve", "--port", "0", "--secrets-key", "secrets.key", "--secrets-from", "held", "--sandbox-debug"]
server = subprocess.Popen([*program, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
def told(pattern):
    while server.poll() is None and not (found := re.search(pattern, open("log").read())):
        time.sleep(0.02)
    return found[1]
url, key = told(r"serving at (\S+)/api"), told(r"shown once: (\S+)")
try:
    with open("key", "w") as file:
        file.write(key)
    def command(*words, stdin=""):
        words = [*program, *words, "--url", url, "--key-file", "key"]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True)
        return done.stdout + done.stderr
    texts = [command("secrets", "set", "OPENAI_API_KEY", stdin=ARGUMENT["value"] + "\n")]
    os.environ.update(CLOCHE_REMOTE_URL=url, CLOCHE_REMOTE_KEY=key)
    import cloche
    names = ["OPENAI_API_KEY", "FILED_KEY"]
    ran = cloche.run(ARGUMENT["asks"], backend="cloche", secrets=names, timeout=30)
    with cloche.Sandbox(backend="cloche", secrets=names[:1], live=True) as sandbox:
        lives = sandbox.exec(["sh", "-c", 'curl -s -H "x-api-key: $OPENAI_API_KEY" https://api.openai.com/plain']).stdout
    wrong = []
    for given in (["NO_SUCH_KEY"], {"OPENAI_API_KEY": cloche.Secret(value=ARGUMENT["own"])}):
        try:
            cloche.run("1", backend="cloche", secrets=given)
        except cloche.ClocheError as error:
            wrong.append(f"{type(error).__name__}: {error}")
    texts += [command("secrets", "list", "--json"), repr(ran), lives, *wrong]
    for name in filter(str.isdigit, os.listdir("/proc")):
        for what in ("environ", "cmdline"):
            try:
                texts.append(open(f"/proc/{name}/{what}", errors="replace").read())
            except OSError:
                pass
finally:
    server.terminate()
    server.wait()
held = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names]
for path in held:
    if "/held/" not in path:
        texts.append(open(path, errors="replace").read())
told = {"stdout": ran.stdout, "stderr": ran.stderr, "lives": lives, "wrong": wrong, "listed": texts[1]}
print(json.dumps({**told, "files": held, "found": [t[:300] for t in texts for v in ARGUMENT["values"] if v in t]}))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the folder of a service: its key, and a folder with secrets of its operator."""
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "FILED_KEY").write_text(f"{FILED}\n")
    (tmp_path / "held" / "secrets.yaml").write_text("FILED_KEY: {hosts: [good.example]}\n")
    (tmp_path / "secrets.key").write_bytes(base64.b64encode(os.urandom(32)))
    return tmp_path


def test_a_service_uses_its_secrets_for_callers_that_name_them(world: World, place: Path) -> None:
    """The host gets the value, the caller and the guest a placeholder, and no other place has it.

    Neither the database, logs, answers and errors, nor the command lines and environments of processes.
    """
    world.forget()
    argument: Any = {"place": str(place), "value": VALUE, "own": "a-value-of-the-caller", "values": [VALUE, FILED]}
    told = world.run(SERVES, {**argument, "asks": ASKS.replace("PLACE", str(place))})
    assert told["stdout"].startswith("False sk-proj-"), told
    assert told["lives"].count("sk-proj-"), told
    arrived = [row["text"] for row in world.seen().arrivals if row["server_name"]]
    assert sum(VALUE.lower() in text for text in arrived) == 2, told
    assert sum(FILED.lower() in text for text in arrived) == 1, told
    assert not told["found"], told
    assert any(path.endswith("records.db") for path in told["files"])
    unknown, own = told["wrong"]
    assert "this service holds no secret NO_SUCH_KEY" in unknown
    assert "cloche secrets set OPENAI_API_KEY" in own
    assert '"FILED_KEY"' in told["listed"], told


def test_a_node_uses_the_secrets_of_its_operator(place: Path) -> None:
    """A lease names them. Values of the caller's are refused before anything is sent, and level confined has none."""
    code = "import os; print(os.environ['FILED_KEY'])"
    node, pod = (
        Node(place, "--secrets-from", str(place / "held"), *words, before=before)
        for words, before in (((), ()), (("--require", "confined"), POD))
    )
    try:
        for each in (node, pod):
            each.ask("node.keep", denied=["10.77.0.1"], ttl=600)
        printed = cloche.run(code, backend=node.backend(), secrets=["FILED_KEY"]).stdout.strip()
        assert len(printed) == len(FILED)
        assert printed != FILED
        with pytest.raises(InvalidRequest, match="this node holds no secret OTHER for this caller; ask its operator"):
            cloche.run(code, backend=node.backend(), secrets=["OTHER"])
        backend = pod.backend()
        backend.usual_level = None
        with pytest.raises(BackendUnavailable, match="secrets need level jail"):
            cloche.run(code, backend=backend, secrets=["FILED_KEY"])
    finally:
        node.end()
        pod.end()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serve with a key."""
    home = tmp_path_factory.mktemp("service")
    with serving(home, "--secrets-key", new_key(home)) as service:
        yield service


def new_key(home: Path) -> str:
    """Write a key, and return its path."""
    path = home / f"{os.urandom(4).hex()}.key"
    path.write_bytes(base64.b64encode(os.urandom(32)))
    return str(path)


PROGRAM = {"code": "import os; print(os.environ['OPENAI_API_KEY'])", "secrets": ["OPENAI_API_KEY"]}


def test_keys_store_and_use_secrets_as_their_scopes_say(service: Service) -> None:
    """Only admins store and remove; runners use them; readers see names and hosts. No answer and no log has a value."""
    with (
        service.client() as admin,
        service.client(service.new_key("run")) as runner,
        service.client(service.new_key("read")) as reader,
    ):
        body = {"value": VALUE, "hosts": ["api.openai.com"]}
        answers = [admin.put("/api/secrets/OPENAI_API_KEY", json=body) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 200]
        for client in (runner, reader):
            answers += [
                client.put("/api/secrets/OPENAI_API_KEY", json=body),
                client.delete("/api/secrets/OPENAI_API_KEY"),
            ]
            assert {answer.status_code for answer in answers[-2:]} == {403}
        answers += [reader.get("/api/secrets"), runner.post("/api/code/exec", json=PROGRAM)]
        assert [row["name"] for row in answers[-2].json()["items"]] == ["OPENAI_API_KEY"]
        assert answers[-1].json()["stdout"].startswith("sk-proj-"), answers[-1].text
        opened = runner.post("/api/sandboxes", json={"secrets": ["OPENAI_API_KEY"]})
        assert opened.json()["heldBy"] == "keeper", opened.text
        printed = runner.post(f"/api/sandboxes/{opened.json()['id']}/exec", json={"argv": ["printenv"]})
        assert "OPENAI_API_KEY=sk-proj-" in printed.json()["stdout"], printed.text
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("OPENAI_API_KEY", {"value": "short"}), ("PATH", body), ("K" * 129, body), ("KEY", {"value": VALUE}),
            ("KEY", {**body, "hosts": ["*.example"]}), ("KEY", {**body, "value": VALUE * 1000}),
            ("KEY", {**body, "x": VALUE}), ("KEY", {**body, "format": VALUE}),
        ]  # fmt: skip
        for name, fields in wrong:
            answers.append(admin.put(f"/api/secrets/{name}", json=fields))
            assert answers[-1].status_code == 422, (name, answers[-1].text)
        removed = [admin.delete("/api/secrets/OPENAI_API_KEY").status_code for _ in range(2)]
        assert removed == [200, 404]
        refused = runner.post("/api/code/exec", json=PROGRAM)
        assert "this service holds no secret OPENAI_API_KEY for this caller" in refused.json()["detail"]
        texts = [answer.text for answer in (*answers, opened, printed, refused)]
    assert not any(VALUE in text for text in (*texts, service.log.read_text()))


def test_another_projects_secret_is_as_unknown_as_none(service: Service) -> None:
    """By name in a run, in the list, and for removal."""
    key = read_key(str(next(service.log.parent.glob("*.key"))))
    database = Database(service.database)
    with database.writing() as session:
        secret = Secret(value=VALUE, hosts=["api.openai.com"])
        store_secret(session, key, "THEIRS", secret, project="other", by="key_1")
    database.close()
    with service.client() as admin:
        assert admin.get("/api/secrets").json()["items"] == []
        details = []
        for name in ("THEIRS", "NOBODYS"):
            ran = admin.post("/api/code/exec", json={"code": "1", "secrets": [name]})
            removed = admin.delete(f"/api/secrets/{name}")
            assert (ran.status_code, removed.status_code) == (422, 404)
            details.append([answer.json()["detail"].replace(name, "IT") for answer in (ran, removed)])
    assert details[0] == details[1]


def test_the_page_stores_lists_and_removes_secrets(service: Service) -> None:
    """By forms with the page's token; a value is on no page, whatever was wrong with it."""
    with service.client("", follow_redirects=True) as browser:
        shown = browser.post("/login", data={"code": service.link.partition("code=")[2]})
        shown = browser.get("/settings")
        token = {"csrfToken": shown.text.partition('name="csrfToken" value="')[2].partition('"')[0]}
        form = {**token, "secret": "PAGE_KEY", "value": VALUE, "hosts": "a.example, b.example"}
        texts = []
        for fields, words in (
            (form, "a.example, b.example"),
            ({**form, "value": VALUE[:11]}, "fewer than 12 characters"),
            ({**form, "hosts": ""}, "PAGE_KEY needs hosts"),
        ):
            texts.append(browser.post("/settings/secrets", data=fields).text)
            assert words in texts[-1]
        assert browser.post("/settings/secrets", data={**form, "csrfToken": "0" * 64}).status_code == 403
        removed = browser.post("/settings/secrets/PAGE_KEY/remove", data=token)
        assert (removed.status_code, "a.example" in removed.text) == (200, False)
    assert not any(VALUE[:11] in text for text in texts)


def test_a_restarted_service_has_its_secrets_with_its_key_alone(tmp_path: Path) -> None:
    """With another key runs that name one are refused with the reason, and other runs go on."""
    key, first = new_key(tmp_path), ""
    for its_key, status in ((key, 200), (new_key(tmp_path), 503), (key, 200)):
        service = start(tmp_path, "--secrets-key", its_key, key=first)
        with service.client() as admin:
            if not first:
                assert admin.put("/api/secrets/OPENAI_API_KEY", json={"value": VALUE}).status_code == 201
            ran = admin.post("/api/code/exec", json=PROGRAM)
            assert ran.status_code == status, ran.text
            (row,) = admin.get("/api/secrets").json()["items"]
            assert row["usable"] is (status == 200)
            if status != 200:
                assert "was stored with another key than this service has" in ran.json()["detail"]
                assert admin.post("/api/code/exec", json={"code": "1"}).status_code == 200
        first = service.key
        service.end()
