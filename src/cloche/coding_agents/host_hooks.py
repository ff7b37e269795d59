"""Have the commands of an agent on the host run in a sandbox: the entries of its own configuration that do so.

Theory of operation: the agent asks a hook before it runs a command. The hook (`cloche agent _rewrite`) answers with
another command, `cloche agent shell -c COMMAND`, which the agent then runs in place of its own. A hook that fails
refuses the command: that of these agents whose hooks are programs by exit code 2 and a reason, as any other failure
would have them run it as it was. Each row was tried with the agent's package; docs/coding-agents.md has the versions.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from threading import Timer
from typing import IO, Any, cast

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass, field

from . import json_text, toml_text
from .host_config import FileEdit, edited, undone

MOST_EVENT_BYTES = 8 << 20
HOOK_S = 600  # for which the agent waits; then it would run the command on the host
ASKING_S = 20.0  # for codex to tell a hook's hash
REFUSED = "cloche: the sandbox cannot be asked, so this command was not run. Tell the user: cloche agent hook --help"

Answer = Callable[[Mapping[str, Any], dict[str, Any], bool], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookRow:
    """Say where an agent's hooks are written: in the user's home, or in a project; and how one of them answers.

    `event` and `matcher` select the tool that runs commands. `answer` makes the agent's form of an answer from the
    event, the tool's new input, and whether the agent is told not to ask its user. `unit` is that of time-outs, in
    parts of a second. `keeps_on` are settings of the project's file by which no other file of the project can switch
    hooks off; `start` are the words by which the user can have the same.
    """

    user_file: str
    project_file: str
    event: str = "PreToolUse"
    matcher: str = "Bash"
    unit: int = 1
    answer: Answer | None = None
    keeps_on: Mapping[str, bool] = field(default_factory=dict)
    start: str = ""


def _for_claude(_: Mapping[str, Any], tool_input: dict[str, Any], is_allowed: bool) -> dict[str, Any]:
    decision = {"permissionDecision": "allow"} if is_allowed else {}
    return {"hookSpecificOutput": {"hookEventName": "PreToolUse", **decision, "updatedInput": tool_input}}


def _for_codex(_: Mapping[str, Any], tool_input: dict[str, Any], __: bool) -> dict[str, Any]:
    # Without "allow" codex takes the answer for malformed, and runs the command as it was; its own approvals remain.
    return _for_claude(_, tool_input, True)


def _for_gemini(_: Mapping[str, Any], tool_input: dict[str, Any], __: bool) -> dict[str, Any]:
    return {"hookSpecificOutput": {"hookEventName": "BeforeTool", "tool_input": tool_input}}


HOOKS: Mapping[str, HookRow] = {
    "claude": HookRow(
        user_file=".claude/settings.json", project_file=".claude/settings.local.json", answer=_for_claude,
        keeps_on={"disableAllHooks": False}, start="""claude --settings '{"disableAllHooks":false}'""",
    ),
    "codex": HookRow(
        user_file=".codex/hooks.json", project_file=".codex/hooks.json", answer=_for_codex,
        start="codex --enable hooks --sandbox danger-full-access",
    ),
    "gemini": HookRow(
        user_file=".gemini/settings.json", project_file=".gemini/settings.json", event="BeforeTool",
        matcher="run_shell_command", unit=1000, answer=_for_gemini,
    ),
    "opencode": HookRow(
        user_file=".config/opencode/plugins/cloche.js", project_file=".opencode/plugins/cloche.js"
    ),
}  # fmt: skip
_PLUGIN = """\
// Commands run in a sandbox of the project (cloche agent hook opencode --remove undoes this).
const words = %s
const quoted = (text) => `'${text.replaceAll("'", "'\\\\''")}'`
export const Cloche = async () => ({
  "tool.execute.before": async (input, output) => {
    if (input.tool !== "bash") return
    if (typeof output.args?.command !== "string") throw new Error("cloche: no command in this call")
    output.args.command = [...words, output.args.command].map(quoted).join(" ")
  },
})
"""


def hook_row(agent: str) -> HookRow:
    """Return an agent's row. Raises InvalidRequest."""
    if agent not in HOOKS:
        raise InvalidRequest(f"hook: {agent!r} is none of {', '.join(HOOKS)}; others can use cloche mcp")
    return HOOKS[agent]


def own_words() -> list[str]:
    """Return the words that start this command, by whole paths."""
    path = os.path.abspath(sys.argv[0])
    if os.path.basename(path) == "cloche" and os.access(path, os.X_OK):
        return [path]
    return [sys.executable, "-P", "-m", "cloche"]  # without -P a project's own `cloche` would run


def shell_words(options: Sequence[str]) -> list[str]:
    """Return the words before a command that have it run in the sandbox."""
    return [*own_words(), "agent", "shell", *options, "-c"]


def rewritten(agent: str, event: object, options: Sequence[str], *, is_allowed: bool) -> dict[str, Any]:
    """Return the answer to an event of an agent's hook: the same call, of a command that runs in the sandbox.

    Raises InvalidRequest for an event that has no command.
    """
    row = hook_row(agent)
    tool_input = event.get("tool_input") if isinstance(event, dict) else None
    command = tool_input.get("command") if isinstance(tool_input, dict) else None
    if row.answer is None or not isinstance(command, str) or not isinstance(tool_input, dict):
        raise InvalidRequest(f"hook: {agent} has sent no command; nothing is run")
    new_input = {**tool_input, "command": shlex.join([*shell_words(options), command])}
    return row.answer(dict(event) if isinstance(event, dict) else {}, new_input, is_allowed)


def installed(
    agent: str, home: str, project: str | None, options: Sequence[str], *, is_allowed: bool
) -> list[FileEdit]:
    """Return the edits that write an agent's hook, for the user or for one project. Raises InvalidRequest."""
    row, path = hook_row(agent), _file(agent, home, project)
    if row.answer is None:
        plugin = _PLUGIN % json.dumps(shell_words(options))
        return [edited(path, lambda *_: plugin, below=project or "")]
    entry = _entry(agent, row, options, is_allowed=is_allowed)

    def add(text: str, name: str) -> str:
        text = json_text.append(_without(text, name, row, agent), ["hooks", row.event], entry, name)
        for key, value in row.keeps_on.items() if project else ():
            text = json_text.put(text, [key], value, name)
        return text

    edit = edited(path, add, below=project or "")
    return [edit, *([_trust(edit, entry, home)] if agent == "codex" else [])]


def removed(agent: str, home: str, project: str | None) -> list[FileEdit]:
    """Return the edits that undo an agent's hook."""
    row, path = hook_row(agent), _file(agent, home, project)
    if row.answer is None:
        return [undone(path, lambda text, _: "" if "agent hook opencode" in text else text, below=project or "")]

    def take(text: str, name: str) -> str:
        text = _without(text, name, row, agent)
        for key, value in row.keeps_on.items() if project else ():
            present = json_text.parse(text or "{}", name).at([key])
            text = json_text.remove(text, [key], name) if present is not None and present.value is value else text
        return text

    edits = [undone(path, take, below=project or "")]
    if agent == "codex":
        indexes = _own_indexes(edits[0].before or "", edits[0].path, row, agent)
        places = [_trust_place(edits[0].path, index) for index in indexes]
        edits.append(undone(f"{home}/.codex/config.toml", lambda text, _: toml_text.without(text, places)))
    return edits


def _file(agent: str, home: str, project: str | None) -> str:
    row = hook_row(agent)
    return f"{home}/{row.user_file}" if project is None else f"{project}/{row.project_file}"


def _entry(agent: str, row: HookRow, options: Sequence[str], *, is_allowed: bool) -> dict[str, Any]:
    allowing = ["--no-questions"] if is_allowed else []
    words = shlex.join([*own_words(), "agent", "_rewrite", agent, *allowing, *options])
    command = f"{words} || {{ echo {shlex.quote(REFUSED)} >&2; exit 2; }}"
    hook = {"type": "command", "command": command, "timeout": HOOK_S * row.unit}
    return {"matcher": row.matcher, "hooks": [hook]}


def _without(text: str, name: str, row: HookRow, agent: str) -> str:
    """Return a text of settings without entries of ours."""
    for index in reversed(_own_indexes(text, name, row, agent)):
        text = json_text.remove(text, ["hooks", row.event, index], name)
    return text


def _own_indexes(text: str, name: str, row: HookRow, agent: str) -> list[int]:
    groups = json_text.parse(text or "{}", name).at(["hooks", row.event])
    return [index for index, group in enumerate(groups.value if groups else ()) if _is_ours(group, agent)]


def _is_ours(group: object, agent: str) -> bool:
    return f" agent _rewrite {agent}" in json.dumps(group) and "cloche" in json.dumps(group)


# codex runs a hook only if its configuration has the hook's hash, which it calculates itself.


def _trust_place(path: str, index: int) -> list[str]:
    return ["hooks", "state", f"{path}:pre_tool_use:{index}:0"]


def _trust(edit: FileEdit, entry: Mapping[str, Any], home: str) -> FileEdit:
    groups = json_text.parse(edit.after or "{}", edit.path).at(["hooks", "PreToolUse"])
    place = _trust_place(edit.path, len(groups.items) - 1 if groups else 0)
    digest = _codex_hash(entry)
    return edited(
        f"{home}/.codex/config.toml",
        lambda text, _: toml_text.with_table(toml_text.without(text, [place]), place, {"trusted_hash": digest}),
    )


def _codex_hash(entry: Mapping[str, Any]) -> str:
    """Ask codex for a hook's hash, in an empty home. Raises InvalidRequest."""
    program = shutil.which("codex")
    if program is None:
        raise InvalidRequest("hook: codex is not on this host's PATH, and it alone can tell the hash of a trusted hook")
    messages = (
        {
            "id": 1,
            "method": "initialize",
            "params": {"clientInfo": {"name": "cloche", "title": "Cloche", "version": "1"}},
        },
        {"method": "initialized"},
    )
    with tempfile.TemporaryDirectory(prefix="cloche-codex-") as home:
        with open(f"{home}/hooks.json", "w", encoding="utf-8") as file:
            json.dump({"hooks": {"PreToolUse": [entry]}}, file)
        listing = {"id": 2, "method": "hooks/list", "params": {"cwds": [home]}}
        text = "".join(json.dumps(message) + "\n" for message in (*messages, listing))
        env = {"PATH": os.environ.get("PATH", ""), "HOME": home, "CODEX_HOME": home}
        try:
            return _hash_in(program, env, home, text)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequest(
                f"hook: codex did not tell the hash of the hook ({error}), so it would ignore it; nothing was written"
            ) from error


def _hash_in(program: str, env: Mapping[str, str], home: str, text: str) -> str:
    """Ask a server of codex, which answers only as long as its input is open."""
    with subprocess.Popen(
        [program, "app-server"], env=env, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        ending = Timer(ASKING_S, server.kill)
        ending.daemon = True
        ending.start()
        try:
            cast("IO[str]", server.stdin).write(text)
            cast("IO[str]", server.stdin).flush()
            for line in cast("IO[str]", server.stdout):
                message = json.loads(line)
                if message.get("id") == 2:
                    return str(message["result"]["data"][0]["hooks"][0]["currentHash"])
        finally:
            ending.cancel()
            server.kill()
    raise ValueError("it has ended")
