"""Host folders for the API: only below `workspace_roots`, opened by descriptor, without following links out of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cloche.core.errors import InvalidRequest, PolicyDenied
from cloche.core.escape import escape_name
from cloche.hostfs import descended, open_folder

from .service import WorkspaceRoot

MOST_PATH = 4_096


@contextmanager
def opened_workspace(roots: Sequence[WorkspaceRoot], path: str, *, writes: bool) -> Iterator[tuple[int, str]]:
    """Open a folder by its absolute path; yield a descriptor and the normalised path.

    Raises PolicyDenied if it is not below a root or the root is not writable, InvalidRequest if it is missing or behind
    a link.
    """
    named = _checked(path)
    root, names = _root_of(roots, named)
    if writes and not root.is_writable:
        raise PolicyDenied(f"workspacePath: {escape_name(root.path)} is read-only, as the operator opened it")
    if writes and any(root.path.startswith(f"{named.rstrip('/')}/") and not root.is_writable for root in roots):
        raise PolicyDenied(
            f"workspacePath: a folder in {escape_name(named)} is read-only; name a folder that does not contain it"
        )
    try:
        top = open_folder(root.path)
    except OSError as error:
        raise InvalidRequest(f"workspacePath: the root {escape_name(root.path)}: {error.strerror}") from error
    try:
        with _below(top, names, named) as folder:
            yield folder, named
    finally:
        os.close(top)


@contextmanager
def _below(top: int, names: Sequence[str], named: str) -> Iterator[int]:
    try:
        holding = descended(top, names)
        folder = holding.__enter__()
    except OSError as error:
        why = "it is a link, or lies behind one" if isinstance(error, NotADirectoryError) else error.strerror
        raise InvalidRequest(f"workspacePath: {escape_name(named)}: {why}") from error
    try:
        yield folder
    finally:
        holding.__exit__(None, None, None)


def _checked(path: str) -> str:
    if not path.startswith("/") or "\0" in path or len(path) > MOST_PATH or ".." in path.split("/"):
        raise InvalidRequest("workspacePath: give the absolute path of a folder, without .. in it")
    return os.path.normpath(path)


def _root_of(roots: Sequence[WorkspaceRoot], path: str) -> tuple[WorkspaceRoot, list[str]]:
    """Return the innermost root that contains a path, and the path's names below it."""
    for root in sorted(roots, key=lambda root: len(root.path), reverse=True):
        below = path.removeprefix(root.path.rstrip("/") + "/") if path != root.path else ""
        if below != path:
            return root, [name for name in below.split("/") if name]
    known_roots = ", ".join(escape_name(root.path) for root in roots) or "there is no such folder"
    raise PolicyDenied(
        f"workspacePath: {escape_name(path)} is not below a folder that the operator opened ({known_roots}); "
        "cloche serve --workspace-root opens more"
    )
