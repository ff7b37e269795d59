"""The process that reads and writes the files of kept logins, for one sandbox: its egress process may open no file.

Theory of operation: for each exchange a thread waits for the lock of its login, and holds it until the egress process
sends the outcome. If another exchange has ended meanwhile, its answer is returned. If the egress process ends first,
the lock's file tells the next exchange that the tokens may be spent. This process ends with the egress process, and not
with the caller of the sandbox.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from cloche.core.errors import ClocheError
from cloche.core.kept_logins import KeptLogin
from cloche.jail import messages
from cloche.jail.setup.launch import RESET_SIGNALS
from cloche.jail.syscalls import PR_SET_DUMPABLE, prctl

from .login_file import Login, LoginFile, begin_exchange, end_exchange

BOOT = "import sys; sys.path += {paths!r}; from cloche.egress.login_server import main; main(0)"
_processes: list[subprocess.Popen[bytes]] = []  # children of this process, to be taken note of when they end
_UNREAD = (-1,)  # a state that no file has
Message = dict[str, Any]


class LoginServer:
    """Serve the logins of one sandbox, by name, on a link."""

    def __init__(self, link: int, logins: Mapping[str, LoginFile]):
        self._link, self._logins = link, logins
        self._states: dict[str, tuple[int, ...]] = dict.fromkeys(logins, _UNREAD)
        self._ends: dict[int, queue.SimpleQueue[Message | None]] = {}

    def serve(self) -> None:
        """Serve until the other end of the link is closed."""
        requests = select.poll()
        requests.register(self._link, select.POLLIN)
        try:
            while requests.poll() and (message := messages.receive(self._link))[0]:  # which would hold the GIL
                self._take(message[0], message[1])
        except OSError:
            pass  # the egress process is gone
        finally:
            for end in self._ends.values():
                end.put(None)
            os.close(self._link)

    def _take(self, tag: str, body: Message) -> None:
        if tag == "look":
            self._answer(body["number"], logins=self._changed())
        elif tag == "begin":
            self._ends[body["number"]] = queue.SimpleQueue()
            threading.Thread(target=self._exchange, kwargs=body, name="cloche-login", daemon=True).start()
        elif (end := self._ends.get(body["number"])) is not None:
            end.put(body)

    def _answer(self, number: int, **reply: Any) -> None:  # noqa: ANN401 - plain values
        messages.send(self._link, "reply", {"number": number, **reply})

    def _changed(self) -> dict[str, Message | None]:
        """Return the logins whose files are others than at the last call."""
        changed: dict[str, Message | None] = {}
        for name, file in self._logins.items():
            state = file.state()
            if state != self._states[name]:
                self._states[name] = state
                login = _readable(file)
                changed[name] = None if login is None else _message_of(login)
        return changed

    def _exchange(self, number: int, name: str, version: int | None) -> None:
        """Hold the lock of a login for an exchange; there is none if the login has another version by then."""
        file, end = self._logins[name], self._ends[number]
        try:
            with file.locked() as lock:
                if not end.empty():
                    return  # it took too long for who asked
                login = _readable(file)
                if version is not None and (login is None or login.version != version):
                    self._answer(number, login=None if login is None else _message_of(login), is_begun=False)
                    return
                since = begin_exchange(lock)
                self._answer(number, login=None if login is None else _message_of(login), is_begun=True, since=since)
                if (reply := end.get()) is not None:
                    written = self._end(file, login, lock, reply)
                    self._answer(number, login=None if written is None else _message_of(written))
        except (OSError, ClocheError) as error:
            self._fail(number, error)
        finally:
            self._ends.pop(number, None)

    def _end(self, file: LoginFile, login: Login | None, lock: int, reply: Message) -> Login | None:
        """Write the tokens of an exchange, and return the new login."""
        if reply["is_dropped"]:
            file.remove()
            login = None
        elif reply["fields"]:
            fields = {name: (mark, value) for name, (mark, value) in reply["fields"].items()}
            kept = {} if reply["is_new"] or login is None else login.fields
            login = file.write(Login(fields={**kept, **fields}, answer=reply["answer"]))
        if reply["is_known"]:
            end_exchange(lock)
        return login

    def _fail(self, number: int, error: Exception) -> None:
        try:
            self._answer(number, error=str(error))
        except OSError:
            pass  # the egress process is gone


def _readable(file: LoginFile) -> Login | None:
    """Return a login; none for one that cannot be read, which a new one replaces."""
    try:
        return file.read()
    except (OSError, ClocheError):
        return None


def _message_of(login: Login) -> Message:
    return {"version": login.version, "fields": dict(login.fields), "answer": login.answer}


def serve(logins: Mapping[str, KeptLogin], paths: list[str]) -> int:
    """Start a process that serves these logins, and return the link for the egress process.

    `paths` are the folders of this package and of `cryptography`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        messages.send(theirs.fileno(), "logins", {name: [kept.path, kept.key] for name, kept in logins.items()})
        _processes[:] = [process for process in _processes if process.poll() is None]
        _processes.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", RESET_SIGNALS + BOOT.format(paths=paths)], stdin=ours.fileno(),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}, start_new_session=True,
            )
        )  # fmt: skip
    return theirs.detach()


def main(link: int) -> None:
    """Serve the logins of the first message."""
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    _, logins, _ = messages.receive(link)
    os.chdir("/")
    LoginServer(link, {name: LoginFile(path, key) for name, (path, key) in logins.items()}).serve()
