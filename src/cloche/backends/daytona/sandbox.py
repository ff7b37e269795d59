"""The sandboxes opened at Daytona: one machine each, with a first process for each run, or one for a live sandbox
.

The workspace is a folder of the machine. Before a run starts, all processes that the previous run left are killed. Runs
count against the account's quota here, and a sandbox when it is created.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloche.core.enforcement import Enforcement
from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.limits import Limits
from cloche.core.loops import finish
from cloche.core.policy import Policy
from cloche.core.request import Request
from cloche.core.suppressed import suppress_logged

from ..containers.container import ARGUMENTS, LEAST_PYTHON, ByteReceiver
from ..containers.machines import HostedContainer, HostedSandbox, LiveInMachine, LookedInto
from ..containers.program import (
    ENVIRONMENT,
    IMAGE_PATH,
    LOOK,
    PROGRAMS,
    REAPER_BYTES,
    TEMPORARY,
    ULIMITS,
    WORKSPACE,
)
from ..garbage_collection import Background, owner
from ..remote.labels import LABEL
from ..remote.quota import SandboxTicket, counter_for
from .client import DaytonaClient, ProviderSandbox
from .relay import MS_NOEXEC
from .terminal import TerminalWire

log = logging.getLogger("cloche.remote")
END_S = 40.0
MINUTE_S = 60.0
_background = Background("cloche-daytona-end", 2 * END_S)
wait_for_all = _background.wait_for_all


class DaytonaMachine:
    """One sandbox at the provider. All methods block and are thread-safe."""

    def __init__(self, client: DaytonaClient, policy: Policy, limits: Limits, homes: Sequence[str] = ()):
        self.client, self._policy, self._limits, self._homes = client, policy, limits, tuple(homes)
        self.is_lost = self._is_deleted = False
        self.found: ProviderSandbox | None = None
        self.mounted: tuple[str, ...] = ()
        self._turn = threading.Lock()
        self._first: TerminalWire | None = None
        self._ticket: SandboxTicket | None = None

    def create(self) -> LookedInto:
        """Create the sandbox and list its programs. Raises BackendUnavailable, StartFailed; nothing is left then."""
        try:
            return self._create()
        except BaseException:
            self.end()
            raise

    def _create(self) -> LookedInto:
        account = self.client.account
        counter = counter_for(account)
        ticket = counter.open_sandbox(account.lifetime_s) if counter is not None else None
        try:
            sandbox = self.client.create(**self._creation())
        except BaseException:
            if ticket is not None:
                ticket.refund()
            raise
        with self._turn:
            self.found, self._ticket = sandbox, ticket
        if ticket is not None:
            ticket.note_id(sandbox.id)
        if self.is_lost:  # `end` was called meanwhile
            raise StartFailed("the sandbox was closed before it had started; open another one", step="create")
        wire, contents = self._boot(prepares=True)
        with self._turn:
            self._first = wire
        mounted = contents.get("mounted")
        self.mounted = tuple(map(str, mounted)) if isinstance(mounted, list) else ()
        name = account.template or "default"
        return LookedInto.of(
            name, str(contents.get("programs") or ""), shown=f"snapshot {name!r}",
            remedy="Name a snapshot that has: daytona.template.",
        )  # fmt: skip

    def start(self) -> TerminalWire:
        """Start a first process. Raises OSError, StartFailed, BackendUnavailable."""
        with self._turn:
            first, self._first = self._first, None
        return first if first is not None else self._boot(prepares=False)[0]

    def end(self) -> None:
        """Delete the sandbox at the provider. Later calls wait for the first."""
        self.is_lost = self.client.is_given_up = True
        with self._turn:
            sandbox = self.found if not self._is_deleted else None
            self._is_deleted = self._is_deleted or sandbox is not None
            ticket, self._ticket = self._ticket, None
            wire, self._first = self._first, None
            if wire is not None:
                wire.close()
            if sandbox is not None:
                with suppress_logged(log, "a sandbox at Daytona may be left, which ends by itself", BackendUnavailable):
                    self.client.delete(sandbox.id)
            if ticket is not None:
                with suppress_logged(log, "the place of a sandbox stays counted", BackendUnavailable):
                    ticket.close()
            self.client.close()

    def _boot(self, *, prepares: bool) -> tuple[TerminalWire, Mapping[str, Any]]:
        sandbox = self.found
        if sandbox is None or self._is_deleted:
            raise ConnectionError("the sandbox was ended")
        wire = TerminalWire(self.client.open_terminal(sandbox))
        try:
            return wire, wire.boot(self._settings(prepares=prepares))
        except BaseException:
            wire.close()
            raise

    def _creation(self) -> dict[str, Any]:
        account, policy = self.client.account, self._policy
        minutes = max(1, math.ceil(account.lifetime_s / MINUTE_S))
        return {
            "snapshot": account.template or None,
            "target": account.region or None,
            "user": "root",  # for the relay only; programs run with another id
            "labels": {LABEL: owner()},
            "public": False,
            "network_block_all": policy.network == "off",
            "auto_stop_interval": minutes,
            "auto_delete_interval": 0,
            "ttl_minutes": minutes,
        }

    def _settings(self, *, prepares: bool) -> dict[str, Any]:
        limits, policy = self._limits, self._policy
        tmp = 0o1777 if "/tmp" in policy.writable_paths else 0o755
        rlimits = {f"RLIMIT_{name.upper()}": limit for name, limit in ULIMITS.items()}
        rlimits |= {"RLIMIT_NPROC": limits.pids, "RLIMIT_DATA": 2 * limits.memory_bytes + REAPER_BYTES}
        rlimits |= {"RLIMIT_FSIZE": limits.disk_bytes}
        return {
            "prepares": prepares,
            "least_python": list(LEAST_PYTHON),
            "places": [
                (WORKSPACE, limits.disk_bytes, 0),
                ("/tmp", limits.tmp_bytes, 0),
                ("/dev/shm", limits.tmp_bytes, MS_NOEXEC),
            ],
            "own": [WORKSPACE, *self._homes],
            "modes": [("/tmp", tmp), ("/dev/shm", 0o1777)],
            "temporary": ["/tmp", "/dev/shm"],
            "clears": not prepares,
            "look": LOOK,
            "programs": list(PROGRAMS),
            "env": {"PATH": IMAGE_PATH, **ENVIRONMENT},
            "rlimits": rlimits,
            "arguments": list(ARGUMENTS),
        }

    def notes(self) -> dict[str, Any]:
        """Return the entries for `meta` of results."""
        described, account = self.found, self.client.account
        sandbox = (
            {"sandbox": described.id, **({"class": described.kind} if described.kind else {})}
            if described is not None
            else {}
        )
        return {
            "backend": "daytona",
            "level_source": "claimed",
            "remote": {**account.as_dict(), **sandbox},
        }


class DaytonaContainer(HostedContainer):
    """One first process in a sandbox at Daytona."""

    background = _background
    machine: DaytonaMachine

    def __init__(self, machine: DaytonaMachine, image: LookedInto):
        super().__init__()
        self.machine, self.rootfs = machine, image
        self.name = machine.found.id if machine.found is not None else ""
        self._wire: TerminalWire | None = None

    @property
    def label(self) -> str:
        """Return the name for messages."""
        return "sandbox at Daytona"

    def _started(self) -> TerminalWire:
        self._wire = self.machine.start()
        return self._wire

    def kill(self) -> None:
        """Delete the sandbox: an unresponsive first process cannot be distinguished from its guest."""
        if self._wire is not None:
            self._wire.kill()
        self.machine.end()

    def argv(self) -> Sequence[str]:
        """Return the provider's id of the sandbox and the program started in it."""
        return (self.name, "python3")


class DaytonaOpenSandbox(HostedSandbox[DaytonaContainer]):
    """Run requests in a sandbox at Daytona, one at a time; see core.protocols.OpenSandbox."""

    _machine: DaytonaMachine

    _loses_notice_of_start = True
    _advice = "It may have run to its end there: check its effects outside of the sandbox"

    def __init__(
        self, *, new_machine: Callable[[], DaytonaMachine], policy: Policy, limits: Limits, enforcement: Enforcement
    ):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._machine = new_machine()
        self._image: LookedInto | None = None

    def _find_rootfs(self, request: Request | None) -> LookedInto:  # noqa: ARG002 - one snapshot serves all
        if self._image is None:
            self._image = self._machine.create()
        return self._image

    def _make(self, rootfs: LookedInto, after: DaytonaContainer | None) -> DaytonaContainer:
        if self._machine.is_lost:
            raise StartFailed("the workspace is gone with its sandbox; open another one", step="boot")
        if after is not None:
            after.shutdown()
        container = DaytonaContainer(self._machine, rootfs)
        container.start(self._policy.preload)
        return container

    def _kind(self, rootfs: LookedInto) -> tuple[object, ...]:
        return "daytona", rootfs.id, id(self)

    def _notes(self, container: DaytonaContainer) -> dict[str, Any]:
        return {
            **container.machine.notes(), "image": container.rootfs.name, "engine": "daytona",
            "start_s": round(container.start_s, 3),
        }  # fmt: skip


class DaytonaLiveSandbox(LiveInMachine[DaytonaContainer]):
    """One sandbox at Daytona, with one first process for all processes in it."""

    backend = "daytona"

    def __init__(
        self,
        *,
        new_machine: Callable[[Sequence[str]], DaytonaMachine],
        policy: Policy,
        limits: Limits,
        enforcement: Enforcement,
    ):
        super().__init__(policy=policy, limits=limits, enforcement=enforcement)
        self._new_machine = new_machine
        self._machine: DaytonaMachine | None = None
        self._image: LookedInto | None = None

    async def close(self) -> None:
        """Delete the sandbox, and wait until the provider has accepted that."""
        try:
            await super().close()
        finally:  # also if the wait is cancelled
            if self._machine is not None:
                await finish(asyncio.to_thread(self._machine.end))

    def _make(self, receiver: ByteReceiver) -> DaytonaContainer:
        machine = self._machine = self._new_machine(self._homes())
        self._image = machine.create()
        return self._launch(DaytonaContainer(machine, self._image), receiver)

    def _hasten(self) -> None:
        if self._machine is not None:
            _background.begin(self._machine.end)

    def _in_memory(self) -> Sequence[str]:
        mounted = self._machine.mounted if self._machine is not None else ()
        return [path for path in (WORKSPACE, *TEMPORARY) if path in mounted]

    def _equipment(self) -> LookedInto:
        if self._image is None:
            raise StartFailed("the sandbox was not created", step="boot")
        return self._image

    def _notes(self) -> dict[str, Any]:
        notes = self._machine.notes() if self._machine is not None else {}
        return {**notes, "image": self._equipment().name, "engine": "daytona"}
