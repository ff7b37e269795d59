"""`cloche exec`: run a command in a sandbox, also with this terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest

from ._fast_path import NOT_FOUND, tell_unread_input
from ._named import NamedCommand, refuse_options
from ._review import check_review, settle_attached, settle_changes, tell_folder, without_folder
from .app import root
from .options import (
    argument,
    debug_option,
    flag,
    folder_options,
    json_option,
    option,
    program_options,
    sandbox_options,
    users_option,
)
from .output import exit_code_of, log_to_stderr, say
from .run import conclude, read_files, read_pairs, run_and_report

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions

# Options end where the command begins, so that its own need no `--`.
COMMAND_SETTINGS = {"allow_interspersed_args": False}
RAW_HELP = "Let the program set your clipboard and the terminal's title."
USER_HELP = "Run as this user in the sandbox, for example root. A throwaway sandbox then gets --users."


class _Exec(NamedCommand):
    """Take the first argument as a name if `--` follows it, or options of its own and `--`.

    click does not report a `--` directly after the options. Options end there, so the rest is the command unchanged.
    """

    needs_dashes = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the parameter `name`, None without a name, and `words`, which then begin with `--`."""
        ordered = self.with_options_first(ctx, args)
        remaining = super().parse_args(ctx, list(ordered))
        command = list(ctx.params.get("words") or ())
        has_name = command[1:2] == ["--"] and ordered[: -len(command)][-1:] != ["--"]
        ctx.params["name"] = command.pop(0) if has_name else None
        ctx.params["words"] = tuple(command)
        return remaining


@root.command("exec", cls=_Exec, no_args_is_help=True, context_settings=COMMAND_SETTINGS)
@argument(
    "words", nargs=-1, required=True, metavar="[NAME --] COMMAND",
    help="The program to run, and its arguments; before -- the name of a sandbox.",
)  # fmt: skip
@flag("-i", "--interactive", help="Pass standard input on as it arrives.")
@flag("-t", "--tty", help="Connect this terminal; -it for a shell or an editor.")
@flag("--raw", help=RAW_HELP)
@option("--cwd", metavar="DIR", help="The working directory in the sandbox. Default: /workspace.")
@option("--user", metavar="NAME", help=USER_HELP)
@sandbox_options()
@users_option()
@folder_options()
@flag("--review", help="Show the changes to the folder, and ask which to write.")
@program_options()
@json_option()
@debug_option()
def _exec(
    name: str | None,
    words: tuple[str, ...],
    interactive: bool,
    tty: bool,
    raw: bool,
    cwd: str | None,
    user: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    as_json: bool,
    review: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Run a command in a throwaway sandbox or a named one.

    Output and exit code pass through, as with `cloche run`. With -i or -t there is no time-out unless --timeout sets
    one. One word before --, or before options and --, is always a NAME; if your command has that form, write -- first.
    """
    if sandbox_debug:
        log_to_stderr()
    if as_json and (interactive or tty):
        raise InvalidRequest("--json prints the result at the end; leave out -i and -t")
    if name is not None:
        words = without_dashes(words)
        _check_name(name)
    exit_code = run_command(
        name, words, reads=interactive, has_terminal=tty, cwd=cwd, user=user, env=env, file=file, options=options,
        as_json=as_json, review=review, is_raw=raw,
    )  # fmt: skip
    if name is None and exit_code == NOT_FOUND:
        _tell_name(words[0])
    return exit_code


def _tell_name(name: str) -> None:
    """Print how to run a command in a sandbox, if the missing command is the name of one."""
    from cloche.keeper import registry

    if registry.is_name(name) and any(registry.is_taken(name, path) for path in registry.places()):
        say(f"{name!r} is the name of a sandbox; for a command in it, write: cloche exec {name} -- COMMAND")


def without_dashes(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command without its leading `--`."""
    if command[0] != "--":
        return command
    if not command[1:]:
        raise InvalidRequest("give a COMMAND after --")
    return command[1:]


def _check_name(name: str) -> None:
    """Raise InvalidRequest if there is no such sandbox, with the reason why the argument before `--` is a name."""
    from cloche.keeper import registry

    try:
        registry.find(name)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{error}. The word before -- is the name of a sandbox; for a command, write -- first: "
            f"cloche exec -- {name} -- ..."
        ) from error


def run_command(
    name: str | None,
    command: Sequence[str] | None,
    *,
    reads: bool,
    has_terminal: bool,
    cwd: str | None,
    user: str | None,
    env: Sequence[str],
    file: Sequence[str],
    options: SandboxOptions,
    as_json: bool = False,
    review: bool = False,
    is_raw: bool = False,
) -> int:
    """Run a command, or a shell if it is None, in the named sandbox, else in a throwaway one; return its exit code."""
    if name is not None:
        refuse_options(name, {**options, "file": tuple(file)})
    check_review(options, review=review, name=name)
    rules, folder = without_folder(options)
    settings: dict[str, Any] = {"live": True, "files": read_files(file), "warm": False, **rules, **(folder or {})}
    if user is not None:
        settings["users"] = True
    variables, timeout = read_pairs(env), options.get("timeout")
    if not reads and not has_terminal:
        from cloche.sync import Sandbox

        with Sandbox(**settings) if name is None else Sandbox.attach(name) as sandbox:
            tell_folder(sandbox.notes)
            start = partial(sandbox.exec, command, cwd=cwd, user=user, env=variables, timeout=timeout)
            exit_code = run_and_report(start, as_json=as_json, debug=False)
            tell_unread_input()
            if folder is not None:
                settle_changes(sandbox, review=review)
            return exit_code
    import asyncio

    from cloche.execution.sandbox import AsyncSandbox

    from ._attached import check_terminal, run_attached

    if has_terminal:
        check_terminal()
    result = asyncio.run(
        run_attached(
            AsyncSandbox(**settings) if name is None else AsyncSandbox.attach(name), command, cwd=cwd, user=user,
            env=variables, timeout=timeout, reads=reads, has_terminal=has_terminal, is_raw=is_raw,
            settle=partial(settle_attached, review=review) if folder is not None else None,
        )
    )  # fmt: skip
    conclude(result, as_json=False)
    return exit_code_of(result)


def has_own_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return os.isatty(0)
