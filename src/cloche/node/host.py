"""A node as the wire's host: leases as callers, their sandboxes, and what the coordinator says."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cloche.audit.log import Audit, audit_for
from cloche.config.keys import Settings
from cloche.config.options import SandboxOptions
from cloche.config.settings import load_settings
from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.policy import Policy
from cloche.wire.allowed import keep_level, options_with_image
from cloche.wire.callers import Caller
from cloche.wire.exec_options import check_fields, check_stays, read_files
from cloche.wire.host import CallTask
from cloche.wire.load import MOST_CONNECTIONS, WireLoad
from cloche.wire.problems import Refused
from cloche.wire.queue import RunQueue
from cloche.wire.sandboxes import NewSandbox, document_of, terms_of
from cloche.wire.secrets import SecretFolder, allowed_with_secrets
from cloche.wire.shares import Shares
from cloche.wire.work import Listing

from .amounts import LeaseRuns, size_of_lease, within_lease
from .denied import DeniedHosts, not_within
from .digests import HeldDigests, digests_here
from .leases import ENDED, RELEASED, SILENT, LeaseTable
from .sandboxes import NodeSandboxes

TTL_S = 60.0  # without a word of the coordinator
ABANDONED_S = 600.0  # so long without a coordinator, the node ends
LOOK_EVERY_S = 0.25
MOST_WORKSPACES, MOST_WORKSPACES_OF_LEASE = 256, 4  # their files stay between runs, in memory with backend "local"
MOST_OUTPUT = 8 << 20  # bytes of a stream in a result, unless the operator's own is more
QUEUE_S = 30.0
DRAIN_S = 4.0
MOST_CALLS_OF_LEASE = 256
# How long, of how many requests, and up to how many characters of them, checked options are used again.
HOLDS_S, MOST_CHECKED, MOST_ASKED = 1.0, 256, 4_096
log = logging.getLogger("cloche.fleet")


class NodeHost:
    """Serve the wire for leases.

    `options` are the operator's, `ttl_s` bounds the coordinator's silence. With `waits` it does not end before it has
    heard of one. `secrets_from` is a folder with the secrets that it holds; empty for none.
    """

    keeps_runs = False

    def __init__(
        self, options: SandboxOptions, *, ttl_s: float = TTL_S, boot: str, waits: bool = False, secrets_from: str = ""
    ):
        self.own_options, self.boot = options, boot
        self.secret_store = SecretFolder(secrets_from, by="this node")
        workspaces = Shares(MOST_WORKSPACES, most_of_one=MOST_WORKSPACES_OF_LEASE)
        self.wire = WireLoad(connections=Shares(MOST_CONNECTIONS), workspaces=workspaces)
        self.sandboxes = NodeSandboxes()
        self.runs: RunQueue = LeaseRuns(self.sandboxes.amounts, deadline_s=QUEUE_S)
        self.leases = LeaseTable()
        self.digests = HeldDigests(partial(digests_here, options))
        self.is_draining = False
        self.denied = DeniedHosts()
        self._calls: dict[str, set[CallTask]] = {}
        self._allowed: dict[str, tuple[float, dict[str, Any]]] = {}  # by the options that were asked for
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._silent_at = time.monotonic() + ttl_s
        self._heard_at = time.monotonic()
        self._waits = waits

    # Leases.

    def admit(self, lease: str, until: float) -> None:
        """Note a valid credential of a lease. Raises Refused for a lease that is over, and a new one without room."""
        if not self.leases.has(lease):
            self._check_new(lease)
        self.leases.note(lease, until)

    def _check_new(self, lease: str) -> None:
        why = self.leases.why_over(lease)
        if why is None and time.monotonic() > self._silent_at:
            why = SILENT
        if why is not None:
            raise lease_over(lease, why)
        if self.is_draining or self.leases.is_full:
            why = (
                "it is being drained"
                if self.is_draining
                else f"it has {len(self.leases)} leases, the most there may be"
            )
            raise Refused(503, "no-lease", f"this node takes no new lease: {why}", remedy="take one of another node")

    @contextmanager
    def calling(self, caller: Caller, call: CallTask) -> Iterator[None]:
        """Count a call of a lease during the body, so that it ends with the lease. Raises Refused (429)."""
        calls = self._calls.setdefault(caller.project, set())
        if len(calls) >= MOST_CALLS_OF_LEASE:
            raise Refused(429, "too-many-calls", f"{len(calls)} calls of this lease go on, the most there may be")
        calls.add(call)
        try:
            yield
        finally:
            calls.discard(call)
            if not calls and self._calls.get(caller.project) is calls:
                del self._calls[caller.project]

    def explain(self, error: Exception, project: str | None) -> Exception:
        """Return the error of a call: if its lease is over, that is why."""
        why = None if project is None else self.leases.why_over(project)
        return error if why is None or project is None else lease_over(project, why)

    async def end_lease(self, lease: str, why: str = RELEASED, *, until: float = 0.0) -> None:
        """End a lease; return when nothing of it is left. `until` is the end of its last credential, 0 if unknown."""
        self._begin_end(lease, why, until)
        if (ending := self._ending.get(lease)) is not None:
            await asyncio.shield(ending)

    def _begin_end(self, lease: str, why: str, until: float = 0.0) -> None:
        if self.leases.end(lease, why, time.time(), until=until) and lease not in self._ending:
            ending = self._ending[lease] = asyncio.ensure_future(self._end_all_of(lease))
            ending.add_done_callback(lambda _: self._note_ended(lease))

    def _note_ended(self, lease: str) -> None:
        ending = self._ending.pop(lease)
        if not ending.cancelled() and (error := ending.exception()) is not None:
            log.error("lease %s did not end properly", lease, exc_info=error)

    async def _end_all_of(self, lease: str) -> None:
        calls = self._calls.get(lease, set())
        tasks = [call.task for call in calls if call.task is not None and call.task is not asyncio.current_task()]
        for call in list(calls):
            call.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.sandboxes.end_of(lease)

    async def tend(self) -> None:
        """End leases in time, also when the coordinator is silent. Return once it has been for `ABANDONED_S`."""
        while self._waits or time.monotonic() - self._heard_at < ABANDONED_S or len(self.leases):
            await asyncio.sleep(LOOK_EVERY_S)
            self.digests.refresh_in_time()
            is_silent = time.monotonic() > self._silent_at
            over = list(self.leases.until) if is_silent else self.leases.over(time.time())
            if over:
                log.warning("%d leases end: %s", len(over), SILENT if is_silent else ENDED)
            for lease in over:  # a slow one delays no other
                self._begin_end(lease, SILENT if is_silent else ENDED)

    # The coordinator.

    async def keep(self, denied: Sequence[str] | None, ttl_s: float, leases: Mapping[str, float]) -> None:
        """Note that the coordinator lives, the addresses that no guest may reach, and later ends of leases.

        Raises InvalidRequest for an address that is none.
        """
        further = () if denied is None else await self.denied.take(denied)
        self.heard(ttl_s)
        for lease, until in leases.items():
            if self.leases.has(lease):
                self.leases.note(lease, until)
        if further:
            self._allowed.clear()
            await self._deny(further)

    async def _deny(self, rules: Sequence[str]) -> None:
        """Deny hosts in live sandboxes, but for those that the operator's rules deny."""
        await self.sandboxes.deny(not_within(rules, (await self.settings()).policy.network_deny))

    def heard(self, ttl_s: float) -> None:
        """Note that the coordinator lives."""
        self._heard_at, self._waits = time.monotonic(), False
        self._silent_at = self._heard_at + ttl_s

    # What a caller may ask for.

    async def settings(self) -> Settings:
        """Return the operator's settings."""
        return load_settings(dict(self.own_options))

    async def use_stored(self) -> None:
        """Do nothing: a node stores no settings."""

    async def allowed_options(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sandbox's options: the caller's, within the operator's ceilings and on backends of this machine.

        Unlike a service's, a node's defaults are no bounds: a lease stands for a part of the machine. Options that
        could weaken isolation are refused, and the addresses of the fleet are denied to each guest. Raises
        PolicyDenied, InvalidRequest.
        """
        if "secrets" in own:  # they open a network, also where none was asked for
            options = await allowed_with_secrets(self, caller, own)
            return {**options, "network_deny": await self._denied(own)}
        asked = f"{size_of_lease(caller.project)} {own!r}"  # plain data
        checked_at, options = self._allowed.get(asked, (0.0, {}))
        if time.monotonic() - checked_at > HOLDS_S:
            tag = self.denied.tag
            options = await self._checked(caller, own)
            if self.denied.tag != tag:
                return await self.allowed_options(caller, own)
            if len(self._allowed) >= MOST_CHECKED:
                self._allowed.clear()
            if len(asked) <= MOST_ASKED:
                self._allowed[asked] = time.monotonic(), options
        return dict(options)

    async def _checked(self, caller: Caller, own: Mapping[str, Any]) -> dict[str, Any]:
        check_fields({name: value for name, value in own.items() if name != "network_ports"}, caller)
        if "image" in own:
            return await options_with_image(self, caller, own)
        options: dict[str, Any] = {**self.own_options, **own}
        settings, base = load_settings(options), await self.settings()
        most = max(MOST_OUTPUT, base.limits.output_bytes)
        if settings.limits.output_bytes > most:
            raise PolicyDenied(
                f"maxOutputBytes: {settings.limits.output_bytes} bytes are above a node's limit ({most})"
            )
        size = size_of_lease(caller.project)
        if size is None:
            raise PolicyDenied("the id of this lease has no amounts; take a lease of this node's fleet")
        options |= within_lease(own, settings.limits, base.limits, size)
        check_stays(settings.backend, base)
        if settings.policy.network != "off":
            options["network_deny"] = await self._denied(own)
            load_settings(options)
        return await keep_level(self, own, options)

    async def _denied(self, own: Mapping[str, Any]) -> list[str]:
        """Return the hosts that a sandbox may not reach: the operator's, the caller's, and those of the fleet."""
        denied = (await self.settings()).policy.network_deny
        return self.denied.beside((*denied, *own.get("network_deny", ())), own=denied)

    def check_workspace(self, policy: Policy) -> None:
        """Raise PolicyDenied for a workspace whose rules reach an address that is denied since it was opened."""
        self.denied.check(policy)

    # Sandboxes and records.

    async def open_sandbox(self, fields: NewSandbox, caller: Caller) -> Mapping[str, Any]:
        """Open a live sandbox of a lease."""
        if fields.workspace is not None:
            raise InvalidRequest("workspace: a node shows no folders of its machine; send files")
        if fields.snapshot is not None:
            raise InvalidRequest("snapshot: a node holds no snapshots; send files")
        files, terms = await read_files(fields.files), terms_of(fields, caller)
        options, tag = await self.allowed_options(caller, fields.options()), self.denied.tag
        facts = await self.sandboxes.create(
            lease=caller.project, terms=terms, document=document_of(fields, terms), options=options, files=files
        )
        if self.denied.tag != tag:  # changed while it was opened
            await self._deny(self.denied.rules or ())
        return facts

    async def list_sandboxes(self, listing: Listing, caller: Caller) -> Mapping[str, Any]:
        """List the sandboxes of a lease."""
        return self.sandboxes.list(listing, caller.project)

    async def end_sandbox(self, sandbox_id: str, caller: Caller) -> Mapping[str, Any]:
        """End a sandbox."""
        return await self.sandboxes.end(sandbox_id, caller.project)

    async def audit(self) -> Audit | None:
        """Return the audit log, None if it is off."""
        return audit_for(await self.settings())

    async def record(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Write an event to the audit log, if it is on."""
        if (audit := await self.audit()) is not None:
            await asyncio.to_thread(audit.record, kind, **fields)

    async def note_refusal(self, error: BaseException, **fields: Any) -> None:  # noqa: ANN401 - JSON
        """Log a refusal."""
        log.info("refused: %s %s", error, fields.get("what", ""))

    def note_call(self, verb: str, status: int, seconds: float, caller: str | None) -> None:
        """Log a call."""
        log.debug("%s %d %.6f %s", verb, status, seconds, caller)

    async def close(self) -> None:
        """End all leases, runs and sandboxes."""
        self.is_draining = True
        for lease in list(self.leases.until):
            self._begin_end(lease, "its node ends")
        await asyncio.gather(*self._ending.values(), return_exceptions=True)
        await self.runs.drain(DRAIN_S)
        await self.sandboxes.end_all()

    def load(self) -> dict[str, Any]:
        """Return what the machine has and what is used of it."""
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return {
            "leases": len(self.leases), "sandboxes": len(self.sandboxes), "runs": self.runs.running,
            "waiting": self.runs.waiting, "cpus": len(os.sched_getaffinity(0)), "memoryBytes": pages * page,
            "memoryAvailableBytes": os.sysconf("SC_AVPHYS_PAGES") * page, "load": list(os.getloadavg()),
        }  # fmt: skip


def lease_over(lease: str, why: str) -> Refused:
    """Return the problem of a lease that is over."""
    return Refused(410, "lease-over", f"lease {lease[:64]} is over: {why}", remedy="take another lease")
