"""Whether gVisor works here: a container is run once, within a bounded time, and the answer kept.

That runsc is installed says little: it may lack a right, or a part of the kernel. That it worked is kept in the user's
cache folder until the program, the user, the boot or the interpreter that containers show is another; that it did not,
for the life of this process.
"""

from __future__ import annotations

import os

from cloche.core.errors import StartFailed
from cloche.core.limits import Limits
from cloche.core.policy import Policy

from ..host import Host, KeptAnswers, changed_ns, measure_host
from .container import RunscContainer
from .engine import PLATFORMS, Engine, find_runsc, version_of, why_no_runsc
from .ground import plain_ground
from .place import Place
from .plan import Shown, plan_container

PROBE_S = 20.0


def find_engine() -> Engine | str:
    """Return the runsc that really runs a container here, or why none does."""
    path = find_runsc()
    if not path:
        return why_no_runsc()
    shown = plain_ground()
    return _KEPT.find((path, changed_ns(path), shown.python, *shown.binds), lambda: _find(path, shown))


def _find(path: str, shown: Shown) -> Engine | str:
    version = version_of(path, changed_ns(path))
    if not version:
        return f"{path} does not say its version"
    try:
        host = measure_host()
    except OSError as error:
        return f"a process cannot be started here: {error}"
    whys = []
    for platform in PLATFORMS:
        engine = Engine(path=path, version=version, platform=platform, is_rootless=host.uid != 0)
        why = _try(engine, host, shown)
        if not why:
            return engine
        whys.append(f"{platform}: {why}")
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


def _from_plain(plain: dict[str, str]) -> Engine | None:
    # What worked elsewhere on this machine need not work where namespaces are refused: in a plain container, say.
    engine = Engine(**plain, is_rootless=os.geteuid() != 0)
    try:
        is_possible = not measure_host().namespaces
    except OSError:
        return None
    return engine if is_possible and engine.platform in PLATFORMS else None


def _to_plain(answer: Engine | str) -> dict[str, str] | None:
    if isinstance(answer, str):
        return None
    return {"path": answer.path, "version": answer.version, "platform": answer.platform}


_KEPT = KeptAnswers[Engine | str]("runsc", to_plain=_to_plain, from_plain=_from_plain)
