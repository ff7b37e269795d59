"""The `cloche` command.

Input: the arguments of the process. Output: an exit code, the program's output on stdout and stderr, messages on
stderr.

`app` finds commands in the modules of this folder. `options` declares the shared options. `output` has the exit codes,
terminal output with escapes, tables and the progress bar. `cells` shows the cells of a session. Every other module
without a leading `_` holds commands: `run` (also `--fix`), `batch`, `exec` and `shell` (`_attached` connects standard
streams or the terminal), `session`, `sandbox` (named sandboxes), `serve` (also `mcp`), `skill`, `audit`, `tools`
(also `approvals`, `container`), `bench`, `system` (`doctor`, `gc`, `backends`, `languages`, `presets`, `images`,
`config`, `conformance`). A command is added in one file (docs/contributing.md).

`_fast_path` runs the usual `exec NAME -- COMMAND` with hardly any imports. `_rare_ends` reports its result if that is
more than an exit code. `_bytecode` caches compiled modules if the installation has none. `_elsewhere` has the messages
for other systems than Linux.

Invariants: exit codes are stable. Output of the guest reaches a terminal escaped, except with `-t`. A module imports
what a command needs when the command runs, because `--version` and `run` start often. Help texts are not part of the
interface.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

EXIT_UNFLUSHED, EXIT_INTERRUPTED = 120, 130
OBJECTS_UNTIL_COLLECTED = 50_000  # imports leave no garbage; the default of 700 would collect a hundred times


def main() -> None:
    """Run the `cloche` command and exit with its code."""
    _occupy_standard_streams()
    if sys.argv[1:] == ["--version"]:
        _print_version()
        return
    if sys.platform == "win32":
        from ._elsewhere import on_windows

        on_windows(sys.argv[1:])
    if sys.pycache_prefix is None and not os.path.exists(globals().get("__cached__") or "/"):
        from ._bytecode import keep_bytecode

        keep_bytecode()
    if sys.argv[1:2] == ["exec"]:
        _run_named(sys.argv[2:])
    elif sys.argv[1:3] == ["sandbox", "exec"]:
        _run_named(sys.argv[3:])
    elif sys.argv[1:2] == ["agent"]:
        from ._fast_agent import start

        start(sys.argv[2:])
    import gc

    gc.set_threshold(OBJECTS_UNTIL_COLLECTED)
    try:
        from .app import root

        root.main(prog_name="cloche")
    except SystemExit as end:
        leave(end.code)
    except KeyboardInterrupt:  # during imports; commands handle it themselves
        leave(EXIT_INTERRUPTED)


def _run_named(arguments: list[str]) -> None:
    """Run a command in a named sandbox and exit with its code; return if the fast path does not apply."""
    try:
        from ._fast_path import run_named

        run = run_named(arguments)
    except KeyboardInterrupt:
        os._exit(EXIT_INTERRUPTED)
    if run is not None and run.code is not None:
        os._exit(run.code)
    if run is not None:
        from ._rare_ends import tell

        sys.exit(tell(run))


def _print_version() -> None:
    """Print the version without importing anything for it; with other arguments click handles `--version`."""
    from cloche import __version__

    try:
        print(f"cloche {__version__}", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"cloche: cannot write the output: {error.strerror}")


def leave(code: object) -> NoReturn:
    """Run exit functions, flush the streams and end the process, without tearing the interpreter down.

    Finalization takes as long as several imports. A library with its own threads may resume during it; Rust's then
    aborts the process.
    """
    import atexit
    import threading

    this: Any = threading
    this._shutdown()
    ending: Any = atexit
    ending._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # there is no stream left to report it on
            code = code or EXIT_UNFLUSHED
    os._exit((code or 0) & 0xFF)


def _occupy_standard_streams() -> None:
    """Open /dev/null for each closed standard stream: otherwise the next descriptor would get the guest's output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open(2): the lowest free number, which is `fd`
            mode, name = ("r", "stdin") if fd == 0 else ("w", ("stdout", "stderr")[fd - 1])
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - as long as the process
