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
@argument("name", required=False, metavar="NAME", help="A sandbox that is kept under this name. Default: a throwaway.")
@flag("--raw", help=RAW_HELP)
@option("--cwd", metavar="DIR", help="The folder inside in which it begins. Default: /workspace.")
@option("--user", metavar="NAME", help=USER_HELP)
@sandbox_options()
@users_option()
@folder_options()
@flag("--review", help="Show what was changed in the folder, and ask what to write.")
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

    It has this terminal, or reads what is piped in. Its exit code passes through. It has no time-out unless --timeout
    gives one.
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
