"""Whether a machine's processor is lent by KVM or emulated: found out by booting one, and remembered."""

from __future__ import annotations

import json
import logging
import os
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from .counter import counter_khz
from .image import Image, place_of_images
from .machine import Machine
from .monitor import KVM, Monitor
from .plan import Acceleration, plan_machine

log = logging.getLogger("cloche.microvm")
TRIAL_S = 5.0  # a guest on KVM is up in a fraction of that
USE_KVM = "To get more, use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold what machines run on here, why not on KVM, and then how fast the processor counts."""

    kind: Acceleration
    reason: str = ""
    counter_khz: int = 0


_turn = threading.Lock()
_found: dict[tuple[int, str], Found] = {}


def find_acceleration(image: Image, monitor: Monitor) -> Found:
    """Return what machines run on; the first time on a host a guest is booted on KVM, for five seconds at most."""
    with _turn:
        key = (os.getpid(), _key(image, monitor))
        if key not in _found:
            reason = _why_not_opened()
            found = Found(kind="tcg", reason=reason) if reason else _remembered(monitor, key[1])
            if found is None:
                found = _try_kvm(image, monitor)
                _remember(monitor, key[1], found)
            _found[key] = found if found.kind == "kvm" else replace(found, counter_khz=counter_khz())
        return _found[key]


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def _why_not_opened() -> str:
    """Return why the monitor could not open the device; empty when it can."""
    if not KVM.exists():
        return "this host has no /dev/kvm"
    return "" if os.access(KVM, os.R_OK | os.W_OK) else f"user {os.geteuid()} may not open {KVM}; join the group kvm"


def _try_kvm(image: Image, monitor: Monitor) -> Found:
    try:
        Machine(plan_machine(Policy(), Limits(), "kvm"), image, monitor).try_out(TRIAL_S)
    except StartFailed as error:
        return Found(kind="tcg", reason=f"no guest got up on KVM within {TRIAL_S:g} s ({error})")
    return Found(kind="kvm")


def _key(image: Image, monitor: Monitor) -> str:
    """Name what the answer depends on: this boot, this user, this monitor and this image."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        changed = os.stat(monitor.program).st_mtime_ns
    except OSError:
        boot, changed = "", 0
    return f"{boot} {os.geteuid()} {monitor.program} {changed} {image.id}"


def _file(monitor: Monitor) -> Path:
    return place_of_images() / f"acceleration-{monitor.engine}.json"


def _remembered(monitor: Monitor, key: str) -> Found | None:
    try:
        found = json.loads(_file(monitor).read_bytes())
        if found["key"] != key or found["kind"] not in ("kvm", "tcg"):
            return None
        return Found(kind=found["kind"], reason=str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(monitor: Monitor, key: str, found: Found) -> None:
    try:
        _file(monitor).parent.mkdir(parents=True, exist_ok=True)
        beside = _file(monitor).with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"key": key, **asdict(found)}), encoding="utf-8")
        beside.replace(_file(monitor))
    except OSError as error:
        log.debug("what machines run on cannot be kept, so the next process tries again: %s", error)
