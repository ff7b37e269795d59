"""The audit log: the code that ran, and the decisions to allow or refuse it, in a chain that reveals changes.

To record an event, give its kind, a single word, and plain data:

    audit = audit_for(settings)                     # None if auditing is off; `AsyncSandbox.audit` is the same
    if audit is not None:
        audit.record("fix_round", round=2, code_sha256=sha256_of(code), error="NameError", is_fixed=False)

`record` redacts secrets, writes one line under a lock, and raises AuditFailed if it cannot; before a run, this prevents
the run. `note` is for events that have already happened: it does not raise, logs a lost event as critical, and returns
the error as text. The kinds that Cloche writes are in `KINDS`. Front ends that audit by default call
`switch_on("name")` once. The fields of `acting` (a tool, an approver) are added to every event recorded inside.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cloche.core.errors import AuditFailed, BackendUnavailable, ClocheError
from cloche.hostfs import own_folder, own_temporary_folder

if TYPE_CHECKING:
    from cloche.config.keys import Settings

    from .chain import ChainLink
    from .redaction import Redactor

DAY_S = 86_400.0
KINDS: Mapping[str, str] = {
    "start": "code is about to run: its hash, the backend, the rules",
    "execution": "how a run ended: its status, the enforced controls, the limits that were hit",
    "approval": "a call of a tool was approved: by whom",
    "denial": "a call was not approved, or the rules or the service refused it: by whom, and why",
    "tool_call": "a program called a function of the caller: which, sizes, how it ended",
    "commit": "changes of a sandbox are about to be written to a folder of the host: which diff, how many paths",
    "packages": "packages are shown to a run: the requirements, the packages, and their index",
    "settings": "the service's settings were changed: by whom, each with its old and its new value",
    "key": "a key of the service was made, rotated or revoked: which, and by whom",
    "secret": "a secret of the service was stored or removed: its name and hosts, never its value",
    "login": "a browser logged in by a one-time link, or requested one: from which address",
    "sandbox": "a sandbox of the service was opened, ended, or is about to be uploaded to: which",
    "restore": "files of a snapshot are about to be written to a folder of the host: which",
    "replicate": "a script that sets variables is about to be written to a folder of the host: of which snapshot",
    "fallback": "a fallback ran instead of the requested backend: which, and why",
    "fix_round": "a model repaired code: which round, with which result",
    "recovery": "an earlier write was interrupted: length and hash of its remains",
    "rotation": "the chain continues here from a full file",
    "removal": "stored code or output beside the log is removed: which",
}
# Fields with Cloche's own values or hashes. Redaction skips them, since a secret such as `ok` would remove them.
_EXACT = frozenset(
    {
        "status",
        "backend",
        "language",
        "level",
        "run",
        "call",
        "door",
        "tool",
        "what",
        "network",
        "limits",
        "enforcement",
        "artifacts",
    }
)
_NUMBERS = (int, float, bool)

log = logging.getLogger("cloche.audit")
_acting: ContextVar[Mapping[str, Any]] = ContextVar("cloche_audit_acting", default={})  # noqa: B039 - never changed
_front_end: str | None = None


class Audit:
    """Record events in a folder. `keep` lists the artifacts stored besides hashes: `code`, `output`.

    Stored artifacts are pruned from time to time, in a thread: by age in seconds and by size, if given. In `bounds`,
    `file_bytes` is the size at which a file is full, and `most_files` the number of full files that are retained.
    """

    def __init__(
        self,
        folder: str,
        *,
        keep: Sequence[str] = (),
        keep_age_s: float | None = None,
        keep_bytes: int | None = None,
        **bounds: int,
    ) -> None:
        self.folder = os.fspath(folder)
        self.keep = tuple(keep)
        self._keep_age_s, self._keep_bytes = keep_age_s, keep_bytes
        self._prune_at = 0.0  # monotonic clock
        self._bounds = bounds
        from .redaction import Redactor
        from .writer import append

        self._append, self._redactor_of = append, Redactor

    def record(self, kind: str, *, redactor: Redactor | None = None, **fields: Any) -> ChainLink:  # noqa: ANN401 - JSON
        """Write one event and return its number and hash. Raises AuditFailed."""
        event = {"door": _front_end or "library", "uid": os.getuid(), "pid": os.getpid(), **_acting.get(), **fields}
        clean = redactor or self._redactor_of()
        try:
            # Common fields need no redaction and are passed on without a call: this runs twice for every run.
            redacted = {
                name: value if name in _EXACT or type(value) in _NUMBERS else _clean(clean, name, value)
                for name, value in event.items()
            }
            return self._append(self.folder, kind, redacted, **self._bounds)
        except ClocheError:
            raise
        except Exception as error:  # data that is not plain, for example infinitely nested
            raise AuditFailed(f"an event ({kind}) cannot be written down: {type(error).__name__}") from error

    def note(self, kind: str, *, redactor: Redactor | None = None, **fields: Any) -> str:  # noqa: ANN401 - JSON
        """Write one event that has already happened; return the error, which is also logged as critical, or empty
        text.
        """
        try:
            self.record(kind, redactor=redactor, **fields)
        except ClocheError as error:
            log.critical("an event (%s) is not in the audit log: %s", kind, error)
            return str(error)
        return ""

    def store(self, kind: str, content: str | bytes, redactor: Redactor) -> str | None:
        """Store redacted content if `keep` lists its kind; return its SHA-256, or None if it is not stored.

        Raises AuditFailed.
        """
        if kind not in self.keep:
            return None
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        from .artifacts import store

        digest = store(self.folder, redactor.data(data))
        if time.monotonic() >= self._prune_at and not (self._keep_age_s is None and self._keep_bytes is None):
            from .prune import CHECK_EVERY_S, start_pruning

            self._prune_at = time.monotonic() + CHECK_EVERY_S
            start_pruning(self, most_age_s=self._keep_age_s, most_bytes=self._keep_bytes)
        return digest

    def head(self) -> ChainLink | None:
        """Return number and hash of the last event. A copy stored elsewhere later shows whether events were cut off."""
        from .writer import head

        return head(self.folder)


def _clean(redactor: Redactor, name: str, value: Any) -> Any:  # noqa: ANN401 - JSON
    if value is None or name.endswith("_sha256"):
        return value
    return redactor.member(name, value)


def switch_on(front_end: str) -> None:
    """Turn auditing on in this process unless the configuration turns it off; `front_end` is the events' field
    `door`.
    """
    global _front_end
    _front_end = front_end


def audit_for(settings: Settings) -> Audit | None:
    """Return the log that these settings ask for; None if auditing is off."""
    if not (settings.audit if settings.audit is not None else _front_end is not None):
        return None
    folder = folder_for(settings)
    return _audit_in(folder, settings.audit_keep, settings.audit_keep_age_s, settings.audit_keep_bytes)


@lru_cache(maxsize=16)
def _audit_in(folder: str, keep: tuple[str, ...], keep_age_s: float | None, keep_bytes: int | None) -> Audit:
    return Audit(folder, keep=keep, keep_age_s=keep_age_s, keep_bytes=keep_bytes)


def folder_for(settings: Settings) -> str:
    """Return the folder of the log that these settings ask for.

    If auditing is on only by default and the state folder is not writable, the log goes to `XDG_RUNTIME_DIR`, or else
    to a private folder in that for temporary files, with a warning, unless that log was used within a day. Raises
    AuditFailed.
    """
    if settings.audit_folder or settings.audit is not None:
        return settings.audit_folder or default_folder()
    named = (os.environ.get(name, "") for name in ("XDG_STATE_HOME", "HOME", "XDG_RUNTIME_DIR", "TMPDIR"))
    return _first_folder(*named)


@lru_cache(maxsize=4)
def _first_folder(_state: str, _home: str, runtime: str, _temporary: str) -> str:
    from .writer import NAME, failure, why_not_in

    try:
        default = default_folder()
        why = why_not_in(default)
        failed = failure(f"{default}/{NAME}", why)
    except AuditFailed as error:
        default, why, failed = "", "this user has no home folder", error
    if not why:
        return default
    fallback = next((folder for folder in _other_folders(runtime) if not why_not_in(folder, is_private=True)), None)
    if fallback is None:
        raise failed
    where = f"{default} cannot be written" if default else why
    if not _was_used(os.path.join(fallback, NAME)):
        log.warning(
            "the audit log is in %s, because %s; name a permanent folder with CLOCHE_AUDIT=/FOLDER", fallback, where
        )
    return fallback


def _was_used(path: str) -> bool:
    """Tell whether a log was written to within the last day."""
    try:
        return time.time() - os.stat(path).st_mtime < DAY_S
    except OSError:
        return False


def _other_folders(runtime: str) -> Iterator[str]:
    if os.path.isabs(runtime):
        yield os.path.join(runtime, "cloche", "audit")
    with suppress(BackendUnavailable):
        yield own_temporary_folder()


def default_folder() -> str:
    """Return this user's state folder on this platform. Raises AuditFailed for a user without a home."""
    folder = own_folder("XDG_STATE_HOME", ".local/state")
    return folder or _state_folder(os.environ.get("XDG_STATE_HOME"), os.path.expanduser("~"))


@lru_cache(maxsize=4)
def _state_folder(xdg: str | None, home: str) -> str:
    from platformdirs import user_state_dir

    with suppress(RuntimeError):  # platformdirs raises this for an empty HOME
        if os.path.isabs(home) or os.path.isabs(xdg or ""):
            return user_state_dir("cloche", appauthor=False)
    raise AuditFailed(
        "the audit log has no place, since this user has no home folder. Where the audit is on, nothing runs "
        "without it: name a folder (CLOCHE_AUDIT=/FOLDER), or switch it off (CLOCHE_AUDIT=off)"
    )


@contextmanager
def acting(**fields: Any) -> Iterator[None]:  # noqa: ANN401 - JSON
    """Add these fields to every event recorded inside, in this task and the tasks that it starts."""
    token = _acting.set({**_acting.get(), **fields})
    try:
        yield
    finally:
        _acting.reset(token)


def acting_as(name: str, otherwise: str) -> str:
    """Return a field that `acting` adds to every event here, such as a service's own ID, or `otherwise`."""
    return str(_acting.get().get(name, otherwise))


def act_for(**fields: Any) -> None:  # noqa: ANN401 - JSON
    """Add these fields to every event of this task from now on, and of the tasks that it starts."""
    _acting.set({**_acting.get(), **fields})
