"""Host folders that the service may touch: those below its workspace roots, opened by descriptors, through no link."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.escape import escape_name
from cloche.hostfs import descend, open_folder

from .service import WorkspaceRoot


def root_of(path: str, roots: Sequence[WorkspaceRoot], *, writes: bool) -> tuple[WorkspaceRoot, list[str]]:
    """Return the root that a path is below, the innermost one, and the names from there. Raises PolicyDenied."""
    names = path.split("/")
    if not path.startswith("/") or "\0" in path or ".." in names:
        raise PolicyDenied('workspacePath: give an absolute path without ".."')
    wanted = [name for name in names if name not in ("", ".")]
    found = [root for root in roots if wanted[: len(_names(root))] == _names(root)]
    if not found:
        raise PolicyDenied(
            f"workspacePath: {escape_name(path[:200])} is below no workspace root; the operator names them with "
            "--workspace-root DIR"
        )
    root = max(found, key=lambda one: len(_names(one)))
    if writes and not root.is_writable:
        raise PolicyDenied(
            f"workspacePath: {escape_name(root.path)} may be read and not written to; --workspace-root DIR:rw allows it"
        )
    return root, wanted[len(_names(root)) :]


@contextmanager
def opened_workspace(path: str, roots: Sequence[WorkspaceRoot], *, writes: bool = False) -> Iterator[int]:
    """Hold a folder below a root open; blocks. Raises PolicyDenied, InvalidRequest for what is no folder there."""
    root, names = root_of(path, roots, writes=writes)
    try:
        above = open_folder(root.path)
        try:
            at = descend(above, names)
        finally:
            os.close(above)
    except OSError as error:
        raise InvalidRequest(
            f"workspacePath: {escape_name(path[:200])} cannot be opened: {error.strerror}; no link is followed"
        ) from error
    try:
        yield at
    finally:
        os.close(at)


def _names(root: WorkspaceRoot) -> list[str]:
    return [name for name in root.path.split("/") if name]
