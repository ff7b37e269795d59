"""`backend="cloche"`: the claims of another machine's `cloche serve`, and the sandboxes that it opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from cloche.core.ceilings import is_digest
from cloche.core.enforcement import Level, NetworkMode
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.limits import Limits
from cloche.core.loops import become_task
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities
from cloche.core.remote import RemoteAccount

from ..remote.accounts import AccountBackend, check_account
from ..remote.claims import check_claims, claimed_capabilities, claimed_controls, claimed_enforcement
from ..remote.failures import RemoteUnavailable
from ..remote.labels import is_left
from ..remote.quota import counter_for
from .connections import ask
from .fields import option_fields
from .live import END_S, LABEL, RemoteSandbox, opened
from .sandbox import ThrowawaySandbox

NAME = "cloche"
NETWORKS: tuple[NetworkMode, ...] = ("off", "allowlist", "open", "bridge")
MOST_PAGES = 50
ANY_LANGUAGE = "*"  # the image that a call names


class ClocheBackend(AccountBackend):
    """Run code at another machine's service, over its wire. Controls are claimed by the service."""

    name = NAME
    serves_functions = "all"  # of the caller, to all guests
    is_disk_granted = installs_packages = streams_files = True
    _image = ""  # by digest; without one the service chooses
    usual_level: Level | None = Level.JAIL  # required where the policy names none; None leaves it to the service

    def with_images(self, images: Mapping[str, str]) -> ClocheBackend:
        """Return the same backend with the image that a call named. Raises InvalidRequest for one without a digest."""
        image = images.get(ANY_LANGUAGE, "")
        if image and not is_digest(image):
            raise InvalidRequest(
                f"image: backend 'cloche' takes an image by its digest (NAME@sha256:...), and {image!r} has none"
            )
        backend = type(self)(self._account)
        backend._image = image
        return backend

    def _checked(self) -> RemoteAccount:
        account = check_account(
            self._account, provider=NAME, package="websockets", extra="remote", variable="CLOCHE_REMOTE_KEY",
            needs_url=True,
        )  # fmt: skip
        key = account.api_key.reveal()
        if not key.isascii() or not key.isprintable() or " " in key:
            raise BackendUnavailable(
                "backend 'cloche': the key has characters that a key cannot have.",
                remedy="Copy the key again, without blanks.",
            )
        return account

    def _claimed(self, account: RemoteAccount) -> Capabilities:
        return claimed_capabilities(
            self.name, self.usual_level or Level.CONFINED, claimed_controls(account.host), NETWORKS
        )

    def _settled(self, policy: Policy, limits: Limits) -> tuple[RemoteAccount, dict[str, Any]]:
        """Return the account and the fields of a sandbox.

        Raises ClocheError for a policy that is known to be unsupported.
        """
        account = self._checked()
        # The service refuses levels below the required one; here the level counts as claimed.
        usual = self.usual_level or Level.CONFINED
        level = max(usual, policy.require_level or usual) if policy.level is None else policy.level
        check_claims(
            policy, claimed_enforcement(level, claimed_controls(account.host)), backend=self.name, networks=NETWORKS,
            network="a network that a service has", level="a service is asked for", can_ask=True,
            has_account=True,
        )  # fmt: skip
        fields = option_fields(policy, limits, usual_level=self.usual_level)
        return account, {**fields, "image": self._image} if self._image else fields

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[ThrowawaySandbox]:
        """Open a throwaway sandbox. Nothing is sent before the first run. Raises InvalidRequest, BackendUnavailable."""
        if policy.on_network == "ask" and policy.network != "off":
            raise InvalidRequest(
                'on_network: "ask" is for a live sandbox, which has somebody to ask (sandbox.network.ask, or a '
                "toolbox's approver); leave it out for single runs"
            )
        account, options = self._settled(policy, limits)
        sandbox = ThrowawaySandbox(account, options, limits)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def open_live(self, policy: Policy, limits: Limits) -> AbstractAsyncContextManager[RemoteSandbox]:
        """Open a live sandbox."""
        return self._living(policy, limits)

    @asynccontextmanager
    async def _living(self, policy: Policy, limits: Limits) -> AsyncIterator[RemoteSandbox]:
        await become_task()
        account, options = self._settled(policy, limits)
        if policy.on_network == "ask":
            options = {**options, "onNetwork": "ask"}
        async with opened(account, options, policy, limits) as sandbox:
            yield sandbox

    def collect_garbage(self) -> list[str]:
        """End sandboxes at the service that dead processes of this host left. Raises BackendUnavailable."""
        account = self._checked()
        return asyncio.run(_collected(account))


async def _collected(account: RemoteAccount) -> list[str]:
    ended, counter = list[str](), counter_for(account)
    async for row in _sandboxes(account):
        labels = row.get("labels")
        label = labels.get(LABEL) if isinstance(labels, dict) else None
        if not isinstance(label, str) or not isinstance(row.get("id"), str) or not is_left(label):
            continue
        with contextlib.suppress(RemoteUnavailable):  # the sandbox has ended meanwhile
            await ask(account, "sandbox.end", {"sandbox": row["id"]}, timeout_s=END_S)
            ended.append(f"sandbox {row['id'][:128]} at {account.host}, of a dead process")
        if counter is not None:
            await asyncio.to_thread(counter.forget_sandbox, row["id"])
    return ended


async def _sandboxes(account: RemoteAccount) -> AsyncIterator[dict[str, Any]]:
    """Yield the running sandboxes of the key's project, page by page."""
    fields: dict[str, Any] = {"state": ["starting", "running", "paused"], "limit": 200}
    for _ in range(MOST_PAGES):
        page = await ask(account, "sandbox.list", fields)
        rows = page.get("items")
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict):
                yield row
        cursor = page.get("nextCursor")
        if not isinstance(cursor, str) or not cursor:
            return
        fields["cursor"] = cursor
