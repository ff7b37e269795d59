"""Whether gVisor works here: a container is run once, within a bounded time, and the answer kept.

That runsc is installed says little: it may lack a right, or a part of the kernel. That it worked is kept in the user's
cache folder until the program, the user, the boot or the interpreter that containers show is another; that it did not,
for the life of this process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from pathlib import Path

from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..host import Host, measure_host
from .container import RunscContainer
from .engine import PLATFORMS, Engine, age_of, find_runsc, version_of, why_no_runsc
from .ground import plain_ground
from .place import Place
from .plan import Shown, plan_container

PROBE_S = 20.0
log = logging.getLogger("cloche.runsc")
_turn = threading.Lock()
_answers: dict[tuple[int, str, int, Shown], Engine | str] = {}


def find_engine() -> Engine | str:
    """Return the runsc that really runs a container here, or why none does."""
    path = find_runsc()
    if not path:
        return why_no_runsc()
    shown = plain_ground()
    key = (os.getpid(), path, age_of(path), shown)
    with _turn:
        if key not in _answers:
            _answers[key] = _find(path, shown)
        return _answers[key]


def _find(path: str, shown: Shown) -> Engine | str:
    version = version_of(path, age_of(path))
    if not version:
        return f"{path} does not say its version"
    try:
        host = measure_host()
    except OSError as error:
        return f"a process cannot be started here: {error}"
    is_rootless = host.uid != 0
    engines = [Engine(path=path, version=version, platform=platform, is_rootless=is_rootless) for platform in PLATFORMS]
    # What worked elsewhere on this machine need not work where namespaces are refused: in a plain container, say.
    known = "" if host.namespaces else _read(path, shown)
    for engine in engines:
        if engine.platform == known:
            return engine
    whys = []
    for engine in engines:
        why = _try(engine, host, shown)
        if not why:
            _write(path, shown, engine.platform)
            return engine
        whys.append(f"{engine.platform}: {why}")
    return f"no container runs on it ({'; '.join(whys)})"


def _try(engine: Engine, host: Host, shown: Shown) -> str:
    """Run a container; nothing is left of it, whatever comes of that."""
    plan = plan_container(Policy(), Limits(), engine=engine, shown=shown)
    try:
        place = Place(plan, host)
    except StartFailed as error:
        return str(error)
    try:
        RunscContainer(place, plan).start((), patience_s=PROBE_S)
    except StartFailed as error:
        return str(error)
    finally:
        place.close()
    return ""


def _place(path: str, shown: Shown) -> Path:
    from platformdirs import user_cache_path

    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [path, str(age_of(path)), str(os.geteuid()), boot.read_text(encoding="ascii") if boot.exists() else ""]
    words += [shown.python, *shown.binds]
    return user_cache_path("cloche") / "runsc" / f"{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:24]}.json"


def _read(path: str, shown: Shown) -> str:
    try:
        return str(json.loads(_place(path, shown).read_bytes())["platform"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _write(path: str, shown: Shown, platform: str) -> None:
    place = _place(path, shown)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps({"platform": platform}), encoding="utf-8")
        beside.replace(place)
    except OSError as error:
        log.debug("that gVisor works cannot be kept: %s", error)


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
