"""What a workspace depends on: each kind of file, which of them is believed, and files that strangers prepared."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloche.records.dependencies import MOST_DEPENDENCIES, find_dependencies, find_managers
from cloche.records.dependency_files import MOST_LOCK_BYTES, MOST_MANIFEST_BYTES

# What is in a workspace by the name of a file.
FILES = {
    "uv.lock": """\
version = 1

[[package]]
name = "shop"
version = "0.1"
source = { virtual = "." }

[[package]]
name = "rich"
version = "13.9.4"
source = { registry = "https://x" }
dependencies = [
    { name = "pygments" },
]
""",
    "poetry.lock": """\
[[package]]
name = "six"
version = "1.16.0"
description = "x"

[package.dependencies]
name = "1"

[metadata]
lock-version = "2.0"
""",
    "Pipfile.lock": """\
{"_meta": {}, "default": {"attrs": {"version": "==23.1.0"}}, "develop": {"local": {"path": "."}}}""",
    "requirements.txt": """\
# all
rich==13.9.4 \\
    --hash=sha256:00
httpx[http2]>=0.27,<1 ; python_version > '3'
-r more.txt
a==1.*
git+https://x/b.git
https://x/c.whl
d @ https://x/d.whl
""",
    "pyproject.toml": """\
[project]
dependencies = ["Rich>=13", "six==1.16.0"]
optional-dependencies = { x = ["numpy"] }
[dependency-groups]
dev = ["pytest", {include-group = "x"}]
[tool.poetry.dependencies]
python = "^3.12"
attrs = "23.1.0"
own = {path = "../own"}
""",
    "Pipfile": """\
[packages]
requests = "*"
six = "==1.16.0"
""",
    "package-lock.json": """\
{"lockfileVersion": 3, "packages": {"": {"name": "shop"}, "node_modules/@a/b": {"version": "1.0.0"},
 "node_modules/x/node_modules/y": {"version": "2.0.0"},
 "packages/own": {"version": "1.0.0"},
 "node_modules/own": {"link": true},
 "node_modules/alias": {"name": "real", "version": "3.0.0"}}}""",
    "yarn.lock": """\
# yarn lockfile v1

"@a/b@^1.0.0", "@a/b@^1.1":
  version "1.1.0"
  resolved "https://x"
  dependencies:
    version "9"

__metadata:
  version: 8

"c@npm:^2":
  version: 2.0.0
  resolution: "real@npm:2.0.0"

"own@workspace:.":
  version: 0.0.0-use.local
""",
    "pnpm-lock.yaml": """\
lockfileVersion: '9.0'
importers:
  .:
    dependencies:
      a: {specifier: ^1, version: 1.0.0}
packages:
  '@a/b@1.0.0':
    resolution: {integrity: x}
    peers: [x, y]
  /old@2.0.0(peer@1.0.0):
    dev: true
  /older/3.0.0_peer@1.0.0: {}
snapshots:
  z@1.0.0: {}
""",
    "bun.lock": """\
{
  // of bun
  "packages": {
    "a": ["@s/a@1.0.0", "", {"u": "http://x,]"}, "sha",],
    "own": ["own@workspace:own"],
  },
}""",
    "package.json": """\
{"packageManager": "pnpm@9.1.0", "dependencies": {"a": "^1.0.0"}, "devDependencies": {"b": "2.0.0"}}""",
    "Cargo.lock": """\
version = 4

[[package]]
name = "shop"
version = "0.1.0"

[[package]]
name = "serde"
version = "1.0.200"
source = "registry+https://x"
""",
    "Cargo.toml": """\
[dependencies]
serde = "1.0.1"
alias = { package = "real", version = "1" }
own = { path = "own" }
[target.'cfg(unix)'.dependencies]
libc = "0.2"
""",
    "go.mod": """\
module example.org/shop

go 1.22

require example.org/a v1.2.3

require (
	example.org/b v0.1.0 // indirect
)
exclude example.org/c v1.0.0
""",
    "go.sum": """\
example.org/a v1.2.3 h1:x
example.org/d v1.0.0/go.mod h1:y
""",
    "Gemfile.lock": """\
PATH
  remote: .
  specs:
    own (0.1)

GEM
  remote: https://x
  specs:
    nokogiri (1.16.0-x86_64-linux)
      racc (~> 1.4)
    racc (1.7.3)

DEPENDENCIES
  nokogiri
""",
    "Gemfile": """\
source "https://x"
gem "rails", "~> 7.0"
  gem 'rake'
""",
}
# What is found there: the package manager, and names with versions.
EXPECTED: dict[str, tuple[str, dict[str, str | None]]] = {
    "uv.lock": ("uv", {"rich": "13.9.4"}),
    "poetry.lock": ("poetry", {"six": "1.16.0"}),
    "Pipfile.lock": ("pipenv", {"attrs": "23.1.0", "local": None}),
    "requirements.txt": ("pip", {"rich": "13.9.4", "httpx": None, "a": None, "d": None}),
    "pyproject.toml": ("poetry", {"Rich": None, "six": "1.16.0", "numpy": None, "pytest": None, "attrs": "23.1.0"}),
    "Pipfile": ("pipenv", {"requests": None, "six": "1.16.0"}),
    "package-lock.json": ("npm", {"@a/b": "1.0.0", "y": "2.0.0", "real": "3.0.0"}),
    "yarn.lock": ("yarn", {"@a/b": "1.1.0", "real": "2.0.0"}),
    "pnpm-lock.yaml": ("pnpm", {"@a/b": "1.0.0", "old": "2.0.0", "older": "3.0.0"}),
    "bun.lock": ("bun", {"@s/a": "1.0.0"}),
    "package.json": ("pnpm", {"a": None, "b": "2.0.0"}),
    "Cargo.lock": ("cargo", {"serde": "1.0.200"}),
    "Cargo.toml": ("cargo", {"serde": None, "real": None, "libc": None}),
    "go.mod": ("go", {"example.org/a": "v1.2.3", "example.org/b": "v0.1.0"}),
    "go.sum": ("go", {"example.org/a": "v1.2.3"}),
    "Gemfile.lock": ("bundler", {"nokogiri": "1.16.0", "racc": "1.7.3"}),
    "Gemfile": ("bundler", {"rails": None, "rake": None}),
}

Write = Callable[..., int]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Give a function that writes files into a folder, and returns the folder's descriptor."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

    def fill(**files: str | bytes) -> int:
        for name, data in files.items():
            (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
        return fd

    yield fill
    os.close(fd)


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_names_its_packages(name: str, write: Write) -> None:
    """A file gives names and pinned versions, its manager, and nothing of the workspace's own."""
    manager, expected = EXPECTED[name]
    notes: list[str] = []

    found = find_dependencies(write(**{name: FILES[name]}), notes=notes)

    assert {one.name: one.version for one in found} == expected
    assert {(one.manager, one.source) for one in found} == {(manager, name)}
    assert notes == []


def test_a_lock_file_is_believed_before_a_manifest(write: Write) -> None:
    """A manifest adds the names that no lock file has, by the same manager; Python's names have many spellings."""
    uv, pyproject = FILES["uv.lock"], FILES["pyproject.toml"]
    folder = write(**{"uv.lock": uv, "pyproject.toml": pyproject, "go.mod": FILES["go.mod"]})

    found = find_dependencies(folder)

    assert found[0].as_dict() == {
        "ecosystem": "python", "manager": "uv", "name": "rich", "version": "13.9.4", "source": "uv.lock",
    }  # fmt: skip
    assert [one.name for one in found if one.source == "pyproject.toml"] == ["six", "numpy", "pytest", "attrs"]
    assert [(one.manager, one.file, one.is_lock) for one in find_managers(folder)] == [
        ("uv", "uv.lock", True),
        ("uv", "pyproject.toml", False),
        ("go", "go.mod", True),
    ]


HOSTILE = {
    "many values": ("package-lock.json", b"[" + b"[]," * 4_000_000 + b"[]]", "more than 1000000 values"),
    "deep JSON": ("package-lock.json", b'{"a":' * 200_000, "nested too deeply"),
    "deep YAML": ("pnpm-lock.yaml", b"packages: " + b"[" * 200_000, "nested too deeply"),
    "billion laughs": ("pnpm-lock.yaml", b"a: &a [x, x]\nb: &b [*a, *a]\npackages: [*b, *b]\n", "anchors"),
    "deep TOML": ("pyproject.toml", b"a = " + b"[" * 200_000, "nested too deeply"),
    "dotted key": ("pyproject.toml", b".".join([b"a"] * 100_000) + b" = 1", "too many parts"),
    "keys below a long table": (
        "pyproject.toml", b"[" + b".".join([b"a"] * 500) + b"]\n" + b"".join(b"a%d=1\n" % n for n in range(20_000)),
        "too many parts",
    ),
    "large manifest": ("pyproject.toml", b"#" * (MOST_MANIFEST_BYTES + 1), f"more than {MOST_MANIFEST_BYTES} bytes"),
    "quotes": ("bun.lock", b'"' * 8_000_000, "texts"),
    "invalid UTF-8": ("package.json", b'{"dependencies": {"\xff": "1"}}', "codec can't decode"),
    "lone surrogate": ("package.json", b'{"dependencies": {"\\ud800": "1.0.0"}}', "1 entries with invalid names"),
    "not a mapping": ("package.json", b"[1]", "not a mapping"),
    "blanks": ("Gemfile", (b"gem" + b" " * 4000 + b"x\n") * 60, ""),
    "giant line": ("yarn.lock", b'"a' * 8_000_000, ""),
    "empty lines": ("uv.lock", b"\n" * 2_000_000, "more than 1000000 lines"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_costs_little_and_is_left_out(case: str, write: Write) -> None:
    """A file that grows when it is read, or is none of its kind, is left out with the reason, and others are read."""
    name, content, reason = HOSTILE[case]
    folder = write(**{name: content, "go.sum": FILES["go.sum"]})
    notes: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    found = find_dependencies(folder, notes=notes)

    assert [one.source for one in found] == ["go.sum"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert reason in "; ".join(notes)


def test_only_regular_files_of_the_folder_are_read(write: Write, tmp_path: Path) -> None:
    """A link, a FIFO, a folder and a file of a terabyte are left out at once, each with the reason."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_text(FILES["uv.lock"])
    folder = write(**{"go.sum": FILES["go.sum"]})
    (tmp_path / "uv.lock").symlink_to(outside)
    os.mkfifo(tmp_path / "poetry.lock")
    (tmp_path / "Cargo.lock").mkdir()
    with open(tmp_path / "yarn.lock", "wb") as sparse:
        os.truncate(sparse.fileno(), 1 << 40)
    assert "rich" in (tmp_path / "uv.lock").read_text()  # whoever follows the link finds it
    notes: list[str] = []

    found = find_dependencies(folder, notes=notes)

    assert [one.source for one in found] == ["go.sum"]
    assert notes == [
        "uv.lock: left out: a link",
        "poetry.lock: left out: not a regular file",
        f"yarn.lock: left out: it has more than {MOST_LOCK_BYTES} bytes",
        "Cargo.lock: left out: Is a directory",
    ]


def test_more_dependencies_than_are_listed_are_said(write: Write) -> None:
    """Ten thousand are listed, and that there are more is said."""
    packages = {f"node_modules/p{number}": {"version": "1.0.0"} for number in range(MOST_DEPENDENCIES + 1)}
    notes: list[str] = []

    found = find_dependencies(write(**{"package-lock.json": json.dumps({"packages": packages})}), notes=notes)

    assert len(found) == MOST_DEPENDENCIES
    assert notes == [f"package-lock.json: only the first {MOST_DEPENDENCIES} dependencies are listed"]
