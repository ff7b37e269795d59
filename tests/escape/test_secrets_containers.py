"""Secrets in containers of docker and of gVisor: used there, trusted there, and known to no daemon."""

from __future__ import annotations

import io
import json
import signal
import ssl
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.escape.test_secrets_held import ASKS, HOST, TABLE
from tests.harness.containers import Daemon
from tests.harness.world import World, open_world

pytestmark = pytest.mark.root
VALUE = "sk-proj-ValueOfContainers0123456789abcdef"
PATHS = ("/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# What a program sees of its container: where a value could be, and which files of certificates it trusts.
LOOKS = """
import glob, ssl
def seen():
    texts = [repr(os.environ)]
    for path in [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline"), "/proc/self/mountinfo"]:
        try:
            texts.append(open(path, "rb").read().decode("latin-1"))
        except OSError:
            pass
    for folder in ("/etc/cloche", "/workspace", "/tmp", "/dev/shm", "/run"):
        for at, _, names in os.walk(folder):
            for name in names:
                try:
                    texts.append(open(os.path.join(at, name), errors="replace").read(1 << 20))
                except OSError:
                    pass
    return repr(texts)
def trusts(paths):
    for name in [name for name in os.environ if name.endswith(("_FILE", "_BUNDLE", "CAINFO"))]:
        del os.environ[name]
    found = {}
    for path in paths:
        context = ssl.create_default_context(cafile=path)
        asked = urllib.request.Request("https://api.openai.com/plain", headers={"Authorization": "Bearer " + K})
        found[path] = urllib.request.urlopen(asked, timeout=10, context=context).status
    return found
K = os.environ["KEY"]
"""
RUNS = """
import cloche, os
secrets = {"KEY": cloche.Secret(value=ARGUMENT["value"], hosts=["api.openai.com"])}
options = {"secrets": secrets, "timeout": 60, "audit": ARGUMENT["audit"], **ARGUMENT["options"]}
code = ARGUMENT["asks"] + ARGUMENT["looks"] + "print(ask(K), K, ask('sk-proj-foreign'), ask('/'.join(())))\\n"
said = {}
result = cloche.run(code + "print(trusts(" + repr(ARGUMENT["paths"]) + ")); print(seen())", **options)
said["run"] = result.stdout, result.stderr, repr(result), repr(result.enforcement.level)
with cloche.Sandbox(live=False, **options) as sandbox:
    said["again"] = [sandbox.run("import os; print(os.environ['KEY'])").stdout for _ in range(2)]
    sandbox.write_file("note", "text")
    with sandbox.session() as session:
        said["cell"] = session.run(code).stdout
        said["beside"] = sandbox.run(code).stdout
        said["cell later"] = session.run(code).stdout
with cloche.Sandbox(live=True, **options) as sandbox:
    said["live"] = sandbox.run(code + "print(seen())").stdout
    said["exec"] = sandbox.exec(["sh", "-c", "echo $KEY $SSL_CERT_FILE"]).stdout
    with sandbox.session() as session:
        said["live cell"] = session.run(code).stdout
        ARGUMENT["looked"] and said.update(looked=__import__("subprocess").run(ARGUMENT["looked"], shell=True, capture_output=True, text=True).stdout)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


def check(world: World, said: dict[str, Any]) -> None:
    """See that all kinds of sandboxes used the value, and that nothing that came back has it."""
    placeholder = said["exec"].split()[0]
    for name in ("live", "live cell", "run", "cell", "beside", "cell later"):
        text = said[name] if isinstance(said[name], str) else said[name][0]
        assert "authorization: Bearer sk-proj-" in text, (name, said)
        assert "403 " in text, "a foreign key is refused"
    assert said["exec"].split()[1] == "/etc/cloche/authorities.pem"
    assert placeholder in said["live"]
    assert placeholder in said["live cell"]
    assert len({*said["again"], said["cell"].split("Bearer ")[1].split()[0] + "\n"}) == 1, "one for a whole sandbox"
    assert VALUE not in repr(said)
    arrivals = [one for one in world.seen().arrivals if f"authorization: bearer {VALUE.lower()}" in one["text"]]
    assert {one["server_name"] for one in arrivals} == {HOST}


@pytest.mark.usefixtures("runsc_alone")
def test_gvisor_uses_a_value_that_it_cannot_read(world: World, tmp_path: Path) -> None:
    """In runs, sessions and live sandboxes; the host's own file of certificates has the authority, too."""
    world.forget()
    argument = {
        "value": VALUE, "audit": str(tmp_path), "asks": ASKS, "looks": LOOKS, "looked": "",
        "options": {"backend": "gvisor"}, "paths": ["/etc/ssl/certs/ca-certificates.crt"],
    }  # fmt: skip
    said = world.run(RUNS, argument, env={"DOCKER_HOST": "unix:///nowhere"})
    check(world, said)
    assert "/etc/ssl/certs/ca-certificates.crt': 200" in said["run"][0]


def with_bundles(daemon: Daemon, image: str, text: str) -> str:
    """Return an image that keeps certificates where other distributions do, also behind a link."""
    container = daemon.docker("create", image, "true").strip()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        for path, target in ((PATHS[0], "/etc/ca-trust/bundle.pem"), (PATHS[1], "")):
            link = tarfile.TarInfo(path[1:])
            link.type, link.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.REGTYPE, "")
            link.size = 0 if target else len(text)
            files.addfile(link, None if target else io.BytesIO(text.encode()))
        file = tarfile.TarInfo("etc/ca-trust/bundle.pem")
        file.size = len(text)
        files.addfile(file, io.BytesIO(text.encode()))
    subprocess.run(daemon.words("cp", "-", f"{container}:/"), input=packed.getvalue(), check=True, capture_output=True)
    daemon.docker("commit", container, "cloche-test:bundles")
    daemon.docker("rm", container)
    return "cloche-test:bundles"


def test_docker_uses_a_value_that_it_cannot_read(docker: Daemon, world: World, tmp_path: Path) -> None:
    """Neither its log, nor what it says of containers, nor its files have it; all files of certificates do trust."""
    world.forget()
    settings = docker.folder / "daemon.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "debug": True}))
    docker.signal(signal.SIGHUP)
    image = with_bundles(docker, docker.image("cloche-test:python"), Path(ssl.get_default_verify_paths().openssl_cafile).read_text())
    argument = {
        "value": VALUE, "audit": str(tmp_path), "asks": ASKS, "looks": LOOKS,
        "looked": f"docker --host {docker.url} inspect $(docker --host {docker.url} ps --all --quiet)",
        "options": {"backend": "docker", "image": image}, "paths": PATHS,
    }  # fmt: skip
    said = world.run(RUNS, argument, env={"DOCKER_HOST": docker.url, "CLOCHE_RUNSC": "none"})
    check(world, said)
    for path in PATHS:
        assert f"{path}': 200" in said["run"][0]
    assert '"Target": "/etc/ca-trust/bundle.pem"' in said["looked"]
    log = (docker.folder / "log").read_text()
    assert '"POST /v' in log or "Calling POST" in log
    found = subprocess.run(["grep", "-rlaF", VALUE, docker.folder], capture_output=True, text=True, check=False).stdout
    assert found == ""
    assert VALUE not in log
