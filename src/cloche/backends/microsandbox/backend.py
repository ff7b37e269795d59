"""The microsandbox backend: one machine of the microsandbox project per sandbox, on KVM only.

Whether it can run machines here is tested by starting one, in a separate process, for at most five seconds: on some
hosts `/dev/kvm` opens and guests hang. The test machine has empty folders as its root and its own HOME, so nothing is
downloaded and no file of the user changes. A hanging test is killed with its process group. The answer is cached in a
file until the next boot.
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
from .machine import ANSWER_S, END_S, OWNER_LABEL, MicrosandboxMachine, call, find_package, plan_machine
from .sandbox import MicrosandboxOpenSandbox

PROBE_S = 5.0
FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp")  # mount points of any system
USE_OTHERS = 'Or use another backend: "microvm" works without KVM, "local" needs nothing.'
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
IMAGE = LANGUAGES["python"].image  # our first process needs Python


def check_host(package: Any) -> None:
    """Raise BackendUnavailable if microsandbox cannot run machines on this host."""
    if platform.system() != "Linux":
        raise _refusal(f"this is {platform.system()}, but Cloche uses it on Linux only")
    kind = str(package.default_backend_kind())
    if kind != "local":
        raise BackendUnavailable(
            f'backend "microsandbox": it is set to run machines elsewhere ({kind}), but Cloche uses only this host.',
            remedy="Unset its cloud profile: code leaves this machine only with a backend chosen for that.",
        )
    if reason := why_no_kvm():
        raise _refusal(reason)
    reason = why_not(SCRIPT, package.version())
    if reason:
        raise _refusal(f"no machine started on KVM within {PROBE_S:g} s ({reason})")


def _refusal(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f'backend "microsandbox": {reason}.', remedy=f"{NEEDS_KVM} {USE_OTHERS}")


_KEPT = KeptAnswers[str](
    "microsandbox", to_plain=str, from_plain=lambda plain: plain if isinstance(plain, str) else None
)


def why_not(script: str, version: str) -> str:
    """Return why the test failed, "" if it succeeded. Cached per boot, user, version and script."""
    return _KEPT.find((version, script), lambda: probe(script, PROBE_S))


def probe(script: str, timeout_s: float) -> str:
    """Run a script with a temporary HOME and return why it failed. Everything is removed afterwards."""
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
    """Kill the process group and reap the process."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


class MicrosandboxBackend:
    """Give sandboxes that are machines of microsandbox.

    `given` is its package, or an object with the same attributes. It is used without the test of the host.
    """

    name = "microsandbox"

    def __init__(self, images: Mapping[str, str] | None = None, *, given: Any = None):
        self._images, self._given = dict(images or {}), given

    def with_images(self, images: Mapping[str, str]) -> MicrosandboxBackend:
        """Return a backend of the same class with other images."""
        return MicrosandboxBackend(images, given=self._given)

    def capabilities(self) -> Capabilities:
        """Return the controls that a machine enforces here. The first call in a process may start a test machine."""
        try:
            self._package()
        except BackendUnavailable as error:
            return Capabilities(backend=self.name, available=False, reason=error.reason, remedy=error.remedy)
        return Capabilities(backend=self.name, available=True, level=Level.VM, controls=microsandbox_controls())

    def check(self) -> None:
        """Raise BackendUnavailable if the package or KVM is missing."""
        self._package()

    @asynccontextmanager
    async def open(self, policy: Policy, limits: Limits) -> AsyncIterator[MicrosandboxOpenSandbox]:
        """Open a sandbox; its machine is created at the first run.

        Raises BackendUnavailable if no machine can run here or a required control is missing.
        """
        package = await asyncio.to_thread(self._package)
        enforcement = Enforcement(level=Level.VM, controls=microsandbox_controls())
        _check(policy, enforcement)

        def new_machine(image: str) -> MicrosandboxMachine:
            return MicrosandboxMachine(
                package, plan_machine(policy, limits, image=image, labels={OWNER_LABEL: owner()})
            )

        sandbox = MicrosandboxOpenSandbox(
            new_machine=new_machine, image_for=self._image_for, policy=policy, limits=limits, enforcement=enforcement
        )
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def collect_garbage(self) -> list[str]:
        """Remove the machines of dead processes; return one line for each. Raises BackendUnavailable."""
        package = self._given or find_package()
        try:
            return call(lambda: _clear(package), END_S * 4)
        except (package.MicrosandboxError, OSError) as error:
            raise BackendUnavailable(f"microsandbox does not list its machines: {error}") from error

    def _package(self) -> Any:
        if self._given is not None:
            return self._given
        package = find_package()
        check_host(package)
        return package

    def _image_for(self, language: str) -> str:
        """Return the configured image of a language, else the default."""
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
    """Raise BackendUnavailable if a required control would be missing."""
    check_policy(
        policy,
        enforcement,
        network="microsandbox has no network",
        level="a virtual machine gives (vm). Use another backend for a lower one",
        lacks=lambda missing: BackendUnavailable(f'backend "microsandbox": {missing}.', remedy=NEEDS_KVM),
    )
