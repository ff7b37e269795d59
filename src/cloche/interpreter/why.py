"""`cloche-why` inside a sandbox: why a host is refused, or a path is not there, in a sentence; without arguments, the
limits. It is shown read-only, as one file, and asks the process that serves the network what that would say.

Facts are in a file beside it; they are what the sandbox was opened with, and name nothing that is hidden.
"""

from __future__ import annotations

import fnmatch
import json
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Facts = dict[str, Any]

FACTS = "/etc/cloche/why.json"
ADDRESS = ("198.18.0.1", 80)  # of the name server; see `egress/explain.py`
MOST, PATIENCE_S = 65536, 10.0
USAGE = """usage: cloche-why [--json] [--host | --path] [HOST[:PORT] | URL | PATH]
Say why a host is refused, or why a file is not there or cannot be written. Without a target: the limits here."""


def main(words: list[str]) -> int:
    """Print the answer; the exit code is 0 if the host may be reached, or the path is there for writing, else 1."""
    flags = {word for word in words if word in ("--json", "--host", "--path", "--help", "-h")}
    targets = [word for word in words if word not in flags]
    if flags & {"--help", "-h"} or len(targets) > 1 or any(word.startswith("--") for word in targets):
        say(USAGE)
        return 0 if flags & {"--help", "-h"} else 2
    facts = read_facts()
    if not targets:
        told: dict[str, Any] = {"limits": limits(facts), "is_allowed": True, "why": "\n".join(limits(facts))}
    else:
        told = of_path(targets[0], facts) if is_path(targets[0], flags) else of_host(targets[0])
    say(json.dumps(told) if "--json" in flags else str(told["why"]))
    return 0 if told["is_allowed"] else 1


def say(text: str) -> None:
    """Print a text; what cannot be encoded is shown as an escape."""
    sys.stdout.write(text.encode(errors="backslashreplace").decode() + "\n")


def read_facts() -> Facts:
    """Return what the sandbox was opened with."""
    try:
        with open(FACTS, encoding="utf-8") as file:
            facts: Facts = json.load(file)
            return facts
    except (OSError, ValueError):
        return {}


def is_path(target: str, flags: set[str]) -> bool:
    """Tell whether a target is a path; a bare name is one if it is there, or begins with a dot."""
    if "--path" in flags or "--host" in flags:
        return "--path" in flags
    return "://" not in target and (target[:1] in "/.~" or "/" in target or os.path.lexists(target))


# Hosts.


def of_host(target: str) -> dict[str, Any]:
    """Return the decision about a host, or about a GET of a URL."""
    scheme, _, rest = target.rpartition("://")
    host, slash, path = rest.partition("/")
    host, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    port = port or {"http": "80", "ssh": "22", "git": "9418"}.get(scheme, "443")
    told = {"kind": "host", "target": target, "host": host, "port": port, "is_allowed": False}
    if not host or not port.isdecimal():
        return {**told, "why": f"{target} is no host; write HOST, HOST:PORT or a URL"}
    request = f" GET {slash}{path}" if slash and " " not in path else ""
    try:
        with socket.create_connection(ADDRESS, PATIENCE_S) as asking:
            asking.sendall(f"{host.encode('idna').decode()} {port}{request}\n".encode("ascii"))
            answer = json.loads(b"".join(pieces_of(asking)))
        return {**told, **answer}
    except (OSError, ValueError):
        return {**told, "why": f"{host}:{port} is not reached: this sandbox has no network"}


def pieces_of(asking: socket.socket) -> Iterator[bytes]:
    """Yield an answer."""
    left = MOST
    while left > 0 and (piece := asking.recv(left)):
        left -= len(piece)
        yield piece


# Paths.


def of_path(target: str, facts: Facts) -> dict[str, Any]:
    """Return what can be said of a path."""
    path = os.path.abspath(os.path.expanduser(target))
    told = {"kind": "path", "target": target, "path": path, "is_allowed": False}
    if os.path.lexists(path):
        return {**told, **of_present(path, facts)}
    hidden = [
        name for name in facts.get("hidden_names", ()) for part in path.split("/") if fnmatch.fnmatchcase(part, name)
    ]
    if hidden:
        why = f"names such as {hidden[0]} are hidden in a sandbox, if the user has them: they have credentials"
        return {**told, "state": "hidden", "why": f"{path} is not shown; {why}. {ask_user('secrets')}"}
    project, home = facts.get("workspace", ""), facts.get("home", "")
    if project and is_below(path, project):
        why = "it is not in the project, or the user hides it (.clocheignore, or for its content)"
        return {**told, "state": "missing", "why": f"{path} is not there: {why}"}
    if home and is_below(path, home):
        why = "the home folder here is the sandbox's own, and has none of the user's files but a few of this program's"
        return {**told, "state": "missing", "why": f"{path} is not there: {why}. {ask_user('also')}"}
    why = "of the user's machine a sandbox shows the system's programs, the project and the folders that the user named"
    return {**told, "state": "not shown", "why": f"{path} is not shown: {why}. {ask_user('also')}"}


def of_present(path: str, facts: Facts) -> dict[str, Any]:
    """Return why a path that is there cannot be read or written, or that it can."""
    if not os.access(path, os.R_OK):
        return {"state": "unreadable", "why": f"{path} is there and cannot be read: its permissions are another user's"}
    if os.access(path, os.W_OK):
        of_project = "of the project: the user sees your changes and decides about them"
        of = of_project if is_below(path, facts.get("workspace") or "/nowhere") else "of the sandbox, and stays in it"
        return {"state": "writable", "is_allowed": True, "why": f"{path} can be read and written; it is {of}"}
    why = "its permissions do not allow it"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        is_shown = any(is_below(path, folder) for folder in facts.get("read_only", ()))
        whose = "which the user shows for reading alone" if is_shown else "shown for reading alone"
        why = f"it is of a folder of the machine, {whose}. Work on a copy in the project or /tmp"
    return {"state": "read-only", "why": f"{path} cannot be written: {why}"}


def is_below(path: str, folder: str) -> bool:
    """Tell whether a path is a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def ask_user(what: str) -> str:
    """Return what would help."""
    texts = {
        "also": "The user can show a folder with --also DIR when this sandbox is opened.",
        "secrets": "Use the variables with secrets, or ask the user for what you need.",
    }
    return texts[what]


def limits(facts: Facts) -> list[str]:
    """Return the limits here, a sentence each."""
    return [str(line) for line in facts.get("limits", ())] or ["nothing is known about this sandbox"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
