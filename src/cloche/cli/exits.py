"""Exit codes, and errors as one line on stderr.

The program's own code passes through. Cloche's are: 124 time-out, 137 out of memory, 125 Cloche could not do
it, 2 wrong usage, 130 Ctrl-C, 143 terminated, 141 nobody reads the output any more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.plain import plain, sendable
from cloche.core.result import Result, Status

EXIT_USAGE = 2
EXIT_FAILED = 125
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_UNREAD = 128 + signal.SIGPIPE

_BY_STATUS = {Status.TIMEOUT: 124, Status.OUT_OF_MEMORY: 137}


def exit_code_of(result: Result) -> int:
    """Return the code that `cloche run` exits with for `result`."""
    return _BY_STATUS.get(result.status or Status.ERROR, result.exit_code & 0xFF)


def guarded(work: Callable[[], int], *, debug: bool = False, as_json: bool = False) -> int:
    """Do the work of one command and return the exit code, its exceptions turned into one line each."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's "ignore" stays
            signal.signal(number, _exit_orderly)
    logging.getLogger("cloche.config").addHandler(_saying)  # what is ignored in the working directory
    try:
        code = work()
        sys.stdout.flush()  # here what goes wrong is said in words; at the interpreter's end it would be a traceback
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_UNREAD
    except ClocheError as error:
        _report(error, str(error), debug=debug, as_json=as_json)
        return EXIT_USAGE if isinstance(error, InvalidRequest) else EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _unexpected(error, debug=debug, as_json=as_json)
        say(f"cannot write {error.filename or 'the output'}: {error.strerror}; make room there, and try again")
        if error.filename is None:
            _discard_stdout()
        return EXIT_FAILED
    except Exception as error:
        return _unexpected(error, debug=debug, as_json=as_json)


def _unexpected(error: Exception, *, debug: bool, as_json: bool) -> int:
    text = f"unexpected {type(error).__name__}: {error}. This is a defect of Cloche"
    _report(error, text if debug else f"{text}; --sandbox-debug shows where", debug=debug, as_json=as_json)
    return EXIT_FAILED


def say(text: str) -> None:
    """Print one line about the run on stderr."""
    line = plain(" ".join(text.splitlines()))
    print(f"cloche: {line}", file=sys.stderr, flush=True)


class _Saying(logging.Handler):
    """Say what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


_saying = _Saying()


def say_losses() -> None:
    """Print a line on stderr for every event that is missing from the audit log."""
    logging.getLogger("cloche.audit").addHandler(_saying)


def _report(error: Exception, text: str, *, debug: bool, as_json: bool) -> None:
    if debug:
        import traceback

        print(plain("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    say(text)
    if as_json:
        print(json.dumps({"error": {"type": type(error).__name__, "message": sendable(str(error))}}))


def _exit_orderly(number: int, _frame: FrameType | None) -> None:
    """Leave like Ctrl-C does: what runs is killed and waited for first."""
    raise SystemExit(128 + number)


def _discard_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
