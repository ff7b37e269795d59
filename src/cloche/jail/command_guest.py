"""A process of a live sandbox, before it is the program: pid 1's fork, which takes an order from the client.

The order asks for a command, a script, a session, or an operation on files. It comes at once, or later for a process
that was forked ahead.
"""

from __future__ import annotations

import posix
import sys

from . import accounts, messages
from .guest import Guest
from .messages import Order
from .pid1 import Parent, never_freed
from .steps import StepFailed, make, perform, perform_calls
from .syscalls import AT_EMPTY_PATH, call, close_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .messages import Building
    from .steps import Step

NO_FOLDER, FILES, USER = "cwd", "files", "user"
SUDO = "sudo"  # the operation of an order
HANDING_OVER: Step = ("hand_over", "give pid 1 the descriptor on which the filter asks", [])
CAPABILITIES, NO_CAPABILITIES = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4), bytes(24)  # for capset(2)
REQUESTS = 4  # the stream that a session has, see `init.wire`
NEW_FILE = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC


class CommandParent(Parent):
    """Hold the inputs of each process of a client's."""

    building: Building
    root_steps: Sequence[Step]  # of root inside, in place of the others
    nice: int  # of guests
    terminal: Any  # our module `init.terminal`
    serve_files: Any  # the function `init.files.serve`
    sudo_module: Any  # our module `init.sudo`, with several users


class CommandGuest(Guest):
    """Be a process that a client asks for: now, by an `early_order` with the streams, or later."""

    def __init__(self, parent: CommandParent, asking: int, early_order: tuple[dict[str, Any], dict[int, int]] | None):
        super().__init__(parent, 0, asking)
        self.link = asking  # failures are pid 1's to report
        self.building, self.early_order = parent.building, early_order
        self.terminal, self.serve_files, self.sudo_module = parent.terminal, parent.serve_files, parent.sudo_module
        self.root_steps, self.nice = parent.root_steps, parent.nice
        self.account: dict[str, str] = {}  # variables of a user that was asked for
        self.order: dict[str, Any] = {}
        never_freed.append(self)

    def _build(self) -> None:
        posix.setpriority(posix.PRIO_PROCESS, 0, self.nice)
        if self.load_interpreter is not None:
            self.interpreter = self.load_interpreter("oneshot")
        self.seconds = perform(self.building.first, self.registers)
        try:
            is_root = self._become_user()
        except OSError as error:
            raise StepFailed((USER, "become the user", []), 0, 1, error) from error
        self.seconds += perform(self.root_steps if is_root else self.building.later, self.registers)
        self._restrict(holds=bool(self.spec.answered))

    def _become_user(self) -> bool:
        """Become the order's user, or the sandbox's own; tell whether that is root."""
        name = self.early_order[0].get("user") if self.early_order is not None else None
        if name is None:
            number = group = self.spec.inside_id
            groups = [group]
        else:
            account = accounts.find(name)
            number, group, groups = account.uid, account.gid, account.groups
            self.account = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
        if self.early_order is not None and self.early_order[0].get("terminal") and name is not None:
            call("fchownat", self.early_order[1][0], b"", number, group, AT_EMPTY_PATH)
        if self.spec.outside is not None:
            posix.setgroups(groups)
        posix.setresgid(group, group, group)
        self.number = number
        if name is not None or not self._keep_own_id(number):
            posix.setresuid(number, number, number)
        return number == 0

    def _keep_own_id(self, number: int) -> bool:
        """Become a user whose programs can neither stop nor trace us: they have not our real and saved id.

        Files are worked on with the effective one, and we have no other before we are a program. Tell whether this
        namespace has an id that no program has.
        """
        if self.spec.outside is None:
            return False
        own = 0 if self.spec.users is None else self.spec.users[1] - 1
        try:
            posix.setresuid(own, number, own)
        except OSError:
            return False
        call("capset", CAPABILITIES, NO_CAPABILITIES)
        return True

    def _hand_over(self) -> None:
        """Give pid 1 the filter's notification descriptor; until then the limit on descriptors is that of pid 1."""
        try:
            super()._hand_over()
        except OSError as error:
            raise StepFailed(HANDING_OVER, 0, 1, error) from error
        perform(self.building.last, {})

    def _take_order(self) -> tuple[Order, list[int]]:
        order, streams = self.early_order or self._await_order()
        self.order = order
        if not is_own(order):
            posix.setresuid(self.number, self.number, self.number)
        python = order.get("python")
        for path in order.get("remove") or ():
            _remove(path)
        for folder in order.get("folders") or ():
            _make_folders_above(f"{folder}/")
        self._write_files(order.get("files") or ())
        self._enter(order.get("cwd"))
        commands = (
            [] if python is not None or is_own(order) else [[str(argument) for argument in order.get("argv") or ()]]
        )
        if python is not None and "source" in python:
            python["source"] = python["source"].encode("utf-8", "surrogateescape")
        env = {**self.account, **{str(name): str(value) for name, value in (order.get("env") or {}).items()}}
        fds = [streams[number] for number in sorted(streams)]
        return Order(commands=commands, python=python, env=env, is_session=REQUESTS in streams), fds

    def _await_order(self) -> tuple[dict[str, Any], dict[int, int]]:
        """Wait for an order, without holding descriptors whose end of file another process waits for."""
        if self.asking > 3:
            close_range(3, self.asking - 1)
        close_range(self.asking + 1)
        if self._has_time(self.asking):
            self._warm_up()
        tag, body, fds = messages.receive(self.asking)
        if tag != "order":  # pid 1 is gone, and so must we be
            posix._exit(1)
        return body["order"], dict(zip(body["streams"], fds, strict=True))

    def _write_files(self, files: Sequence[tuple[str, int, str]]) -> None:
        """Write files with the program's own rights: path, mode, and content in hexadecimal."""
        for path, mode, text in files:
            try:
                _make_folders_above(path)
                fd = posix.open(path, NEW_FILE, mode)
                try:
                    perform_calls([make("write", fd, bytes.fromhex(text))])
                finally:
                    posix.close(fd)
            except OSError as error:
                raise StepFailed((FILES, f"write {path}", []), 0, 1, error) from error

    def _enter(self, folder: str | None) -> None:
        if folder is None:
            return
        if folder == "~" or folder.startswith("~/"):  # of a requested user; that of the own one is known outside
            folder = self.account.get("HOME", "/") + folder[1:]
        try:
            posix.chdir(folder)
        except OSError as error:
            raise StepFailed((NO_FOLDER, f"work in {folder}", []), 0, 1, error) from error

    def _start_program(self, order: Order, fds: list[int]) -> None:
        if self.order.get("op") == SUDO:
            self._serve_sudo(fds[0])
        if self.order.get("terminal"):
            self.terminal.take(fds[0])
        if not is_own(self.order):
            super()._start_program(order, fds)
            return
        self._take_streams(fds, is_compiling=False)
        if fds[3] != 3:
            call("dup3", fds[3], 3, 0)
        self._close_descriptors([3])
        try:
            self.serve_files(self.order)
        except OSError:
            posix._exit(1)
        posix._exit(0)

    def _serve_sudo(self, listener: int) -> None:
        """Accept a connection, which lets pid 1 go on when our link is closed, and serve it. Never returns."""
        connection = self.sudo_module.accept(listener)
        try:
            if connection >= 0:
                self._close_descriptors([connection])
                self.sudo_module.serve(connection, (0, self.spec.inside_id))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # of a client that is gone, or not ours
        posix._exit(1)


def is_own(order: dict[str, Any]) -> bool:
    """Tell whether the order is for one of Cloche's own programs: an operation on files."""
    return order.get("op") == "files"


def _remove(path: str) -> None:
    try:
        posix.unlink(path)
    except OSError:
        pass  # the run, or another process, has made something else of it


def _make_folders_above(path: str) -> None:
    slash = path.find("/", 1)
    while slash > 0:
        try:
            posix.mkdir(path[:slash], 0o755)
        except OSError:
            pass  # it exists, or the next open reports the error
        slash = path.find("/", slash + 1)
