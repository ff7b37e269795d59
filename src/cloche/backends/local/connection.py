"""The caller's end of a helper, on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.errors import OutcomeUnknown, StartFailed
from cloche.jail import wire
from cloche.jail.launch import make_cgroup, start_helper
from cloche.jail.remains import clear_remains
from cloche.jail.spec import Run, Spec

CLOSE_PATIENCE_S = 10.0

OnWord = Callable[[str, dict[str, Any], list[int]], None]


class Connection:
    """Hold one helper process: start it, run in it, end it. Use from one event loop."""

    def __init__(self, spec: Spec, executable: str):
        self._spec = spec
        self._executable = executable
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._was_started = False

    @property
    def is_alive(self) -> bool:
        return self._link is not None

    async def start(self) -> None:
        """Start the helper and tell it what to build. Raises StartFailed."""
        cgroup = self._spec.cgroup
        place = {"version": cgroup["version"], "folders": cgroup["folders"]} if cgroup else {}
        try:
            self._process, self._link = start_helper(self._executable, **place)
        except OSError as error:
            raise StartFailed(f"cannot start the helper process: {error}", step="helper", errno=error.errno) from error
        self._link.setblocking(False)
        if cgroup is not None:
            self._make_cgroup(cgroup)
        self._send("open", {}, self._spec.as_wire())

    def _make_cgroup(self, cgroup: Mapping[str, Any]) -> None:
        """Make the control group here and now, while the helper's interpreter starts on the other processor."""
        try:
            make_cgroup(cgroup)
        except OSError as error:
            raise StartFailed(f"cannot make the control group: {error}", step="cgroup", errno=error.errno) from error

    def send_run(self, run: Run, streams: Sequence[int], *, is_last: bool = False) -> None:
        """Send one run with its descriptors: standard input, output, error, and the value's pipe.

        After the last one, the helper clears up and ends by itself.
        """
        self._was_started = False
        self._send(
            "run", {"timeout_s": run.timeout_s, "private": run.private, "is_last": is_last}, run.as_wire(), streams
        )

    async def attend(self, on_word: OnWord) -> dict[str, Any]:
        """Wait for the end of the run that was sent; every earlier word goes to `on_word`.

        Raises StartFailed when the sandbox could not be set up, OutcomeUnknown when the helper is gone although the
        code had been started.
        """
        while True:
            tag, body, fds = await self._receive()
            if tag == "ended":
                return body
            if tag == "failed":
                raise StartFailed(body["message"], step=body["step"], index=body["index"], errno=body["errno"])
            if tag in ("", "lost"):
                self._drop()
                raise self._loss()
            self._was_started = self._was_started or tag == "started"
            on_word(tag, body, fds)

    def kill(self, cause: str) -> None:
        """Ask the helper to kill the run; the end is still reported by `attend`."""
        if self._link is not None:
            try:
                wire.send(self._link, "kill", {"cause": str(cause)})
            except OSError:
                pass  # the helper is gone, which `attend` is about to find

    async def close(self) -> None:
        """Let the helper clear up, and wait until it is gone; one that was killed is cleared up after."""
        self._drop()
        if self._process is not None:
            await _wait_for_exit(self._process)
            if self._process.returncode != 0:
                with contextlib.suppress(OSError):  # the result stands; what is left is named after us and empty
                    await asyncio.to_thread(clear_remains, self._spec)
            self._process = None

    def _loss(self) -> Exception:
        if self._was_started:
            return OutcomeUnknown("the helper process ended while the code was running; it may have run in part")
        return StartFailed("the helper process ended before the code was started", step="helper")

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _send(self, tag: str, body: dict[str, Any], payload: dict[str, Any], fds: Sequence[int] = ()) -> None:
        packed = wire.pack(payload)
        try:
            if self._link is None:
                raise BrokenPipeError(32, "the helper process is gone")
            wire.send(self._link, tag, body, [packed, *fds])
        except OSError as error:
            raise StartFailed(f"cannot reach the helper process: {error}", step="helper", errno=error.errno) from error
        finally:
            os.close(packed)

    async def _receive(self) -> tuple[str, dict[str, Any], list[int]]:
        while self._link is not None:
            try:
                return wire.receive(self._link)
            except BlockingIOError:
                await _until_readable(self._link.fileno())
        return "", {}, []


async def _until_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _settle, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait by a pidfd: `Popen.wait` with a time-out polls."""
    fd = os.pidfd_open(process.pid)
    try:
        await asyncio.wait_for(_until_readable(fd), CLOSE_PATIENCE_S)
    except TimeoutError:
        process.kill()
    finally:
        os.close(fd)
    process.wait()
