"""Two more runners at level jail: a cell of a live session, and a cell in a fork of one.

Theory of operation. A program becomes two cells: the prelude, and the attempt's own code. Its last word ends the cell
and not the interpreter, so what it has done to its session is still there when the session is closed. The forks of
attempts that ask for no limits of their own come from one session, which must outlive them all. Where an attempt has a
first program, its session is still open when the second looks for what is left. Plain attempts follow one another in
one session, or one fork, each in a folder of its own, until one leaves the interpreter other than it was.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import cloche
from cloche.core.errors import InvalidRequest
from cloche.sync import Session
from tests.harness.escape.attempts import JAIL, Attempt, Seen
from tests.harness.escape.runners import (
    CODA,
    PRELUDE,
    Workspace,
    as_seen,
    level_keywords,
    new_token,
    run_on_terminal,
    show_on_terminal,
)
from tests.harness.escape.targets import Canaries

BEFORE = "import sys\nsys.argv = ['cell', {argument!r}]\n"
# The interpreter's own link to its caller, and the end of a cell: children and other threads end as ever.
IN_A_CELL = """
import threading
frame = sys._getframe()
while type(frame.f_locals.get("self")).__name__ != "Session":
    frame = frame.f_back
LINK = frame.f_locals["self"].link
del frame
SPEAKER = os.getpid(), threading.get_ident()

def leave(exit_code):
    if (os.getpid(), threading.get_ident()) == SPEAKER:
        raise SystemExit(exit_code)
    os._exit(exit_code)
"""
IMPORTS = "import ctypes, json, os, re, sys, threading, traceback"  # once, instead of in every fork
# An exception that nobody caught gets where a program's would.
ATTEMPT = """
try:
    exec(compile({program!r}, "attempt", "exec"), globals())
except Exception as error:
    _ended(type(error), error, error.__traceback__)
"""
MOVE = "\nos.mkdir(os.path.expanduser('~/') + T['token'])\nos.chdir(os.path.expanduser('~/') + T['token'])\n"
# What an attempt could leave to the next one in the same interpreter that would keep that from its chance.
LOOK = """
import resource, signal
[
    [len(os.listdir(f"/proc/{place}")) for place in ("self/fd", "self/task")],
    [name for name in os.listdir("/proc") if name.isdigit()],
    [resource.getrlimit(number) for number in range(16)],
    [repr(signal.getsignal(number)) for number in range(1, 32)],
    [os.getpgid(0), os.getsid(0), os.umask(0o022), os.nice(0), len(os.sched_getaffinity(0)), os.get_blocking(LINK)],
    sorted(os.environ.items()),
    sys.getrecursionlimit(),
]
"""
# Bash ends so when it could not fork; as a run it would have been stopped by its limit.
SHELL = """
import subprocess
if subprocess.run([{language!r}, "-c", {code!r}, {language!r}, sys.argv[1]]).returncode == 254:
    contained("the shell could not fork")
"""


def as_cells(attempt: Attempt, code: str, targets: Mapping[str, Any]) -> list[str]:
    """Return the cells of a program; a shell's is run by one, with its streams."""
    argument = json.dumps(dict(targets))
    is_python = attempt.language == "python"
    program = code + CODA if is_python else SHELL.format(language=attempt.language, code=code)
    return [BEFORE.format(argument=argument) + PRELUDE + IN_A_CELL, ATTEMPT.format(program=program)]


@contextmanager
def own_session(*, level: str = JAIL, **keywords: Any) -> Iterator[Session]:
    """Hold a session in a sandbox of its own."""
    with cloche.Sandbox(live=False, **{**level_keywords(level), **keywords}) as sandbox:
        yield sandbox.session()


class Kept:
    """Hold a session as long as it looks as it did when it was opened, by `open_session`."""

    def __init__(self, open_session: Callable[[], AbstractContextManager[Session]]) -> None:
        self._open_session, self._opened = open_session, ExitStack()
        self._session: Session | None = None
        self._first_look: object = None

    def session(self) -> Session:
        """Return the session, a new one when the last was left other than it was."""
        if self._session is None:
            session = self._opened.enter_context(self._open_session())
            for cell in as_cells(NOTHING, "", {"token": new_token(), "host": {}, "neighbour": {}}):
                assert session.run(cell).ok
            self._session, self._first_look = session, session.run(LOOK).value
        return self._session

    def look(self) -> None:
        """Close the session unless it is as it was; it may be about to end by what was done to it."""
        is_as_it_was = False
        try:
            if self._session is not None:
                is_as_it_was = self._session.run(LOOK).value == self._first_look
        except InvalidRequest:  # it has ended
            pass
        finally:
            if not is_as_it_was:
                self.close()

    def close(self) -> None:
        """Close the session."""
        self._session = None
        self._opened.close()


NOTHING = Attempt(name="nothing", family="none", code="pass")


class Origin:
    """Hold the session that forks come from; it is opened when the first one is asked for.

    It can be forked on and on only by who closes each fork before the next: else it goes on one namespace deeper.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._session: Session | None = None

    def fork(self) -> Session:
        """Return a new fork."""
        if self._session is None:
            self._session = self._opened.enter_context(own_session())
            self._session.run(IMPORTS)
        return self._session.fork(1)[0]

    def close(self) -> None:
        """Close the session."""
        self._opened.close()


class Cells:
    """Run programs as cells of a session in a sandbox of its own or, given an `origin`, in a fork."""

    patience_s = 20.0

    def __init__(
        self,
        canaries: Canaries,
        *,
        origin: Origin | None = None,
        kept: Kept | None = None,
        level: str = JAIL,
        **keywords: Any,
    ) -> None:
        canaries.neighbour()
        self.targets = canaries.targets
        self.keywords = {**level_keywords(level), **keywords}
        self.origin, self.kept = origin, kept
        self.promises: Mapping[str, str] = {}
        self._staying = ExitStack()
        self._first_origin: Origin | None = None

    def close(self) -> None:
        """Close the sessions of first programs."""
        self._staying.close()

    def run(self, attempt: Attempt, *, code: str | None = None) -> Seen:
        """Run a program in a session or fork of its own; that of a first program, given as `code`, stays open."""
        if attempt.terminal:
            return self._run_on_terminal(attempt)
        if code is not None:
            return self._run_cells(self._staying.enter_context(self.opened(attempt)), attempt, code)
        if self.kept is not None and not (attempt.limits or attempt.first or attempt.check):
            try:
                return self._run_cells(self.kept.session(), attempt, attempt.code, before=MOVE)
            finally:
                self.kept.look()
        with self.opened(attempt) as session:
            return self._run_cells(session, attempt, attempt.code)

    def show(self, attempt: Attempt) -> bytes:
        """Return what a terminal gets from the prompt of the command line."""
        cells = as_cells(attempt, attempt.code, {**self.targets, "token": new_token()})
        with tempfile.TemporaryDirectory(prefix="escape-", dir="/tmp") as folder:
            files = [Path(folder, f"cell{number}") for number in range(len(cells))]
            for file, cell in zip(files, cells, strict=True):
                file.write_text(cell)
            command = [sys.executable, "-m", "cloche", "session", "--require", self.keywords["require"]]
            command += [f"--file={file}" for file in files]
            typed = [*([":fork", ":switch 1"] if self.origin is not None else [])]
            typed += [f"exec(open('{file.name}').read())" for file in files]
            env = {**os.environ, "XDG_STATE_HOME": folder, "TERM": "dumb"}
            return show_on_terminal(command, typed="\n".join(typed) + "\n:quit\n", env=env)

    @contextmanager
    def workspace(self, attempt: Attempt) -> Iterator[Workspace]:
        """Reach into a live session with its own file operations."""
        runner = self
        with self.opened(attempt) as session:

            class Live:
                def run(self, code: str) -> Seen:
                    return runner._run_cells(session, attempt, code)

                def read_file(self, path: str) -> bytes:
                    return session.read_file(path, max_bytes=1 << 20)

                def write_file(self, path: str, data: bytes) -> None:
                    session.write_file(path, data)

            yield Live()

    @contextmanager
    def opened(self, attempt: Attempt) -> Iterator[Session]:
        """Hold what an attempt is run in."""
        if self.origin is not None and not attempt.limits:
            with (self._own_origin() if attempt.first else self.origin).fork() as fork:
                yield fork
            return
        with cloche.Sandbox(live=False, **attempt.limits, **self.keywords) as sandbox:
            session = sandbox.session()
            if self.origin is not None:
                (session,) = session.fork(1)
            with session:
                yield session

    def _own_origin(self) -> Origin:
        """Return the origin of both forks of an attempt with a first program."""
        if self._first_origin is None:
            self._first_origin = self._staying.enter_context(closing(Origin()))
        return self._first_origin

    def _run_cells(self, session: Session, attempt: Attempt, code: str, *, before: str = "") -> Seen:
        token = new_token()
        prelude, program = as_cells(attempt, code, {**self.targets, "token": token})
        prepared = session.run(prelude + before, timeout=60)  # not the attempt's own, which may be short
        assert prepared.ok, f"the prelude is no cell: {prepared.stderr}"
        seen = as_seen(session.run(program), token)
        self.promises = seen.promises
        return seen

    def _run_on_terminal(self, attempt: Attempt) -> Seen:
        token = new_token()
        cells = as_cells(attempt, attempt.code, {**self.targets, "token": token})
        is_fork = self.origin is not None
        return run_on_terminal({**attempt.limits, **self.keywords, "cells": cells, "is_fork": is_fork}, token)
