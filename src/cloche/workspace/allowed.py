"""Decide which folders of the host may be shown to a sandbox, and at which path inside.

Theory of operation: the folder is opened once, and every decision is made about its descriptor. Its path is the
kernel's, with all links resolved. It and all folders above it are also compared with the forbidden folders by device
and inode, so another spelling, or a bind mount of a forbidden folder, is refused too.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from cloche import hostfs
from cloche.config.state import DATABASE
from cloche.core.errors import BackendUnavailable, InvalidRequest
from cloche.core.escape import escape_name
from cloche.core.record import dataclass

from .hidden import BELOW, CREDENTIAL_FOLDERS

WORKSPACE, SAME = "/workspace", "same"
MOST_PATH = 4000  # bytes; PATH_MAX is 4,096 with the final NUL, and names are appended
# Refused, with everything below.
SYSTEM_TREES = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/sys", "/dev", "/run", "/boot",
    "/var/lib", "/var/run", "/var/log", "/var/spool", "/var/cache", "/var/mail", "/lost+found",
)  # fmt: skip
# Refused themselves; folders in them may belong to users.
SYSTEM_FOLDERS = ("/", "/var", "/root", "/home", "/opt", "/srv", "/mnt", "/media", "/tmp", "/var/tmp")
# Services often have their home here; folders below this user's home are allowed.
_HOLDS_HOMES = "/var/lib"
# Refused only below a home: elsewhere these may be a project's folders.
_OF_HOMES = frozenset({".docker", ".mozilla", ".thunderbird", ".local/share/keyrings", ".config/google-chrome"})
# Created by the jail itself, so no host folder is shown there.
JAIL_TREES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/proc", "/sys", "/dev", "/run")
JAIL_FOLDERS = ("/", "/tmp", "/var", "/var/tmp", "/home", "/root", "/opt", "/srv", "/home/sandbox")
# Cloche's folders: the variable that moves each, and its default below a home; all are named "cloche".
_PLATFORM: Mapping[str, tuple[str, str]] = {
    "configuration": ("XDG_CONFIG_HOME", ".config"),
    "state (records, audit, sockets)": ("XDG_STATE_HOME", ".local/state"),
    "data (packages, skills)": ("XDG_DATA_HOME", ".local/share"),
    "cache": ("XDG_CACHE_HOME", ".cache"),
}
# Variables that name a file or folder, with its contents.
_NAMED: Mapping[str, str] = {
    "CLOCHE_CONFIG": "configuration file",
    "CLOCHE_ENV_FILE": "settings",
    "CLOCHE_AUDIT": "audit log",
    DATABASE: "records",
    "CLOCHE_APPROVALS": "approvals",
    "CLOCHE_MICROVM_IMAGE": "image of virtual machines",
}
# In the folder of the records' file; with a database server, the key is in the working directory.
_KEY_OF_RECORDS = "snapshots.key"
_BESIDE_RECORDS = (_KEY_OF_RECORDS, "snapshots", "blobs")
_RUNTIME = "/run/cloche"
_Identity = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedFolder:
    """A folder that may be shown: its real path, its device and inode, and a descriptor that the caller closes.

    `owner` is uid and gid. Callers that need the folder to be their own compare it themselves.
    """

    path: str
    fd: int
    owner: tuple[int, int]
    dev: int
    ino: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlace:
    """An absolute path where Cloche stores something of its own, and a name for the contents."""

    path: str
    contents: str


def own_folders(further: Mapping[str, str] | None = None) -> tuple[OwnPlace, ...]:
    """Return the paths where Cloche stores its own files for this user, existing or not.

    `further` maps paths from settings, such as the audit log's folder, to a name for their contents.
    """
    own_places = (*_platform_places(), *_named_places(), *_places_beside_records(), *_further_places(further or {}))
    return tuple(dict.fromkeys(own_places))


def _platform_places() -> Iterator[OwnPlace]:
    for contents, (variable, below_home) in _PLATFORM.items():
        if folder := hostfs.own_folder(variable, below_home):
            yield OwnPlace(path=os.path.normpath(folder), contents=contents)
        for home in homes():  # also if a variable moves it: older files there are still private
            yield OwnPlace(path=os.path.join(home, below_home, "cloche"), contents=contents)
    for home in homes():
        yield OwnPlace(path=os.path.join(home, ".cloche"), contents="configuration")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        yield OwnPlace(path=os.path.join(os.path.normpath(runtime), "cloche"), contents="sockets")
    yield OwnPlace(path=_RUNTIME, contents="sockets")
    with suppress(BackendUnavailable):
        if os.path.lexists(temporary := hostfs.own_temporary_folder()):
            yield OwnPlace(path=temporary, contents="sockets and audit")


def _named_places() -> Iterator[OwnPlace]:
    for variable, contents in _NAMED.items():
        path = _path_in(variable, os.environ.get(variable, ""))
        if path and not (
            variable == "CLOCHE_ENV_FILE" and os.path.basename(path).startswith(".env")
        ):  # `.env*` is hidden anyway
            yield OwnPlace(path=os.path.abspath(path), contents=f"{contents} ({variable})")


def _places_beside_records() -> Iterator[OwnPlace]:
    location = os.environ.get(DATABASE, "")
    contents = f"records ({DATABASE})"
    if path := _path_in(DATABASE, location):
        folder = os.path.dirname(os.path.abspath(path))
        yield from (OwnPlace(path=os.path.join(folder, name), contents=contents) for name in _BESIDE_RECORDS)
    elif location and os.path.lexists(key := os.path.join(_working_directory(), _KEY_OF_RECORDS)):
        yield OwnPlace(path=key, contents=contents)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _path_in(variable: str, value: str) -> str:
    if variable == "CLOCHE_AUDIT":
        value = os.path.expanduser(value)
        return value if os.path.isabs(value) else ""  # otherwise it is a switch (on, off)
    if "://" in value:
        scheme, _, location = value.partition(":///")
        return location.partition("?")[0] if scheme.startswith("sqlite") and location != ":memory:" else ""
    return value


def _further_places(further: Mapping[str, str]) -> Iterator[OwnPlace]:
    for path, contents in further.items():
        yield OwnPlace(path=os.path.abspath(path), contents=contents)


def homes() -> tuple[str, ...]:
    """Return this user's home directory, from HOME and from the password database."""
    candidates = [os.environ.get("HOME", "")]
    with suppress(KeyError):
        candidates.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return tuple(dict.fromkeys(os.path.normpath(home) for home in candidates if os.path.isabs(home)))


def check_folder(
    path: str | os.PathLike[str], *, own_places: Sequence[OwnPlace] | None = None, is_git: bool = False
) -> AllowedFolder:
    """Open a folder that may be shown to a sandbox. `own_places` defaults to `own_folders()`.

    `is_git` marks a git directory, which may lie in a `.git`. Raises InvalidRequest with the reason and a remedy.
    """
    named = os.fspath(path)
    fd = _open(named)
    try:
        real = _real_path(fd, named)
        facts = os.fstat(fd)
        above = _identities_above(fd)
        _refuse_system(real, named, above)
        _refuse_homes(real, named, above[0], facts.st_uid)
        _refuse_credentials(real, named, is_git=is_git)
        for own_place in own_folders() if own_places is None else own_places:
            _refuse_own(real, named, above, own_place)
        return AllowedFolder(path=real, fd=fd, owner=(facts.st_uid, facts.st_gid), dev=facts.st_dev, ino=facts.st_ino)
    except BaseException:
        os.close(fd)
        raise


def _refused(named: str, why: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"workspace: {escape_name(named)} {why}. {remedy}")


def _open(named: str) -> int:
    if not named or "\0" in named:
        raise InvalidRequest(f'workspace: {escape_name(named)!r} is not a path. Name a folder, such as ".".')
    try:
        return hostfs.open_folder(os.path.expanduser(named), follows_link=True)
    except NotADirectoryError as error:
        raise _refused(named, "is not a folder", "Name the folder that holds it.") from error
    except OSError as error:
        raise _refused(named, f"cannot be opened: {error.strerror}", "Name a folder that you can read.") from error


def _real_path(fd: int, named: str) -> str:
    real = os.readlink(f"/proc/self/fd/{fd}")
    with suppress(OSError):
        if os.path.isabs(real) and os.path.samestat(os.stat(real), os.fstat(fd)):
            if len(os.fsencode(real)) <= MOST_PATH:
                return real
            raise _refused(named, "has a path that is too long", "Move it higher up.")
    raise _refused(
        named, "was moved or removed, or has no path here", "Name a folder that is not temporary or removed."
    )


def _identities_above(fd: int) -> list[_Identity]:
    """Return device and inode of an open folder and of all folders above it, the folder itself first."""
    identities: list[_Identity] = []
    current_fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        while True:
            facts = os.fstat(current_fd)
            identity = (facts.st_dev, facts.st_ino)
            if identities and identities[-1] == identity:
                return identities
            identities.append(identity)
            inner, current_fd = current_fd, os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=current_fd)
            os.close(inner)
    finally:
        os.close(current_fd)


def _identity(path: str) -> _Identity | None:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def is_below(path: str, above: str) -> bool:
    """Tell whether a normalised path equals another, or lies below it."""
    return path == above or path.startswith(f"{above.rstrip('/')}/")


def _refuse_system(real: str, named: str, above: Sequence[_Identity]) -> None:
    remedy = "Name a project's folder."
    for folder in SYSTEM_FOLDERS:
        if real == folder or _identity(folder) == above[0]:
            raise _refused(named, f"is {folder}, a folder of the system" if folder != "/" else "is the root", remedy)
    is_in_home = any(is_below(real, home) and home.startswith(f"{_HOLDS_HOMES}/") for home in homes())
    for tree in SYSTEM_TREES:
        if tree == _HOLDS_HOMES and is_in_home:
            continue
        if is_below(real, tree) or _identity(tree) in above:
            raise _refused(named, f"lies in {tree}, a folder of the system", remedy)


def _refuse_homes(real: str, named: str, own: _Identity, owner: int) -> None:
    remedy = "Name the project's folder in it."
    home_paths = list(homes())
    with suppress(KeyError):
        home_paths.append(pwd.getpwuid(owner).pw_dir)
    for home in map(os.path.realpath, home_paths):
        if home == "/":
            continue
        if real == home or _identity(home) == own:
            raise _refused(named, "is a home folder, which has keys and start-up files", remedy)
        if is_below(home, real) or own in _around(home):
            raise _refused(named, f"holds the home {escape_name(home)}", remedy)


def _refuse_credentials(real: str, named: str, *, is_git: bool) -> None:
    remedy = "Name a folder without credentials."
    names = real.split("/")
    for above, name in zip(("", *names), names, strict=False):
        is_folder_of_keys = name in CREDENTIAL_FOLDERS or (above == ".config" and name in BELOW[".config"])
        if is_folder_of_keys:
            raise _refused(named, f"lies in {name}, where credentials are kept", remedy)
    if ".git" in names and not is_git:
        raise _refused(named, "lies in .git, which only git may change", "Name the folder that holds it.")
    for home in map(os.path.realpath, homes()):
        for name in sorted(_OF_HOMES):
            if is_below(real, os.path.join(home, name)):
                raise _refused(named, f"lies in ~/{name}, where credentials are kept", remedy)


def _refuse_own(real: str, named: str, above: Sequence[_Identity], own_place: OwnPlace) -> None:
    own_real = os.path.realpath(own_place.path)
    if is_below(real, own_real) or _identity(own_real) in above:
        raise _refused(
            named,
            f"lies in Cloche's own {own_place.contents}, {escape_name(own_place.path)}",
            "Name a folder outside of it.",
        )
    if is_below(own_real, real) or is_below(own_place.path, real) or above[0] in _around(own_real):
        raise _refused(
            named, f"holds Cloche's own {own_place.contents}, {escape_name(own_place.path)}",
            "Name a folder further down, or keep that elsewhere.",
        )  # fmt: skip


def _around(path: str) -> set[_Identity]:
    identities: set[_Identity] = set()
    while (above := os.path.dirname(path)) != path:
        path = above
        if (identity := _identity(path)) is not None:
            identities.add(identity)
    return identities


def at_for(path: str, at: str = SAME) -> str:
    """Return the path inside at which a folder is shown: `at`, or by default the folder's own real path.

    A folder at or below `/workspace` on the host is shown as `/workspace`, since that name is used inside. Raises
    InvalidRequest for an unusable path.
    """
    if at == SAME:
        return WORKSPACE if is_below(path, WORKSPACE) else _checked_place(path, f"at: {escape_name(path)}")
    return _checked_place(at, f"at: {escape_name(at)}")


def _checked_place(mount_path: str, where: str) -> str:
    if (
        not mount_path.startswith("/")
        or mount_path.startswith("//")
        or os.path.normpath(mount_path) != mount_path
        or "\0" in mount_path
    ):
        raise InvalidRequest(f'{where} is not a plain absolute path; write one such as "/project", or "{SAME}"')
    if len(os.fsencode(mount_path)) > MOST_PATH:
        raise InvalidRequest(f"{where} is too long; {MOST_PATH} bytes are allowed")
    if mount_path in JAIL_FOLDERS or any(is_below(mount_path, tree) for tree in JAIL_TREES):
        raise InvalidRequest(f'{where} belongs to the sandbox\'s own system; choose another path, such as "/project"')
    if mount_path != WORKSPACE and is_below(mount_path, WORKSPACE):
        raise InvalidRequest(f'{where} lies below {WORKSPACE}, which is a link to the folder; write "{WORKSPACE}"')
    return mount_path
