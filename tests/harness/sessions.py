"""A driver of live sessions as a plain subprocess: what a caller does, without a jail around the driver."""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloche
from cloche.backends.session import AGAIN_S, NOTHING
from cloche.backends.session_languages import BASH, JAVASCRIPT, ControlMessage

DRIVERS = Path(cloche.__file__).parent / "interpreter"
PROGRAMS = {"javascript": JAVASCRIPT, "bash": BASH}
PATIENCE_S = 60.0
CTRL_C: tuple[ControlMessage, ...] = (("interrupt", {}),)
END_OF_LINK: dict[str, Any] = {"op": "end"}


@dataclass
class Ran:
    """Hold all that was seen of one run by the time its end was known."""

    done: dict[str, Any]
    displays: list[dict[str, Any]] = field(default_factory=list)
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def exit_code(self) -> int:
        return int(self.done["exit_code"])

    @property
    def value(self) -> Any:
        return self.done["value"]

    @property
    def error(self) -> str:
        return str(self.done.get("error", {}).get("name", ""))


class Driver:
    """Start a driver and talk to it; leaving the block ends the link, and checks that the driver ends well by that."""

    def __init__(self, language: str, folder: Path, *, program: str = "", env: Mapping[str, str] | None = None):
        driver = PROGRAMS[language]
        self.codec, self.stopping = driver.new_codec(), driver.interrupt
        self.link, theirs = socket.socketpair()
        self.answers, says = os.pipe()
        with theirs, open(says, "wb"):
            file = str(DRIVERS / driver.file_name)
            self.process = subprocess.Popen(
                driver.command(program or driver.program, file, theirs.fileno(), says),
                pass_fds=[theirs.fileno(), says],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", **(env or {})},
            )
        self.selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.pipes = {"stdout": self.process.stdout.fileno(), "stderr": self.process.stderr.fileno()}
        for name, fd in self.pipes.items():
            os.set_blocking(fd, False)
            self.selector.register(fd, selectors.EVENT_READ, name)
        self.selector.register(self.answers, selectors.EVENT_READ, "link")
        self.run_id, self.has_signalled = 0, False
        self.settled = Ran(done={})  # what came before the run that is next
        self.ready = self._await("ready").done
        if self.ready is END_OF_LINK:
            self.kill()
            raise EOFError(f"the driver of {language} ended before it was ready")

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *failure: object) -> None:
        self.hang_up()
        try:
            exit_code = self.process.wait(PATIENCE_S)
        finally:
            self.kill()
        if failure[0] is None:
            assert exit_code == 0

    def kill(self) -> None:
        """End everything in the driver's process group, and let go of its pipes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.selector.close()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End the link, and read no more answers."""
        self.link.close()
        if self.answers >= 0:
            if self.selector.get_map() is not None:
                self.selector.unregister(self.answers)
            os.close(self.answers)
            self.answers = -1

    def run(self, code: str, *, interrupt_at: bytes = b"", interrupt_after_s: float = 0.0) -> Ran:
        """Run `code`; interrupt it once `interrupt_at` was printed, or after a time, until it is over."""
        self.send(code)
        return self._await("done", interrupt_at=interrupt_at, interrupt_after_s=interrupt_after_s)

    def await_end(self) -> Ran:
        """Wait for the end of the run that was sent last."""
        return self._await("done")

    def await_output(self, text: bytes) -> None:
        """Wait until the run that was sent last has printed something, which is not kept."""
        ran, deadline = Ran(done={}), time.monotonic() + PATIENCE_S
        while text not in ran.stdout:
            assert time.monotonic() < deadline, f"{text!r} was not printed; so far {ran}"
            for key, _ in self.selector.select(PATIENCE_S):
                assert key.data != "link", "it has ended"
                self._read_pipe(ran, key.data)

    def send(self, code: str) -> None:
        """Ask for a run from a thread of its own, as long code may have to wait for the driver."""
        if self.has_signalled:  # as a caller does
            self.has_signalled = False
            number, self.run_id = self.run_id, NOTHING
            self._send("")
            self.settled = self._await("done")
            self.run_id = number
        self.run_id += 1
        self._send(code)

    def _send(self, code: str) -> None:
        self.codec.renew()
        data = self.codec.encode_run(self.run_id, code)
        threading.Thread(target=self._send_all, args=(data,)).start()

    def _send_all(self, data: bytes) -> None:
        try:
            self.link.sendall(data)
        except OSError:
            pass  # the driver is gone, which the end of the link says better

    def interrupt(self, words: tuple[ControlMessage, ...] = ()) -> None:
        """Do what the helper does at `words`, or at those that a caller says first."""
        self.has_signalled = True
        for _, body in words or self.stopping.first:
            send = os.killpg if body.get("to_group", True) else os.kill
            try:
                send(self.process.pid, body.get("number", signal.SIGINT))
            except ProcessLookupError:
                pass  # it is gone, which the end of the link says better

    def _await(self, op: str, *, interrupt_at: bytes = b"", interrupt_after_s: float = 0.0) -> Ran:
        ran, self.settled = Ran(done={}, stdout=self.settled.stdout, stderr=self.settled.stderr), Ran(done={})
        begin = time.monotonic()
        interrupt_s, words = interrupt_after_s or math.inf, self.stopping.first
        while not ran.done:
            for key, _ in self.selector.select(min(interrupt_s, PATIENCE_S)):
                if key.data == "link":
                    self._read_link(ran, op)
                else:
                    self._read_pipe(ran, key.data)
            if ran.done:  # what has ended is not interrupted any more
                break
            waited_s = time.monotonic() - begin
            if waited_s > interrupt_s or (interrupt_at and interrupt_at in ran.stdout):
                self.interrupt(words)
                interrupt_at, interrupt_s, words = b"", waited_s + AGAIN_S, self.stopping.again
            if waited_s > PATIENCE_S:
                raise TimeoutError(f"no {op}; so far {ran}")
        for name in self.pipes:
            while self._read_pipe(ran, name):
                pass
        return ran

    def _read_link(self, ran: Ran, op: str) -> None:
        data = os.read(self.answers, 1 << 16)
        if not data:
            ran.done = END_OF_LINK
        for message in self.codec.feed(data) if data else []:
            if message["op"] == op:
                assert op != "done" or message["id"] == self.run_id
                ran.done = message
            else:
                ran.displays.append(message)

    def _read_pipe(self, ran: Ran, name: str) -> bool:
        """Read what is there; tell whether there was something."""
        try:
            data = os.read(self.pipes[name], 1 << 16)
        except BlockingIOError:
            return False
        if not data and self.pipes[name] in self.selector.get_map():
            self.selector.unregister(self.pipes[name])
        setattr(ran, name, getattr(ran, name) + data)
        return bool(data)


if __name__ == "__main__":  # a session by hand: `python -m tests.harness.sessions bash`
    with Driver(sys.argv[1], Path.cwd()) as driver:
        for line in sys.stdin:
            print(driver.run(line))
