"""Building blocks of commands: arguments, options that several commands share, and exit codes.

A command is a function that returns an exit code. It gets the options of a sandbox as one mapping, `options`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click

from cloche.core.limits import REQUESTED_LIMITS

from .output import guarded, log_to_say

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]


class Command(click.Command):
    """Run the function guarded; its return value is the exit code."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        rows = [(param.make_metavar(ctx), param.text) for param in self.params if isinstance(param, _Argument)]
        if rows:
            with formatter.section("Arguments"):
                formatter.write_dl(rows)
        super().format_options(ctx, formatter)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: click 8.5 would list the arguments a second time."""

    def invoke(self, ctx: click.Context) -> None:
        """Run the function, print each exception as one line, and exit with the code."""
        from cloche.audit.log import switch_on

        switch_on("cli")
        log_to_say()
        values = ctx.params
        debug, as_json = values.get("sandbox_debug", False), values.get("as_json", False)
        names = [param.name for param in self.params if isinstance(param, _SandboxOption) and param.name in values]
        if names:
            values["options"] = {name: values.pop(name) for name in names}
        ctx.exit(guarded(lambda: int(click.Command.invoke(self, ctx)), debug=debug, as_json=as_json))


class CommandGroup(click.Group):
    """List commands in the order of their declaration."""

    command_class = Command

    def __init__(self, name: str | None = None, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(name, **{"no_args_is_help": True, **settings})

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's own
        """Return the names of the commands."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. Raises UsageError with similar names."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not error.message.startswith("No such command"):
                raise
            from difflib import get_close_matches

            similar = ", ".join(map(repr, get_close_matches(args[0], self.list_commands(ctx))))
            text = f"No such command {args[0]!r}."
            groups = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            inner = [
                name
                for name, group in groups.items()
                if isinstance(group, click.Group) and args[0] in group.list_commands(ctx)
            ]
            if inner:  # a command of a subgroup is the better guess
                similar = ", ".join(repr(f"{name} {args[0]}") for name in inner)
            raise click.UsageError(f"{text} Did you mean {similar}?" if similar else text, ctx) from None


CommandGroup.group_class = CommandGroup


class _Argument(click.Argument):
    """Be an argument with a help text, with every version of click."""

    def __init__(self, name: str, *, metavar: str, text: str, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__([name], metavar=metavar, **settings)
        self.text = f"{text}  [required]" if self.required else text

    def make_metavar(self, ctx: click.Context | None = None) -> str:  # noqa: ARG002 - click's own
        """Return how the usage shows it."""
        shown = str(self.metavar)
        return shown if self.required or shown.startswith("[") else f"[{shown}]"


class _SandboxOption(click.Option):
    """Be an option that is a keyword of a sandbox."""


def argument(name: str, *, metavar: str, help: str, **settings: Any) -> Decorator:  # noqa: A002, ANN401 - click's own
    """Give a command an argument."""
    return _adds(partial(_Argument, name, metavar=metavar, text=help, **settings))


def option(*names: str, help: str, **settings: Any) -> Decorator:  # noqa: A002, ANN401 - click's own
    """Give a command an option; a default is shown."""
    return _adds(partial(click.Option, names, help=help, **{"show_default": "default" in settings, **settings}))


def flag(*names: str, help: str) -> Decorator:  # noqa: A002 - click's own
    """Give a command an option without a value."""
    return _adds(partial(click.Option, names, help=help, is_flag=True))


def _adds(*make: Callable[[], click.Parameter]) -> Decorator:
    def add(function: Function) -> Function:
        # click's decorators collect parameters in this attribute, last first, since decorators apply from below.
        function.__dict__.setdefault("__click_params__", []).extend(parameter() for parameter in reversed(make))
        return function

    return add


def _joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return one list of a repeated option; each value may be a list with commas."""
    return ",".join(values) or None


def _name_env_file(_: click.Context, __: click.Parameter, file: str | None) -> None:
    """Set CLOCHE_ENV_FILE for this process: all settings are then read from that file."""
    if file:
        os.environ["CLOCHE_ENV_FILE"] = file


# The keywords of a sandbox that have an option, in the order of the help. `spelled` is the option's name if it differs
# from the keyword's.
_SANDBOX: Mapping[str, Mapping[str, Any]] = {
    "backend": {"metavar": "NAME", "help": "A backend, as `cloche backends` lists them."},
    "runtime": {
        "metavar": "NAME", "help": "runc: docker's own runtime, not gVisor's; runsc: gvisor; other names as --backend.",
    },
    "prefer": {"metavar": "WHAT", "help": "strongest or fastest: how to choose among the available backends."},
    "fallback": {"metavar": "WHAT", "help": "process: trusted code may run as a plain process; none: it may not."},
    "trusted": {
        "is_flag": True, "callback": lambda _, __, value: value or None,
        "help": "The code is your own, not a model's; --fallback applies.",
    },
    "image": {"metavar": "IMAGE", "help": "Container image, for backends that use images."},
    "require": {
        "metavar": "NAME", "multiple": True, "callback": _joined,
        "help": "A level or control that must be enforced; else it is an error. Repeatable.",
    },
    "best_effort": {
        "metavar": "NAME", "multiple": True, "callback": lambda _, __, values: _joined(_, __, values) or (),
        "help": "A control that may be missing. Repeatable.",
    },
    "accept_claimed": {
        "is_flag": True, "default": None, "help": "Accept a provider's own claims for --require.",
    },
    "preset": {"metavar": "NAME", "help": "A preset, as `cloche presets` lists them."},
    "tier": {"metavar": "N", "type": int, "help": "Tier of trust, 1 to 4."},
    "config": {"metavar": "FILE", "help": "Use this configuration file."},
    **{row.keyword: {"metavar": row.metavar, "type": row.number, "help": row.help} for row in REQUESTED_LIMITS},
    "network": {"metavar": "MODE", "help": "off, allowlist, open, or bridge (docker's own network)."},
    "network_allow": {
        "metavar": "HOST", "multiple": True, "callback": _joined,
        "help": "Allow only this host: api.example.org, *.example.org:8443. Repeatable.",
    },
    "network_deny": {
        "metavar": "HOST", "multiple": True, "callback": _joined,
        "help": "Never allow this host or network. Repeatable.",
    },
    "network_ports": {
        "spelled": "--network-port", "metavar": "PORT", "multiple": True, "callback": _joined,
        "help": "A port that --network open allows besides 80 and 443. Repeatable.",
    },
    "secrets": {
        "spelled": "--secret", "metavar": "NAME[=SOURCE][@HOST]", "multiple": True,
        "callback": lambda _, __, values: values or None,
        "help": "A secret for these hosts alone, which the program cannot read: NAME of a known provider, "
        "NAME=env:VAR@HOST, NAME=file:PATH@HOST, NAME=cmd:COMMAND@HOST, NAME=login:PROVIDER. Repeatable.",
    },
    "packages": {
        "metavar": "NAMES", "multiple": True, "callback": _joined,
        "help": "Packages to install first: rich,httpx; or auto. Repeatable.",
    },
    "toolchains": {
        "spelled": "--toolchain", "metavar": "DIR", "multiple": True, "callback": lambda _, __, values: values or None,
        "help": "Mount this folder of programs read-only, and add it to PATH: ~/.cargo. Repeatable.",
    },
    "locked": {"metavar": "FILE", "help": "Install exactly the packages of this lock file: cloche.lock."},
    "screen": {"metavar": "MODE", "help": "Check Python code before it runs: off, warn, block (with --no-sandbox)."},
}  # fmt: skip
# Options of a folder of the host, for commands that open a sandbox.
_FOLDER: Mapping[str, Mapping[str, Any]] = {
    "workspace": {"metavar": "DIR", "help": "Work in a copy-on-write view of this folder of the host."},
    "workspace_at": {"metavar": "PATH", "help": "The folder's path in the sandbox. Default: its own path."},
    "workspace_disk": {"metavar": "SIZE", "help": "Limit on the data written in the folder. Default: 2g."},
    "workspace_hide": {
        "metavar": "PATTERN", "multiple": True, "callback": lambda _, __, values: values or None,
        "help": "Also hide these paths of the folder, written as a line of .clocheignore. Repeatable.",
    },
    "workspace_read": {
        "metavar": "DIR", "multiple": True, "callback": lambda _, __, values: values or None,
        "help": "Also mount this folder, read-only, at its own path. Repeatable.",
    },
}  # fmt: skip
_ENV_FILE: Mapping[str, Any] = {
    "metavar": "FILE", "expose_value": False, "callback": _name_env_file,
    "help": "Read Cloche's own variables from this .env file. The program does not get them.",
}  # fmt: skip


def sandbox_options(*names: str, but: tuple[str, ...] = (), help: Mapping[str, str] | None = None) -> Decorator:  # noqa: A002
    """Add the named options to a command, or all except `but`; `help` replaces texts. --config adds --env-file.

    The command gets one mapping of them, `options`; None means that an option was not given.
    """
    makers: list[Callable[[], click.Parameter]] = []
    for name in names or (name for name in _SANDBOX if name not in but):
        row = {**_SANDBOX[name], **({"help": help[name]} if help and name in help else {})}
        row.pop("spelled", None)
        makers.append(partial(_SandboxOption, [spelled(name), name], **row))
        if name == "config":
            makers.append(partial(click.Option, ["--env-file"], **_ENV_FILE))
    return _adds(*makers)


def folder_options(*but: str) -> Decorator:
    """Add the options of a folder of the host, except `but`; they are in `options` as well."""
    rows = {name: row for name, row in _FOLDER.items() if name not in but}
    return _adds(*(partial(_SandboxOption, [spelled(name), name], **row) for name, row in rows.items()))


def users_option() -> Decorator:
    """Add --users and --account to a command that opens a live sandbox; they are in `options` as well."""
    text = "Have several users in the sandbox, including root."
    account = "Name the sandbox's ordinary account, with the home /home/NAME."
    return _adds(
        partial(_SandboxOption, ["--users"], is_flag=True, callback=lambda _, __, value: value or None, help=text),
        partial(_SandboxOption, ["--account"], metavar="NAME", help=account),
    )


def spelled(name: str) -> str:
    """Return the option name of a keyword."""
    return str(_SANDBOX.get(name, {}).get("spelled", f"--{name.replace('_', '-')}"))


def json_option(help: str = "Print JSON.") -> Decorator:  # noqa: A002 - click's own
    """Add --json, its parameter `as_json`; errors are then JSON, too."""
    return flag("--json", "as_json", help=help)


def debug_option(help: str = "Print the debug log.") -> Decorator:  # noqa: A002 - click's own
    """Add --sandbox-debug; an unexpected error then shows its traceback."""
    return flag("--sandbox-debug", help=help)


def in_option() -> Decorator:
    """Add --in, its parameter `inside`."""
    return option("--in", "inside", metavar="NAME", help="Run in the sandbox with this name.")


def no_sandbox_option() -> Decorator:
    """Add --no-sandbox; see `with_backend`."""
    return flag("--no-sandbox", help="Run a child process with limits, without isolation.")


def program_options() -> Decorator:
    """Add --env and --file."""
    return _adds(
        partial(click.Option, ["--env"], metavar="K=V", multiple=True, help="A variable for the program. Repeatable."),
        partial(
            click.Option, ["--file"], metavar="SRC[:DST]", multiple=True,
            help="Copy a file or directory in. Repeatable.",
        ),
    )  # fmt: skip


def output_options() -> Decorator:
    """Add --out and --spill."""
    return _adds(
        partial(click.Option, ["--out"], metavar="DIR", help="Copy created and changed files to DIR."),
        partial(
            click.Option, ["--spill"], metavar="DIR",
            help="Write the full output to DIR/stdout.txt and DIR/stderr.txt.",
        ),
    )  # fmt: skip
