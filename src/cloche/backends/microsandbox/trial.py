"""Whether microsandbox can run machines here: found out by running one, in a process of its own, for five seconds.

That `/dev/kvm` opens does not say it: there are hosts where it does and guests hang. The trial's machine has empty
folders for its root and a home of its own, so nothing is fetched and nothing of the user's is touched. What hangs is
killed with its process group, and the answer is kept in a file until the next boot.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from cloche.core.errors import BackendUnavailable

log = logging.getLogger("cloche.microsandbox")
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


_turn = threading.Lock()
_found: dict[tuple[int, str], str] = {}


def why_not(script: str, version: str) -> str:
    """Return why a trial failed; empty when it did not. One is made per boot, user, version and script."""
    with _turn:
        key = (os.getpid(), _key(script, version))
        if key not in _found:
            known = _remembered(key[1])
            _found[key] = try_out(script, TRIAL_S) if known is None else known
            if known is None:
                _remember(key[1], _found[key])
        return _found[key]


def _key(script: str, version: str) -> str:
    """Name what the answer depends on."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{boot} {os.geteuid()} {version} {script}".encode()).hexdigest()


def _file() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("cloche") / "microsandbox.json"


def _remembered(key: str) -> str | None:
    try:
        found = json.loads(_file().read_bytes())
        return str(found["reason"]) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(key: str, reason: str) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        beside = _file().with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"key": key, "reason": reason}), encoding="utf-8")
        beside.replace(_file())
    except OSError as error:
        log.debug("what a trial of microsandbox showed cannot be kept, so the next process tries again: %s", error)


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


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
