"""`cloche shell`: a shell in a sandbox, with this terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .app import root
from .exec import RAW_HELP, USER_HELP, has_own_terminal, run_command
from .options import (
    argument,
    debug_option,
    flag,
    folder_options,
    option,
    program_options,
    sandbox_options,
    users_option,
)
from .output import log_to_stderr

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions


@root.command("shell")
@argument("name", required=False, metavar="NAME", help="The name of a sandbox. Default: a throwaway sandbox.")
@flag("--raw", help=RAW_HELP)
@option("--cwd", metavar="DIR", help="The working directory in the sandbox. Default: /workspace.")
@option("--user", metavar="NAME", help=USER_HELP)
@sandbox_options()
@users_option()
@folder_options()
@flag("--review", help="Show the changes to the folder, and ask which to write.")
@program_options()
@debug_option()
def _shell(
    name: str | None,
    raw: bool,
    cwd: str | None,
    user: str | None,
    env: tuple[str, ...],
    file: tuple[str, ...],
    review: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Open a shell in a throwaway sandbox or a named one.

    It gets this terminal, or reads standard input from a pipe. Its exit code passes through. There is no time-out
    unless --timeout sets one.
    """
    if sandbox_debug:
        log_to_stderr()
    return run_command(
        name,
        None,
        reads=True,
        has_terminal=has_own_terminal(),
        cwd=cwd,
        user=user,
        env=env,
        file=file,
        options=options,
        review=review,
        is_raw=raw,
    )
