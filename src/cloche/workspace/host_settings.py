"""Find the paths that git's settings on the host name, and those that agents' files import.

Git reads the file of `include.path`, and runs the programs of `core.hooksPath`, `core.fsmonitor`, filters, aliases and
many more settings. So each word of each value counts if it is a path in the folder, relative to any folder from which
git may read it. A condition (`includeIf`) counts as met. Only the host's settings are read, never the sandbox's.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.record import dataclass, field
from .host_links import HostLinks, Resolver

MOST_FILES, MOST_BYTES, MOST_WORDS, MOST_PATH = 1_000, 1 << 20, 100_000, 4096
MOST_IMPORTER_BYTES = 1 << 18
FOLDERS = frozenset({"core.hookspath", "init.templatedir"})  # settings that name a folder: everything in it counts
_INCLUDES = frozenset({"include", "includeif"})
_BLANKS = re.compile(
    r"\s*"
)  # matched separately: a search beginning with it takes quadratic time in long runs of blanks
_HEADER = re.compile(r'\[\s*([-.\w]+)(?:\s+"((?:[^"\\\n]|\\.)*)")?\s*\]')
_KEY = re.compile(r"([A-Za-z][-A-Za-z0-9]*)[ \t]*(=?)[ \t]*")
_ENDS_OF_WORDS = re.compile(r"[\s'\"`;|&()<>=!$]+")
_IMPORT = re.compile(r"(?:^|\s)@([^\s`'\"<>]{1,400})")


@dataclass(slots=True)
class NamedPaths:
    """Paths in the folder, each with the file that names it."""

    by_git: dict[str, str] = field(default_factory=dict)
    folders_of_git: dict[str, str] = field(default_factory=dict)
    by_agents: dict[str, str] = field(default_factory=dict)
    is_complete: bool = True


def find_named(
    root: str, links: HostLinks, homes: Sequence[str], resolver: Resolver, check: Callable[[], None]
) -> NamedPaths:
    """Return the paths named by the settings of all repositories in a folder, of homes and of the system."""
    reader = _SettingsReader(root, homes, resolver, check)
    for path in links.git_files:
        check()
        reader.add_git_file(path)
    for path in links.settings:
        top = path[: path.rindex(".git/")] if ".git/" in path else path.rpartition("/")[0]
        reader.add_settings(os.path.join(root, path), path, os.path.join(root, top))
    for home in homes:
        for name in (".gitconfig", ".config/git/config"):
            reader.add_settings(os.path.join(home, name), f"~/{name}", root)
    config_paths = [os.environ.get(name, "") for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM")]
    config_paths += [os.path.join(os.environ.get("XDG_CONFIG_HOME", ""), "git/config"), "/etc/gitconfig"]
    for name in filter(os.path.isabs, config_paths):
        reader.add_settings(name, name, root)
    for path in links.importers:
        reader.add_importer(path, path)
    reader.run()
    return reader.named


class _SettingsReader:
    def __init__(self, root: str, homes: Sequence[str], resolver: Resolver, check: Callable[[], None]):
        self.root, self.homes, self.resolver, self.check = root, homes, resolver, check
        self.named = NamedPaths()
        self.settings: list[tuple[str, str, str]] = []  # path, name in messages, work tree
        self.importers: list[tuple[str, str]] = []
        self.seen: set[str] = set()
        self.candidates = 0

    def add_settings(self, path: str, called: str, top: str) -> None:
        if path not in self.seen:
            self.seen.add(path)
            self.settings.append((path, called, top))

    def add_importer(self, path: str, called: str) -> None:
        if path not in self.seen:
            self.seen.add(path)
            self.importers.append((path, called))

    def add_git_file(self, path: str) -> None:
        top = os.path.join(self.root, os.path.dirname(path))
        text = _read(os.path.join(self.root, path), 1 << 13)
        if not text.startswith("gitdir:"):
            return
        folder = os.path.join(top, text.removeprefix("gitdir:").strip())
        common = os.path.join(folder, _read(os.path.join(folder, "commondir"), 1 << 13).strip())
        for git_directory in {os.path.normpath(folder), os.path.normpath(common)}:
            for name in ("config", "config.worktree"):
                self.add_settings(os.path.join(git_directory, name), path, top)
            for inside in self._in_folder(git_directory):
                self.named.folders_of_git.setdefault(inside, path)

    def run(self) -> None:
        while self.settings or self.importers:
            self.check()
            if len(self.seen) > MOST_FILES or self.candidates > MOST_WORDS:
                self.named.is_complete = False
                return
            if self.settings:
                self._read_settings(*self.settings.pop())
            else:
                self._read_importer(*self.importers.pop())

    def _read_settings(self, path: str, called: str, top: str) -> None:
        text = _read(path, MOST_BYTES)
        if len(text) >= MOST_BYTES:
            self.named.is_complete = False
        bases = dict.fromkeys((os.path.dirname(path), os.path.dirname(os.path.realpath(path)), top))
        for key, value in settings_in(text):
            to = self.named.folders_of_git if key in FOLDERS else self.named.by_git
            is_include = key.endswith(".path") and key.partition(".")[0] in _INCLUDES
            for candidate in {value, *_ENDS_OF_WORDS.split(value)}:
                self.check()
                self.candidates += 1
                if self.candidates > MOST_WORDS:
                    return  # `run` then sets is_complete to False
                if not 0 < len(candidate) <= MOST_PATH or "\0" in candidate:
                    continue
                for path_candidate_paths in self._candidate_paths(candidate, bases):
                    for inside in self._in_folder(path_candidate_paths):
                        if inside or key in FOLDERS:
                            to.setdefault(inside, called)
                    if is_include:
                        self.add_settings(os.path.normpath(path_candidate_paths), called, top)

    def _candidate_paths(self, candidate: str, bases: Iterable[str]) -> list[str]:
        if candidate.startswith("~/"):
            return [home + candidate[1:] for home in self.homes]
        return list({os.path.join(base, os.path.expanduser(candidate)) for base in bases})

    def _read_importer(self, path: str, called: str) -> None:
        text = _read(os.path.join(self.root, path), MOST_IMPORTER_BYTES)
        for match in _IMPORT.finditer(text):
            self.candidates += 1
            candidate = match.group(1).rstrip(".,;:!?)")
            for path_candidate_paths in self._candidate_paths(
                candidate, [os.path.join(self.root, os.path.dirname(path))]
            ):
                for inside in filter(None, self._in_folder(path_candidate_paths)):
                    self.named.by_agents.setdefault(inside, called)
                    self.add_importer(inside, called)

    def _in_folder(self, path: str) -> Iterable[str]:
        return self.resolver.follow("", path, is_trusted=True).paths


def _read(path: str, max_bytes: int) -> str:
    try:
        real_path = os.path.realpath(path)
        if not stat.S_ISREG(os.stat(real_path).st_mode):
            return ""
        # O_NONBLOCK: another process may replace the file by a FIFO after the stat.
        fd = os.open(real_path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return (file.read(max_bytes) or b"").decode(errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def settings_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield names (in lower case) and values of a git configuration."""
    section, position = "", 0
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    while (position := _end(_BLANKS, text, position)) < len(text):
        if header := _HEADER.match(text, position):
            section = re.sub(r"\\(.)", r"\1", ".".join(filter(None, header.groups()))).lower()
            position = header.end()
        elif key := _KEY.match(text, position):
            value, position = _value(text, key.end()) if key.group(2) else ("", key.end())
            if value:
                yield f"{section}.{key.group(1).lower()}", value
        else:  # a comment, a blank line, or a syntax error
            position = text.find("\n", position) + 1 or len(text)


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return position if match is None else match.end()


def _value(text: str, position: int) -> tuple[str, int]:
    characters: list[str] = []
    is_quoted = False
    while position < len(text) and (text[position] != "\n"):
        char = text[position]
        if char == "\\" and position + 1 < len(text):
            position += 1
            characters.append({"n": "\n", "t": "\t", "b": "\b", "\n": ""}.get(text[position], text[position]))
        elif char == '"':
            is_quoted = not is_quoted
        elif char in "#;" and not is_quoted:
            end = text.find("\n", position)
            return "".join(characters).strip(), len(text) if end < 0 else end
        else:
            characters.append(char)
        position += 1
    return "".join(characters).strip(), position
