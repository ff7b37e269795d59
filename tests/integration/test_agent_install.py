"""Agents from registries on loopback: only the scripts that a row names run, in a jail; nothing half made is found.

Egress never reaches loopback, so the steps that download run without a jail here (`downloads_outside`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloche
from cloche.coding_agents.find import FoundAgent, find_agent
from cloche.coding_agents.install import install_agent
from cloche.coding_agents.installed import newest
from cloche.coding_agents.row import CodingAgent, Package
from cloche.core.errors import InvalidRequest, StartFailed
from cloche.packages.folders import agents_store
from cloche.packages.store import Store
from tests.harness.npm import NpmRegistry, serving_npm
from tests.harness.packages import own_index

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")
WAIT_S = 60.0
SEARCH = "/usr/bin:/bin"
NPM_AGENT = CodingAgent(
    name="fake", title="Fake", program="fake", package=Package(registry="npm", name="@me/fake", scripts=("@me/fake",))
)
PYPI_AGENT = CodingAgent(name="snake", title="Snake", program="snake", package=Package(registry="pypi", name="snake"))
# Puts the native program in place, as real agents do, and notes what it could do beside that.
INSTALL = """
const fs = require("fs"), net = require("net"), path = require("path");
const native = path.join(path.dirname(require.resolve("@me/fake-native/package.json")), "program");
fs.unlinkSync("bin/fake");
fs.copyFileSync(native, "bin/fake");
fs.chmodSync("bin/fake", 0o755);
const notes = { home: fs.existsSync(SECRET), beside: "" };
try { fs.writeFileSync(path.join(path.dirname(native), "mark"), "x"); notes.beside = "written"; } catch (error) {}
fs.symlinkSync(SECRET, "link");
const done = (network) => {
  fs.writeFileSync("notes.json", JSON.stringify({ ...notes, network }));
  process.exit(0);
};
net.connect(PORT, "127.0.0.1", () => done("connected")).on("error", (error) => done(error.code));
"""
SNAKE = """
import below, json, subprocess, sys
def main():
    own = subprocess.run(["python3", "-c", "import below"], capture_output=True).returncode
    print(json.dumps([below.NAME, sys.prefix, sys.argv[1:], own]))
"""
NATIVE = """#!/bin/sh
echo native "$@"
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmRegistry]:
    """Serve a registry of npm's with one agent in it, and give an empty data folder."""
    for name in [name for name in os.environ if name.lower().startswith("npm_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "npmrc"))
    with serving_npm() as served:
        (tmp_path / "npmrc").write_text(f"registry={served.url}/\n")
        yield served


def _add_agent(registry: NpmRegistry, script: str, version: str = "1.0.0") -> None:
    registry.add("@me/fake-native", "1.0.0", {"program": NATIVE})
    registry.add("scripted", "1.0.0", {"index.js": ""}, scripts={"postinstall": "touch here"})
    registry.add(
        "@me/fake", version, {"install.cjs": script, "bin/fake": "#!/bin/sh\nexit 3\n"}, bin={"fake": "bin/fake"},
        dependencies={"@me/fake-native": "*", "scripted": "*"}, scripts={"postinstall": "node install.cjs"},
    )  # fmt: skip


def _run(found: FoundAgent, *arguments: str) -> str:
    result = cloche.run(argv=[*found.words, *arguments], toolchains=list(found.toolchains))
    assert result.ok, result.stderr
    return result.stdout


@pytest.mark.both_users
def test_the_scripts_of_the_row_run_in_a_jail_and_no_other(registry: NpmRegistry, tmp_path: Path) -> None:
    """A script puts the native program in place; it reaches no server of this host, no file of a user's, no package
    beside its own; links that it leaves are not taken; the files of the store stay as they were.
    """
    secret = tmp_path / "secret"
    secret.write_text("secret")
    port = registry.url.rpartition(":")[2]
    _add_agent(registry, INSTALL.replace("SECRET", json.dumps(str(secret))).replace("PORT", port))
    installed = asyncio.run(install_agent(NPM_AGENT))
    modules = Path(installed.folder, "agent", "node_modules")
    notes = json.loads((modules / "@me/fake/notes.json").read_text())
    assert (installed.version, notes["home"], notes["beside"]) == ("1.0.0", False, "")
    assert notes["network"] in {"ECONNREFUSED", "ENETUNREACH"}
    assert not (modules / "scripted/here").exists()
    assert not os.path.lexists(modules / "@me/fake/link")
    (stored,) = Store().layers()
    assert "exit 3" in Path(stored.folder, "node_modules/@me/fake/bin/fake").read_text()
    assert not any(path.stat().st_mode & 0o222 for path in (modules, modules / "@me/fake/bin/fake"))
    found = find_agent(NPM_AGENT, variables={"PATH": SEARCH})
    assert (found.origin, found.toolchains) == ("installed", (installed.folder,))
    assert _run(found, "a", "b c") == "native a b c\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "cannot start fake"),
        pytest.param("process.exit(7)", "postinstall of the package ended with 7", marks=pytest.mark.soak),
    ],
)
def test_an_agent_that_does_not_work_is_not_there(registry: NpmRegistry, script: str, why: str) -> None:
    """Its script failed, or its program does not start."""
    _add_agent(registry, script)
    with pytest.raises(StartFailed, match=why):
        asyncio.run(install_agent(NPM_AGENT))
    _check_nothing_is_there()


def test_a_cancelled_installation_leaves_nothing(registry: NpmRegistry) -> None:
    """While a script runs, which has no end."""
    _add_agent(registry, "setTimeout(() => 0, 1e6)")

    async def cancel() -> None:
        task = asyncio.create_task(install_agent(NPM_AGENT))
        await asyncio.to_thread(_wait, lambda: bool(list(Path(agents_store(), "making").glob("*/scripts-*"))))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    _check_nothing_is_there()


def _check_nothing_is_there() -> None:
    assert not [path for name in ("making", "layers") for path in Path(agents_store(), name).glob("*")]
    with pytest.raises(InvalidRequest, match="cloche agent install fake"):
        find_agent(NPM_AGENT, variables={"PATH": SEARCH})


def _wait(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.both_users
def test_an_agent_in_python_has_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports its packages; a Python that it starts by name is the project's."""
    with own_index(tmp_path, monkeypatch) as index:
        index.add("below")
        for version in ("1.0", "1.1"):
            index.add("snake", version, {"snake.py": SNAKE}, requires=("below",), scripts={"snake": "snake:main"})
        installed = asyncio.run(install_agent(PYPI_AGENT, "1.0"))
    assert (installed, installed.version) == (newest("snake"), "1.0")
    found = find_agent(PYPI_AGENT, variables={"PATH": SEARCH})
    name, prefix, arguments, code = json.loads(_run(found, "--x"))
    assert (name, prefix, arguments, code) == ("below", f"{installed.folder}/agent", ["--x"], 1)
