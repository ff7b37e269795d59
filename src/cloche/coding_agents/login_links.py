"""Links that an agent wants opened to log in: written inside to a folder of its home, opened on the host.

The script `SCRIPT` is the `BROWSER` inside. Its files are the guest's. A link is opened if it is short, has one of the
origins of the agent's row, and few came before. The answer of the browser may come to a port of this host's loopback,
which is forwarded to the same port inside during the login.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import islice
from urllib.parse import parse_qsl, urlsplit

from cloche.core.errors import InvalidRequest
from cloche.hostfs import descended, open_folder, open_regular

from .row import Login

FOLDER = (".cloche", "links")
SCRIPT_PATH = ".cloche/browser"
SCRIPT = """#!/bin/sh
# Asks the host to open a link.
folder="$HOME/.cloche/links"
mkdir -p "$folder" && printf %s "$1" > "$folder/.$$" && mv "$folder/.$$" "$folder/$$"
"""
MOST_CHARS, MOST_LINKS, MOST_ENTRIES = 4096, 5, 64
LEAST_S = 2.0  # between two links
LEAST_PORT = 32_768  # of those that a system gives to who asks for any
_LINK = re.compile(r"https://[\x21-\x7e]+")
_DOTS = re.compile(r"/(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)  # which a browser takes out of a path


def check_link(text: str, login: Login) -> str:
    """Return a link that may be opened. Raises InvalidRequest."""
    if len(text) > MOST_CHARS or not _LINK.fullmatch(text):
        raise InvalidRequest("it is no link of https, or a long one")
    parts = urlsplit(text)
    if "\\" in text or not any(_is_below(parts.scheme, parts.netloc, parts.path, origin) for origin in login.browser):
        raise InvalidRequest(f"{parts.netloc[:100]} is no place where this agent logs in")
    return text


def _is_below(scheme: str, netloc: str, path: str, origin: str) -> bool:
    """Tell whether a link is one of an origin, which may have a path that the link's begins with."""
    own = urlsplit(origin)
    folder = own.path.rstrip("/")
    is_same = (scheme, netloc) == (own.scheme, own.netloc)
    return is_same and f"{path}/".startswith(f"{folder}/") and _DOTS.search(path) is None


def callback_port(link: str, login: Login) -> int | None:
    """Return the port of this host's loopback where the answer to a login comes; None for another way.

    Others than the row's and those that a system gives away are left to this host's own servers.
    """
    targets = [text for name, text in parse_qsl(urlsplit(link).query) if name == "redirect_uri"]
    try:
        target = urlsplit(targets[0]) if len(targets) == 1 else urlsplit("")
        port = target.port
    except ValueError:
        return None
    if target.scheme != "http" or target.hostname not in ("localhost", "127.0.0.1") or port is None:
        return None
    return port if port in login.callback_ports or port >= LEAST_PORT else None


class LinkFolder:
    """Take links from the folder in an agent's home, which the guest writes. Raises OSError if the home is gone."""

    def __init__(self, home: str, login: Login, tell: Callable[[str], None]):
        self._home, self._login, self._tell = home, login, tell
        self._opened_at: list[float] = []

    def take(self) -> Iterator[str]:
        """Yield the links that have come and may be opened; tell of others."""
        for text in self._texts():
            now = time.monotonic()
            if len(self._opened_at) >= MOST_LINKS or (self._opened_at and now < self._opened_at[-1] + LEAST_S):
                self._tell("the agent asks for too many links; one was not opened")
                continue
            try:
                link = check_link(text, self._login)
            except InvalidRequest as error:
                self._tell(f"a link of the agent was not opened: {error}")
                continue
            self._opened_at.append(now)
            yield link

    def _texts(self) -> list[str]:
        texts = []
        home = open_folder(self._home)
        try:
            with descended(home, FOLDER) as folder:
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in islice(entries, MOST_ENTRIES))
                for name in names:
                    if not name.startswith("."):
                        texts.append(_read(name, folder))
                        os.unlink(name, dir_fd=folder)
        except OSError:
            pass  # there is none yet, or something else is in its place
        finally:
            os.close(home)
        return texts


def _read(name: str, folder: int) -> str:
    fd, _ = open_regular(name, folder)
    with open(fd, "rb") as file:
        return file.read(MOST_CHARS + 1).decode("utf-8", "replace")


def open_on_host(link: str) -> bool:
    """Open a link in the user's browser, and tell whether there is one. Nothing of the link is read by a shell."""
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    names = (os.environ.get("BROWSER", ""), *(("xdg-open", "open") if has_screen else ()))
    program = next((path for name in names if name and (path := shutil.which(name))), None)
    if program is None:
        return False
    try:
        subprocess.Popen(
            [program, link], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    except OSError:
        return False
    return True
