"""What a checker of types sees of the blocking face: pyright reads this file in `make check`; nothing runs it."""

from typing import Protocol, assert_type

import cloche
from cloche.backends.cloche import ClocheBackend
from cloche.backends.daytona import DaytonaBackend
from cloche.backends.e2b import E2BBackend
from cloche.core.protocols import Backend, SupportsAccount
from cloche.skills.run import run_skill
from cloche.skills.skill import Skill
from cloche.sync import Sandbox, Session


class _Remote(Backend, SupportsAccount, Protocol):
    """Be what every backend is that sends code elsewhere."""


_REMOTE: tuple[type[_Remote], ...] = (E2BBackend, DaytonaBackend, ClocheBackend)


def _of_calls(skill: Skill) -> None:
    assert_type(cloche.run("x", timeout=1, on_output=lambda _, __: None), cloche.Result)
    assert_type(run_skill(skill, "x", timeout=1), cloche.Result)


def _of_sandboxes(sandbox: Sandbox) -> None:
    assert_type(sandbox.run("x", timeout=1), cloche.Result)
    assert_type(sandbox.read_file("a", max_bytes=1), bytes)
    assert_type(sandbox.write_file("a", b""), None)
    assert_type(sandbox.list_files(), tuple[str, ...])
    assert_type(sandbox.session("bash"), Session)


def _of_sessions(session: Session) -> None:
    assert_type(session.run("x", out="y"), cloche.Result)
    assert_type(session.read_file("a"), bytes)
    assert_type(session.fork(2), list[Session])
    for given in (session.checkpoint, session.rollback):
        assert_type(given("x"), None)
    for plain in (session.interrupt, session.restart, session.end, session.close):
        assert_type(plain(), None)
