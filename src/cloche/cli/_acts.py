"""Confirmation and the audit log, for commands whose effect cannot be undone."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cloche.core.errors import InvalidRequest

from .options import flag

if TYPE_CHECKING:
    from cloche.audit.log import Audit

yes_option = flag("--yes", "-y", help="Do not ask.")


def require_yes(question: str, *, yes: bool, otherwise: str = "nothing was done") -> None:
    """Ask for confirmation on the terminal, unless `yes` is set. The caller escapes names within `question`.

    Raises InvalidRequest with the text `otherwise` if the answer is no, and if there is no terminal.
    """
    if yes:
        return
    if not os.isatty(0):
        raise InvalidRequest(f"{question} There is no terminal to ask on, so {otherwise}; --yes answers it")
    print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InvalidRequest(otherwise)


def audit_log() -> Audit | None:
    """Return the audit log; None if it is off."""
    from cloche.audit.log import audit_for
    from cloche.config.settings import load_settings

    return audit_for(load_settings())
