"""Messages on macOS and Windows, whose kernels lack what sandboxes on this machine are made of."""

from __future__ import annotations

from typing import NoReturn

from .errors import BackendUnavailable
from .policy import BACKEND_ROWS

WINDOWS = "win32"
_NAMES = {"darwin": "macOS", WINDOWS: "Windows", "cygwin": "Cygwin"}
WORK_ELSEWHERE = tuple(name for name, row in BACKEND_ROWS.items() if row.provider and not row.needs_linux)


def system_name(platform: str) -> str:
    """Return the common name of a system, from `sys.platform`."""
    return _NAMES.get(platform, platform)


def unavailable_on(platform: str, name: str = "local") -> BackendUnavailable:
    """Return the error of a backend that needs Linux on another system, with what works there."""
    system = system_name(platform)
    if platform == WINDOWS:
        reason = f"Cloche needs Linux, with any backend, and this is {system}."
        return BackendUnavailable(
            reason, remedy="Install Cloche in WSL 2 (wsl --install), which is Linux; everything works there."
        )
    *first_names, last = WORK_ELSEWHERE
    reason = f"backend {name!r} needs Linux, and this is {system}."
    return BackendUnavailable(
        reason, remedy=f"Use backend {', '.join(first_names)} or {last}, or a virtual machine with Linux."
    )


def refuse_on_windows(*_arguments: object, **_keywords: object) -> NoReturn:
    """Stand for any function or class of Cloche on Windows. Raises BackendUnavailable."""
    raise unavailable_on(WINDOWS)
