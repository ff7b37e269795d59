"""Waiting until a helper has hung up, or has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess

from cloche.jail import wire

CLOSE_PATIENCE_S = 10.0


async def until_end(link: socket.socket) -> None:
    """Wait until the other end has hung up; what it says is dropped."""
    while True:
        try:
            tag, _, fds = wire.receive(link.fileno())
        except BlockingIOError:
            await _until_readable(link.fileno())
            continue
        except OSError:
            return
        for fd in fds:
            os.close(fd)
        if not tag:
            return


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


async def wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait by a pidfd: `Popen.wait` with a time-out polls."""
    fd = os.pidfd_open(process.pid)
    try:
        await asyncio.wait_for(_until_readable(fd), CLOSE_PATIENCE_S)
    except TimeoutError:
        process.kill()
    finally:
        os.close(fd)
    process.wait()
