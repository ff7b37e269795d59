"""Configuration of agents and clients on the host: what is added, and that taking it out leaves the user's own."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cloche.coding_agents import host_config, host_hooks, json_text, mcp_clients, toml_text
from cloche.core.errors import InvalidRequest

SETTINGS = """{
  // the user's own
  "model": "m", /* kept */
  "hooks": {
    "PreToolUse": [
      {"matcher": "Edit", "hooks": [{"type": "command", "command": "mine"}]} // last
    ],
  }
}
"""
TABLES = """# the user's own
model = "m" # kept
hooks.state."/other:pre_tool_use:0:0".trusted_hash = "sha256:1"

[profiles.cloche]
model = "n"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a user without any configuration."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(host_hooks, "_codex_hash", lambda entry: f"sha256:{len(json.dumps(entry))}")
    return tmp_path


def written(edits: list[host_config.FileEdit], *, is_undo: bool = False) -> None:
    """Write edits as the commands do."""
    host_config.write([edit for edit in edits if edit.before != edit.after], is_undo=is_undo)


@pytest.mark.parametrize("agent", list(host_hooks.HOOKS))
@pytest.mark.parametrize("existing", [None, SETTINGS])
def test_a_hook_is_added_and_undone_to_the_byte(agent: str, existing: str | None, home: Path) -> None:
    """Also when it is added twice; the user's other entries and comments stay meanwhile."""
    path = home / host_hooks.HOOKS[agent].user_file
    if existing is not None and path.suffix == ".json":
        path.parent.mkdir(parents=True)
        path.write_text(existing)
        path.chmod(0o644)
    for _ in range(2):
        written(host_hooks.installed(agent, str(home), None, ["--allow", "api.example.org"], is_allowed=False))
    text = path.read_text()
    assert text.count("rewrite" if path.suffix == ".json" else "tool.execute.before") == 1
    assert "api.example.org" in text
    if existing is not None and path.suffix == ".json":
        assert path.stat().st_mode & 0o777 == 0o644
        assert all(words in text for words in ("// the user's own", "/* kept */", '"command": "mine"', "// last"))
    written(host_hooks.removed(agent, str(home), None), is_undo=True)
    assert (path.read_text() if path.exists() else None) == (existing if path.suffix == ".json" else None)
    assert not (home / ".codex/config.toml").exists()


def test_what_the_user_changed_meanwhile_stays(home: Path) -> None:
    """Then the entries alone are taken out, also those by which codex trusts a hook, but no other hook's."""
    (home / ".codex").mkdir()
    config, hooks = home / ".codex/config.toml", home / ".codex/hooks.json"
    config.write_text(TABLES)
    hooks.write_text(SETTINGS)
    written(host_hooks.installed("codex", str(home), None, [], is_allowed=False))
    states = tomllib.loads(config.read_text())["hooks"]["state"]
    assert states[f"{hooks}:pre_tool_use:1:0"]["trusted_hash"].startswith("sha256:")
    config.write_text(config.read_text() + '\n[hooks.state."/late:pre_tool_use:0:0"]\ntrusted_hash = "sha256:2"\n')
    hooks.write_text(hooks.read_text().replace('"m"', '"other"'))
    written(host_hooks.removed("codex", str(home), None), is_undo=True)
    assert list(tomllib.loads(config.read_text())["hooks"]["state"]) == [
        "/other:pre_tool_use:0:0",
        "/late:pre_tool_use:0:0",
    ]
    assert config.read_text().startswith(TABLES)
    assert (
        json_text.parse(hooks.read_text(), "it").value
        == json_text.parse(SETTINGS.replace('"m"', '"other"'), "it").value
    )


def test_a_project_cannot_switch_its_hook_off(home: Path) -> None:
    """The project's local settings outrank those of its repository, and are undone with the hook."""
    project = home / "project"
    path = project / ".claude/settings.local.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"disableAllHooks": true}')
    written(host_hooks.installed("claude", str(home), str(project), [], is_allowed=False))
    assert json.loads(path.read_text())["disableAllHooks"] is False
    path.write_text(path.read_text() + "\n")
    written(host_hooks.removed("claude", str(home), str(project)), is_undo=True)
    assert not path.exists() or json.loads(path.read_text()) == {}


@pytest.mark.parametrize("client", list(mcp_clients.CLIENTS))
def test_a_server_is_added_to_each_client(client: str, home: Path) -> None:
    """It is replaced by the next one, and undone to the byte."""
    path = home / mcp_clients.CLIENTS[client].user_file
    path.parent.mkdir(parents=True, exist_ok=True)
    before = TABLES if path.suffix == ".toml" else SETTINGS
    path.write_text(before)
    for words in (["cloche", "mcp"], ["cloche", "mcp", "--memory", "1g"]):
        written([mcp_clients.installed(client, str(home), None, words)])
    text = path.read_text()
    tree = tomllib.loads(text) if path.suffix == ".toml" else json_text.parse(text, "it").value
    for name in (*mcp_clients.CLIENTS[client].table, "cloche"):
        tree = tree[name]
    assert "1g" in str(tree)
    assert text.count("/* kept */" if path.suffix == ".json" else "# kept") == 1
    written([mcp_clients.removed(client, str(home), None)], is_undo=True)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "text", ["", "{}", "{ }\n", '{"a": 1}', '{"a": [1, 2,],}', SETTINGS, '// only\n{"a": {"b": 2}}']
)
def test_json_is_edited_in_place(text: str) -> None:
    """What is put or appended is there, the rest is as it was, and taking it out gives the former text."""
    changed = json_text.put(text, ["x", "y"], {"z": ["ü", None]}, "it")
    before = json_text.parse(text or "{}", "it").value
    assert json_text.parse(changed, "it").value == {**before, "x": {"y": {"z": ["ü", None]}}}
    assert json_text.parse(json_text.remove(changed, ["x", "y"], "it"), "it").value == before
    twice = json_text.append(json_text.append(text, ["l"], 1, "it"), ["l"], 2, "it")
    assert json_text.parse(twice, "it").value == {**before, "l": [1, 2]}


@pytest.mark.parametrize(
    "text", ["[", "{'a': 1}", '{"a" 1}', '{"a": 1]', "{} x", '{"a": 1', "[" * 300 + "]" * 300, "nope"]
)
def test_text_that_is_no_json_is_left_alone(text: str) -> None:
    """The error names the file."""
    with pytest.raises(InvalidRequest, match="the-file"):
        json_text.put(text, ["a"], 1, "the-file")


def test_tables_that_cannot_be_added_are_refused() -> None:
    """A table that exists, or an invalid file, is no table to add to."""
    for text in ('[a.b]\nc = "1"\n', 'a = "1"\n', "a = \n"):
        with pytest.raises(InvalidRequest):
            toml_text.with_table(text, ["a", "b"], {"d": "2"})


def test_a_file_is_no_way_out_of_a_project(home: Path) -> None:
    """A link of a project's to the user's own files is refused, and so is what is no regular file."""
    project = home / "project"
    (project / ".claude").mkdir(parents=True)
    (home / ".profile").write_text("echo mine\n")
    (project / ".claude/settings.local.json").symlink_to(home / ".profile")
    with pytest.raises(InvalidRequest, match="leads out of the project"):
        host_hooks.installed("claude", str(home), str(project), [], is_allowed=False)
    (home / ".gemini/settings.json").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="no regular file"):
        host_hooks.installed("gemini", str(home), None, [], is_allowed=False)


@pytest.mark.parametrize("agent", ["claude", "codex", "gemini"])
def test_a_command_is_quoted_whole(agent: str) -> None:
    """Whatever is in it, a shell gives it to the sandbox as one word; other parts of the call stay."""
    command = """echo 'a' "b" $HOME `id` \\\n; touch /tmp/x # '"""
    event = {"tool_input": {"command": command, "timeout": 5}}
    answer = host_hooks.rewritten(agent, event, ["--allow", "a b"], is_allowed=False)["hookSpecificOutput"]
    new_input = answer.get("updatedInput") or answer["tool_input"]
    assert new_input["timeout"] == 5
    assert shlex.split(new_input["command"])[-5:] == ["shell", "--allow", "a b", "-c", command]
    no_commands: tuple[object, ...] = (None, [], {}, {"tool_input": {"command": 1}}, {"tool_input": "x"})
    for malformed in no_commands:
        with pytest.raises(InvalidRequest, match="no command"):
            host_hooks.rewritten(agent, malformed, [], is_allowed=False)


def test_no_module_of_a_project_runs_in_place_of_a_hook(tmp_path: Path) -> None:
    """A hook, a command and a client's server start in the project's folder, which may have a folder `cloche`."""
    (tmp_path / "cloche").mkdir()
    (tmp_path / "cloche/__init__.py").write_text("raise SystemExit('of the project')")
    words = [*host_hooks.own_words(), "--version"]
    assert words[0] == sys.executable
    assert b"of the project" not in subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stderr
