"""Secrets in containers of docker and of gVisor: used there, trusted there, and known to no daemon."""

from __future__ import annotations

import io
import json
import signal
import ssl
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.escape.test_secrets_held import ASKS, HOST, TABLE
from tests.harness.containers import Daemon
from tests.harness.world import World, open_world

pytestmark = pytest.mark.root
VALUE = "sk-proj-ValueOfContainers0123456789abcdef"
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
LINKED = "/etc/ca-trust/bundle.pem"
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
import cloche, os, subprocess
files = {"~/.token": "token {}"}
secrets = {"KEY": cloche.Secret(value=ARGUMENT["value"], hosts=["api.openai.com"], files_inside=files)}
options = {"secrets": secrets, "timeout": 60, "audit": ARGUMENT["audit"], **ARGUMENT["options"]}
code = ARGUMENT["asks"] + ARGUMENT["looks"]
code += "print(K, ask(K), ask('sk-proj-foreign'), open(os.path.expanduser('~/.token')).read())\\n"
said = {}
result = cloche.run(code + f"print(trusts({ARGUMENT['paths']})); print(seen())", **options)
said["run"] = result.stdout + result.stderr
texts = [repr(result), repr(result.meta)]
if ARGUMENT["is_long"]:
    with cloche.Sandbox(live=False, **options) as sandbox:
        sandbox.write_file("note", "text")
        said["again"] = sandbox.run(code).stdout
        with sandbox.session() as session:
            said["cell"] = session.run(code).stdout
            said["beside"] = sandbox.run(code).stdout
            said["later"] = session.run(code).stdout
if ARGUMENT["is_long"] or ARGUMENT["daemon"]:
    has_users = ARGUMENT["is_long"] and options["backend"] == "docker"
    with cloche.Sandbox(live=True, users=has_users, **options) as sandbox:
        said["live"] = sandbox.run(code + "print(seen())").stdout
        texts.append(sandbox.exec(["sh", "-c", "echo $KEY $SSL_CERT_FILE"]).stdout)
        with sandbox.session() as session:
            said["live cell"] = session.run(code).stdout
            command = f"docker --host {ARGUMENT['daemon']} inspect $(docker --host {ARGUMENT['daemon']} ps -aq)"
            inspected = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
for folder, _, names in os.walk(ARGUMENT["audit"]):
    texts += [open(os.path.join(folder, name), errors="replace").read() for name in names]
print(json.dumps({"said": said, "texts": texts, "inspected": inspected if ARGUMENT["daemon"] else ""}))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Open a world with a provider."""
    with open_world(TABLE) as world:
        yield world


def run(
    world: World, audit: Path, paths: Sequence[str], *, is_long: bool = False, daemon: str = "", **options: Any
) -> dict[str, Any]:
    """Use a value in sandboxes of a backend, and see that nothing that came back has it."""
    world.forget()
    argument = {
        "value": VALUE, "audit": str(audit), "asks": ASKS, "looks": LOOKS, "paths": paths, "is_long": is_long,
        "daemon": daemon, "options": options,
    }  # fmt: skip
    env = {"DOCKER_HOST": daemon or "unix:///nowhere", **({"CLOCHE_RUNSC": "none"} if daemon else {})}
    came: dict[str, Any] = world.run(RUNS, argument, env=env)
    said: dict[str, str] = came["said"]
    for name, text in said.items():
        assert f"authorization: Bearer {text.split()[0]}" in text, (name, text)
        assert f"token {text.split()[0]}" in text
        assert "403 api.openai.com:443" in text, "a foreign key is refused"
    assert VALUE not in repr(came)
    assert [path for path in paths if f"{path!r}: 200" not in said["run"]] == []
    assert len({said[name].split()[0] for name in ("again", "cell", "beside", "later") if name in said}) <= 1
    assert "live" not in said or f"{said['live'].split()[0]} /etc/cloche/authorities.pem" in repr(came["texts"])
    arrivals = [one for one in world.seen().arrivals if f"authorization: bearer {VALUE.lower()}" in one["text"]]
    assert {one["server_name"] for one in arrivals} == {HOST}
    assert len(arrivals) == len(said) + len(paths)
    return came


@pytest.mark.usefixtures("runsc_alone")
@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_gvisor_uses_a_value_that_it_cannot_read(world: World, tmp_path: Path, is_long: bool) -> None:
    """The host's own file of certificates has the authority, too."""
    run(world, tmp_path, [BUNDLE], is_long=is_long, backend="gvisor")


def with_bundles(daemon: Daemon) -> str:
    """Return an image that keeps certificates where other distributions do, also behind a link."""
    container = daemon.docker("create", daemon.image("cloche-test:python"), "true").strip()
    data = Path(ssl.get_default_verify_paths().openssl_cafile or BUNDLE).read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as files:
        link = tarfile.TarInfo(PATHS[0][1:])
        link.type, link.linkname = tarfile.SYMTYPE, LINKED
        files.addfile(link)
        for path in (LINKED, PATHS[1]):
            file = tarfile.TarInfo(path[1:])
            file.size = len(data)
            files.addfile(file, io.BytesIO(data))
    subprocess.run(daemon.words("cp", "-", f"{container}:/"), input=packed.getvalue(), check=True, capture_output=True)
    daemon.docker("commit", container, "cloche-test:bundles")
    daemon.docker("rm", container)
    return "cloche-test:bundles"


@pytest.mark.parametrize("is_long", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_docker_uses_a_value_that_it_cannot_read(docker: Daemon, world: World, tmp_path: Path, is_long: bool) -> None:
    """Neither its log, nor what it says of containers, nor its files have it; all files of certificates do trust."""
    settings = docker.folder / "daemon.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "debug": True}))
    docker.signal(signal.SIGHUP)
    came = run(world, tmp_path, PATHS, is_long=is_long, daemon=docker.url, backend="docker", image=with_bundles(docker))
    assert f'"Target": "{LINKED}"' in came["inspected"]
    grep = ["grep", "-rlaF", docker.folder, "-e"]
    assert subprocess.run([*grep, VALUE], capture_output=True, text=True, check=False).stdout == ""
    assert "Calling POST" in (docker.folder / "log").read_text()


@pytest.mark.soak
def test_gvisor_of_docker_uses_a_value_that_it_cannot_read(gvisor: Daemon, world: World, tmp_path: Path) -> None:
    """Its runtime reads the file of certificates by itself."""
    run(
        world, tmp_path, PATHS, is_long=True, daemon=gvisor.url, backend="docker", image=with_bundles(gvisor),
        level="gvisor",
    )  # fmt: skip
