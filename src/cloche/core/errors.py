"""Errors that name their cause and the next step.

The guest's outcome is a status on the result; an exception means that Cloche could not do its part.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class ClocheError(Exception):
    """Report a failure. Every error Cloche raises on purpose derives from this one.

    `program` is the `index` and `id` of a batch's program that failed; None elsewhere.
    """

    program: Mapping[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle and copy with all attributes: parameters of `__init__` differ from `args`."""
        return _make_again, (type(self), self.args), self.__dict__


def _make_again(kind: type[ClocheError], arguments: tuple[Any, ...]) -> ClocheError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments  # those of an OSError, `__init__` sets
    return error


class InvalidRequest(ClocheError, ValueError):
    """Blame the caller: an argument or a configuration value is wrong."""


class Conflict(ClocheError):
    """Blame the caller: the request contradicts the present state; something runs, or exists already."""


class PolicyDenied(ClocheError):
    """Blame the rules: the policy refuses this request before anything ran."""


class ApprovalDenied(ClocheError):
    """Report a human's no."""


class BackendUnavailable(ClocheError):
    """Blame the environment: this host cannot run the request; the message has the remedy.

    `reason` names the missing part, and `remedy` the next step, where the message has both.
    """

    def __init__(self, reason: str, *, remedy: str = ""):
        stop = "" if not remedy or reason.endswith((".", "?", "!", ":", ";", ",")) else "."
        super().__init__(f"{reason}{stop} {remedy}".rstrip())
        self.reason = reason
        self.remedy = remedy


class LanguageUnavailable(BackendUnavailable):
    """Blame the environment: the backend works, but has no program that runs this language."""


class StartFailed(ClocheError):
    """Blame the environment: the sandbox could not be set up and nothing ran. A retry may help.

    `step`, `index` and `errno` name the first set-up step that failed; None when the failure came before any step.
    """

    def __init__(self, message: str, *, step: str | None = None, index: int | None = None, errno: int | None = None):
        super().__init__(message)
        self.step = step
        self.index = index
        self.errno = errno


class AuditFailed(ClocheError):
    """Blame the environment: the audit log cannot be written, and where it is on nothing runs without it."""


class RecordsFailed(ClocheError):
    """Blame the environment: the database of records cannot be used now; no record was lost or half written."""


class WorkspaceConflict(ClocheError):
    """Report that a folder of the host differs from the one that a sandbox's changes were made to; nothing was written.

    `paths` maps each path that differs to the reason.
    """

    def __init__(self, message: str, *, paths: Mapping[str, str] | None = None):
        super().__init__(message)
        self.paths = dict(paths or {})


class WorkspaceFailed(ClocheError):
    """Blame the environment: a folder of the host could not be written, and is as it was; the message has the cause."""


class NotFound(ClocheError, LookupError):
    """Blame the caller: there is no such record, or it is not this caller's."""


class OutcomeUnknown(ClocheError):
    """Report a link lost after the code was sent: it may or may not have run. Do not retry blindly."""


class NodeLost(OutcomeUnknown):
    """Report a node that was lost, or a lease that is over, with everything that ran there.

    `node` and `lease` name them.
    """

    def __init__(self, message: str, *, node: str = "", lease: str = ""):
        super().__init__(message)
        self.node = node
        self.lease = lease


class InternalError(ClocheError):
    """Blame Cloche: something happened that its own logic excludes."""


class SandboxFileError(ClocheError):
    """Report a file operation inside a sandbox that failed; `path` is the guest's path.

    In a live sandbox `kind` says why in a word: not_found, is_directory, not_directory, not_regular, permission,
    exists, not_empty, too_large, full, loop, name_too_long, busy, invalid, timeout, unsupported, pids (there can be no
    further process, which each operation is), or other.
    """

    def __init__(self, message: str, *, path: str, kind: str = ""):
        super().__init__(message)
        self.path = path
        self.kind = kind


class TooManyWatches(InvalidRequest):
    """Report that a sandbox can watch no further folder; nothing was begun."""


class SandboxFileNotFound(SandboxFileError, FileNotFoundError):
    """Report that the sandbox has no such file."""


class SandboxFileTooLarge(SandboxFileError):
    """Report that the file exceeds `max_bytes`, or that there is too much to be listed; nothing was returned."""


class SandboxFileRefused(SandboxFileError, PermissionError):
    """Report a path that leaves the workspace, passes a link, is not a regular file, or changed since it was found."""


class SandboxFileExists(SandboxFileError, FileExistsError):
    """Report that something is there already, or that a folder is not empty."""


class SandboxDirectoryError(SandboxFileError, IsADirectoryError):
    """Report that the path is a directory, where a file is needed."""


class SandboxNotDirectoryError(SandboxFileError, NotADirectoryError):
    """Report that the path, or a parent of it, is no directory where one is needed."""
