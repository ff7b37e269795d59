"""Packages of npm: what is asked for, the operator's own registry, and a package-lock.json as a stranger's file."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloche.core.errors import InvalidRequest, PolicyDenied, StartFailed
from cloche.packages.lock import format_lock, read_lock
from cloche.packages.npm import Npm, npm_target, read_pins, resolve_step
from cloche.packages.registry import Registry, find_registry
from cloche.packages.requirements import parse_requirement, parse_requirements
from cloche.packages.resolve import Pin
from cloche.packages.rules import Rules
from cloche.packages.target import own_target

HASH = bytes(64)
INTEGRITY = f"sha512-{base64.b64encode(HASH).decode()}"
REGISTRY = Registry(url="https://a.example/npm", default="https://default.example")
URL = "https://a.example/npm/one/-/one-1.0.0.tgz"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("npm:lodash", "npm:lodash"),
        (" npm:lodash@4 ", "npm:lodash@4"),
        ("npm:lodash@latest", "npm:lodash@latest"),
        ("npm:@scope/a.b_c@^1.2.3", "npm:@scope/a.b_c@^1.2.3"),
        ("npm:a@>=1  <2 || 3.x", "npm:a@>=1 <2 || 3.x"),
        ("npm:a@1.2.3 - 2", "npm:a@1.2.3 - 2"),
        ("npm:a@~1.0.0-beta.1+build", "npm:a@~1.0.0-beta.1+build"),
        ("npm:a@*", "npm:a@*"),
    ],
)
def test_a_requirement_is_a_name_with_a_range(line: str, text: str) -> None:
    """Names keep their one spelling: `a.b` and `a-b` are two packages."""
    found = parse_requirement(line)
    assert (found.text, found.is_npm) == (text, True)
    assert text.startswith(found.name)
    assert parse_requirement(found.text) == found


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("npm:", "no name"),
        ("npm:@scope", "no name"),
        ("npm:.hidden", "no name"),
        ("npm:-g", "no name"),
        ("npm:a b", "no name"),
        ("npm:node_modules", "no name"),
        ("npm:../a", "a place"),
        ("npm:./a", "a place"),
        ("npm:owner/repository", "a place"),
        ("npm:file:../a", "a place"),
        ("npm:git@host.example:a/b.git", "a place"),
        ("npm:https://evil.example/a.tgz", "a place"),
        ("npm:a@https://evil.example/a.tgz", "a place"),
        ("npm:a@git+ssh://evil.example/a.git", "a place"),
        ("npm:a@github:owner/repository", "a place"),
        ("npm:a@owner/repository", "a place"),
        ("npm:a@file:../b", "a place"),
        ("npm:a@workspace:*", "a place"),
        ("npm:a@npm:b@1", "another package"),
        ("npm:a@next", "a tag"),
        ("npm:a@", "no range"),
        ("npm:a@>", "no range"),
        ("npm:a@1 ||", "no range"),
        ("npm:a@1; rm", "no range"),
        ("npm:a@${HOME}", "characters"),
        ("npm:a\n", None),
        ("npm:a\nb", "characters"),
        (f"npm:{'a' * 300}", "no name"),
    ],
)
def test_what_chooses_where_it_comes_from_is_refused(line: str, why: str | None) -> None:
    """An address, git, a path, an alias, a tag."""
    if why is None:
        assert parse_requirement(line).text == line.strip()
        return
    with pytest.raises(InvalidRequest, match=why) as refused:
        parse_requirement(line)
    assert "a requirement" in str(refused.value)


def test_rules_for_npm_begin_with_its_prefix() -> None:
    """A name of Python's says nothing of npm's, and a star alone is everything."""
    asked = parse_requirements(["npm:left-pad", "npm:@corp/a.b", "left-pad"])
    assert Rules(allow=("left-pad", "l*")).unlisted(asked) == ("npm:@corp/a.b", "npm:left-pad")
    assert Rules(allow=("npm:left-*", "npm:@corp/*")).unlisted(asked) == ("left-pad",)
    assert Rules(allow=("npm:@corp/a-b", "left-pad")).unlisted(asked) == ("npm:@corp/a.b", "npm:left-pad")
    assert Rules(allow=("*",)).unlisted(asked) == ()
    for pattern in ("npm:left-pad", "npm:*", "*"):
        with pytest.raises(PolicyDenied, match="npm:left-pad"):
            Rules(deny=(pattern,)).check_denied(["npm:left-pad"])
    Rules(deny=("left-pad",)).check_denied(["npm:left-pad"])


def _find(folder: Path, **environ: str) -> Registry:
    return find_registry(environ, home=str(folder / "home"), systems=(str(folder / "etc"),))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Return a folder with a home and a system."""
    (tmp_path / "home").mkdir()
    (tmp_path / "etc").mkdir()
    return tmp_path


def test_the_registry_is_that_of_the_operators_own_npm(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment before the user's file before the system's; the working directory says nothing."""
    work = host / "work"
    work.mkdir()
    (work / ".npmrc").write_text("registry=https://evil.example/\n")
    monkeypatch.chdir(work)
    assert (_find(host).url, _find(host, NPM_CONFIG_USERCONFIG=".npmrc").url) == ("", "")
    (host / "etc/npmrc").write_text('; all\nregistry = "https://system.example/npm/"\ncafile=/etc/ca.pem\n')
    assert (_find(host).url, _find(host).ca_file) == ("https://system.example/npm", "/etc/ca.pem")
    (host / "home/.npmrc").write_text(
        "registry=https://user.example:8443/  # mine\n@corp:registry=https://corp.example/x/\n"
    )
    found = _find(host)
    assert (found.url, found.scopes) == ("https://user.example:8443", (("@corp", "https://corp.example/x"),))
    assert found.hosts == ("user.example:8443", "corp.example:443")
    assert _find(host, npm_config_registry="http://10.0.0.5:4873").network_allow[0] == "10.0.0.5:4873"
    assert _find(host, NPM_CONFIG_REGISTRY="https://e.example").url == "https://e.example"
    with pytest.raises(InvalidRequest, match="not an address") as refused:
        _find(host, npm_config_registry="me:secret@a.example")
    assert "secret" not in str(refused.value)


def test_credentials_go_to_their_registry_and_are_shown_nowhere(host: Path) -> None:
    """Tokens, names with passwords, references to variables; the step has them in one file."""
    name = base64.b64encode(b"me:word").decode()
    (host / "home/.npmrc").write_text(
        "registry=https://a.example/npm/\n//a.example/:_authToken=wrong\n//a.example/npm/:_authToken=${TOKEN}\n"
        f"@corp:registry=https://b.example\n//b.example/:_auth={name}\n//c.example/:_authToken=others\n"
    )
    found = _find(host, TOKEN="s;cret")
    assert dict(found.credentials) == {"a.example:443": ("", "s;cret"), "b.example:443": ("me", "word")}
    step = resolve_step({"a": "*"}, Npm(argv=("npm",)), found, Rules(min_age_s=86400.0))
    (settings,) = [file.data.decode() for file in step.files if b"cret" in file.data]
    assert settings.splitlines() == [
        'registry="https://a.example/npm/"',
        '@corp:registry="https://b.example/"',
        '//a.example/npm/:_authToken="s;cret"',
        f'//b.example/:_auth="{name}"',
    ]
    assert "cret" not in f"{step!r}{step.argv}{step.env}{found!r}"
    assert "--ignore-scripts" in step.argv
    assert any(word.startswith("--before=") for word in step.argv)
    assert found.credentials.hide("with s;cret") == "with ****"


def _lock(at: str = "node_modules/one", more: dict[str, Any] | None = None, **fields: Any) -> str:
    package = {"version": "1.0.0", "resolved": URL, "integrity": INTEGRITY, **fields}
    return json.dumps({"lockfileVersion": 3, "packages": {"": {"name": "x"}, at: package, **(more or {})}})


def test_a_package_lock_is_read() -> None:
    """Places, aliases, and what is bundled; of what is for other hosts alone, nothing."""
    expected = Pin(name="npm:one", version="1.0.0", url=URL, sha512=HASH.hex(), at="one")
    assert read_pins(_lock(), REGISTRY) == (expected,)
    (aliased,) = read_pins(_lock("node_modules/@s/b/node_modules/other", name="one"), REGISTRY)
    assert (aliased.name, aliased.at) == ("npm:one", "@s/b/node_modules/other")
    elsewhere = {"version": "1.0.0", "optional": True, "os": ["darwin"]}
    others: dict[str, Any] = {
        "node_modules/mac": elsewhere,
        "node_modules/odd": {**elsewhere, "os": ["!linux"]},
        "node_modules/one/node_modules/bundled": {"inBundle": True, "version": "1"},
    }
    assert read_pins(_lock(more=others, os=["linux", "darwin"], cpu=["!mips"]), REGISTRY) == (expected,)
    mirrored = _lock(resolved="https://default.example/one/-/one-1.0.0.tgz")
    assert read_pins(mirrored, REGISTRY) == (expected,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_lock(resolved="https://evil.example/one.tgz"), "not a host of the registry"),
        (_lock(resolved="https://a.example:444/one.tgz"), "not a host of the registry"),
        (_lock(resolved="http://a.example/one.tgz"), "not a host of the registry"),
        (_lock(resolved="https://me:word@a.example/one.tgz"), "has no https address"),
        (_lock(resolved="git+ssh://git@a.example/one.git#1"), "has no https address"),
        (_lock(resolved="file:../one"), "has no https address"),
        (_lock(resolved=None), "no address"),
        (_lock(integrity="sha1-AAAA"), "no hash"),
        (_lock(integrity="sha512-AAAA"), "no hash"),
        (_lock(integrity="sha512-%%"), "no hash"),
        (_lock(integrity=""), "no hash"),
        (_lock(link=True), "a link"),
        (_lock("node_modules/../one"), "not a place|not a name"),
        (_lock("node_modules/.bin"), "not a place|not a name"),
        (_lock("node_modules/one/node_modules/../../two", name="one"), "not a place"),
        (_lock("/node_modules/one", name="one"), "not a place"),
        (_lock("packages/one", name="one"), "not a place"),
        (_lock("node_modules/node_modules", name="one"), "not a place"),
        (_lock(name="../one"), "not a name"),
        (_lock(version="1.0.0\nx"), "no version"),
        (_lock(version=""), "no version"),
        ("[]", "cannot be used"),
        ("{}", "cannot be used"),
        ('{"packages": {"a": 1}}', "cannot be used"),
        ("[" * 100_000, "cannot be used"),
    ],
)
def test_a_package_lock_that_is_not_as_it_should_be_is_refused(text: str, why: str) -> None:
    """Nothing of it is downloaded."""
    with pytest.raises(StartFailed, match=why):
        read_pins(text, REGISTRY)


def test_a_package_that_is_needed_and_not_for_this_host_is_told() -> None:
    """Where npm itself would end, too."""
    with pytest.raises(InvalidRequest, match="npm:one is only for os darwin"):
        read_pins(_lock(os=["darwin"]), REGISTRY)


def test_a_lock_file_holds_packages_of_both_kinds(tmp_path: Path) -> None:
    """Each part by itself; one of npm's alone is for any version of Python."""
    asked, file = parse_requirements(["npm:one@1", "six"]), tmp_path / "cloche.lock"
    pins = read_pins(_lock(), REGISTRY)
    python = Pin(name="six", version="1", url="https://a.example/six-1-py3-none-any.whl", sha256="0" * 64)
    file.write_text(format_lock(asked, (*pins, python), own_target()))
    locked = read_lock(str(file))
    assert {pin.identity for pin in locked.pins} == {pin.identity for pin in (*pins, python)}
    assert [pin.name for pin in locked.part(is_npm=False).pins] == ["six"]
    assert locked.part(is_npm=True).pins == tuple(replace(pin, url="") for pin in pins)
    with pytest.raises(InvalidRequest, match="only in it: six"):
        locked.check(asked[:1], own_target())
    file.write_text(format_lock(asked[:1], pins, own_target()).replace(own_target().tag, "cpython-39"))
    read_lock(str(file)).check(asked[:1], own_target())
    assert npm_target().tag == "npm"
