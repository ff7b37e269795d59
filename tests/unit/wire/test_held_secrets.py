"""The folder with an operator's secrets, and what a caller may say of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import cloche
from cloche.core.errors import InvalidRequest
from cloche.core.secrets import Secret
from cloche.wire.secrets import SecretFolder

VALUE = "sk-proj-RealValue0123456789abcdefXYZ"
TABLE = """
WITH_HOSTS: {hosts: [a.example], projects: [mine]}
FROM_ENV: {env: THE_VARIABLE, hosts: [b.example], format: "Key {}", foreign: allow}
FROM_COMMAND: {command: gh auth token, hosts: [c.example]}
ELSEWHERE: {file: /run/value, hosts: [d.example]}
BROKEN: {}
"""


def held(folder: Path, project: str, *names: str) -> dict[str, Secret]:
    """Return secrets of a folder."""
    return asyncio.run(SecretFolder(str(folder), by="this node").of(project, names))


def test_a_folder_holds_files_and_what_its_table_names(tmp_path: Path) -> None:
    """A known provider's file needs no row; a file that a mounted Secret has beside it is none of them."""
    for name in ("OPENAI_API_KEY", "WITH_HOSTS", "..data"):
        (tmp_path / name).write_text(VALUE)
    (tmp_path / "secrets.yaml").write_text(TABLE)
    names = ("OPENAI_API_KEY", "WITH_HOSTS", "FROM_ENV", "FROM_COMMAND", "ELSEWHERE")
    assert held(tmp_path, "mine", *names) == {
        "OPENAI_API_KEY": Secret(file=f"{tmp_path}/OPENAI_API_KEY", hosts=["api.openai.com"]),
        "WITH_HOSTS": Secret(file=f"{tmp_path}/WITH_HOSTS", hosts=["a.example"]),
        "FROM_ENV": Secret(env="THE_VARIABLE", hosts=["b.example"], format="Key {}", foreign="allow"),
        "FROM_COMMAND": Secret(command="gh auth token", hosts=["c.example"]),
        "ELSEWHERE": Secret(file="/run/value", hosts=["d.example"]),
    }
    errors = []
    for name in ("WITH_HOSTS", "UNKNOWN"):
        with pytest.raises(InvalidRequest) as caught:
            held(tmp_path, "other", name)
        errors.append(str(caught.value).replace(name, "IT"))
    assert (
        errors[0]
        == errors[1]
        == ("secrets: this node holds no secret IT for this caller; ask its operator, who holds them in secrets_from")
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            "KEY: {value: abc}",
            "it takes file, env, command, hosts, format, foreign, places, files_inside, projects; a value",
        ),
        ("KEY: {}", "KEY: secrets: KEY needs hosts: it is not the name of a known provider's secret"),
        ("KEY: {env: A, command: b, hosts: [a.example]}", "env and command are given; give one source"),
        ("KEY: {hosts: a.example}", "hosts must be a list"),
        ("PATH: {hosts: [a.example]}", "PATH: this is not the name of a variable"),
        ("[KEY]", r"write NAME: \{hosts: \[api.example.com\]\} for each secret"),
        ("KEY: {hosts: ['*.example']}", "is not the name of a host"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path: Path, table: str, words: str) -> None:
    """At the start of a server, and at each use."""
    (tmp_path / "secrets.yaml").write_text(table)
    with pytest.raises(InvalidRequest, match=words):
        SecretFolder(str(tmp_path), by="this node").read()


@pytest.mark.parametrize("backend", ["cloche", "ray", "kubernetes"])
def test_a_callers_own_values_and_hosts_are_refused_before_anything_is_sent(backend: str) -> None:
    """The error names who holds them and has nothing of a value; there is no account here that could be asked."""
    wrong = [{"KEY": Secret(value=VALUE)}, {"KEY": Secret(hosts=["a.example"])}, ["KEY@a.example"], ["KEY=env:HOME"]]
    for secrets in (*wrong, [VALUE], VALUE):
        with pytest.raises(InvalidRequest, match=r"takes (names alone|a list of names)") as caught:
            cloche.run("1", backend=backend, secrets=secrets)  # type: ignore[arg-type]
        assert "RealValue" not in str(caught.value)
    with pytest.raises(InvalidRequest, match="a name is given twice"):
        cloche.run("1", backend=backend, secrets=["KEY", "KEY"])
    with pytest.raises(InvalidRequest, match="with network 'off' no host is reached"):
        cloche.run("1", backend=backend, secrets=["KEY"], network="off")
