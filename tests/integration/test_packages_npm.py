"""Packages of npm from a local registry: Node and TypeScript find them, no script of theirs runs, hostile ones end.

Egress never reaches loopback, where this registry is, so the steps that download run without a jail here
(`downloads_outside`); those that unpack, and the programs, run in one.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import cloche
from cloche.backends import toolchain
from cloche.backends.local import plan
from cloche.cli.app import root
from cloche.core.errors import BackendUnavailable, InvalidRequest, PolicyDenied, StartFailed
from cloche.core.languages import LANGUAGES
from cloche.core.policy import Policy
from cloche.execution.packages import check_backend
from cloche.execution.prepare import prepare
from cloche.packages.requirements import parse_requirements
from cloche.packages.store import Store
from cloche.testing.fake import FakeBackend
from tests.harness.npm import NpmRegistry, serving_npm
from tests.harness.packages import serving_packages

pytestmark = pytest.mark.usefixtures("settings_of_nobody", "downloads_outside")
TOOLCHAINS = Path(__file__).parents[2] / ".toolchains" / "bin"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NpmRegistry]:
    """Serve a registry, which this user's environment names, and give an empty store."""
    for name in [name for name in os.environ if name.lower().startswith("npm_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(tmp_path / "npmrc"))
    with serving_npm() as served:
        (tmp_path / "npmrc").write_text(f"registry={served.url}/\n")
        yield served


MODULE = """
import { createRequire } from "node:module";
import { execSync } from "node:child_process";
import { appendFileSync } from "node:fs";
import x from "@corp/x";
import above from "above";
const require = createRequire(import.meta.url);
let why = "it can be written to";
try { appendFileSync(require.resolve("below"), "x"); } catch (error) { why = error.code; }
console.log(JSON.stringify([x, above, require("below"), execSync("say-above").toString(), why]));
"""


def _add_three(registry: NpmRegistry) -> None:
    """Add packages that need two versions of a third one, one with a command that was written on Windows."""
    registry.add("below", "1.5.0")
    registry.add("below", "2.0.0")
    command = "#!/usr/bin/env node\r\nconsole.log('said')\n"
    files = {"index.js": "module.exports = require('below');\n", "cli.js": command}
    registry.add("above", "1.2.0", files, dependencies={"below": "^1"}, bin={"say-above": "cli.js"})
    registry.add("@corp/x", files={"m.mjs": "export default 5;"}, exports="./m.mjs")


@pytest.mark.both_users
def test_packages_are_there_with_what_they_need_and_can_only_be_read(registry: NpmRegistry) -> None:
    """For import and for require, each with its own version of a third one; commands are on PATH."""
    _add_three(registry)
    result = cloche.run(MODULE, language="javascript", packages=["above@1", "npm:@corp/x", "below@latest"])
    assert result.ok, result.stderr
    assert json.loads(result.stdout)[:4] == [5, ["below", "1.5.0"], ["below", "2.0.0"], "said\n"]
    assert json.loads(result.stdout)[4] in {"EROFS", "EACCES"}
    assert result.meta["packages"] == [
        "npm:@corp/x@1.0.0", "npm:above@1.2.0", "npm:below@1.5.0", "npm:below@2.0.0",
    ]  # fmt: skip
    before = len(registry.asked)
    packages = ["below@latest", "above@1", "@corp/x"]
    again = cloche.run('require("below"); console.log("here")', language="js", packages=packages)
    assert (again.stdout, len(registry.asked)) == ("here\n", before)


@pytest.mark.parametrize("level", ["confined", "process"])
def test_they_are_there_below_level_jail(registry: NpmRegistry, level: str) -> None:
    """By a link beside the workspace."""
    _add_three(registry)
    result = cloche.run("import x from '@corp/x'; console.log(x)", language="js", packages=["@corp/x"], level=level)
    assert result.stdout == "5\n", result.stderr


@pytest.mark.toolchain
@pytest.mark.parametrize("engine", ["deno", "tsx"])
def test_typescript_finds_them(registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """By either of its engines, in a module with types."""
    _add_three(registry)
    if TOOLCHAINS.is_dir():  # where this checkout has them; an installed suite has them on PATH
        monkeypatch.setenv(toolchain.FOLDERS_VARIABLE, str(TOOLCHAINS))
    language = LANGUAGES["typescript"]
    chosen = replace(language, engines=tuple(one for one in language.engines if one.name == engine))
    monkeypatch.setattr(plan, "language_named", lambda name: {**LANGUAGES, language.name: chosen}[name])
    code = 'import x from "@corp/x";\nimport above from "above";\nconst n: number = x;\nconsole.log(n, above[1]);'
    result = cloche.run(code, language="typescript", packages=["@corp/x", "above"])
    assert (result.stdout, result.meta["runtime"].partition(" ")[0]) == ("5 1.5.0\n", engine), result.stderr


def test_python_and_npm_have_a_layer_each(
    registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one list, one live sandbox, one lock file; a plain name in a list for any program is Python's."""
    registry.add("two")
    lock = tmp_path / "cloche.lock"
    with serving_packages() as index:
        index.add("one")
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url)
        with cloche.Sandbox(packages=["one", "npm:two"]) as sandbox:
            assert sandbox.run("import one; one.NAME").value == "one"
            assert sandbox.run('console.log(require("two")[0])', language="javascript").stdout == "two\n"
            with sandbox.session(language="javascript") as session:
                assert session.run('require("two")[0]').value == "two"
            with pytest.raises(InvalidRequest, match=r"when it is opened: Sandbox\(packages=\['npm:two'\]\)"):
                sandbox.install("npm:two")
        assert len(Store().layers()) == 2
        options = ["packages", "lock", "one", "npm:two", "--output", str(lock)]
        with pytest.raises(SystemExit) as ended:
            root(options)
        assert not ended.value.code
        registry.add("two", "2.0.0")
        code = 'console.log(require("two")[1])'
        with cloche.Sandbox(packages=["one", "npm:two"], locked=str(lock)) as sandbox:
            assert sandbox.run(code, language="javascript").stdout == "1.0.0\n"
        config = tmp_path / "owner.yaml"
        config.write_text("sandbox: {packages: [one]}")
        monkeypatch.setenv("CLOCHE_CONFIG", str(config))
        assert cloche.run("1", language="javascript").meta["packages"] == ["one==1.0"]


def test_a_lock_file_brings_nothing_that_was_not_asked_for(
    registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What nothing needs, a version that its parent does not take, another hash, and one that is too young; a mirror
    does as well as the registry.
    """
    registry.add("one", dependencies={"below": "^1.0.0"})
    for version in ("1.0.0", "2.0.0"):
        registry.add("below", version)
    registry.add("two", dependencies={"below": "^2.0.0"})
    registry.add("evil")
    lock = tmp_path / "cloche.lock"
    with pytest.raises(SystemExit) as ended:
        root(["packages", "lock", "npm:one", "npm:two", "--output", str(lock)])
    assert not ended.value.code
    text = lock.read_text()
    assert registry.url.partition("//")[2] not in text
    code = 'console.log(require("one")[1], require("below")[1])'

    def run() -> str:
        return cloche.run(code, language="javascript", packages=["one", "two"], locked=lock).stdout

    rows = text.split("[[packages]]")
    nested = next(row for row in rows if 'node_modules/below"' in row)
    below = next(row for row in rows if 'at = "below"' in row)
    evil = below.replace("below", "evil").replace('version = "2.0.0"', 'version = "1.0.0"')
    wrong = {"1.0.0": "2.0.0", "2.0.0": "1.0.0"}
    at = below.partition('version = "')[2][:5]
    for changed, why in (
        (f"{text}\n[[packages]]{evil}", r"pins npm:evil@1\.0\.0, which no requested package needs"),
        (text.replace(nested, nested.replace(wrong[at], at)), r"is not valid: .*invalid: below@"),
        (text.replace(below, re.sub(r'sha512 = "..', 'sha512 = "00', below)), "no file of"),
        (text.replace(below, below.replace(at, "https://evil.example")), "has no version"),
    ):
        assert changed != text
        lock.write_text(changed)
        with pytest.raises((InvalidRequest, StartFailed), match=why):
            run()
    lock.write_text(text)
    with serving_npm() as mirror:
        for name in ("descriptions", "times", "tarballs"):
            setattr(mirror, name, getattr(registry, name))
        monkeypatch.setenv("npm_config_registry", mirror.url)
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "elsewhere"))
        assert run() == f"1.0.0 {at}\n"
        assert len(mirror.downloads()) == 4
        mirror.times["below"]["2.0.0"] = "2999-01-01T00:00:00.000Z"
        config = tmp_path / "owner.yaml"
        config.write_text("sandbox: {packages_min_age: 7d}")
        monkeypatch.setenv("CLOCHE_CONFIG", str(config))
        with pytest.raises(InvalidRequest, match=r"below@2\.0\.0 with a date before"):
            run()


def test_no_script_of_a_package_runs(registry: NpmRegistry, tmp_path: Path) -> None:
    """Neither here nor in a sandbox: the package has what was packed, and nothing more."""
    mark = f"touch {tmp_path}/ran; touch /tmp/ran; echo 'module.exports = 2' > index.js"
    scripts = dict.fromkeys(("preinstall", "install", "postinstall", "prepare"), mark)
    registry.add("one", files={"index.js": "module.exports = 1\n", "binding.gyp": "{}"}, scripts=scripts)
    result = cloche.run('console.log(require("one"))', language="javascript", packages=["one"])
    assert (result.stdout, (tmp_path / "ran").exists()) == ("1\n", False), result.stderr


def test_a_tarball_with_another_hash_than_the_listed_one_is_not_kept(registry: NpmRegistry) -> None:
    """What the registry sends is compared before anything opens it."""
    path = registry.add("one")
    registry.sent[path] = registry.tarballs[registry.add("other")]
    with pytest.raises(StartFailed, match="has the hash"):
        cloche.run("1", packages=["npm:one"])
    store = Store()
    assert (store.layers(), os.listdir(f"{store.folder}/making")) == ([], [])


def test_a_tarball_on_a_host_that_nobody_named_is_not_fetched(registry: NpmRegistry) -> None:
    """The registry may say so; the operator did not."""
    registry.add("one")
    registry.files_at = "https://files.example"
    with pytest.raises(StartFailed, match="packages_hosts"):
        cloche.run("1", packages=["npm:one"])
    assert registry.downloads() == []


def test_a_token_is_with_the_downloads_alone(registry: NpmRegistry, tmp_path: Path) -> None:
    """The registry gets it; the program and the store have nothing of it."""
    registry.token = "hunter2"
    registry.add("one")
    with open(tmp_path / "npmrc", "a") as file:
        file.write(f"{registry.url.removeprefix('http:')}/:_authToken=hunter2\n")
    code = 'console.log(JSON.stringify([process.env, require("one")]))'
    result = cloche.run(code, language="javascript", packages=["one"])
    assert result.ok, result.stderr
    assert "hunter2" not in f"{result.stdout}{result.meta}"
    folder = Path(os.environ["XDG_DATA_HOME"])
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert registry.downloads()


def test_the_operator_says_which_and_how_old(
    registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Denied also below another one, whatever it is called there; a release that is too young does not count."""
    registry.add("bad")
    registry.add("one", dependencies={"good": "npm:bad@1"})
    registry.add("two", "1.0.0")
    registry.add("two", "1.1.0", time="2999-01-01T00:00:00.000Z")
    config = tmp_path / "owner.yaml"
    config.write_text("sandbox: {packages_deny: ['npm:bad'], packages_allow: ['npm:*', one], packages_min_age: 1d}")
    monkeypatch.setenv("CLOCHE_CONFIG", str(config))
    with pytest.raises(PolicyDenied, match="npm:bad may not be installed"):
        cloche.run("1", packages=["npm:one"])
    with pytest.raises(PolicyDenied, match="two is not among those"):
        cloche.run("1", packages=["two"])
    assert cloche.run('console.log(require("two")[1])', language="js", packages=["two"]).stdout == "1.0.0\n"


def test_what_cannot_be_resolved_is_told_in_the_words_of_npm(
    registry: NpmRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any code ran; and where there is no npm, what brings it."""
    registry.add("one")
    with pytest.raises(InvalidRequest, match=r"No matching version found for one@2"):
        cloche.run("1", packages=["npm:one@2"])
    with pytest.raises(InvalidRequest, match="nowhere"):
        cloche.run("1", packages=["npm:nowhere"])
    monkeypatch.setattr(toolchain, "default_search_path", lambda: ())
    with pytest.raises(BackendUnavailable, match=r"resolved by npm, and .* missing.*apt-get install npm"):
        cloche.run("1", packages=["npm:one@>=1"])


def test_backends_that_show_no_packages_of_npm_say_so() -> None:
    """Also those that show layers of Python's."""

    class ShowsLayers(FakeBackend):
        def check_layers(self, policy: Policy) -> None:
            """Do nothing."""

    prepared = prepare(backend=ShowsLayers())
    check_backend(prepared, parse_requirements(["six"]))
    with pytest.raises(BackendUnavailable, match="packages of npm"):
        check_backend(prepared, parse_requirements(["npm:six"]))


def _entry(name: str, kind: bytes = tarfile.REGTYPE, to: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, to, size
    return entry


HOSTILE = {
    "up": (_entry("package/../../../outside"), "leads out"),
    "into another package": (_entry("package/../other/index.js"), "leads out"),
    "absolute": (_entry("/tmp/outside"), "leads out"),
    "backslashes": (_entry("package/..\\outside"), "leads out"),
    "a link": (_entry("package/link", tarfile.SYMTYPE, "/etc/passwd"), "not a regular file"),
    "a hard link": (_entry("package/link", tarfile.LNKTYPE, "package/index.js"), "not a regular file"),
    "a device": (_entry("package/null", tarfile.CHRTYPE), "not a regular file"),
    "a pipe": (_entry("package/pipe", tarfile.FIFOTYPE), "not a regular file"),
    "a name that is too long": (_entry(f"package/{'a' * 300}"), "too long"),
    "folders without end": (_entry(f"package/{'a/' * 100}b"), "parts"),
    "a folder that is a file": (_entry("package/index.js/b"), "cannot write"),
}  # fmt: skip


# tests/unit/packages/test_unpack_tarballs.py and test_frames.py show that each is refused.
WHOLE = ("up", "a folder that is a file")


@pytest.mark.parametrize("what", [pytest.param(w, marks=[pytest.mark.soak] * (w not in WHOLE)) for w in HOSTILE])
def test_a_hostile_tarball_ends_before_anything_is_used(registry: NpmRegistry, what: str) -> None:
    """Nothing is written elsewhere, and nothing stays."""
    entry, why = HOSTILE[what]
    registry.add("one", odd=[(entry, b"")])
    with pytest.raises(StartFailed, match=why):
        cloche.run("1", packages=["npm:one"])
    store = Store()
    assert (store.layers(), os.listdir(f"{store.folder}/making")) == ([], [])
    assert not os.path.exists("/tmp/outside")


def test_commands_lead_nowhere_else(registry: NpmRegistry) -> None:
    """One that is outside of its package, or has the name of a path, is none; no name is read by a shell."""
    odd = "x'; touch made; '.js"
    files = {"index.js": "", odd: "#!/bin/sh\necho odd\n"}
    commands = {"up": "../other.js", "root": "/bin/sh", "../bin": "index.js", "none": "none.js", "odd": odd}
    registry.add("one", files=files, bin=commands)
    code = 'ls "$(dirname "$(command -v odd)")"; odd; ls'
    result = cloche.run(code, language="bash", packages=["npm:one"])
    assert result.stdout == "odd\nodd\n", result.stderr
