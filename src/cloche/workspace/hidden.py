"""Decide which paths of a host folder are hidden from a sandbox: credentials by name and by content, hooks, and
patterns.

Theory of operation: one walk visits all names by descriptors. The type of an entry comes from the directory listing, so
only folders are stat'ed (to detect mounts), no link is followed, and a file is read only if its name is one of a few.
Entries that cannot be examined are hidden. In installed packages, whose files are public and needed by programs, only a
user's own credential files are hidden. `mask_rows` computes the overlay layer that hides the paths.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from cloche import hostfs
from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass, field

from .ignore import MOST_BYTES, IgnorePatterns
from .mounts import mount_of, mounts_below
from .tracked import find_tracked

IGNORE_FILE, STAGE_PREFIX = ".clocheignore", ".cloche-"
MOST_DEPTH, MOST_HIDDEN, MOST_TIME_S = 200, 10_000, 60.0
MOST_READ, MOST_CONFIG = 1 << 14, 1 << 16
MOST_PATH_BYTES = 3584  # of a relative folder path: PATH_MAX leaves room for names, and for the mask's folder before it

# Names of files with credentials; hidden in installed packages too.
CREDENTIAL_FILES = frozenset({
    ".netrc", "_netrc", ".pgpass", ".git-credentials", ".pypirc", ".my.cnf", ".s3cfg", ".boto", ".dockercfg",
    ".vault-token", ".databrickscfg",
})  # fmt: skip
# Shown in installed packages, where they are examples from a registry.
KEY_FILES = frozenset({
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", "credentials.json",
    "application_default_credentials.json", "service-account.json", "service_account.json", "serviceAccountKey.json",
    "credentials.tfrc.json", "snapshots.key",
})  # fmt: skip
CREDENTIAL_FOLDERS = frozenset({".ssh", ".aws", ".gnupg", ".kube", ".azure", ".password-store"})
# By the parent's name: the entries with credentials. Other entries of the folder are shown.
BELOW: Mapping[str, frozenset[str]] = {
    ".config": frozenset({"gcloud", "gh", "hub", "op", "rclone"}),
    ".docker": frozenset({"config.json"}),
    ".cargo": frozenset({"credentials", "credentials.toml"}),
    ".gem": frozenset({"credentials"}),
    ".m2": frozenset({"settings.xml", "settings-security.xml"}),
    ".claude": frozenset({".credentials.json"}),
    ".codex": frozenset({"auth.json"}),
    ".gemini": frozenset({"oauth_creds.json"}),
    ".qwen": frozenset({"oauth_creds.json"}),
    "uv": frozenset({"credentials"}),
}
_SHOWN_ENV = re.compile(r"\.env.*[._-](?:example|sample|template|dist|defaults|tmpl|tpl)\Z", re.DOTALL)
_PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----|^PuTTY-User-Key-File-")
# By suffix: the file is read, and hidden if it contains a private key.
KEY_ENDINGS = frozenset({".pem", ".key", ".ppk", ".asc", ".PEM", ".KEY"})
# By name: the file is read, and hidden if it contains a credential (not the name of a variable).
BY_CONTENT: Mapping[str, re.Pattern[bytes]] = {
    ".npmrc": re.compile(rb"^[^#;\n]{0,500}?_(?:authToken|password|auth)\s*=\s*[^\s$]", re.MULTILINE),
    ".yarnrc": re.compile(rb"^[^#\n]{0,500}?_(?:authToken|password|auth)\"?\s+\"?[^\s$]", re.MULTILINE),
    ".yarnrc.yml": re.compile(rb"^\s{0,20}npmAuth(?:Token|Ident)\s*:\s*[\"']?[^\s$\"']", re.MULTILINE),
    "pip.conf": re.compile(rb"://[^/\s@:$]{0,200}:[^/\s@$]{1,500}@"),
}
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages", "node_modules"})
_ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})
_GIT_MARKS = frozenset({"HEAD", "objects", "refs"})
_GIT_HEAD = re.compile(rb"\A(?:ref: |[0-9a-f]{40})")
_NOTED = CREDENTIAL_FILES | KEY_FILES | BY_CONTENT.keys() | _ENVIRONMENT_MARKS | _GIT_MARKS | {"config"}
_NOTHING: frozenset[str] = frozenset()
_MOUNTED = "something else is mounted there"
_LOOK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REPLACED = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)  # replaced since it was listed
_OUT_OF_MEANS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_URL_SECRET = re.compile(
    rb"https?://(?:[^/\s@:]{0,200}:[^/\s@]{1,500}|(?:gh[a-z]_|github_pat_|glpat-|x-)[^/\s@]{1,500}|[^/\s@:]{36,500})@"
    rb"|^\s{0,20}extraheader\s*=\s*[\"']?authorization:",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The hidden paths below the folder, topmost only, each with its reason.

    `tracked` are the hidden paths that git tracks, or that have tracked files below. `repositories` are the folders
    with a `.git`, "" for the top. `mounts` are the mount points among the paths. `warnings` are sentences for the user.
    `scanned` counts the names visited.
    """

    paths: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    tracked: tuple[str, ...] = ()
    repositories: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scanned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFolder:
    """A folder of the mask, with the permissions and mtime (ns) of the original folder that it covers."""

    path: str
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """An overlay layer that hides paths: folders, parents first ("" is the root), and whiteouts."""

    folders: tuple[MaskFolder, ...] = ()
    whiteouts: tuple[str, ...] = ()


def find_hidden(folder: int, *, patterns: Sequence[str] = (), hides_special: bool = False) -> Hidden:
    """Return the hidden paths of an open folder: by default rules, its `.clocheignore`, and the policy's patterns.

    `hides_special` hides sockets and FIFOs, for a folder shown by a bind mount: there they reach processes of the host
    even if nothing can be written. In an overlay they reach no process.

    Raises InvalidRequest for too many or too long patterns, too many hidden paths, or a walk of more than a minute;
    OSError if the folder itself cannot be read.
    """
    walk = _Walk(
        folder,
        ignore=IgnorePatterns(_ignore_lines(folder), where=IGNORE_FILE),
        policy=IgnorePatterns(patterns, where="the policy's hidden paths"),
        hides_special=hides_special,
    )
    walk.run()
    reasons = dict(sorted(walk.reasons.items()))
    paths_outside_git = [path for path in reasons if ".git" not in path.split("/")]
    tracked = find_tracked(folder, paths_outside_git, walk.repositories)
    return Hidden(
        paths=tuple(reasons),
        reasons=MappingProxyType(reasons),
        tracked=tracked or (),
        repositories=tuple(walk.repositories),
        mounts=tuple(sorted(walk.mounts)),
        warnings=(*walk.warnings, *_about_tracked(tracked)),
        scanned=walk.scanned,
    )


def find_hidden_in_git(git: int) -> Hidden:
    """Return the hidden paths of an open folder that is shown as `.git`; each path begins with `.git`.

    Raises the errors of `find_hidden`.
    """
    none = IgnorePatterns((), where="nothing")
    walk = _Walk(git, ignore=none, policy=none)
    walk.run_in_git()
    return Hidden(
        paths=tuple(sorted(walk.reasons)), reasons=MappingProxyType(walk.reasons), mounts=tuple(walk.mounts),
        warnings=tuple(walk.warnings), scanned=walk.scanned,
    )  # fmt: skip


def mask_rows(folder: int, hidden: Hidden) -> Mask:
    """Return the mask for an open folder. A path is left out if a parent has disappeared or is a link."""
    folders: dict[str, MaskFolder] = {}
    whiteouts = [path for path in hidden.paths if _add_above(folder, path, folders)]
    return Mask(folders=tuple(folders[path] for path in sorted(folders, key=_depth)), whiteouts=tuple(whiteouts))


def _depth(path: str) -> tuple[int, str]:
    return (path.count("/") + 1 if path else 0, path)


def _add_above(folder: int, path: str, folders: dict[str, MaskFolder]) -> bool:
    """Add the missing parents of a path; tell whether all of them exist."""
    above = path.rpartition("/")[0]
    if above in folders:
        return True
    new_folders: dict[str, MaskFolder] = {}
    fd = hostfs.open_folder(".", folder)
    try:
        _note_folder("", fd, new_folders)
        names = above.split("/") if above else []
        for depth, name in enumerate(names, 1):
            outer, fd = fd, os.open(name, _LOOK, dir_fd=fd)
            os.close(outer)
            _note_folder("/".join(names[:depth]), fd, new_folders)
    except OSError:
        return False
    finally:
        os.close(fd)
    folders.update(new_folders)
    return True


def _note_folder(path: str, fd: int, folders: dict[str, MaskFolder]) -> None:
    facts = os.fstat(fd)
    folders[path] = MaskFolder(path=path, mode=stat.S_IMODE(facts.st_mode) & 0o1777, mtime_ns=facts.st_mtime_ns)


def _ignore_lines(folder: int) -> list[str]:
    """Return the lines of the folder's `.clocheignore`. Raises InvalidRequest if it cannot be read completely."""
    try:
        data = _head(IGNORE_FILE, folder, MOST_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidRequest(
            f"{IGNORE_FILE}: is not a file that can be read ({error.strerror}), so the hidden paths are unknown; "
            "put a regular file there, or remove it"
        ) from error
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{IGNORE_FILE}: has more than {MOST_BYTES} bytes; join some of its patterns")
    return os.fsdecode(data.removeprefix(b"\xef\xbb\xbf")).split("\n")


def _head(name: str, dir_fd: int, max_bytes: int) -> bytes:
    fd, _ = hostfs.open_regular(name, dir_fd)
    with open(fd, "rb", buffering=0) as file:
        return file.read(max_bytes) or b""


def _about_tracked(tracked: Sequence[str] | None) -> Iterator[str]:
    if tracked is None:
        yield "Whether git tracks any of the hidden paths is not known: git could not be asked."
    elif tracked:
        listed = ", ".join(map(escape_name, tracked[:5])) + (f" and {len(tracked) - 5} more" if tracked[5:] else "")
        yield f"Tracked by git, and hidden from the sandbox: {listed}."


class _Walk:
    def __init__(
        self, folder: int, *, ignore: IgnorePatterns, policy: IgnorePatterns, hides_special: bool = False
    ) -> None:
        self._hides_special = hides_special
        self.reasons: dict[str, str] = {}
        self.mounts: list[str] = []
        self.warnings: list[str] = []
        self.repositories: list[str] = []
        self.scanned = 0
        self._folder = folder
        self._device, self._mount = os.fstat(folder).st_dev, mount_of(folder)
        self._patterns = [(patterns, why) for patterns, why in ((ignore, IGNORE_FILE), (policy, "policy")) if patterns]
        self._deadline = time.monotonic() + MOST_TIME_S

    def run(self) -> None:
        fd = hostfs.open_folder(".", self._folder)
        try:
            # The shown folder itself may have a name of BELOW.
            name = os.path.basename(os.readlink(f"/proc/self/fd/{self._folder}"))
            self._look_in(fd, "", name if name in BELOW else "", is_installed=False, depth=0)
        finally:
            os.close(fd)
        # Also single files: an overlay would show the file that the mount covers.
        for path in mounts_below(os.readlink(f"/proc/self/fd/{self._folder}")):
            names = path.split("/")
            if not any("/".join(names[:depth]) in self.reasons for depth in range(1, len(names) + 1)):
                self.mounts.append(path)
                self._hide(path, _MOUNTED)

    def run_in_git(self) -> None:
        fd = hostfs.open_folder(".", self._folder)
        try:
            self._look_in_git(fd, ".git/", depth=1)
        finally:
            os.close(fd)

    def _hide(self, path: str, why: str) -> None:
        self.reasons[path] = why
        if len(self.reasons) > MOST_HIDDEN:
            raise InvalidRequest(
                f"more than {MOST_HIDDEN} paths would be hidden; name the folders that hold them in {IGNORE_FILE}, "
                "or choose a smaller folder"
            )

    def _check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise InvalidRequest(
                f"the folder cannot be looked through in {MOST_TIME_S:.0f} s; choose a smaller one, or name fewer "
                "patterns"
            )

    def _look_in(self, dir_fd: int, above: str, name: str, *, is_installed: bool, depth: int) -> None:
        """Examine all names of an open folder. `above` is its path with a trailing slash, empty for the top."""
        self._check_time()
        folders, noted, listed = self._list(dir_fd, above, BELOW.get(name, _NOTHING))
        is_repository = noted.keys() >= _GIT_MARKS and _has(_GIT_HEAD, "HEAD", dir_fd)
        if "/.git/" in f"/{above}":  # `modules/PATH`: only repositories in it are examined
            if is_repository:
                self._look_in_git(dir_fd, above, depth=depth)
            for entry_name in folders if not is_repository else ():
                self._descend(entry_name, dir_fd, above, is_installed=False, depth=depth)
            return
        if ".git" in noted:
            self.repositories.append(above[:-1])
        is_installed = is_installed or name in _PACKAGE_FOLDERS or not noted.keys().isdisjoint(_ENVIRONMENT_MARKS)
        excluded: set[str] = set()
        if is_repository:  # a bare repository: its other entries are examined as in any folder
            excluded |= {"objects", "hooks"}
            self._look_at_git_files(dir_fd, above, [*folders, *noted])
        for entry_name, is_folder in noted.items():
            why = _reason(entry_name, dir_fd, name, is_folder=is_folder, is_installed=is_installed)
            if why:
                excluded.add(entry_name)
                self._hide(above + entry_name, why)
        for number, (entry_name, is_folder) in enumerate(listed, 1):
            if not number & 63:
                self._check_time()
            if entry_name not in excluded and (
                why := self._reason_of_patterns(entry_name, above + entry_name, is_folder=is_folder)
            ):
                excluded.add(entry_name)
                self._hide(above + entry_name, why)
        for entry_name in folders:
            if entry_name not in excluded:
                self._descend(entry_name, dir_fd, above, is_installed=is_installed, depth=depth)

    def _list(
        self, dir_fd: int, above: str, special: frozenset[str]
    ) -> tuple[list[str], dict[str, bool], list[tuple[str, bool]]]:
        """Return the subfolders, the names that a rule may match, and, if there are patterns, all names.

        Each name of the latter two comes with whether it is a folder.
        """
        folders: list[str] = []
        noted: dict[str, bool] = {}
        listed: list[tuple[str, bool]] = []
        noted_names = _NOTED | special if special else _NOTED
        keeps_all = bool(self._patterns)
        count = 0
        with os.scandir(dir_fd) as entries:
            for entry in entries:  # this loop may run 100,000 times
                count += 1
                name = entry.name
                if is_folder := entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif self._hides_special and not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                    self._hide(above + name, "a socket, a pipe or a device")
                if name[0] == "." or name in noted_names or name[-4:] in KEY_ENDINGS:
                    noted[name] = is_folder
                if keeps_all:
                    listed.append((name, is_folder))
        self.scanned += count
        return folders, noted, listed

    def _reason_of_patterns(self, name: str, path: str, *, is_folder: bool) -> str:
        for patterns, why in self._patterns:
            if patterns.hides(name, path, is_folder=is_folder):
                return why
        return ""

    def _descend(self, name: str, dir_fd: int, above: str, *, is_installed: bool, depth: int) -> None:
        path = above + name
        if depth >= MOST_DEPTH:
            self._hide(path, f"more than {MOST_DEPTH} folders deep, so not looked at")
            return
        if len(path) > MOST_PATH_BYTES // 4 and len(os.fsencode(path)) > MOST_PATH_BYTES:
            self._hide(path, f"its path has more than {MOST_PATH_BYTES} bytes, so not looked at")
            return
        try:
            inner = hostfs.open_folder(name, dir_fd)
        except OSError as error:
            if error.errno in _OUT_OF_MEANS:
                raise
            if error.errno not in _REPLACED:
                self._hide(path, "cannot be read, so not looked at")
            return
        try:
            if os.fstat(inner).st_dev != self._device or mount_of(inner) != self._mount:
                self.mounts.append(path)
                self._hide(path, _MOUNTED)
            elif name == ".git":
                self._look_in_git(inner, f"{path}/", depth=depth + 1)
            else:
                self._look_in(inner, f"{path}/", name, is_installed=is_installed, depth=depth + 1)
        finally:
            os.close(inner)

    def _look_in_git(self, dir_fd: int, above: str, *, depth: int) -> None:
        """Examine a git directory: its hooks are hidden, and only `modules` (submodules) is walked."""
        names = os.listdir(dir_fd)
        self.scanned += len(names)
        self._look_at_git_files(dir_fd, above, names)
        if "modules" in names:
            self._descend("modules", dir_fd, above, is_installed=False, depth=depth)

    def _look_at_git_files(self, dir_fd: int, above: str, names: Sequence[str]) -> None:
        if "hooks" in names:
            self._hide(f"{above}hooks", "git hooks")
        for config in ("config", "config.worktree"):
            with suppress(OSError):
                if config in names and _URL_SECRET.search(_head(config, dir_fd, MOST_CONFIG)):
                    self.warnings.append(
                        f"{escape_name(above + config)} holds a password or a token, and programs inside can read it: "
                        "git needs the file. Use a credential helper, and remove it there."
                    )


def _reason(name: str, dir_fd: int, folder_name: str, *, is_folder: bool, is_installed: bool) -> str:
    """Return why an entry of an open folder is hidden by default; empty if it is shown."""
    if name.startswith(STAGE_PREFIX):
        return "Cloche's own"
    if name in CREDENTIAL_FOLDERS:
        return "credential folder"
    if name in BELOW.get(folder_name, _NOTHING):
        return "credentials"
    if name.startswith(".env") and _SHOWN_ENV.match(name) is None:
        is_shown = is_folder and (is_installed or _holds_environment(name, dir_fd))
        return "" if is_shown else "environment variables"
    return "" if is_folder else _reason_of_file(name, dir_fd, is_installed=is_installed)


def _reason_of_file(name: str, dir_fd: int, *, is_installed: bool) -> str:
    if name in CREDENTIAL_FILES:
        return "credentials"
    if name in BY_CONTENT:
        return "a credential is in it" if _has(BY_CONTENT[name], name, dir_fd) else ""
    if is_installed:
        return ""
    if name in KEY_FILES:
        return "key file"
    return "a private key is in it" if name[-4:] in KEY_ENDINGS and _has(_PRIVATE_KEY, name, dir_fd) else ""


def _has(pattern: re.Pattern[bytes], name: str, dir_fd: int) -> bool:
    """Tell whether the beginning of a regular file matches. An unreadable file does not: the sandbox cannot read it
    either.
    """
    try:
        return pattern.search(_head(name, dir_fd, MOST_READ)) is not None
    except OSError:
        return False


def _holds_environment(name: str, dir_fd: int) -> bool:
    try:
        with hostfs.descended(dir_fd, (name,)) as inner:
            return _is_environment(".", inner) or any(_is_environment(child, inner) for child in os.listdir(inner))
    except OSError:
        return False


def _is_environment(name: str, dir_fd: int) -> bool:
    for mark in _ENVIRONMENT_MARKS:
        with suppress(OSError):
            os.stat(f"{name}/{mark}", dir_fd=dir_fd, follow_symlinks=False)
            return True
    return False
