"""Packages by the network that a sandbox is served: only the index is reached, by those that download alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.internet.sites import REACHES
from tests.harness.world import PUBLIC, World, open_world

pytestmark = pytest.mark.user_soak
INDEX = {"UV_DEFAULT_INDEX": "https://index.example/simple"}
INSTALLS = """
import os, tempfile, time
import cloche

with tempfile.TemporaryDirectory() as folder:
    os.environ["XDG_DATA_HOME"] = folder
    os.environ["CLOCHE_CONFIG"] = f"{folder}/owner.yaml"
    with open(f"{folder}/owner.yaml", "w") as file:
        file.write("sandbox: {packages_hosts: [files.example]}")
    code = """
CODE = """
import urllib.request
import harmless
try:
    urllib.request.urlopen("https://index.example/simple/", timeout=5)
    reached = True
except OSError:
    reached = False
[reached, "index.example" in str(__import__("os").environ)]
"""
ENDS = """
    result = cloche.run(code, packages=["harmless"])
    found = [result.value, result.meta["packages"], result.stderr]

    with cloche.Sandbox() as sandbox:
        found.append(list(sandbox.install("harmless_more")))
        found.append(sandbox.run("import harmless_more").status)
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Return a host and its internet."""
    with open_world() as opened:
        yield opened


def test_only_the_index_is_reached_and_by_the_downloads_alone(world: World) -> None:
    """By its names over TLS; the program that has the package finds no network, and no trace of the index."""
    world.forget()
    value, packages, stderr, more, status = world.run(f"{INSTALLS}{CODE!r}{ENDS}", user="ordinary", env=INDEX)
    assert value == [False, False], stderr
    assert packages == ["harmless==1.0", "harmless-more==1.0"]
    assert (more, status) == (["harmless-more==1.0"], "ok")
    seen = world.seen()
    assert seen.names == {"index.example", "files.example"}
    assert {(protocol, port) for protocol, _, port in seen.endpoints} <= {("tcp", 443), ("udp", 53), ("tcp", 53)}


def test_a_build_reaches_nothing(world: World) -> None:
    """What its attempts reach outside, they do not reach from it, and no packet of theirs leaves."""
    assert world.run(f"{REACHES}\nprint(json.dumps(reaches()))", user="ordinary") == [True, True, True]
    world.forget()
    installs = INSTALLS.replace("packages_hosts", "packages_build: [reaching-*], packages_hosts")
    ends = """
    result = cloche.run(code, packages=["reaching-source"])
    print(json.dumps([result.value, result.meta.get("packages_built"), result.stderr]))
"""
    program = f"{installs}{'import reaching_source; reaching_source.REACHED'!r}{ends}"
    value, built, stderr = world.run(program, user="ordinary", env=INDEX)
    assert (value, built) == ([False, False, False], ["reaching-source==1.0"]), stderr
    assert world.seen().names == {"index.example", "files.example"}
    assert PUBLIC not in {address for _, address, _ in world.seen().endpoints}


@pytest.mark.parametrize("is_default", [False, True])
def test_files_on_a_host_that_nobody_named_are_not_fetched(world: World, is_default: bool) -> None:
    """The index may say so; the operator did not. uv's own default is believed."""
    world.forget()
    program = f"""
import os, tempfile
import cloche
from cloche.packages import defaults
if {is_default}:
    defaults.default_index = lambda: "https://index.example/simple"
with tempfile.TemporaryDirectory() as folder:
    os.environ["XDG_DATA_HOME"] = folder
    try:
        cloche.run("1", packages=["harmless"])
        why = "it was"
    except cloche.ClocheError as error:
        why = str(error)
    print(json.dumps(why))
"""
    why = world.run(program, user="ordinary" if is_default else "root", env={} if is_default else INDEX)
    assert why == "it was" if is_default else "operator can name files.example in packages_hosts" in why
    assert ("files.example" in world.seen().names) == is_default


def test_only_the_registry_is_reached_by_npm(world: World) -> None:
    """By its name over TLS, as npm's own configuration says; the program finds no network."""
    world.forget()
    program = """
import os, tempfile
import cloche
with tempfile.TemporaryDirectory() as folder:
    os.environ["XDG_DATA_HOME"] = folder
    code = '''
import harmless from "harmless";
let reached = true;
try { await fetch("https://registry.example/harmless", { signal: AbortSignal.timeout(5000) }); }
catch { reached = false; }
console.log(harmless, reached, JSON.stringify(process.env).includes("registry.example"));
'''
    result = cloche.run(code, language="javascript", packages=["harmless@1"])
    print(json.dumps([result.stdout, result.stderr]))
"""
    environment = {"npm_config_registry": "https://registry.example/", "NPM_CONFIG_USERCONFIG": "/nonexistent"}
    stdout, stderr = world.run(program, user="ordinary", env=environment)
    assert stdout == "harmless false false\n", stderr
    seen = world.seen()
    assert seen.names == {"registry.example"}
    assert {(protocol, port) for protocol, _, port in seen.endpoints} <= {("tcp", 443), ("udp", 53), ("tcp", 53)}


if os.environ.get("CLOCHE_TEST_INDEX"):  # by choice: it asks this machine's own index

    def test_the_index_of_this_machine_has_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """By the command line, as a user has it."""
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
        words = [
            sys.executable,
            "-m",
            "cloche",
            "run",
            "--packages",
            "rich",
            "-c",
            "import rich; rich.print('[b]there[/b]')",
        ]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        assert (done.stdout, done.returncode) == ("there\n", 0), done.stderr
