"""`cloche exec`: run a command in a sandbox, also with this terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cloche.core.errors import InvalidRequest

from .app import root
from .options import argument, debug_option, flag, json_option, option, program_options, sandbox_options
from .output import exit_code_of, log_to_stderr
from .run import conclude, read_files, read_pairs, run_and_report

if TYPE_CHECKING:
    from cloche.config.keys import SandboxOptions

# Options end where the command begins, so that its own need no `--`.
COMMAND_SETTINGS = {"allow_interspersed_args": False}
USER_HELP = "Work as this user inside, root for example: the sandbox then has several (`users`)."


@root.command("exec", no_args_is_help=True, context_settings=COMMAND_SETTINGS)
@argument("words", nargs=-1, required=True, metavar="COMMAND", help="The program to run, and its arguments.")
@flag("-i", "--interactive", help="Pass standard input on as it comes.")
@flag("-t", "--tty", help="Pass this terminal on: -it for a shell or an editor.")
@option("--cwd", metavar="DIR", help="The folder inside in which it works. Default: /workspace.")
@option("--user", metavar="NAME", help=USER_HELP)
@sandbox_options()
@program_options()
@json_option()
@debug_option()
def _exec(
    words: tuple[str, ...],
    interactive: bool,
    tty: bool,
    cwd: str | None,
    user: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    as_json: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Run a command in a throwaway sandbox.

    Its output and its exit code pass through, as with `cloche run`. With -i or -t it has no time-out unless --timeout
    gives one.
    """
    if sandbox_debug:
        log_to_stderr()
    if len(words) > 1 and words[1] == "--":
        raise InvalidRequest(f"{words[0]!r} is no sandbox; leave it out, and the command runs in a throwaway one")
    if as_json and (interactive or tty):
        raise InvalidRequest("--json prints what came of a command at its end; leave out -i and -t")
    return run_command(
        words, reads=interactive, has_terminal=tty, cwd=cwd, user=user, env=env, file=file, options=options,
        as_json=as_json,
    )  # fmt: skip


def run_command(
    words: Sequence[str] | None,
    *,
    reads: bool,
    has_terminal: bool,
    cwd: str | None,
    user: str | None,
    env: Sequence[str],
    file: Sequence[str],
    options: SandboxOptions,
    as_json: bool = False,
) -> int:
    """Run a command, or a shell, in a sandbox of its own; return its exit code."""
    settings: dict[str, Any] = {"live": True, "files": read_files(file), "warm": False, **options}
    if user is not None:
        settings["users"] = True
    variables = read_pairs(env)
    if not reads and not has_terminal:
        from cloche.sync import Sandbox

        with Sandbox(**settings) as sandbox:
            return run_and_report(
                partial(sandbox.exec, words, cwd=cwd, user=user, env=variables), as_json=as_json, debug=False
            )
    import asyncio

    from cloche.execution.sandbox import AsyncSandbox

    from ._attached import check_terminal, run_attached

    if has_terminal:
        check_terminal()
    result = asyncio.run(
        run_attached(
            AsyncSandbox(**settings), words, cwd=cwd, user=user, env=variables, timeout=options.get("timeout"),
            reads=reads, has_terminal=has_terminal,
        )
    )  # fmt: skip
    conclude(result, as_json=False)
    return exit_code_of(result)


def has_own_terminal() -> bool:
    """Tell whether a person sits at our standard input."""
    return os.isatty(0)
