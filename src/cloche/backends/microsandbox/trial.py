"""Whether microsandbox can run machines here: found out by running one, in a process of its own, for five seconds.

That `/dev/kvm` opens does not say it: there are hosts where it does and guests hang. The trial's machine has empty
folders for its root and a home of its own, so nothing is fetched and nothing of the user's is touched. What hangs is
killed with its process group, and the answer is kept in a file until the next boot.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable

from ..host import KeptAnswers

KVM = Path("/dev/kvm")
TRIAL_S = 5.0
FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp")  # what any system has places for
NEEDS_KVM = "Use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."
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
    if not KVM.exists():
        raise _refusal("this host has no /dev/kvm")
    if not os.access(KVM, os.R_OK | os.W_OK):
        raise _refusal(f"user {os.geteuid()} may not open {KVM}; join the group kvm")
    reason = why_not(SCRIPT, package.version())
    if reason:
        raise _refusal(f"no machine got up on KVM within {TRIAL_S:g} s ({reason})")


def _refusal(reason: str) -> BackendUnavailable:
    return BackendUnavailable(f'backend "microsandbox": {reason}.', remedy=f"{NEEDS_KVM} {USE_OTHERS}")


_KEPT = KeptAnswers[str](
    "microsandbox", to_plain=str, from_plain=lambda plain: plain if isinstance(plain, str) else None
)


def why_not(script: str, version: str) -> str:
    """Return why a trial failed; empty when it did not. One is made per boot, user, version and script."""
    return _KEPT.find((version, script), lambda: try_out(script, TRIAL_S))


def try_out(script: str, patience_s: float) -> str:
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
            _, said = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            return "it hangs"
        finally:
            _end(process)
        last = said.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no reason given"]
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
