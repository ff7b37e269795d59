"""What the server tells a client about itself and its tools, as data of the protocol; without the protocol package.

`early` sends it before that package is imported, and `server` builds the package's server from it: there is no second
copy. Keys are in the order in which the package writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloche import __version__
from cloche.agent.approval import Risk
from cloche.agent.catalog import Tool, ToolAction, tool_named
from cloche.agent.toolbox import Toolbox
from cloche.core.errors import InvalidRequest

NAME, TITLE = "cloche", "Cloche"
DESCRIPTION = "Runs code that a language model wrote, so that it cannot hurt this machine."
INSTRUCTIONS = (
    "Runs code in a sandbox that has no access to this machine's files. Running code may have to be approved by the "
    "user. Files stay in the workspace of a session, and so do variables, if run_code says so. Without a "
    "session they may be gone after a call; open_session opens one, and its handle is passed as `session`."
)
HANDSHAKES = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")  # the revisions that begin with `initialize`
_CAPABILITIES: Mapping[str, Any] = {
    "prompts": {"listChanged": False},
    "resources": {"listChanged": False, "subscribe": False},
    "tools": {"listChanged": False},
}
SESSION = {
    "type": "string",
    "description": "The handle of a session that open_session opened: its files, and what code defined, are kept "
    "between calls. Empty: this connection's own session where the protocol has connections, else one that is gone "
    "after the call.",
    "default": "",
}


def _object(description: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object; properties with a default may be missing."""
    required = [name for name, schema in properties.items() if "default" not in schema]
    return {"properties": properties, "required": required, "type": "object", "description": description}


def _typed(kind: str, description: str) -> dict[str, Any]:
    return {"type": kind, "description": description}


_TEXT = _typed("string", "The text for the model.")
TOLD = _object("The outcome of a tool.", text=_TEXT)
OPENED = _object("A session that was opened.", text=_TEXT, session=_typed("string", "The handle to pass as `session`."))
RAN = _object(
    "The outcome of a run.",
    text=_TEXT,
    status=_typed(
        "string",
        "ok, error, timeout, out_of_memory, output_limit, pids_limit, disk_limit, signaled or denied.",
    ),
    exit_code=_typed("integer", "The program's exit code; 128 plus the number for a signal; -1 on time-out."),
    stdout=_typed("string", "Standard output; of a long one head and tail."),
    stderr=_typed("string", "Standard error, likewise."),
    value={"description": "The value of the last expression: as JSON, or its repr().", "default": None},
    value_is_repr={**_typed("boolean", "Whether value is a repr()."), "default": False},
    duration_s=_typed("number", "Seconds of wall clock."),
    state=_typed(
        "string",
        "What became of what earlier calls defined: it was kept, it is new (this call began in a new "
        "interpreter, which goes on), it is lost (the interpreter ended with this call), or none is ever kept.",
    ),
    truncated=_typed("boolean", "Whether output was left out."),
    figures=_typed("integer", "The number of images in the result."),
    backend=_typed("string", "The backend that ran it."),
    level={
        "anyOf": [{"type": "string"}, {"type": "null"}],
        "description": "The level of isolation that was enforced.",
        "default": None,
    },
)

# What each deed is called, and whether it only reads, may destroy, and does the same when done twice.
_ANNOTATIONS: Mapping[ToolAction, tuple[str, bool, bool, bool]] = {
    ToolAction.RUN: ("Run a program", False, True, False),
    ToolAction.SHELL: ("Run a shell command", False, True, False),
    ToolAction.HOST: ("Run a command on the host", False, True, False),
    ToolAction.READ: ("Read a file", True, False, True),
    ToolAction.LIST: ("List files", True, False, True),
    ToolAction.WRITE: ("Write a file", False, True, True),
    ToolAction.EDIT: ("Edit a file", False, True, False),
    ToolAction.DIFF: ("Show the changes to the project", True, False, True),
    ToolAction.COMMIT: ("Write the changes to the project", False, True, False),
}
_TITLES: Mapping[str, str] = {
    "run_python_code": "Run Python",
    "code_exec": "Run a program, isolated from the agent's files",
    "code.execute": "Run Python or C#",
    "os.execute_sandboxed": "Run a shell command in the sandbox",
}


def about(version: str) -> dict[str, Any]:
    """Return the answer to `initialize` at a revision."""
    return {
        "capabilities": _CAPABILITIES,
        "instructions": INSTRUCTIONS,
        "protocolVersion": version if version in HANDSHAKES else HANDSHAKES[-1],
        "serverInfo": {"description": DESCRIPTION, "name": NAME, "title": TITLE, "version": __version__},
    }


def catalog_rows(toolbox: Toolbox, names: Sequence[str] | None) -> list[tuple[Tool, dict[str, Any]]]:
    """Return the tools to offer, each with its row. Raises InvalidRequest for a name that the tier does not have."""
    selected = None if names is None else {tool_named(name, toolbox.tier).name for name in names}
    if selected is not None and not selected:
        raise InvalidRequest("tools: name at least one, or leave it out for all")
    return [
        (tool, _catalog_row(tool, reaches_out=_reaches_out(toolbox, tool)))
        for tool in toolbox.tools
        if selected is None or tool.name in selected
    ]


def _reaches_out(toolbox: Toolbox, tool: Tool) -> bool:
    """Tell whether a tool can act on more than its workspace."""
    is_on_host = toolbox.risk(tool.name) is Risk.CRITICAL
    return tool.runs_code and (is_on_host or toolbox.policy.network != "off")


def _catalog_row(tool: Tool, *, reaches_out: bool) -> dict[str, Any]:
    title, reads, destroys, repeats = _ANNOTATIONS[tool.action]
    schema = tool.schema
    schema["properties"]["session"] = dict(SESSION)
    return _row(
        tool.wire_name, _TITLES.get(tool.name, title), tool.description, schema, RAN if tool.runs_code else TOLD,
        destructiveHint=destroys, idempotentHint=repeats, openWorldHint=reaches_out, readOnlyHint=reads,
    )  # fmt: skip


def _row(
    name: str, title: str, description: str, schema: Mapping[str, Any], output: Mapping[str, Any], **hints: bool
) -> dict[str, Any]:
    first = {key: schema[key] for key in ("properties", "required", "type")}
    return {
        "annotations": {**hints, "title": title}, "description": description, "inputSchema": {**first, **schema},
        "name": name, "outputSchema": dict(output), "title": title,
    }  # fmt: skip


def _session_row(
    name: str, title: str, description: str, output: Mapping[str, Any], **properties: Mapping[str, Any]
) -> dict[str, Any]:
    schema = {"properties": properties, "required": list(properties), "type": "object"}
    return _row(
        name, title, description, schema, output,
        destructiveHint=bool(properties), idempotentHint=False, openWorldHint=False, readOnlyHint=False,
    )  # fmt: skip


OPEN_SESSION = _session_row(
    "open_session",
    "Open a session",
    "Open a workspace whose files, and what code defined, are kept between calls, and get its handle. Pass the handle "
    "as `session` to the other tools. It is closed by close_session, or when it was not used for long.",
    OPENED,
)
CLOSE_SESSION = _session_row(
    "close_session",
    "Close a session",
    "Close a session: what runs in it ends, and its files are gone.",
    TOLD,
    session={"type": "string"},
)


def tool_rows(toolbox: Toolbox, names: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the answer to `tools/list`."""
    return [*(row for _, row in catalog_rows(toolbox, names)), OPEN_SESSION, CLOSE_SESSION]
