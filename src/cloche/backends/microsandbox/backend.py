"""The microsandbox backend: every sandbox in a machine of that project's, on KVM alone.

Whether microsandbox can run machines here is tried by running one, in a process of its own, for five seconds: there are
hosts where `/dev/kvm` opens and guests hang. The machine of this probe has empty folders for its root and a HOME of its
own, so nothing is fetched and nothing of the user's is touched. What hangs is killed with its process group, and the
answer is kept in a file until the next boot.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import BackendUnavailable
from cloche.core.languages import LANGUAGES
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Capabilities

from ..enforcement import check_policy, microsandbox_controls
from ..garbage_collection import is_dead, owner
from ..host import NEEDS_KVM, KeptAnswers, why_no_kvm
from .machine import ANSWER_S, END_S, OWNER_LABEL, Machine, call, find_package, plan_machine
from .sandbox import MicrosandboxOpenSandbox

PROBE_S = 5.0
FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp")  # what any system mounts something on
USE_OTHERS = 'Or another backend: "microvm" needs no KVM, "local" nothing at all.'
SCRIPT = """
import asyncio, sys
import microsandbox
async def main(root):
    one = await microsandbox.Sandbox.create(
        "cloche-trial", image=microsandbox.Image.bind(root), memory=256, cpus=1,
        network=microsandbox.Network.none(), ephemeral=True, replace=True)
    await one.kill(timeout=2.0)
asyncio.run(main(sys.argv[1]))
"""

ANY_LANGUAGE = "*"
IMAGE = LANGUAGES["python"].image  # what has no Python could not hold our first process


def check_host(package: Any) -> None:
    """Raise BackendUnavailable where microsandbox runs no machine on this very host."""
    if platform.system() != "Linux":
        raise _refusal(f"this is {platform.system()}, and Cloche uses it on Linux alone")
    kind = str(package.default_backend_kind())
    if kind != "local":
        raise BackendUnavailable(
            f'backend "microsandbox": it is set to run machines elsewhere ({kind}), and Cloche uses this host alone.',
            remedy="Unset its cloud profile: code leaves this machine only when it is told to.",
        )
    if reason := why_no_kvm():
        raise _refusal(reason)
    reason = why_not(SCRIPT, package.version())
    if reason:
        raise _refusal(f"no machine got up on KVM within {PROBE_S:g} s ({reason})")


def _refusal(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f'backend "microsandbox": {reason}.', remedy=f"{NEEDS_KVM} {USE_OTHERS}")


_KEPT = KeptAnswers[str](
    "microsandbox", to_plain=str, from_plain=lambda plain: plain if isinstance(plain, str) else None
)


def why_not(script: str, version: str) -> str:
    """Return why a probe failed; empty when it did not. One is made per boot, user, version and script."""
    return _KEPT.find((version, script), lambda: probe(script, PROBE_S))


def probe(script: str, timeout_s: float) -> str:
    """Run a script in a home of its own, and return how it failed; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="cloche-microsandbox-", ignore_cleanup_errors=True) as home:
        root = Path(home) / "root"
        for name in FOLDERS:
            (root / name).mkdir(parents=True)
        env = {**os.environ, "HOME": home, "MSB_HOME": f"{home}/msb"}
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(root)], env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return "it hangs"
        finally:
            _end(process)
        last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
        return last[0][-300:] if process.returncode else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill all of its group, and reap it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


class MicrosandboxBackend:
    """Give sandboxes that are machines of microsandbox's.

    `given` is its package, or what has the same parts, for whoever knows that it works: it is not tried out.
    """

    name = "microsandbox"

    def __init__(self, images: Mapping[str, str] | None = None, *, given: Any = None):
        self._images, self._given = dict(images or {}), given

    def with_images(self, images: Mapping[str, str]) -> MicrosandboxBackend:
        """Return the same backend with other images."""
        return MicrosandboxBackend(images, given=self._given)

    def capabilities(self) -> Capabilities:
        """Say what a machine enforces here; the first time in a process, one is run to find out whether any can be."""
        try:
            self._package()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=error.reason, remedy=error.remedy)
        return Capabilities(backend=self.name, available=True, level=Level.VM, controls=microsandbox_controls())

    def check(self) -> None:
        """Raise BackendUnavailable when the package or KVM is missing."""
        self._package()

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[MicrosandboxOpenSandbox]:
        """Open a sandbox; its machine is created at its first run.

        Raises BackendUnavailable where there is none to be had, or when one cannot give what is required.
        """
        package = await asyncio.to_thread(self._package)
        enforcement = Enforcement(level=Level.VM, controls=microsandbox_controls())
        _check(policy, enforcement)

        def new_machine(image: str) -> Machine:
            return Machine(package, plan_machine(policy, limits, image=image, labels={OWNER_LABEL: owner()}))

        sandbox = MicrosandboxOpenSandbox(
            new_machine=new_machine, image_for=self._image_for, policy=policy, limits=limits, enforcement=enforcement
        )
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def collect_garbage(self) -> list[str]:
        """Remove machines of processes that are dead; return a line for each. Raises BackendUnavailable."""
        package = self._given or find_package()
        try:
            return call(lambda: _clear(package), END_S * 4)
        except (package.MicrosandboxError, OSError) as error:
            raise BackendUnavailable(f"microsandbox does not tell its machines: {error}") from error

    def _package(self) -> Any:
        if self._given is not None:
            return self._given
        package = find_package()
        check_host(package)
        return package

    def _image_for(self, language: str) -> str:
        """Return the image that is configured for a language, else the usual one."""
        return self._images.get(language) or self._images.get(ANY_LANGUAGE) or IMAGE


async def _clear(package: Any) -> list[str]:
    leftover, cursor = [], None
    while True:
        page = await asyncio.wait_for(package.Sandbox.list_with(cursor=cursor), ANSWER_S)
        for sandbox in page.sandboxes:
            labels = sandbox.config().get("labels") or {}
            if OWNER_LABEL in labels and is_dead(labels[OWNER_LABEL]):
                await sandbox.destroy(force=True, timeout=END_S)
                leftover.append(f"machine {sandbox.name}")
        cursor = page.next_cursor
        if not cursor:
            return leftover


def _check(policy: Policy, enforcement: Enforcement) -> None:
    """Raise BackendUnavailable when something asked for would be missing."""
    check_policy(
        policy,
        enforcement,
        network="on microsandbox it is off only",
        level="a virtual machine gives: that is vm. Use another backend for less",
        lacks=lambda missing: BackendUnavailable(f'backend "microsandbox": {missing}.', remedy=NEEDS_KVM),
    )
