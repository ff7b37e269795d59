"""What is kept of a helper from run to run, and when the jail that it has built ahead is nobody's any more."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import cloche
from cloche.forkserver.slot import START_S, Slot, Template
from cloche.jail import messages
from cloche.jail.messages import Building, Spec

PACKAGE = Path(cloche.__file__).parent
REPORT = {"cpu_user_s": 0.02, "cpu_system_s": 0.01}


class Group:
    """Play a control group's figures."""

    def __init__(self) -> None:
        self.figures = {"oom_kills": 0, "tasks": 1}

    def read(self) -> dict[str, int]:
        """Return the figures as they are now."""
        return dict(self.figures)

    def close(self) -> None:
        """Let go of nothing."""


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[Slot, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    slot = Slot(ours, None, cast("Template", None))
    yield slot, theirs
    slot.close()
    theirs.close()


def prepare(slot: Slot, *, rebuilds: bool, workspace: int = -1) -> None:
    """Have a prefork jail built."""
    slot.prepare("a jail", Building(), {"private": []}, is_prefork=True, rebuilds=rebuilds, workspace=workspace)


def received(link: socket.socket) -> tuple[str, dict[str, Any], int]:
    """Return what the helper receives, with the number of descriptors that came along."""
    tag, body, fds = messages.receive(link.fileno())
    for fd in fds:
        socket.close(fd)
    return tag, body, len(fds)


def test_a_jail_is_named_by_its_key_once_its_helper_was_told_to_build_it(pair: tuple[Slot, socket.socket]) -> None:
    """With a socket for its orders, the status, and the workspace that it is to attach."""
    slot, helper = pair
    with socket.socket() as held:
        prepare(slot, rebuilds=False, workspace=held.fileno())
    tag, body, count = received(helper)
    assert (tag, count) == ("prepare", 5)
    assert slot.handoff is not None
    assert body == {"private": [], "is_prefork": True, "has_workspace": True, "generation": slot.handoff.generation}
    assert (slot.key, slot.rebuilds) == ("a jail", False)


def test_a_helper_that_is_gone_has_built_nothing(pair: tuple[Slot, socket.socket]) -> None:
    """The error is raised, and no jail is named."""
    slot, helper = pair
    helper.close()
    with pytest.raises(BrokenPipeError):
        prepare(slot, rebuilds=True)
    assert slot.key is None


@pytest.mark.parametrize(
    ("rebuilds", "is_over", "key"),
    [(True, True, "a jail"), (True, False, "a jail"), (False, False, "a jail"), (False, True, None)],
)
def test_a_jail_that_keeps_a_workspace_ends_with_its_run(
    pair: tuple[Slot, socket.socket], rebuilds: bool, is_over: bool, key: str | None
) -> None:
    """Any other is built anew by its helper, which needs no order for that."""
    slot, _ = pair
    prepare(slot, rebuilds=rebuilds)
    assert slot.handoff is not None
    slot.take_message("ended", {"generation": slot.handoff.generation + is_over})
    assert slot.key == key


@pytest.mark.parametrize(("rebuilds", "key"), [(True, "a jail"), (False, None)])
def test_a_failed_start_ends_a_jail_that_keeps_a_workspace(
    pair: tuple[Slot, socket.socket], rebuilds: bool, key: str | None
) -> None:
    """What the guest had attached is attached by nobody else there."""
    slot, _ = pair
    prepare(slot, rebuilds=rebuilds)
    slot.account_failure()
    assert slot.key == key
    prepare(slot, rebuilds=rebuilds)
    slot.invalidate()
    assert slot.key is None


def test_a_run_s_figures_are_what_came_on_top(pair: tuple[Slot, socket.socket]) -> None:
    """Those of runs before it, and of what failed before it started, are not its own."""
    slot, _ = pair
    group = Group()
    slot._gauges = cast("Any", group)
    group.figures = {"oom_kills": 2, "tasks": 5}
    slot.account_failure()
    group.figures = {"oom_kills": 3, "tasks": 5}
    first: dict[str, Any] = dict(REPORT)
    slot.account(first, is_watched=False)
    group.figures = {"oom_kills": 3, "tasks": 9}
    second: dict[str, Any] = dict(REPORT)
    slot.account(second, is_watched=True)
    assert (first["counters"], first["tasks"]) == ({"oom_kills": 1}, 0)
    assert (second["counters"], second["tasks"]) == ({"oom_kills": 0}, 9)


def test_only_what_the_helper_did_not_watch_is_spent_from_the_quota(pair: tuple[Slot, socket.socket]) -> None:
    """The helper fills the quota for what it watches; making the next guest ready counts for the rest."""
    slot, _ = pair
    slot.account(dict(REPORT), is_watched=True)
    assert slot._spent_s == 0.0
    slot.account(dict(REPORT), is_watched=False)
    assert slot._spent_s == pytest.approx(0.03 + START_S)


def test_what_is_told_to_be_dying_is_until_the_next_run(pair: tuple[Slot, socket.socket]) -> None:
    """Its report says so."""
    slot, _ = pair
    slot.account({**REPORT, "is_quiet": True}, is_watched=True)
    assert slot.is_dying
    slot.account(dict(REPORT), is_watched=False)
    assert not slot.is_dying


def test_a_helper_is_told_of_a_sandbox_once(pair: tuple[Slot, socket.socket]) -> None:
    """The same amounts again are no message; others are."""
    slot, helper = pair
    slot.open(Spec())
    slot.open(Spec())
    slot.open(Spec(disk_bytes=1))
    assert [received(helper)[0] for _ in range(2)] == ["open", "open"]
    helper.setblocking(False)
    with pytest.raises(BlockingIOError):
        received(helper)


def changed_slots(tree: ast.AST, fields: set[str]) -> list[str]:
    """Return what a module assigns to fields of something that is called a slot."""
    targets = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets.append(node.target)
    found = [
        part
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
    ]
    texts = [ast.unparse(one) for one in found if one.attr in fields]
    return [text for text in texts if text.split(".")[-2].removeprefix("_") == "slot"]


def test_a_slot_changes_by_its_own_methods_alone(pair: tuple[Slot, socket.socket]) -> None:
    """No other module assigns a field of one."""
    fields = set(vars(pair[0]))
    code = "slot.key = self._slot.spent = 1; one._slot._spent_s += 1; slot.handoff.generation = slot.other = 2"
    assert changed_slots(ast.parse(code), fields) == ["slot.key", "one._slot._spent_s"]
    spoken_of = {path: text for path in PACKAGE.rglob("*.py") if "slot." in (text := path.read_text())}
    found = {path: changed_slots(ast.parse(text), fields) for path, text in spoken_of.items()}
    assert {path: texts for path, texts in found.items() if texts} == {}
