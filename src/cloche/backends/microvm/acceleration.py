"""Whether a machine's processor is lent by KVM or emulated: found out by booting one, and remembered."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..host import KeptAnswers, changed_ns
from .counter import counter_khz
from .image import Image
from .machine import Machine
from .monitor import KVM, Monitor
from .plan import Acceleration, plan_machine

TRIAL_S = 5.0  # a guest on KVM is up in a fraction of that
USE_KVM = "To get more, use a host with KVM, or nested virtualisation, whose /dev/kvm this user may open."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold what machines run on here, why not on KVM, and then how fast the processor counts."""

    kind: Acceleration
    reason: str = ""
    counter_khz: int = 0


def find_acceleration(image: Image, monitor: Monitor) -> Found:
    """Return what machines run on; the first time on a host a guest is booted on KVM, for five seconds at most."""
    reason = _why_not_opened()
    about = (monitor.program, changed_ns(monitor.program), image.id)
    found = Found(kind="tcg", reason=reason) if reason else _KEPT.find(about, lambda: _try_kvm(image, monitor))
    return found if found.kind == "kvm" else replace(found, counter_khz=counter_khz())


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


def _from_plain(plain: tuple[Acceleration, str]) -> Found:
    kind, reason = plain
    if kind not in ("kvm", "tcg"):
        raise ValueError(kind)
    return Found(kind=kind, reason=str(reason))


_KEPT = KeptAnswers[Found]("microvm", to_plain=lambda found: (found.kind, found.reason), from_plain=_from_plain)
