"""The default index and registry: what the installed clients say of themselves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cloche.core.enforcement import Level
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.policy import Policy
from cloche.core.result import Result, Status
from cloche.execution.registry import npm_programs
from cloche.packages import defaults
from cloche.packages.index import Index
from cloche.packages.npm import Npm
from cloche.packages.registry import Registry
from cloche.packages.steps import Done, Step

DEFAULT = "https://default.example/simple"
LISTED = ("a.files.example:443", "b.files.example:443")


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test asked, no other has."""
    monkeypatch.setattr(defaults, "_listed", {})
    for asked in (defaults.default_index, defaults.default_registry):
        asked.cache_clear()
        monkeypatch.setattr(defaults, asked.__name__, asked.__wrapped__)


def _client(folder: Path, says: str) -> str:
    path = folder / "client"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Have an index that lists two hosts, whoever asks; return what was asked."""
    steps: list[Step] = []

    async def run_step(_backend: object, _policy: Policy, step: Step, **_more: Any) -> Done:
        steps.append(step)
        return _said('["a.files.example", "B.files.example"]\n')

    monkeypatch.setattr(defaults, "run_step", run_step)
    monkeypatch.setattr(defaults, "default_index", lambda: DEFAULT)
    monkeypatch.setattr(defaults, "find_index", lambda *, default: Index(url=default))
    return steps


def _said(text: str) -> Done:
    return Done(result=Result(status=Status.OK, exit_code=0, stdout=text, stderr="", duration=0.1))


def _complete(index: Index) -> Index:
    backend: Any = None
    return asyncio.run(defaults.with_default_index(backend, Policy(level=Level.JAIL), index, "some"))


def test_the_clients_name_their_own_whatever_is_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither variables nor a file of the working directory has a say."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "npm_config_registry", "NPM_CONFIG_REGISTRY"):
        monkeypatch.setenv(name, "https://evil.example/simple")
    (tmp_path / ".npmrc").write_text("registry=https://evil.example/\n")
    monkeypatch.chdir(tmp_path)
    programs, _ = npm_programs()
    npm = Npm(argv=(programs["node"], programs["npm"]))
    for found in (defaults.default_index(), defaults.default_registry(npm)):
        assert found.startswith("https://")
        assert "evil" not in found


@pytest.mark.parametrize("says", ["", "https://a.example\nhttps://b.example", "--default-index <DEFAULT_INDEX> one"])
def test_a_client_that_names_none_is_an_error(says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to do."""
    client = _client(tmp_path, says)
    monkeypatch.setattr(defaults, "find_uv", lambda: client)
    with pytest.raises(BackendUnavailable, match="UV_DEFAULT_INDEX"):
        defaults.default_index()
    with pytest.raises(BackendUnavailable, match="registry=") as refused:
        defaults.default_registry(Npm(argv=(client,)))
    Path(client).unlink()
    with pytest.raises(BackendUnavailable, match="does not report its default"):
        defaults.default_registry(Npm(argv=(client,)))
    assert refused.value.remedy


def test_the_default_index_says_where_its_files_are(asked: list[Step]) -> None:
    """It is asked once; its hosts may have public addresses alone."""
    found = _complete(Index(file_hosts=("named.example:443",)))
    assert (found.url, found.listed_hosts) == (DEFAULT, LISTED)
    assert found.file_hosts == ("named.example:443",)
    assert _complete(Index(url=DEFAULT)).listed_hosts == LISTED
    (step,) = asked
    assert b'"https://default.example/simple/some/"' in step.stdin
    assert [rule.partition("@")[0] for rule in step.network_allow] == ["default.example:443", "named.example:443"]


def test_no_other_index_is_asked(asked: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who configured one names its hosts; that goes without uv, too."""
    own = Index(url="https://own.example/simple")
    assert _complete(own) == own

    def no_uv() -> str:
        raise BackendUnavailable("no uv")

    monkeypatch.setattr(defaults, "default_index", no_uv)
    assert _complete(own) == own
    with pytest.raises(BackendUnavailable, match="no uv"):
        _complete(Index())
    assert not asked


@pytest.mark.parametrize(
    "said",
    ["", "{}", '["a.example"', "[1]", '["*.example"]', '["10.0.0.1"]', '["[::1]"]', '["localhost"]', '["a.b@::/0"]',
     '["a.example:22"]', '["a.b\\n"]', '["a.b","c.b","d.b","e.b","f.b"]', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_short_list_of_names_is_refused(
    said: str, asked: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it becomes a rule of a network."""

    async def run_step(*_: object) -> Done:
        return _said(said)

    monkeypatch.setattr(defaults, "run_step", run_step)
    with pytest.raises(StartFailed, match="cannot be used"):
        _complete(Index())
    assert not asked


def test_a_registry_has_npms_default_beside_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is listed to be there is at the own one."""
    npm = Npm(argv=(_client(tmp_path, "https://default.example/"),))
    own = asyncio.run(defaults.with_default_registry(Registry(url="https://own.example"), npm))
    assert (own.url, own.default) == ("https://own.example", "https://default.example")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".npmrc").write_text("//default.example/:_authToken=word\n")
    for name in ("npm_config_registry", "NPM_CONFIG_REGISTRY", "NPM_CONFIG_USERCONFIG", "npm_config_userconfig"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("cloche.packages.registry.SYSTEM_FOLDERS", ())
    found = asyncio.run(defaults.with_default_registry(Registry(file_hosts=("f.example:443",)), npm))
    assert (found.url, found.file_hosts) == ("https://default.example", ("f.example:443",))
    assert dict(found.credentials) == {"default.example:443": ("", "word")}
