"""Branch, HEAD and status of a git repository in a hostile folder, read without git and without its configuration.

`git status` runs programs that the repository's configuration names (fsmonitor, filters, hooks). This module only reads
files: HEAD, refs, index, trees, and the working tree, by descriptors, within bounds of time, number and size. Omissions
are reported by `is_partial` and a reason. Nothing outside of the folder is read: not a `.git` elsewhere, the objects of
other repositories, or the user's own ignore file.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass
from cloche.hostfs import look, open_folder, open_regular

from .git_ignore import IgnoreRules, is_ignored, parse_rules
from .git_index import LINK, MOST_DEPTH, SUBMODULE, Folder, IndexEntry, parse_index
from .git_objects import Objects, ReadBudget, Unknown, is_folder_mode, read_small

MOST_SECONDS = 10.0
MOST_LINES = 1_000
_MOST_LINES_CHARS = 256 << 10
_MOST_CONFIG, _MOST_HEAD, _MOST_RULES = 256 << 10, 4096, 256 << 10
_MOST_INDEX, _MOST_REFS = 64 << 20, 32 << 20
_MOST_COMPARED = 64 << 20
_MOST_CONVERTED = 16 << 20
_NAME = re.compile(rb"[0-9a-f]{40}")
_LONG_NAME = re.compile(rb"[0-9a-f]{64}")
_ASSIGNMENT = re.compile(r"([A-Za-z][\w-]*)\s*(?:=(.*))?")
_UNMERGED = ("DD", "AU", "UD", "UA", "DU", "AA", "UU")  # by the bits of a path's stages
_QUOTED = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The state of a repository. `status` has the lines of `git status --porcelain`, a rename as `D` and `A`.

    `head` is the commit, None before the first one; a detached HEAD has no `branch`.
    """

    is_repository: bool
    branch: str | None = None
    head: str | None = None
    status: tuple[str, ...] = ()
    is_partial: bool = False
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it in the wire's format."""
        return {
            "isRepository": self.is_repository, "branch": self.branch, "head": self.head, "status": list(self.status),
            "isPartial": self.is_partial, "reason": self.reason,
        }  # fmt: skip


def read_git_state(folder: int, *, deadline: float | None = None) -> GitState:
    """Return the state of the repository whose working tree is an open folder.

    `deadline` is a time of `time.monotonic`, by default ten seconds from now. Files not read by then are reported as
    missing from the state. Raises InvalidRequest for an unreadable folder.
    """
    bounds = ReadBudget(deadline=time.monotonic() + MOST_SECONDS if deadline is None else deadline)
    try:
        facts = look(".git", folder)
        if facts is None:
            return GitState(is_repository=False, reason="there is no .git in this folder")
        if not stat.S_ISDIR(facts.st_mode):
            return GitState(
                is_repository=True, is_partial=True, reason=".git is a file or a link, which is not followed"
            )
    except OSError as error:
        raise InvalidRequest(f"the folder cannot be read: {error.strerror}; change its owner or mode") from error
    try:
        git = open_folder(".git", folder)
    except OSError as error:
        return GitState(is_repository=True, is_partial=True, reason=f".git cannot be read: {error.strerror}")
    try:
        return _read(folder, git, bounds)
    finally:
        os.close(git)


def _read(folder: int, git: int, bounds: ReadBudget) -> GitState:
    with bounds.noting(is_last=True):
        if _look(b"HEAD", git) is None:
            return GitState(is_repository=False, reason=".git has no HEAD")
    branch = head = None
    is_head_known = False
    lines: Sequence[str] = ()
    with bounds.noting(is_last=True):
        branch, ref = _read_head(git)
        head = _resolve(git, ref.decode("utf-8", "replace")) if ref.startswith(b"refs/") else ref
        is_head_known = True
    with bounds.noting(is_last=True):
        if _look(b"commondir", git) is not None:
            raise Unknown(".git refers to objects elsewhere, which are not read")
        config = _read_config(git)
        if "worktree" in config:
            raise Unknown("the configuration names another working tree, which is not read")
        if (head is not None and _LONG_NAME.fullmatch(head)) or config.get("objectformat", "sha1") != "sha1":
            raise Unknown("the repository uses SHA-256, so files are not compared")
        lines = _status(folder, git, head if is_head_known else b"", config, bounds)
    status_lines = _within_bounds(lines)
    if len(status_lines) < len(lines):
        bounds.note(f"there are {len(lines)} lines of status, of which {len(status_lines)} are kept")
    return GitState(
        is_repository=True,
        branch=branch,
        head=head.decode() if head else None,
        status=status_lines,
        is_partial=bool(bounds.noted),
        reason="; ".join(bounds.noted) or None,
    )


def _within_bounds(lines: Sequence[str]) -> tuple[str, ...]:
    sizes = accumulate(map(len, lines[:MOST_LINES]))
    return tuple(line for line, size in zip(lines, sizes, strict=False) if size <= _MOST_LINES_CHARS)


# HEAD, refs and configuration


def _read_head(git: int) -> tuple[str | None, bytes]:
    """Return the branch, and the content of HEAD: the name of a commit or of a ref."""
    data = (read_small(git, "HEAD", _MOST_HEAD) or b"").strip()
    if _NAME.fullmatch(data) or _LONG_NAME.fullmatch(data):
        return None, data
    ref = data.removeprefix(b"ref:").strip()
    text = ref.decode("utf-8", "backslashreplace")
    if not data.startswith(b"ref:") or not _is_ref(text):
        raise Unknown("HEAD is damaged")
    if _look(b"reftable", git) is not None:
        raise Unknown("refs are stored as a reftable, which is not supported")
    return text.removeprefix("refs/heads/"), ref


def _resolve(git: int, ref: str) -> bytes | None:
    """Return the commit that a ref names, None if it does not exist yet."""
    for _ in range(5):
        data = _loose_ref(git, ref)
        if data is None:
            return _packed_ref(git, ref.encode())
        if _NAME.fullmatch(data) or _LONG_NAME.fullmatch(data):
            return data
        ref = data.removeprefix(b"ref:").strip().decode("utf-8", "replace")
        if not data.startswith(b"ref:") or not _is_ref(ref):
            break
    raise Unknown("the branch's ref is damaged")


def _loose_ref(git: int, ref: str) -> bytes | None:
    try:
        return data.strip() if (data := read_small(git, ref, _MOST_HEAD)) is not None else None
    except Unknown as error:
        if isinstance(error.__cause__, NotADirectoryError | IsADirectoryError):
            return None  # refs/heads/a is a file or a folder, and a packed ref has a name below or above
        raise


def _is_ref(ref: str) -> bool:
    """Tell whether a name is that of a ref, which is opened as a path below `.git`."""
    components = ref.split("/")
    return components[0] == "refs" and len(components) > 2 and not {"", ".", ".."} & set(components) and "\0" not in ref


def _packed_ref(git: int, ref: bytes) -> bytes | None:
    for line in (read_small(git, "packed-refs", _MOST_REFS) or b"").splitlines():
        name, _, path = line.partition(b" ")
        if path == ref and (_NAME.fullmatch(name) or _LONG_NAME.fullmatch(name)):
            return name
    return None


def _read_config(git: int) -> Mapping[str, str]:
    """Return the values of `core` and `extensions` in lower case, without includes and other sections."""
    text = (read_small(git, "config", _MOST_CONFIG) or b"").decode("utf-8", "replace")
    values: dict[str, str] = {}
    is_ours = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            is_ours = line.strip().lower() in ("[core]", "[extensions]")
        elif is_ours and (match := _ASSIGNMENT.fullmatch(line[:_MOST_HEAD].strip())):
            values[match[1].lower()] = "true" if match[2] is None else match[2].strip().strip('"').lower()
    return values


# status


def _status(folder: int, git: int, head: bytes | None, config: Mapping[str, str], bounds: ReadBudget) -> list[str]:
    """Return the lines of the status. An empty `head` means an unknown commit: staged changes are left out."""
    data = read_small(git, "index", _MOST_INDEX)
    index = Folder() if data is None else parse_index(data, bounds)
    staged: dict[bytes, str] = {}
    with bounds.noting(is_last=True):
        staged = {} if head == b"" else _staged(git, head, index, bounds)
    tree = _WorkingTree(git, config, bounds)
    with bounds.noting(is_last=True):
        tree.walk(folder, index, b"", tree.outer_rules(git))
    codes = {path: f"{staged.get(path, ' ')}{tree.changed.get(path, ' ')}" for path in {*staged, *tree.changed}}
    codes.update((path, _UNMERGED[stages - 1]) for path, stages in index.unmerged_paths())
    lines = [f"{codes[path]} {quote_path(path)}" for path in sorted(codes)]
    return lines + [f"?? {quote_path(path)}" for path in sorted(tree.untracked)]


def quote_path(path: bytes) -> str:
    """Return a path as git prints it: quoted if it has a blank or anything but printable ASCII."""
    text = "".join(_QUOTED.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in path)
    return f'"{text}"' if text != path.decode("latin-1") or " " in text else text


def _staged(git: int, head: bytes | None, index: Folder, bounds: ReadBudget) -> dict[bytes, str]:
    if head is None:
        return {path: "A" for path, entry in index.paths() if not entry.is_intended}
    objects = Objects(git, bounds)
    codes: dict[bytes, str] = {}
    try:
        tree = objects.tree_of(bytes.fromhex(head.decode()))
        codes.update(_tree_changes(objects, tree, index, b""))
    except OSError as error:
        raise Unknown(f"the commit cannot be read: {error.strerror}") from error
    finally:
        objects.close()
    unmerged = dict(index.unmerged_paths())
    return {path: code for path, code in codes.items() if path not in unmerged}


def _tree_changes(objects: Objects, tree: bytes, index: Folder, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    if index.tree_hash() == tree:
        return
    if prefix.count(b"/") > MOST_DEPTH:
        raise Unknown(f"the commit has folders deeper than {MOST_DEPTH}")
    before = objects.tree(tree)
    for name, (mode, oid) in before.items():
        if is_folder_mode(mode):
            yield from _tree_changes(objects, oid, index.folders.get(name, Folder()), prefix + name + b"/")
        elif (entry := index.files.get(name)) is None or entry.is_intended:
            yield prefix + name, "D"
        elif (entry.mode, entry.name) != (mode, oid):
            yield prefix + name, "T" if stat.S_IFMT(entry.mode) != stat.S_IFMT(mode) else "M"
    tree_names = {name: is_folder_mode(mode) for name, (mode, _) in before.items()}
    for name, entry in index.files.items():
        if tree_names.get(name, True) and not entry.is_intended:
            yield prefix + name, "A"
    for name, folder in index.folders.items():
        if not tree_names.get(name, False):
            yield from ((path, "A") for path, entry in folder.paths(prefix + name + b"/") if not entry.is_intended)


class _WorkingTree:
    """Walk the files once, and collect those that differ from the index, and those that are untracked."""

    def __init__(self, git: int, config: Mapping[str, str], bounds: ReadBudget):
        self.changed: dict[bytes, str] = {}
        self.untracked: list[bytes] = []
        self._bounds = bounds
        self._heeds_mode = config.get("filemode", "true") != "false"
        self._converts = config.get("autocrlf", "false") in ("true", "input")
        self._has_filters = False
        index = _look(b"index", git)
        self._indexed_at = index.st_mtime_ns if index else 0
        self._heed_attributes(git, "info/attributes")

    def outer_rules(self, git: int) -> tuple[IgnoreRules, ...]:
        """Return the ignore patterns outside of the working tree."""
        return self._rules(git, "info/exclude", b"")

    def walk(self, fd: int | None, folder: Folder, prefix: bytes, rules: Sequence[IgnoreRules] | None) -> None:
        """Compare one folder, open or missing, and those below. An ignored folder has no `rules`."""
        names = self._names(fd) if fd is not None and rules is not None else {}
        if fd is not None and b".gitattributes" in names:
            self._heed_attributes(fd, ".gitattributes")
        if fd is not None and rules is not None and b".gitignore" in names:
            rules = (*rules, *self._rules(fd, ".gitignore", prefix))
        for name, entry in folder.files.items():
            self._bounds.count_name()
            with self._bounds.noting():
                if code := self._compare(fd, name, entry):
                    self.changed[prefix + name] = code
        for name, below in folder.folders.items():
            self._walk_below(fd, name, below, prefix, rules)
        if rules is not None:
            # Like git: a folder in place of a file is a deletion, and its files are not listed.
            tracked = {*folder.files, *folder.unmerged, *(name for name in folder.folders if names.get(name))}
            untracked = {name: is_folder for name, is_folder in names.items() if name not in tracked}
            self.untracked += [prefix + path for path in self._untracked(fd, untracked, prefix, rules)]

    def _walk_below(
        self, parent: int | None, name: bytes, folder: Folder, prefix: bytes, rules: Sequence[IgnoreRules] | None
    ) -> None:
        path = prefix + name
        if rules is not None and self._is_ignored(rules, path, is_folder=True):
            rules = None
        with self._bounds.noting():
            fd = self._opened(parent, name)
            try:
                self.walk(fd, folder, path + b"/", rules)
            finally:
                if fd is not None:
                    os.close(fd)

    def _opened(self, parent: int | None, name: bytes) -> int | None:
        """Return a descriptor of a folder, None if it no longer exists."""
        if parent is None:
            return None
        try:
            return open_folder(os.fsdecode(name), parent)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Unknown(f"a folder cannot be read: {error.strerror}") from error

    def _names(self, folder: int) -> dict[bytes, bool]:
        """Return the names in a folder that git considers, with whether each is a folder."""
        names: dict[bytes, bool] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._bounds.count_name()
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if entry.name != ".git" and (is_folder or entry.is_symlink() or entry.is_file()):
                        names[os.fsencode(entry.name)] = is_folder
        except OSError as error:
            raise Unknown(f"a folder cannot be read: {error.strerror}") from error
        return names

    def _untracked(
        self, parent: int | None, names: Mapping[bytes, bool], prefix: bytes, rules: Sequence[IgnoreRules]
    ) -> Iterator[bytes]:
        for name, is_folder in names.items():
            if self._is_ignored(rules, prefix + name, is_folder=is_folder):
                continue
            if not is_folder:
                yield name
                continue
            with self._bounds.noting():
                fd = self._opened(parent, name)
                try:
                    if fd is not None and self._has_untracked(fd, prefix + name + b"/", rules):
                        yield name + b"/"
                finally:
                    if fd is not None:
                        os.close(fd)

    def _has_untracked(self, folder: int, prefix: bytes, rules: Sequence[IgnoreRules]) -> bool:
        """Tell whether an untracked folder has a file that is not ignored, or is a repository."""
        if prefix.count(b"/") > MOST_DEPTH:
            raise Unknown(f"there are folders deeper than {MOST_DEPTH}")
        if _is_repository(folder):
            return True
        names = self._names(folder)
        if b".gitignore" in names:
            rules = (*rules, *self._rules(folder, ".gitignore", prefix))
        by_kind = dict(sorted(names.items(), key=lambda item: item[1]))  # files first: one suffices
        return any(True for _ in self._untracked(folder, by_kind, prefix, rules))

    def _is_ignored(self, rules: Sequence[IgnoreRules], path: bytes, *, is_folder: bool) -> bool:
        return is_ignored(rules, path, is_folder=is_folder, check=self._bounds.check_time)

    def _rules(self, folder: int, path: str, base: bytes) -> tuple[IgnoreRules, ...]:
        data: bytes | None = None
        with self._bounds.noting():
            data = read_small(folder, path, _MOST_RULES)
        rules, is_whole = parse_rules(data or b"", base)
        if not is_whole:
            self._bounds.note("a .gitignore file has too many lines, or lines that are too long")
        return (rules,)

    def _heed_attributes(self, folder: int, path: str) -> None:
        with self._bounds.noting():
            data = read_small(folder, path, _MOST_RULES) or b""
            self._converts |= re.search(rb"\b(?:text|eol|crlf)\b", data) is not None
            self._has_filters |= re.search(rb"\b(?:filter=|ident\b|working-tree-encoding=)", data) is not None

    def _compare(self, folder: int | None, name: bytes, entry: IndexEntry) -> str | None:
        """Return the status code of a file that differs from its entry in the index."""
        if entry.is_trusted:
            return None
        facts = None if folder is None else _look(name, folder)
        if folder is None or facts is None or (stat.S_ISDIR(facts.st_mode) and entry.mode != SUBMODULE):
            return "D"
        if entry.is_intended:
            return "A"
        if entry.mode == SUBMODULE and stat.S_ISDIR(facts.st_mode):
            self._bounds.note("submodules were not compared")
            return None
        if entry.mode == SUBMODULE or (entry.mode == LINK) != stat.S_ISLNK(facts.st_mode):
            return "T"
        if not stat.S_ISLNK(facts.st_mode) and not stat.S_ISREG(facts.st_mode):
            return "M"
        if self._heeds_mode and entry.mode != LINK and bool(entry.mode & 0o100) != bool(facts.st_mode & 0o100):
            return "M"
        if self._is_as_it_was(entry, facts):
            return None
        if entry.size not in (0, facts.st_size & 0xFFFFFFFF):
            return "M"
        return None if self._has_content(folder, os.fsdecode(name), entry, facts) else "M"

    def _is_as_it_was(self, entry: IndexEntry, facts: os.stat_result) -> bool:
        """Tell whether a file is unmodified since it was added, as git does: by size, times and inode."""
        modified = entry.times[2] * 10**9 + entry.times[3]
        if modified >= self._indexed_at:  # "racily clean" (git's Documentation/technical/racy-git)
            return False
        times = (*divmod(facts.st_ctime_ns, 10**9), *divmod(facts.st_mtime_ns, 10**9))
        is_same_time = all(indexed in (now & 0xFFFFFFFF, 0) for indexed, now in zip(entry.times, times, strict=True))
        return is_same_time and (entry.size, entry.inode) == (facts.st_size & 0xFFFFFFFF, facts.st_ino & 0xFFFFFFFF)

    def _has_content(self, folder: int, name: str, entry: IndexEntry, facts: os.stat_result) -> bool:
        """Tell whether a file has the content of its entry. Raises Unknown if it is not read."""
        self._bounds.check_time()
        if facts.st_size > min(_MOST_COMPARED, self._bounds.content_bytes):
            raise Unknown("files that are too large were not compared")
        self._bounds.content_bytes -= facts.st_size
        try:
            if entry.mode == LINK:
                return _blob_name([os.fsencode(os.readlink(name, dir_fd=folder))], facts.st_size) == entry.name
            if _hash_of(name, folder, facts.st_size) == entry.name:
                return True
            if self._converts and facts.st_size <= _MOST_CONVERTED and _converted_hash(name, folder) == entry.name:
                return True
        except OSError as error:
            raise Unknown(f"a file cannot be read: {error.strerror}") from error
        if self._has_filters:
            self._bounds.note("filters of the repository were not run: files are compared as they are")
        return False


def _look(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return look(os.fsdecode(name), folder)
    except OSError as error:
        raise Unknown(f"a file cannot be read: {error.strerror}") from error


def _is_repository(folder: int) -> bool:
    facts = _look(b".git", folder)
    if facts is None or not stat.S_ISDIR(facts.st_mode):
        return facts is not None and stat.S_ISREG(facts.st_mode)
    try:
        git = open_folder(".git", folder)
    except OSError:
        return True  # unreadable: treated as a repository
    try:
        return all(_look(name, git) for name in (b"HEAD", b"objects", b"refs"))
    finally:
        os.close(git)


def _blob_name(chunks: Iterable[bytes], size: int) -> bytes:
    state = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in chunks:
        state.update(chunk)
    return state.digest()


def _hash_of(name: str, folder: int, size: int) -> bytes:
    fd, _ = open_regular(name, folder)
    with open(fd, "rb") as file:
        chunks = iter(lambda: file.read(min(1 << 18, max(0, size - file.tell()))), b"")
        return _blob_name(chunks, size)


def _converted_hash(name: str, folder: int) -> bytes:
    """Return the hash of a file after conversion to the repository's line ends."""
    fd, _ = open_regular(name, folder)
    with open(fd, "rb") as file:
        data = file.read(_MOST_CONVERTED).replace(b"\r\n", b"\n")
    return _blob_name([data], len(data))
