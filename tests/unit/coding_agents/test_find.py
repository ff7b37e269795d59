"""An agent is found as the user's managers of versions installed it, and only what it needs is shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cloche.coding_agents.find import find_agent
from cloche.coding_agents.row import CodingAgent, Package
from cloche.core.errors import InvalidRequest

NODE_SCRIPT = "#!/usr/bin/env node\n"
ROW = CodingAgent(
    name="fake", title="Fake", program="fake", package=Package(registry="npm", name="fake"), tools=("rg",)
)


def _program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a home folder of this user's, without installed agents."""
    folder = tmp_path.resolve() / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def _find(*folders: Path) -> tuple[str, list[str], tuple[str, ...]]:
    search = os.pathsep.join((*map(str, folders), "/usr/bin", "/bin"))
    found = find_agent(ROW, variables={"PATH": search})
    return found.words[0], list(found.toolchains), found.path


def test_npm_with_a_manager_of_versions(home: Path) -> None:
    """As of nvm: the link is followed, the folder of this one version is shown, and its Node is on PATH."""
    root = home / ".nvm/versions/node/v22.1.0"
    script = _program(root / "lib/node_modules/fake/cli.js", NODE_SCRIPT)
    _program(root / "bin/node")
    _link(root / "bin/fake", script)
    program, shown, path = _find(root / "bin")
    assert (program, shown, path[0]) == (str(script), [str(root)], str(root / "bin"))


def test_npm_with_a_prefix_of_its_own(home: Path) -> None:
    """A package finds those beside its own: all of node_modules is shown."""
    modules = home / "tools/node_modules"
    native = _program(modules / "@me/fake/bin/fake")
    _link(modules / ".bin/fake", native)
    program, shown, path = _find(modules / ".bin")
    assert (program, shown, path[0]) == (str(native), [str(modules)], str(modules / ".bin"))


def test_uv_and_pipx(home: Path) -> None:
    """The environment and its interpreter are shown, `~/.local/bin` is not; their Python is not on PATH."""
    python = _program(home / ".local/share/uv/python/cpython-3.12/bin/python3.12")
    environment = home / ".local/share/uv/tools/fake"
    _link(environment / "bin/python", python)
    script = _program(environment / "bin/fake", f"#!{environment}/bin/python\n")
    _link(home / ".local/bin/fake", script)
    program, shown, path = _find(home / ".local/bin")
    assert (program, shown) == (str(script), [str(python.parents[1]), str(environment)])
    assert not any(folder.startswith(str(home)) for folder in path)


@pytest.mark.parametrize("kind", ["pyenv", "volta"])
def test_shims(home: Path, kind: str) -> None:
    """A shim is not the program: its manager is asked, outside of any project."""
    root = home / f".{kind}"
    real = _program(root / "versions/3.12/bin/fake")
    answer = f'#!{sys.executable}\nimport os, sys\nassert sys.argv[1:] == ["which", "fake"] and os.getcwd() == "/"\n'
    _program(root / "bin" / kind, f"{answer}print({str(real)!r})\n")
    if kind == "volta":
        _link(root / "bin/fake", _program(root / "bin/volta-shim"))
    else:
        _program(root / "shims/fake")
    program, shown, _ = _find(root / ("bin" if kind == "volta" else "shims"))
    assert (program, shown) == (str(real), [str(root / "versions/3.12")])


def test_tools_are_shown_if_they_may_be(home: Path) -> None:
    """One that lies in a home itself is left out, and so is its folder."""
    _program(home / "tools/bin/fake")
    _program(home / "rg")
    found = find_agent(ROW, variables={"PATH": f"{home}/tools/bin:{home}"})
    assert (dict(found.tools), found.toolchains) == ({}, (str(home / "tools"),))


def test_what_is_missing_is_named_with_its_remedy(home: Path) -> None:
    """The program itself, or the interpreter of its script; a relative folder of PATH is not searched."""
    _program(home / "here/fake", NODE_SCRIPT)
    with pytest.raises(InvalidRequest, match="fake is not on this host's PATH; get it: cloche agent install fake"):
        find_agent(ROW, variables={"PATH": "here"})
    with pytest.raises(InvalidRequest, match="is started by node, which is not on this host's PATH"):
        find_agent(ROW, variables={"PATH": f"{home}/here"})
