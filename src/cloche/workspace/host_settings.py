"""What git's settings on the host name, and what agents' files import: files that steer by somebody else's name.

Git reads a file that `include.path` names, and runs what `core.hooksPath`, `core.fsmonitor`, filters, aliases and many
more settings name. So each word of each value counts where it is a path in the folder, from wherever git may read it;
a condition (`includeIf`) counts as met. The settings are the host's own: the sandbox's are never read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..core.record import dataclass, field
from .host_links import Found, Resolver

MOST_FILES, MOST_BYTES, MOST_WORDS, MOST_PATH = 1_000, 1 << 20, 100_000, 4096
MOST_IMPORTER_BYTES = 1 << 18
FOLDERS = frozenset({"core.hookspath", "init.templatedir"})  # settings that name a folder, all of which counts
_INCLUDES = frozenset({"include", "includeif"})
_BLANKS = re.compile(r"\s*")  # by itself: a pattern that begins with it would look at them once from each on
_HEADER = re.compile(r'\[\s*([-.\w]+)(?:\s+"((?:[^"\\\n]|\\.)*)")?\s*\]')
_KEY = re.compile(r"([A-Za-z][-A-Za-z0-9]*)[ \t]*(=?)[ \t]*")
_ENDS_OF_WORDS = re.compile(r"[\s'\"`;|&()<>=!$]+")
_IMPORT = re.compile(r"(?:^|\s)@([^\s`'\"<>]{1,400})")


@dataclass(slots=True)
class Named:
    """Hold paths in the folder, each with the file that names it."""

    by_git: dict[str, str] = field(default_factory=dict)
    folders_of_git: dict[str, str] = field(default_factory=dict)
    by_agents: dict[str, str] = field(default_factory=dict)
    is_complete: bool = True


def find_named(root: str, found: Found, homes: Sequence[str], resolver: Resolver, check: Callable[[], None]) -> Named:
    """Return what is named by the settings of all repositories in a folder, of homes and of the system."""
    looking = _Looking(root, homes, resolver, check)
    for path in found.git_files:
        check()
        looking.add_git_file(path)
    for path in found.settings:
        top = path[: path.rindex(".git/")] if ".git/" in path else path.rpartition("/")[0]
        looking.add_settings(os.path.join(root, path), path, os.path.join(root, top))
    for home in homes:
        for name in (".gitconfig", ".config/git/config"):
            looking.add_settings(os.path.join(home, name), f"~/{name}", root)
    asked = [os.environ.get(name, "") for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM")]
    asked += [os.path.join(os.environ.get("XDG_CONFIG_HOME", ""), "git/config"), "/etc/gitconfig"]
    for name in filter(os.path.isabs, asked):
        looking.add_settings(name, name, root)
    for path in found.importers:
        looking.add_importer(path, path)
    looking.run()
    return looking.named


class _Looking:
    """Hold what is to be read, and what was found."""

    def __init__(self, root: str, homes: Sequence[str], resolver: Resolver, check: Callable[[], None]):
        self.root, self.homes, self.resolver, self.check = root, homes, resolver, check
        self.named = Named()
        self.settings: list[tuple[str, str, str]] = []  # path, what it is called, work tree
        self.importers: list[tuple[str, str]] = []
        self.seen: set[str] = set()
        self.words = 0

    def add_settings(self, path: str, called: str, top: str) -> None:
        """Have a file of settings read, unless it was."""
        if path not in self.seen:
            self.seen.add(path)
            self.settings.append((path, called, top))

    def add_importer(self, path: str, called: str) -> None:
        """Have a file of instructions in the folder read, unless it was."""
        if path not in self.seen:
            self.seen.add(path)
            self.importers.append((path, called))

    def add_git_file(self, path: str) -> None:
        """Have the settings read of the repository that a `.git` file names."""
        top = os.path.join(self.root, os.path.dirname(path))
        text = _read(os.path.join(self.root, path), 1 << 13)
        if not text.startswith("gitdir:"):
            return
        folder = os.path.join(top, text.removeprefix("gitdir:").strip())
        common = os.path.join(folder, _read(os.path.join(folder, "commondir"), 1 << 13).strip())
        for one in {os.path.normpath(folder), os.path.normpath(common)}:
            for name in ("config", "config.worktree"):
                self.add_settings(os.path.join(one, name), path, top)
            for inside in self._in_folder(one):
                self.named.folders_of_git.setdefault(inside, path)

    def run(self) -> None:
        """Read all, and what those name to be read."""
        while self.settings or self.importers:
            self.check()
            if len(self.seen) > MOST_FILES or self.words > MOST_WORDS:
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
            for word in {value, *_ENDS_OF_WORDS.split(value)}:
                self.check()
                self.words += 1
                if self.words > MOST_WORDS:
                    return  # `run` says so
                if not 0 < len(word) <= MOST_PATH or "\0" in word:
                    continue
                for whole in self._meant(word, bases):
                    for inside in self._in_folder(whole):
                        if inside or key in FOLDERS:
                            to.setdefault(inside, called)
                    if is_include:
                        self.add_settings(os.path.normpath(whole), called, top)

    def _meant(self, word: str, bases: Iterable[str]) -> list[str]:
        """Return what a word may stand for as a path."""
        if word.startswith("~/"):
            return [home + word[1:] for home in self.homes]
        return list({os.path.join(base, os.path.expanduser(word)) for base in bases})

    def _read_importer(self, path: str, called: str) -> None:
        text = _read(os.path.join(self.root, path), MOST_IMPORTER_BYTES)
        for found in _IMPORT.finditer(text):
            self.words += 1
            word = found.group(1).rstrip(".,;:!?)")
            for whole in self._meant(word, [os.path.join(self.root, os.path.dirname(path))]):
                for inside in filter(None, self._in_folder(whole)):
                    self.named.by_agents.setdefault(inside, called)
                    self.add_importer(inside, called)

    def _in_folder(self, path: str) -> Iterable[str]:
        return self.resolver.follow("", path, is_trusted=True).paths


def _read(path: str, most: int) -> str:
    """Return the beginning of a regular file of the host's; nothing where there is none."""
    try:
        whole = os.path.realpath(path)
        if not stat.S_ISREG(os.stat(whole).st_mode):
            return ""
        fd = os.open(whole, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return (file.read(most) or b"").decode(errors="surrogateescape")
    except (OSError, ValueError):
        return ""


def settings_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of git's settings, the names in lower case."""
    section, at = "", 0
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    while (at := _end(_BLANKS, text, at)) < len(text):
        if header := _HEADER.match(text, at):
            section = re.sub(r"\\(.)", r"\1", ".".join(filter(None, header.groups()))).lower()
            at = header.end()
        elif key := _KEY.match(text, at):
            value, at = _value(text, key.end()) if key.group(2) else ("", key.end())
            if value:
                yield f"{section}.{key.group(1).lower()}", value
        else:  # a comment, a blank line, or what git would not read
            at = text.find("\n", at) + 1 or len(text)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _value(text: str, at: int) -> tuple[str, int]:
    """Return a value with its quotes and escapes undone, and where it ends."""
    parts: list[str] = []
    is_quoted = False
    while at < len(text) and (text[at] != "\n"):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            at += 1
            parts.append({"n": "\n", "t": "\t", "b": "\b", "\n": ""}.get(text[at], text[at]))
        elif char == '"':
            is_quoted = not is_quoted
        elif char in "#;" and not is_quoted:
            end = text.find("\n", at)
            return "".join(parts).strip(), len(text) if end < 0 else end
        else:
            parts.append(char)
        at += 1
    return "".join(parts).strip(), at
