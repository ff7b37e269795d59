"""The egress process: outside every sandbox and without privileges, it serves the sockets created inside.

It is started by `client`, and ends when that end of its link is closed. Each `open` on the link is one sandbox's
network. One that serves sandboxes of keepers `outlives_caller`: keepers hold no copy of the link, so it ends with the
last of their networks once the caller is gone, and it tells the caller of the end of each.

It reads a guest's bytes, so it drops its privileges first: its user if that is root, all capabilities, gaining new
ones, and by a filter all system calls that serving a network does not need.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cloche.jail import messages
from cloche.jail.syscalls import PR_SET_DUMPABLE, address_of, call, prctl

from .network import GuestNetwork

if TYPE_CHECKING:
    from .opened import SecretsOpener

NOBODY = 65534
PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER = 38, 1
CAPABILITY_VERSION = 0x20080522
MEMORY_BYTES = 4 << 30  # of addresses
STACK_BYTES = 1 << 20  # of a thread that looks a name up
MOST_FILES = 65_536
FINISH_S = 60.0  # for tokens that are being exchanged
MESSAGE_BYTES = 64 << 20  # of the memory file of a message, the only kind of file that is written


def main(link: int) -> None:
    """Serve until the caller is gone, whose first message is the filter of system calls, as the kernel takes it."""
    _, settings, _ = messages.receive(link)
    "\u00fc".encode("idna")  # rules need that codec, whose modules another user may not be able to read
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    opener = _secrets_opener(settings["authorities"]) if settings["has_secrets"] else None
    threading.stack_size(STACK_BYTES)
    _give_up_rights()
    install_filter(settings["program"])
    gc.freeze()
    asyncio.run(Served(link, opener, outlives_caller=settings["outlives_caller"]).until_over())


def _secrets_opener(authorities: str) -> SecretsOpener:
    """Return what opens the secrets of sandboxes; the modules and the authorities are read now, with all rights."""
    from .opened import SecretsOpener
    from .tls import host_context

    return SecretsOpener(host_context(authorities))


def _give_up_rights() -> None:
    _limit(resource.RLIMIT_NOFILE, MOST_FILES)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, MESSAGE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    os.chdir("/")
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass  # a user namespace without that id; the capabilities go in any case
    header = CAPABILITY_VERSION.to_bytes(4, "little") + bytes(4)
    call("capset", header, bytes(24))
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def install_filter(program: bytes) -> None:
    """Have this process, and all threads that it starts, make no system call but those that a filter allows."""
    call("seccomp", SECCOMP_SET_MODE_FILTER, 0, struct.pack("Hxxxxxx", len(program) // 8) + address_of(program))


def _limit(kind: int, limit: int) -> None:
    """Set a limit, or the caller's own if that is lower."""
    _, hard = resource.getrlimit(kind)
    limit = limit if hard == resource.RLIM_INFINITY else min(hard, limit)
    resource.setrlimit(kind, (limit, limit))


class Served:
    """Hold the networks of all sandboxes, and the link to the caller that opens them."""

    def __init__(self, link: int, opener: SecretsOpener | None, *, outlives_caller: bool):
        self._link, self._opener, self._outlives_caller = link, opener, outlives_caller
        self._networks: set[GuestNetwork] = set()
        self._has_caller = True
        self._over = asyncio.Event()

    async def until_over(self) -> None:
        """Serve until the end."""
        os.set_blocking(self._link, False)
        asyncio.get_running_loop().add_reader(self._link, self._receive)
        await self._over.wait()
        if self._opener is not None:
            await self._opener.finish(FINISH_S)
        os._exit(0)  # which closes everything at once; threads may still look a name up

    def _receive(self) -> None:
        tag, body, fds = messages.receive(self._link)
        if tag == "open":
            self._open(body, fds)
        else:
            asyncio.get_running_loop().remove_reader(self._link)
            self._has_caller = False
            self._end_if_over()

    def _open(self, body: dict[str, Any], fds: list[int]) -> None:
        try:
            jail_link, control, *values = fds
            network = GuestNetwork(body, jail_link, control, self._drop)
            self._networks.add(network)
            if self._opener is not None:
                network.present.begin(self._opener, body["secrets"], values)
        except BaseException:  # there was no room for all of them, say; to close them tells that it is gone
            for fd in fds:
                os.close(fd)
            raise

    def _drop(self, network: GuestNetwork) -> None:
        self._networks.discard(network)
        if self._outlives_caller:
            with suppress(OSError):  # the caller is gone, or has long not asked
                messages.send(self._link, "closed")
        self._end_if_over()

    def _end_if_over(self) -> None:
        if not (self._has_caller or (self._outlives_caller and self._networks)):
            self._over.set()
