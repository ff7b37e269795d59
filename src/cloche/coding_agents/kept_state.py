"""Files in an agent's home folder that later sessions obey, compared with the version that the user has accepted.

    agents/NAME/accepted.json    the accepted files: contents up to a bound, hashes of the others

`state_changes` compares before a session starts, `accept_state` and `restore_state` carry out the user's answer, and
`own_writes` excludes files that Cloche itself writes at a start. Everything in the home folder is the guest's:
it is read by descriptors, through no link and no mount, up to bounds, and is never run. A link is a separate entry.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import asdict, dataclass, field
from cloche.workspace.host_files import HostTree

from .places import AgentPlace
from .row import CodingAgent

if TYPE_CHECKING:
    from cloche.workspace.lines import Work

ACCEPTED = "accepted.json"
MOST_FILES, MOST_NAMES, MOST_DEPTH = 2000, 20_000, 24  # of one pattern
MOST_FILE_BYTES, MOST_HELD_BYTES = 1 << 20, 4 << 20  # of one file, of those of one pattern
MOST_ACCEPTED_BYTES, MOST_DIFF_CHARS = 256 << 20, 64 << 10
MOST_STEPS, MOST_ALL_STEPS = 200_000, 1_000_000  # of one comparison of lines, of all
# Files by which any program in the home folder runs something.
EVERYWHERE = (
    ".profile", ".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".zshrc", ".zshenv", ".zprofile",
    ".gitconfig", ".config/git/**", ".npmrc", ".pypirc", ".pythonrc", ".config/fish/**", ".ssh/config",
    ".cargo/config", ".cargo/config.toml", ".local/bin/*", ".local/lib/python*/site-packages/*.pth",
    ".local/lib/python*/site-packages/*customize.py",
)  # fmt: skip
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """Hold one entry: a file, a link (its `data` is the target), or something else. `data` is None beyond the bounds.

    With `keys`, it is a part of a JSON file: `data` is the JSON of pairs of a path of keys and a value.
    """

    kind: Literal["file", "link", "other"] = "file"
    sha256: str = ""
    size: int = 0
    is_executable: bool = False
    data: bytes | None = None
    keys: str = ""

    def is_same(self, other: KeptFile | None) -> bool:
        """Tell whether another entry is equal."""
        return other is not None and (self.kind, self.sha256, self.is_executable) == (
            other.kind, other.sha256, other.is_executable,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """Say how an entry differs from the accepted one. `diff` has unified hunks; `note` says why it is empty."""

    path: str
    what: Literal["added", "removed", "modified"]
    diff: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanges:
    """Hold the changes since the user has accepted the state. `cut` are patterns with more files than are compared.

    `files` are the entries that were compared, which `accept_state` accepts.
    """

    changes: tuple[StateChange, ...] = ()
    cut: tuple[str, ...] = ()
    files: Mapping[str, KeptFile] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"changes": [asdict(change) for change in self.changes], "cut": list(self.cut)}


@dataclass(slots=True)
class _State:
    files: dict[str, KeptFile] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)


def state_changes(place: AgentPlace, row: CodingAgent) -> StateChanges:
    """Compare the kept files with the accepted ones. Blocks."""
    from cloche.workspace.lines import Work

    accepted, now, work = _read_accepted(place), _read_state(place, row), Work(MOST_ALL_STEPS, MOST_STEPS)
    paths = sorted({*accepted, *now.files})
    pairs = ((path, accepted.get(path), now.files.get(path)) for path in paths)
    changes = [_change(path, old, new, work) for path, old, new in pairs if new is None or not new.is_same(old)]
    return StateChanges(changes=tuple(changes), cut=tuple(now.cut), files=now.files)


def accept_state(place: AgentPlace, shown: StateChanges) -> None:
    """Note the shown state as accepted; later changes are shown the next time. Raises OSError."""
    _write_accepted(place, shown.files)


def copy_accepted(source: AgentPlace, place: AgentPlace) -> None:
    """Copy the accepted state for a place whose home is a copy."""
    _write_accepted(place, _read_accepted(source))


@contextmanager
def own_writes(place: AgentPlace, row: CodingAgent) -> Iterator[None]:
    """Accept the files that Cloche itself writes meanwhile, and no earlier change."""
    accepted, before = _read_accepted(place), _read_state(place, row).files
    yield
    after = _read_state(place, row).files
    changed = {path for path in {*accepted, *before} if not _is_same(accepted.get(path), before.get(path))}
    for path in {*accepted, *before, *after}:
        if changed.isdisjoint((path, path.partition("#")[0])):  # keys may come from what was a link, or no JSON
            if path in after:
                accepted[path] = after[path]
            else:
                accepted.pop(path, None)
    _write_accepted(place, accepted)


def _is_same(old: KeptFile | None, new: KeptFile | None) -> bool:
    return new is None if old is None else old.is_same(new)


def restore_state(place: AgentPlace, row: CodingAgent) -> tuple[str, Mapping[str, str]]:
    """Put the accepted state back, after saving the present one.

    Return the archive with the present files that differ, and the paths that could not be restored, with reasons.
    Raises OSError.
    """
    accepted, now = _read_accepted(place), _read_state(place, row).files
    differing = [path for path in {*accepted, *now} if path not in now or not now[path].is_same(accepted.get(path))]
    archive = _save(place, {path: now[path] for path in sorted(differing) if path in now})
    left: dict[str, str] = {}
    home_fd = hostfs.open_folder(place.home)
    try:
        for path in sorted(differing):
            try:
                left |= {path: why} if (why := _restore(home_fd, path, accepted.get(path), now.get(path))) else {}
            except OSError as error:
                left[path] = error.strerror or str(error)
    finally:
        os.close(home_fd)
    return archive, left


# Reading.


def _read_state(place: AgentPlace, row: CodingAgent) -> _State:
    state = _State()
    try:
        home_fd = hostfs.open_folder(place.home)
    except FileNotFoundError:
        return state
    except PermissionError as error:
        raise InvalidRequest(
            f"{escape_name(place.home)} cannot be read: an earlier session has taken its permissions away; "
            "restore them by chmod 700"
        ) from error
    try:
        with HostTree(home_fd) as tree:
            _Reading(tree, state).read((*row.state_to_review, *EVERYWHERE))
    finally:
        os.close(home_fd)
    return state


class _Reading:
    def __init__(self, tree: HostTree, state: _State):
        self.tree, self.state = tree, state
        self.files = self.names = self.held = 0
        self.pattern = ""

    def read(self, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            self.pattern, self.files, self.names, self.held = (
                pattern,
                0,
                0,
                0,
            )  # a flood below one hides nothing of another
            path, _, keys = pattern.partition("#")
            self._below("", path.split("/"), keys)

    def _cut(self) -> None:
        if self.pattern not in self.state.cut:
            self.state.cut.append(self.pattern)

    def _below(self, folder: str, names: Sequence[str], keys: str) -> None:
        """Read what matches below a folder of the home; `**` matches everything below."""
        first, *rest = names
        is_all = first == "**"
        if folder.count("/") >= MOST_DEPTH or self.names > MOST_NAMES or self.files > MOST_FILES:
            self._cut()
            return
        candidates = self._names(folder) if set("*?[") & set(first) else [first]
        for name in candidates:
            if not is_all and not fnmatchcase(name, first):
                continue
            path = f"{folder}/{name}" if folder else name
            facts = self._look(path)
            if facts is not None and stat.S_ISDIR(facts.st_mode):
                if is_all or rest:
                    self._below(path, names if is_all else rest, keys)
            elif facts is not None and (is_all or not rest or stat.S_ISLNK(facts.st_mode)):
                self._add(path, facts, keys)

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder, no more than are left to be looked at."""
        try:
            fd = self.tree.folder(folder.split("/") if folder else ())
            if fd is None:
                return []
            with os.scandir(fd) as entries:
                names = [entry.name for entry in islice(entries, MOST_NAMES + 1 - self.names)]
        except OSError as error:
            if error.errno not in _MISSING:  # the guest has made it unreadable: a program may know the names
                self._cut()
            return []
        self.names += len(names)
        return sorted(names)

    def _look(self, path: str) -> os.stat_result | None:
        try:
            return self.tree.look(path)
        except OSError as error:
            if error.errno not in _MISSING:
                self._cut()
            return None

    def _add(self, path: str, facts: os.stat_result, keys: str) -> None:
        self.files += 1
        if self.files > MOST_FILES:
            self._cut()
            return
        if stat.S_ISLNK(facts.st_mode):
            with suppress(OSError):
                target = self.tree.target(path)
                self.state.files[path] = _entry("link", target, len(target))
        elif not stat.S_ISREG(facts.st_mode):
            self.state.files[path] = _entry("other", b"", 0)
        else:
            self._add_file(path, facts, keys)

    def _add_file(self, path: str, facts: os.stat_result, keys: str) -> None:
        try:
            data = self._content(path, facts.st_size)
        except OSError:  # it was replaced meanwhile, or cannot be read
            self.state.files[path] = _entry("other", b"", 0)
            return
        chosen = _chosen(data, keys) if keys and data is not None else None
        if chosen is not None:
            if chosen != b"[]":
                self.state.files[f"{path}#{keys}"] = _entry("file", chosen, len(chosen), keys=keys)
            return
        # Of a file that is too long to be read, the change time tells whether it is the same.
        known = data if data is not None else f"{facts.st_ino} {facts.st_ctime_ns} {facts.st_size}".encode()
        self.state.files[path] = KeptFile(
            sha256=hashlib.sha256(known).hexdigest(), size=facts.st_size,
            is_executable=bool(facts.st_mode & 0o111), data=data,
        )  # fmt: skip

    def _content(self, path: str, size: int) -> bytes | None:
        """Return a file's content, None if it is too much to be held. Raises OSError."""
        if size > MOST_FILE_BYTES or self.held + size > MOST_HELD_BYTES:
            return None
        with open(self.tree.open_regular(path)[0], "rb") as file:
            data = file.read(size + 1)
        self.held += len(data)
        return data


def _entry(kind: Literal["file", "link", "other"], data: bytes, size: int, *, keys: str = "") -> KeptFile:
    return KeptFile(kind=kind, sha256=hashlib.sha256(data).hexdigest(), size=size, data=data, keys=keys)


def _chosen(data: bytes, keys: str) -> bytes | None:
    """Return the JSON of pairs of a path and a value at some keys; None without a JSON object."""
    try:
        document = json.loads(data)
        pairs = [[path, value] for path, value in _values(document, keys.split("."))]
        return json.dumps(pairs, indent=2, sort_keys=True).encode() if isinstance(document, dict) else None
    except (ValueError, RecursionError):
        return None


def _values(document: Any, keys: Sequence[str]) -> Iterator[tuple[list[str], Any]]:  # noqa: ANN401 - any JSON
    if not isinstance(document, dict):
        return
    first, *rest = keys
    for name in sorted(document) if first == "*" else [first] if first in document else []:
        if not rest:
            yield [name], document[name]
        for path, value in _values(document[name], rest) if rest else ():
            yield [name, *path], value


# Showing.


def _change(path: str, old: KeptFile | None, new: KeptFile | None, work: Work) -> StateChange:
    what: Literal["added", "removed", "modified"] = "added" if old is None else "removed" if new is None else "modified"
    texts = ["" if entry is None else _text(entry) for entry in (old, new)]
    if texts[0] is None or texts[1] is None:
        sizes = " to ".join(f"{entry.size:,} bytes" for entry in (old, new) if entry is not None)
        return StateChange(path=path, what=what, note=f"not shown: binary, or too long ({sizes})")
    from cloche.workspace.lines import changed_regions, hunks
    from cloche.workspace.patch import text_lines

    before, after = text_lines(texts[0]), text_lines(texts[1])
    diff = "".join(hunks(before, after, changed_regions(before, after, work)))
    notes = [_kind(entry) for entry in (old, new) if entry is not None and _kind(entry)]
    if len(diff) > MOST_DIFF_CHARS:
        notes.append(f"only the first {MOST_DIFF_CHARS:,} characters are shown")
    return StateChange(path=path, what=what, diff=diff[:MOST_DIFF_CHARS], note=", then ".join(dict.fromkeys(notes)))


def _kind(entry: KeptFile) -> str:
    if entry.kind == "link":
        return "a link"
    return "neither a file nor a link" if entry.kind == "other" else "executable" if entry.is_executable else ""


def _text(entry: KeptFile) -> str | None:
    if entry.data is None or b"\0" in entry.data:
        return None
    try:
        return entry.data.decode()
    except UnicodeDecodeError:
        return None


# The accepted state.


def _read_accepted(place: AgentPlace) -> dict[str, KeptFile]:
    try:
        with open(f"{place.state}/{ACCEPTED}", "rb") as file:
            rows = json.loads(file.read(MOST_ACCEPTED_BYTES))
        return {path: KeptFile(**{**row, "data": _decoded(row["data"])}) for path, row in rows.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # then everything is shown as new


def _decoded(data: str | None) -> bytes | None:
    return None if data is None else base64.b64decode(data)


def _write_accepted(place: AgentPlace, files: Mapping[str, KeptFile]) -> None:
    rows = {
        path: {**asdict(entry), "data": None if entry.data is None else base64.b64encode(entry.data).decode()}
        for path, entry in sorted(files.items())
    }
    os.makedirs(place.state, mode=0o700, exist_ok=True)
    state_fd = hostfs.open_folder(place.state)
    try:
        hostfs.replace(state_fd, ACCEPTED, json.dumps(rows).encode(), mode=0o600, permissions=0o600)
    finally:
        os.close(state_fd)


# Restoring.


def _save(place: AgentPlace, files: Mapping[str, KeptFile]) -> str:
    """Write files to an archive of mode 0600; return its path."""
    import io
    import tarfile

    os.makedirs(place.saved, mode=0o700, exist_ok=True)
    name = time.strftime(f"state-%Y%m%d-%H%M%S-{os.urandom(2).hex()}.tar", time.gmtime())
    saved_fd = hostfs.open_folder(place.saved)
    try:
        with (
            hostfs.new_file(saved_fd, 0o600, name=name) as (_, file),
            file,
            tarfile.open(fileobj=file, mode="w", errors="surrogateescape") as into,
        ):
            for path, entry in files.items():
                member = tarfile.TarInfo(path)
                member.size, member.mode = len(entry.data or b""), 0o600
                into.addfile(member, io.BytesIO(entry.data or b""))
    finally:
        os.close(saved_fd)
    return f"{place.saved}/{name}"


def _restore(home_fd: int, path: str, old: KeptFile | None, new: KeptFile | None) -> str:
    """Put one entry back; return why it cannot be, or an empty string. Raises OSError."""
    if old is not None and (old.data is None or old.kind == "other"):
        return "its accepted content is too long to be kept, or was no file"
    if (old or new or KeptFile()).keys:
        return _restore_keys(home_fd, path.rpartition("#")[0], old, (old or new or KeptFile()).keys)
    with _parent(home_fd, path) as (parent_fd, name):
        facts = hostfs.look(name, parent_fd)
        if old is None:
            if facts is not None and not stat.S_ISDIR(facts.st_mode):
                os.unlink(name, dir_fd=parent_fd)
        elif facts is not None and stat.S_ISDIR(facts.st_mode):
            return "a folder is there now"
        elif old.kind == "link":
            if facts is not None:
                os.unlink(name, dir_fd=parent_fd)
            os.symlink(os.fsdecode(old.data or b""), name, dir_fd=parent_fd)
            _give(home_fd, name, parent_fd)
        else:
            _replace(home_fd, parent_fd, name, old.data or b"", 0o700 if old.is_executable else 0o600)
    return ""


def _restore_keys(home_fd: int, path: str, old: KeptFile | None, keys: str) -> str:
    """Put the values at some keys of a JSON file back, and leave the others."""
    with _parent(home_fd, path) as (parent_fd, name):
        fd, _ = hostfs.open_regular(name, parent_fd)
        with open(fd, "rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
        try:
            document = json.loads(data)
            for at, _ in list(_values(document, keys.split("."))):
                _inner(document, at[:-1]).pop(at[-1])
            for at, value in json.loads(old.data or b"[]") if old is not None else ():
                _inner(document, at[:-1])[at[-1]] = value
            text = json.dumps(document, indent=2).encode()
        except (ValueError, TypeError, AttributeError, RecursionError):
            return "it is not JSON any more"
        _replace(home_fd, parent_fd, name, text, 0o600)
    return ""


def _inner(document: Any, keys: Sequence[str]) -> Any:  # noqa: ANN401 - any JSON
    for key in keys:
        document = document.setdefault(key, {})
    return document


@contextmanager
def _parent(home_fd: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the folder of a path in the home, and make it where something else, or nothing, is there."""
    *above, name = path.split("/")
    fd = hostfs.open_folder(".", home_fd)
    try:
        for folder in above:
            facts = hostfs.look(folder, fd)
            if facts is not None and not stat.S_ISDIR(facts.st_mode):
                os.unlink(folder, dir_fd=fd)
            if hostfs.make_folder(folder, fd, 0o700):
                _give(home_fd, folder, fd)
            outer, fd = fd, hostfs.open_folder(folder, fd)
            os.close(outer)
        yield fd, name
    finally:
        os.close(fd)


def _replace(home_fd: int, parent_fd: int, name: str, data: bytes, mode: int) -> None:
    with hostfs.new_file(parent_fd, 0o600) as (beside, file):
        with file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
        _give(home_fd, beside, parent_fd)
        os.rename(beside, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)


def _give(home_fd: int, name: str, dir_fd: int) -> None:
    """Give a new entry to the owner of the home folder."""
    if os.geteuid() == 0:
        facts = os.fstat(home_fd)
        os.chown(name, facts.st_uid, facts.st_gid, dir_fd=dir_fd, follow_symlinks=False)
