"""Manifests of development environments: made from files, read strictly, and never granting anything."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest, NotFound
from cloche.records.database import Database
from cloche.records.devenv import (
    FILE,
    INDEX,
    DevEnvManifest,
    Setup,
    default_name,
    generate,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from cloche.records.devenv_store import list_manifests, save_manifest, stored_manifest
from cloche.records.provision import tighten

MANIFEST = DevEnvManifest(name="shop-1f3a9c2e", created_at="2026-01-31T12:00:00Z")
# What is in a workspace -> the languages (name, version, evidence) and the commands that are found.
WORKSPACES: dict[str, tuple[dict[str, str], list[tuple[str, str | None, str]], list[str]]] = {
    "uv": (
        {".python-version": "# ours\n3.12\n",
 "uv.lock": "", "pyproject.toml": "[project]\nrequires-python = '>=3.9'\n"},
        [("python", "3.12", ".python-version")],
        ["uv sync --frozen"],
    ),
    "pip and npm": (
        {"requirements.txt": "", "package-lock.json": "{}", "package.json": '{"engines": {"node": ">=20"}}'},
        [("python", None, "requirements.txt"), ("javascript", ">=20", "package.json")],
        ["pip install -r requirements.txt", "npm ci"],
    ),
    "poetry": (
        {"pyproject.toml": "[tool.poetry]\nname = 'x'\n[project]\nrequires-python = '>=3.11'\n"},
        [("python", ">=3.11", "pyproject.toml")],
        ["poetry install --no-interaction"],
    ),
    "pipenv": ({"Pipfile.lock": "{}"}, [("python", None, "Pipfile.lock")], ["pipenv sync"]),
    "yarn": (
        {".nvmrc": "v20.1.0\n", "yarn.lock": ""},
        [("javascript", "v20.1.0", ".nvmrc")],
        ["yarn install --frozen-lockfile"],
    ),
    "pnpm": ({"pnpm-lock.yaml": ""}, [("javascript", None, "pnpm-lock.yaml")], ["pnpm install --frozen-lockfile"]),
    "bun, binary": (
        {"bun.lockb": "\0", "package.json": '{"dependencies": {"a": "^1"}}'},
        [("javascript", None, "bun.lockb")], ["bun install --frozen-lockfile"],
    ),
    "bun": ({"bun.lock": "{}"}, [("javascript", None, "bun.lock")], ["bun install --frozen-lockfile"]),
    "rust, go and ruby": (
        {
            "Cargo.toml": "", "rust-toolchain.toml": "[toolchain]\nchannel = '1.80'\n",
            "go.mod": "module x\n\ngo 1.22.1\n", "Gemfile": 'ruby "3.3.0"\n',
        },
        [("rust", "1.80", "rust-toolchain.toml"), ("go", "1.22.1", "go.mod"), ("ruby", "3.3.0", "Gemfile")],
        ["cargo fetch", "go mod download", "bundle install"],
    ),
    "nothing": ({"README": ""}, [], []),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    """Open an empty workspace, `tmp_path / "shop"`."""
    (tmp_path / "shop").mkdir()
    fd = os.open(tmp_path / "shop", os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("case", WORKSPACES)
def test_languages_and_commands_come_from_files(case: str, folder: int, tmp_path: Path) -> None:
    """Each package manager has its command, each language its version and the file that says so; all is valid."""
    files, languages, commands = WORKSPACES[case]
    for name, text in files.items():
        (tmp_path / "shop" / name).write_text(text)

    made = generate(folder, str(tmp_path / "shop"))

    assert [(one.name, one.version, one.evidence) for one in made.languages] == languages
    assert [" ".join(one.run) for one in made.setup] == commands
    assert parse_manifest(json.loads(json.dumps(made.as_dict()))) == made


def test_default_names_are_the_paths_own() -> None:
    """A name has the folder's and eight digits of its path's hash: two folders of one name have two."""
    assert default_name("/srv/shop") == default_name("/srv/shop/") != default_name("/home/shop")
    assert default_name("/srv/shop").startswith("shop-")
    for path in ("/srv/ä ö\n", "/", "/srv/...", "/srv/" + "x" * 255, "/srv/\udcff"):
        parse_manifest({"version": 1, "name": default_name(path)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "manifest: unknown field 'colour'"),
        ({"limit": {}}, "did you mean 'limits'"),
        ({"version": 2}, "version: '2' is an unknown version"),
        ({"name": "a/b"}, "name: "),
        ({"name": None}, "name: "),
        ({"workspacePath": "../other"}, "workspacePath: '../other' leads out"),
        ({"workspacePath": "/etc"}, "workspacePath: '/etc' leads out"),
        (
            {"languages": [{"name": "python", "evidence": "x", "versoin": "3"}]},
            r"languages\[0\]: unknown field 'versoin'",
        ),
        ({"languages": [{"name": "python"}]}, r"languages\[0\]: evidence is missing"),
        ({"dependencies": [{"ecosystem": "a", "manager": "b", "file": "../x"}]}, r"dependencies\[0\].file: "),
        ({"dependencies": {}}, "dependencies: must be a list"),
        ({"setup": [{"run": []}]}, r"setup\[0\].run: "),
        ({"setup": [{"run": ["a", 1]}]}, r"setup\[0\].run\[1\]: "),
        ({"setup": [{"run": ["a\0"]}]}, r"setup\[0\].run\[0\]: "),
        ({"setup": [{"run": ["a"], "network": ["http://x/"]}]}, r"setup\[0\].network: "),
        ({"setup": [{"run": ["a"]}] * 65}, "setup: must be a list of at most 64"),
        ({"env": {"1A": "x"}}, "env.1A: "),
        ({"env": {"A": "x" * 1025}}, "env.A: "),
        ({"env": {"MY_TOKEN": "x"}}, "env.MY_TOKEN: a manifest holds no secrets"),
        ({"limits": {"memroy": "1g"}}, "limits.memroy: unknown limit; did you mean 'memory'"),
        ({"limits": {"memory": "much"}}, "limits.memory: "),
        ({"limits": {"memory": True}}, "limits.memory: "),
        ({"createdAt": "today"}, "createdAt: "),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    """What is unknown or wrong is an error that says where it stands and which value it is."""
    with pytest.raises(InvalidRequest, match=message):
        parse_manifest({**MANIFEST.as_dict(), **change})


def test_a_manifest_is_written_through_no_link(folder: int, tmp_path: Path) -> None:
    """Writing replaces a link and leaves what it leads to; reading follows none, and takes no FIFO and no giant."""
    outside, file = tmp_path / "outside", tmp_path / "shop" / FILE
    outside.write_text(json.dumps(MANIFEST.as_dict()))
    with pytest.raises(NotFound, match="devenv generate"):
        read_manifest(folder)
    file.symlink_to(outside)
    assert json.loads(file.read_text())["name"] == MANIFEST.name  # whoever follows the link finds it
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_manifest(folder)

    write_manifest(folder, replace(MANIFEST, name="mine"))

    assert read_manifest(folder).name == "mine"
    assert not file.is_symlink()
    assert json.loads(outside.read_text())["name"] == MANIFEST.name
    assert os.listdir(tmp_path / "shop") == [FILE]
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_manifest(folder)
    file.unlink()
    file.write_bytes(b"[" * 300_000)
    with pytest.raises(InvalidRequest, match="more than"):
        read_manifest(folder)
    file.write_bytes(b"[" * 200_000)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read_manifest(folder)


def test_limits_are_only_lowered(tmp_path: Path) -> None:
    """Less than the operator's limit is taken, more is not and said; the operator's own stays as it is."""
    settings = load_settings({"memory": "256m", "timeout": 30}, environ={}, home=tmp_path, cwd=tmp_path)
    less = tighten(replace(MANIFEST, limits={"memory": "64m", "timeout": "5s"}), settings)
    more = tighten(replace(MANIFEST, limits={"memory": "8g", "outputLimit": "1g", "timeout": 30}), settings)

    assert dict(less.options) == {"memory": 64 << 20, "timeout": 5.0}
    assert less.notes == ()
    assert dict(more.options) == {}
    assert [note.partition(":")[0] for note in more.notes] == ["limits.memory", "limits.outputLimit"]


@pytest.mark.parametrize(
    ("held", "wanted", "options", "notes"),
    [
        ({"network": False}, [["evil.example"]], {}, 1),
        ({"network_allow": ["*.example.org"]}, [["a.example.org", "evil.example"]], ("a.example.org",), 1),
        ({"network_allow": ["*.example.org"]}, [["a.example.org"], []], ("a.example.org",), 0),
        ({"network_allow": ["*.example.org"]}, [["evil.example"]], "off", 1),
        ({"network_allow": ["*.example.org"]}, [[]], "off", 0),
        ({"network_allow": ["a.example.org"]}, [["*.example.org"]], "off", 1),
        ({"network": "open"}, [["a.example.org"]], ("a.example.org",), 0),
        ({"network": "open"}, [["db.example@10.0.0.1"]], "off", 1),
        ({"network": "open"}, [["a.example.org"], [INDEX]], {}, 0),
        ({"network": "open"}, [["a.example.org"], None], {}, 0),
    ],
)
def test_the_network_is_only_narrowed(held: Any, wanted: Any, options: Any, notes: int, tmp_path: Path) -> None:
    """Hosts that the operator allows are what remains; others are said; nothing opens what is closed."""
    settings = load_settings(held, environ={}, home=tmp_path, cwd=tmp_path)
    setup = tuple(Setup(run=("make",), network=None if one is None else tuple(one)) for one in wanted)

    terms = tighten(replace(MANIFEST, setup=setup), settings)

    if options == "off":
        options = {"network": "off"}
    elif isinstance(options, tuple):
        options = {"network": "allowlist", "network_allow": options}
    assert dict(terms.options) == options
    assert len(terms.notes) == notes


def test_the_newest_manifest_of_each_workspace_is_stored(location: str) -> None:
    """A workspace of a project has one manifest, over which the next is written; other projects do not see it."""
    database = Database(location)
    try:
        save_manifest(database, MANIFEST, "/srv/shop")
        again = save_manifest(database, replace(MANIFEST, name="again"), "/srv/shop")
        save_manifest(database, MANIFEST, "/srv/shop", project="other")

        assert list_manifests(database)["items"] == [again]
        assert stored_manifest(database, "/srv/shop").name == "again"
        with pytest.raises(NotFound):
            stored_manifest(database, "/srv/else")
    finally:
        database.close()
