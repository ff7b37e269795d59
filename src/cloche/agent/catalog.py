"""The table of tools: names, descriptions for the model, arguments, actions, risks, and the tiers that have them.

`read_arguments` checks a model's arguments against a tool's schema: no unknown names, no other types. Risk depends on
where code runs, not on the tool's name: in a sandbox HIGH, on the host CRITICAL. `with_tier` turns a tier into options
of the sandbox.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.settings import given_options, load_settings
from cloche.core.enforcement import Level
from cloche.core.errors import InvalidRequest
from cloche.core.policy import DEFAULT_LANGUAGES, TIERS, parse_tier, tier_numbered
from cloche.core.protocols import Backend
from cloche.core.record import dataclass, replace

from .approval import Risk

HOST_SHELLS = ("bash", "sh", "cmd", "powershell")
_TYPES_OF: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,),
}  # fmt: skip
DEFAULT_TIER = 3


class ToolAction(enum.StrEnum):
    """Name the effect of a tool."""

    RUN = "run"
    SHELL = "shell"
    HOST = "host"
    READ = "read"
    LIST = "list"
    WRITE = "write"
    EDIT = "edit"
    DIFF = "diff"
    COMMIT = "commit"


# The risk of what runs no code; code's own depends on where it runs.
RISK_OF_ACTION: Mapping[ToolAction, Risk] = {
    ToolAction.READ: Risk.LOW,
    ToolAction.LIST: Risk.LOW,
    ToolAction.WRITE: Risk.MEDIUM,
    ToolAction.EDIT: Risk.MEDIUM,
    ToolAction.DIFF: Risk.LOW,
    ToolAction.COMMIT: Risk.HIGH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Describe one tool. `properties` is JSON schema by argument; those with a `default` may be left out."""

    name: str
    description: str
    action: ToolAction
    tiers: tuple[int, ...]
    properties: Mapping[str, Mapping[str, Any]]
    languages: tuple[str, ...] = ()

    @property
    def wire_name(self) -> str:
        """Return the name where only letters, digits, `_` and `-` are allowed."""
        return self.name.replace(".", "_")

    @property
    def runs_code(self) -> bool:
        return self.action in (ToolAction.RUN, ToolAction.SHELL, ToolAction.HOST)

    @property
    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the arguments; nothing else is taken."""
        return {
            "type": "object",
            "properties": copy.deepcopy(dict(self.properties)),  # frameworks write into what they are given
            "required": [name for name, schema in self.properties.items() if "default" not in schema],
            "additionalProperties": False,
        }


def _text_schema(description: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON schema
    return {"type": "string", "description": description, **more}


_TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "Seconds; never more than the operator allows.",
    "default": 30,
}
_PATH = _text_schema("A path relative to the workspace, or below /memory or /configs.")
_CODE = _text_schema("The whole program. What it prints is returned, and the value of its last expression.")
_FRESH_EACH_CALL = "Each call begins anew: variables and imports of earlier ones are not there."
_LIVE_CODE = "The code of this call. What it prints is returned, and the value of its last expression."
_ALL, _CODE_TIERS, _HOST_TIERS = (1, 2, 3, 4), (3, 4), (4,)
_NO_NETWORK = "no network,"
MOST_HOSTS = 10  # that a description names
_SANDBOXED = (
    f"It runs in a sandbox: {_NO_NETWORK} no access to host files or to anything but the workspace, "
    "limited time, memory and output. Files that it leaves in the workspace are still there in the next call."
)
_WITH_FUNCTIONS = (
    "Python programs can call these functions, which run outside of the sandbox. Do all steps in one program where you "
    "can, and print only what you need to know."
)
_WITH_SECRETS = "Credentials are in these variables; each has a placeholder that works at its hosts alone:"

# Descriptions of the tools where there is no sandbox.
_ON_HOST: Mapping[ToolAction, str] = {
    ToolAction.RUN: "Run a program on the host itself, with no sandbox, and get what it prints. "
    "A human approves and confirms each call.",
    ToolAction.SHELL: "Run one bash command on the host itself, with no sandbox. "
    "A human approves and confirms each call.",
}


_RESTART = {
    "type": "boolean",
    "description": "Begin with a new interpreter: what earlier calls defined is gone, files stay.",
    "default": False,
}


def _tool(name: str, deed: ToolAction, description: str, **fields: Any) -> Tool:  # noqa: ANN401 - the fields of Tool
    tiers = (
        _HOST_TIERS if deed is ToolAction.HOST else _CODE_TIERS if deed in (ToolAction.RUN, ToolAction.SHELL) else _ALL
    )
    return Tool(name=name, action=deed, description=description, tiers=tiers, **fields)


def _language_schema(languages: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    language = _text_schema("The language.", enum=list(languages), default=languages[0])
    return {"language": language} if len(languages) > 1 else {}


_NO_MANAGERS = ", and no package managers"
_IN_PYTHON_OR_CSHARP = " in Python or C#"


def _program(name: str, description: str, languages: tuple[str, ...]) -> Tool:
    """Return a tool that runs a program in one of some languages, by default the first."""
    properties = {"code": _CODE, **_language_schema(languages), "timeout": _TIMEOUT}
    text = f"{description} {_SANDBOXED}"
    return _tool(name, ToolAction.RUN, text, properties=properties, languages=languages)


TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        _program("run_code", "Run a program that you wrote, and get what it prints.", DEFAULT_LANGUAGES),
        _program("run_python_code", "Run a Python program, and get what it prints.", ("python",)),
        _program(
            "code_exec",
            "Run a program. It has no access to host files or to the agent's workspace of notes"
            f"{_NO_MANAGERS}. Use the file tools for all file operations.",
            DEFAULT_LANGUAGES,
        ),
        _program("code.execute", f"Run a program{_IN_PYTHON_OR_CSHARP}.", ("python", "csharp")),
        _tool(
            "os.execute_sandboxed",
            ToolAction.SHELL,
            "Run one shell command in the sandbox. Prefer it to os.execute, which is only for when no sandbox is "
            f"available. {_SANDBOXED}",
            properties={"command": _text_schema("One command for bash."), "timeout": _TIMEOUT},
            languages=("bash",),
        ),
        _tool(
            "os.execute",
            ToolAction.HOST,
            "Run one command on the host itself, limited by its time-out alone. A human approves and confirms each "
            "call. Use os.execute_sandboxed whenever a sandbox is available.",
            properties={
                "command": _text_schema("The command."),
                "shell": _text_schema("What runs it.", enum=list(HOST_SHELLS), default="bash"),
                "timeout": _TIMEOUT,
            },
        ),
        _tool(
            "read_file",
            ToolAction.READ,
            "Read a text file of the workspace, or a part of it.",
            properties={
                "path": _PATH,
                "offset": {"type": "integer", "minimum": 0, "description": "First line, from 0.", "default": 0},
                "lines": {"type": "integer", "minimum": 1, "description": "How many lines.", "default": 2000},
            },
        ),
        _tool(
            "list_files",
            ToolAction.LIST,
            "List the files below a folder of the workspace.",
            properties={"path": {**_PATH, "default": "."}},
        ),
        _tool(
            "write_file",
            ToolAction.WRITE,
            "Create or replace a text file, with its folders.",
            properties={"path": _PATH, "content": _text_schema("The whole content.")},
        ),
        _tool(
            "edit_file",
            ToolAction.EDIT,
            "Replace a passage of a text file. The passage must be there exactly once.",
            properties={
                "path": _PATH,
                "old": _text_schema("The passage as it is, with enough around it to be found once."),
                "new": _text_schema("The passage as it shall be."),
            },
        ),
    )
}


# Those of a sandbox that works in a view of a folder of the host.
FOLDER_TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        _tool(
            "show_changes",
            ToolAction.DIFF,
            "Show what you have changed in the project's folder, and get the id by which commit_changes writes it. The "
            "project itself is not changed before that.",
            properties={},
        ),
        _tool(
            "commit_changes",
            ToolAction.COMMIT,
            "Write the changes that show_changes showed under this id to the project's folder. A human sees them, and "
            "approves or refuses.",
            properties={"id": _text_schema("The id of the diff.")},
        ),
    )
}


def tools_of(tier: int) -> tuple[Tool, ...]:
    """Return the tools that a tier has. Raises InvalidRequest for a tier that does not exist."""
    number = tier_numbered(tier).number
    return tuple(tool for tool in TOOLS.values() if number in tool.tiers)


def tool_named(name: str, tier: int, among: Iterable[Tool] | None = None) -> Tool:
    """Return a tool of a tier by its name or `wire_name`; `among` has the tier's tools as described to the model.

    Raises InvalidRequest with the tiers that have it, or the names of the tools.
    """
    have = (*tools_of(tier), *(tool for tool in among or () if tool.name in FOLDER_TOOLS))
    if not isinstance(name, str):
        raise InvalidRequest(f"a tool's name is text, not {type(name).__name__}")
    table = {**TOOLS, **{entry.name: entry for entry in have if entry.name in FOLDER_TOOLS}}
    tool = table.get(name) or next((entry for entry in table.values() if entry.wire_name == name), None)
    if tool is None:
        raise InvalidRequest(f"there is no tool {name!r}; tier {tier} has: {', '.join(entry.name for entry in have)}")
    if tool not in have:  # of the table: the description makes no difference
        tiers = " and ".join(map(str, tool.tiers))
        raise InvalidRequest(f"tier {tier} has no tool {name!r}: it is for tier {tiers}; choose that with tier=")
    return next((entry for entry in among or () if entry.name == tool.name), tool)


def describe_on_host(tool: Tool) -> Tool:
    """Return the tool with the description for code that runs on the host."""
    return replace(tool, description=_ON_HOST.get(tool.action, tool.description))


def describe_with_languages(tool: Tool, languages: Collection[str]) -> Tool:
    """Return the tool limited to these languages; a tool without any of them stays, and says why when called."""
    have = tuple(name for name in tool.languages if name in languages)
    if tool.action is not ToolAction.RUN or have in ((), tool.languages):
        return tool
    further = {name: schema for name, schema in tool.properties.items() if name not in ("code", "language")}
    properties = {"code": tool.properties["code"], **_language_schema(have), **further}
    return replace(
        tool, description=tool.description.replace(_IN_PYTHON_OR_CSHARP, ""), properties=properties, languages=have
    )


def describe_with_functions(tool: Tool, text: str) -> Tool:
    """Return the tool with the stubs of functions of the host that its Python programs may call."""
    if tool.action is not ToolAction.RUN or "python" not in tool.languages or not text:
        return tool
    return replace(tool, description=f"{tool.description} {_WITH_FUNCTIONS}\n\n{text}")


def describe_with_secrets(tool: Tool, hosts_by_name: Mapping[str, Sequence[str]]) -> Tool:
    """Return the tool with the variables that have placeholders of secrets, and their hosts."""
    if tool.action not in (ToolAction.RUN, ToolAction.SHELL) or not hosts_by_name:
        return tool
    return replace(tool, description=f"{tool.description} {text_of_secrets(hosts_by_name)}")


def text_of_secrets(hosts_by_name: Mapping[str, Sequence[str]]) -> str:
    """Return the sentence that tells a model of the variables with secrets; empty without any."""
    rows = [f"{name} ({', '.join(hosts)})" if hosts else name for name, hosts in hosts_by_name.items()]
    return f"{_WITH_SECRETS} {', '.join(rows)}." if rows else ""


def describe_with_package_managers(tool: Tool) -> Tool:
    """Return the tool with the description for a sandbox that has package managers."""
    return replace(tool, description=tool.description.replace(_NO_MANAGERS, ""))


def describe_with_network(tool: Tool, mode: str, hosts: Sequence[str]) -> Tool:
    """Return the tool with the description for a sandbox whose network is an allowlist, or open."""
    if mode == "open":
        reach = "public hosts by HTTP and HTTPS"
    else:
        more = f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
        reach = f"{', '.join(hosts[:MOST_HOSTS]) or 'no host'}{more} only"
    return replace(tool, description=tool.description.replace(_NO_NETWORK, f"network to {reach},"))


def describe_with_interpreters(tool: Tool, languages: Collection[str]) -> Tool:
    """Return the tool with the description for interpreters of some languages that keep state between calls."""
    with_interpreter = [name for name in tool.languages if name in languages]
    if tool.action is not ToolAction.RUN:
        return tool
    if not with_interpreter:
        return replace(tool, description=f"{tool.description} {_FRESH_EACH_CALL}")
    named = " and ".join(filter(None, (", ".join(with_interpreter[:-1]), with_interpreter[-1])))
    further = " Other languages begin anew with each call." if len(with_interpreter) < len(tool.languages) else ""
    note = (
        f" In {named} so are variables, functions and imports: the interpreter goes on from call to call, also after "
        f"an error or a time-out, until restart; when it is gone, the answer says why.{further}"
    )
    code = {**_CODE, "description": _LIVE_CODE}
    return replace(
        tool, description=tool.description + note, properties={**tool.properties, "code": code, "restart": _RESTART}
    )


def risk_of(tool: Tool, *, is_on_host: bool) -> Risk:
    """Return a tool's risk, given whether code runs on the host."""
    if not tool.runs_code:
        return RISK_OF_ACTION[tool.action]
    return Risk.CRITICAL if is_on_host or tool.action is ToolAction.HOST else Risk.HIGH


def read_arguments(tool: Tool, arguments: object) -> dict[str, Any]:
    """Return a tool's arguments, complete with defaults. Raises InvalidRequest that names tool and argument."""
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{tool.name}: give the arguments as an object, not {type(arguments).__name__}")
    unknown = [str(name) for name in arguments if name not in tool.properties]
    if unknown:
        known_names = ", ".join(tool.properties)
        raise InvalidRequest(f"{tool.name}: there is no argument {unknown[0]!r}; it takes: {known_names}")
    return {name: _read(tool, name, schema, arguments) for name, schema in tool.properties.items()}


def _read(tool: Tool, name: str, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if "default" in schema and arguments.get(name) is None:  # null: what a strict schema has instead of leaving it out
        return schema["default"]
    if name not in arguments:
        raise InvalidRequest(f"{tool.name}: the argument {name!r} is missing")
    value, kinds = arguments[name], _TYPES_OF[schema["type"]]
    if isinstance(value, bool) is not (bool in kinds) or not isinstance(value, kinds):
        raise InvalidRequest(f"{tool.name}: {name} must be of type {schema['type']}, not {type(value).__name__}")
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidRequest(f"{tool.name}: {name} {value!r} is not one of: {', '.join(schema['enum'])}")
    if "minimum" in schema and not value >= schema["minimum"]:
        raise InvalidRequest(f"{tool.name}: {name} must be at least {schema['minimum']}, not {value}")
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        raise InvalidRequest(f"{tool.name}: {name} must be more than {schema['exclusiveMinimum']}, not {value}")
    return value


def tier_of(options: SandboxOptions) -> int:
    """Return the requested tier, else the configured one; the host's tier must be requested here."""
    asked_tier = options.get("tier")
    if asked_tier is not None:
        return parse_tier(asked_tier, name="tier")
    return min(settings_of(options).tier or DEFAULT_TIER, DEFAULT_TIER)


def settings_of(options: SandboxOptions) -> Settings:
    """Return the settings that options come to; a backend that is an object is left out."""
    return load_settings(
        {name: value for name, value in given_options(options).items() if name != "backend" or isinstance(value, str)}
    )


def with_tier(options: SandboxOptions, tier: int) -> SandboxOptions:
    """Return the options of a tier's sandbox. Tiers without code have a workspace all the same, for files alone."""
    toolbox_options = options.copy()
    toolbox_options["tier"] = tier
    if not TIERS[tier].runs_code:
        toolbox_options["tier"] = None
        if settings_of(toolbox_options).tier is not None:  # a configured one would hold: no code runs in either
            toolbox_options["tier"] = DEFAULT_TIER
    return toolbox_options


def level_of(backend: object) -> Level | None:
    """Return the level that a backend of the caller's own says it has; None for the named ones."""
    if backend is None or isinstance(backend, str):
        return None
    return cast("Backend", backend).capabilities().level
