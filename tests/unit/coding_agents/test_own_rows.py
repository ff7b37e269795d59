"""Rows of the user's own change the table or add to it; a project's file cannot, and a wrong one names its field."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cloche.coding_agents.own_rows import _FIELDS, _LOGIN, _PACKAGE, agent_named, known_agents, read_row
from cloche.coding_agents.plan import AgentOptions, Program, command, environment
from cloche.coding_agents.row import CodingAgent, Login, Package
from cloche.coding_agents.table import TABLE
from cloche.config.readers import parse_hosts
from cloche.core.errors import InvalidRequest
from cloche.core.limits import GIB
from cloche.core.secrets import read_secrets

OWN = """
agents:
  claude:
    env: {ANTHROPIC_MODEL: opus, DISABLE_TELEMETRY: 1}
    memory: 4g
  mine:
    program: my-agent
    package: {registry: npm, name: "@me/agent", scripts: ["@me/agent"]}
    hosts: [api.example.com]
    secrets: ["MY_KEY@api.example.com"]
    first_files: {.mine/settings.json: "{}"}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the user's folder of configuration, outside of the project."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/cloche").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "config/cloche/cloche.yaml"


def test_a_row_of_the_users_own(config: Path) -> None:
    """One of the table keeps the fields that are not named; another name is a new agent."""
    config.write_text(OWN)
    claude, mine = agent_named("claude"), agent_named("mine")
    assert (claude.env, claude.memory_bytes) == ({"ANTHROPIC_MODEL": "opus", "DISABLE_TELEMETRY": "1"}, 4 * GIB)
    assert (claude.package, claude.secrets) == (TABLE["claude"].package, TABLE["claude"].secrets)
    assert mine.package == Package(registry="npm", name="@me/agent", scripts=("@me/agent",))
    assert (mine.title, mine.hosts, mine.for_prompt) == ("mine", ("api.example.com",), ("{prompt}",))
    assert [*known_agents()] == [*TABLE, "mine"]


def test_a_file_of_the_project_cannot_have_one(config: Path) -> None:
    """It came with a checkout: nothing starts until the key is gone."""
    Path("cloche.yaml").write_text("agents: {claude: {program: evil}}\n")
    with pytest.raises(InvalidRequest, match=r"project/cloche\.yaml.*agents"):
        agent_named("claude")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "mine.program is missing"),
        ({"program": "/bin/x"}, "mine.program: '/bin/x' must be the name of a program"),
        ({"program": "x", "hosst": []}, "mine: unknown field 'hosst'; did you mean 'hosts'"),
        ({"program": "x", "hosts": ["a b"]}, "mine.hosts"),
        ({"program": "x", "env": {"A-B": "1"}}, "mine.env: 'A-B' is not the name of a variable"),
        ({"program": "x", "arguments": "--all"}, "mine.arguments: it must be a list"),
        ({"program": "x", "shown": ["../.ssh"]}, r"mine.shown\[0\]: '../.ssh' must be a path below"),
        ({"program": "x", "first_files": {"/etc/x": "y"}}, "mine.first_files: '/etc/x' must be a path below"),
        ({"program": "x", "package": {"registry": "cargo", "name": "x"}}, "mine.package.registry: it must be npm or"),
        ({"program": "x", "package": {"registry": "npm"}}, "mine.package.name is missing"),
        ({"program": "x", "memory": "much"}, "mine.memory: 'much' is not a size"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], message: str) -> None:
    """With the place of the row before it."""
    with pytest.raises(InvalidRequest, match=f"^file: agents.{message}"):
        read_row("mine", fields, where="file: agents.mine")


def test_a_row_has_every_field_of_the_table() -> None:
    """What the table can say, the user can."""
    for readers, kind in ((_FIELDS, CodingAgent), (_PACKAGE, Package), (_LOGIN, Login)):
        own = {spec.name for spec in dataclasses.fields(kind)} - ({"name"} if kind is CodingAgent else set())
        assert {field for field, _ in readers.values()} == own


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_rows_of_the_table_are_whole(row: CodingAgent) -> None:
    """Hosts and secrets can be read, first files of JSON are JSON, every path is below the home, words are filled."""
    parse_hosts([*row.hosts, *row.telemetry], name="hosts")
    read_secrets(list(row.secrets))
    files = [row.first_files, *row.key_files.values()]
    for path, text in [pair for texts in files for pair in texts.items()]:
        assert not path.endswith(".json") or json.loads(text)
    paths = [*row.shown, *row.copied, *row.state_to_review, *(path for texts in files for path in texts)]
    assert not [path for path in paths if path.startswith(("/", "~")) or ".." in path]
    assert set(row.key_files) <= {name.partition("@")[0] for name in row.secrets}
    assert not set(row.hosts) & set(row.telemetry)
    assert any("{prompt}" in word for word in row.for_prompt)
    options = AgentOptions(prompt="a {b}")
    words = command(row, Program(words=("/x",)), options, home="/h", project='/p/"q')
    assert "a {b}" in words
    assert not re.search(r"\{(project|home)\}", " ".join(words))


def test_the_row_of_the_documents_is_one() -> None:
    """With its login, whose ports are numbers."""
    text = (Path(__file__).parents[3] / "docs" / "coding-agents.md").read_text()
    rows = yaml.safe_load(text.partition("```yaml\nagents:\n")[2].partition("```")[0])
    read = {name: read_row(name, fields, where=name) for name, fields in rows.items()}
    assert read["mine"].login is not None
    assert read["mine"].login.callback_ports == (1455,)


def test_the_choice_of_a_model_is_passed_on_and_no_secret() -> None:
    """What the row names of the user's variables comes inside as it is; nothing else of them."""
    row = TABLE["openhands"]
    theirs = {"LLM_MODEL": "gpt-5", "LLM_API_KEY": "sk-0123456789", "OTHER": "x"}
    inside = environment(row, Program(words=("x",)), "/home/you", "/project", "/bin", theirs)
    assert {name: value for name, value in inside.items() if name in theirs} == {"LLM_MODEL": "gpt-5"}
    secrets = {name.partition("@")[0] for one in TABLE.values() for name in one.secrets}
    assert not secrets & {name for one in TABLE.values() for name in one.passed}


def test_a_wrong_file_of_a_project_is_told_in_one_line(tmp_path: Path) -> None:
    """Nothing starts until it is gone; `cloche agent` says so as every other command does."""
    (tmp_path / "cloche.yaml").write_text("agents: {}")
    words = [sys.executable, "-P", "-m", "cloche", "agent", "list"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.startswith(f"cloche: {tmp_path}/cloche.yaml: agents asks for")
    assert result.stderr.count("\n") == 1
