"""What acts need that nobody can undo: a yes before them, and the audit log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from cloche.core.errors import InvalidRequest

from .options import flag

if TYPE_CHECKING:
    from cloche.audit.log import Audit

NOTHING_DONE = "nothing was done"
yes_option = flag("--yes", "-y", "yes", help="Do not ask.")


def confirm(question: str, *, yes: bool) -> bool:
    """Ask the user, unless `yes` has answered; without a terminal, raise InvalidRequest. False is a no, which is said.

    What a question names is escaped by whoever asks.
    """
    if yes:
        return True
    if not os.isatty(0):
        raise InvalidRequest(f"{question} There is no terminal to ask at, so {NOTHING_DONE}; --yes does it")
    if click.confirm(f"{question} Go on?", err=True):
        return True
    click.echo(NOTHING_DONE, err=True)
    return False


def audit_log() -> Audit | None:
    """Return the audit log; None where it is off."""
    from cloche.audit.log import audit_for
    from cloche.config.settings import load_settings

    return audit_for(load_settings())
