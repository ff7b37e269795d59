"""Files in an agent's home folder at its start: merged, copied and linked by one program inside.

The program runs as the guest, so that whatever the agent left there, a link for example, reaches nothing of the host.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloche.core.errors import SandboxFileError, StartFailed
from cloche.core.escape import escape_line
from cloche.execution.sandbox import AsyncSandbox

from .boundaries import INTERPRETER
from .limits_text import with_limits
from .row import CodingAgent

MOST_COPIED_BYTES = 1 << 20
_WRITES = r"""
import json, os, sys
def merged(old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list):
        return old + [value for value in new if value not in old]
    return new
def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None
def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.cloche-new"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.replace(temporary, path)
for path, how, value in json.load(sys.stdin):
    if how == "json":
        old = read(path)
        new = merged(old, value)
        if new != old:
            write(path, json.dumps(new, indent=2) + "\n")
    elif how == "link":
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(value, path)
    elif how == "copy" or not os.path.lexists(path):
        write(path, value)
"""


async def write_home_files(
    sandbox: AsyncSandbox,
    row: CodingAgent,
    home: str,
    project: str,
    variables: Mapping[str, str],
    *,
    shown: Mapping[str, str],
    limits: Iterable[str],
    login: Mapping[str, str],
) -> None:
    """Write the row's first files and copies of the user's own; link `shown` paths to where their folders are.

    `variables` are those of the sandbox, `login` the agent's own file with the placeholders of one. A first file of
    JSON is merged into what is there; another one is written once. `limits` become a block of the instructions file.
    Raises StartFailed.
    """
    rows = [
        (f"{home}/{path}", "json" if path.endswith(".json") else "first", filled)
        for path, filled in _first_files(row, {"{project}": project, "{home}": home}, variables)
    ]
    rows += _copied(row, home)
    rows += [(f"{home}/{path}", "link", target) for path, target in shown.items()]
    rows += [(f"{home}/{path}", "copy", text) for path, text in login.items()]
    if row.instructions:
        rows = await _with_limits(sandbox, rows, f"{home}/{row.instructions}", limits)
    if rows:
        command = [INTERPRETER, "-I", "-S", "-c", _WRITES]  # the host's: what PATH leads to may be the guest's
        result = await sandbox.exec(command, stdin=json.dumps(rows), cwd="/")
        if not result.ok:
            lines = result.stderr.strip().splitlines()[-1:]
            raise StartFailed(f"agent: its home folder: {escape_line(''.join(lines))}", step="home")


def _first_files(row: CodingAgent, words: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield paths and contents of the first files, and of those for the secrets that are set."""
    files = list(row.first_files.items())
    for name, texts in row.key_files.items():
        if name in variables:
            # Some agents remember by its end that a key was agreed to.
            words = {**words, f"{{{name}}}": variables[name], f"{{{name}_end}}": variables[name][-20:]}
            files += texts.items()
    for path, text in files:
        yield path, _fill(json.loads(text) if path.endswith(".json") else text, words)


async def _with_limits(
    sandbox: AsyncSandbox, rows: list[tuple[str, str, Any]], path: str, limits: Iterable[str]
) -> list[tuple[str, str, Any]]:
    """Return the rows with the limits in the instructions file: in the user's own, or in what is there."""
    existing = next((text for target, _, text in rows if target == path), None)
    if existing is None:
        try:
            existing = os.fsdecode(await sandbox.read_file(path, count=MOST_COPIED_BYTES))
        except SandboxFileError:
            existing = ""
    return [*(row for row in rows if row[0] != path), (path, "copy", with_limits(existing, limits))]


def _fill(value: Any, words: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
    """Return JSON, or a text, with the words replaced in keys and texts."""
    if isinstance(value, str):
        for word, text in words.items():
            value = value.replace(word, text)
        return value
    if isinstance(value, dict):
        return {_fill(key, words): _fill(inner, words) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, words) for inner in value]
    return value


def _copied(row: CodingAgent, home: str) -> Iterator[tuple[str, str, Any]]:
    """Yield rows for copies of the user's own files, up to 1 MiB each, without one that has a value of a secret."""
    values = [value for name in row.secrets if (value := os.environ.get(name.partition("@")[0]))]
    for path, keys in row.copied.items():
        try:
            with open(f"{home}/{path}", "rb") as file:
                data = file.read(MOST_COPIED_BYTES + 1)
        except OSError:
            continue
        text = os.fsdecode(data)
        if len(data) <= MOST_COPIED_BYTES and not any(value in text for value in values):
            yield from _copy(f"{home}/{path}", text, keys, row.first_files.get(path, ""))


def _copy(path: str, text: str, keys: tuple[str, ...], first: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the row for a copy; that of TOML ends with the text of the row's first file."""
    if not keys:
        yield path, "copy", text
        return
    try:
        document = json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    except ValueError:
        return
    chosen = {key: document[key] for key in keys if isinstance(document, dict) and key in document}
    if path.endswith(".json"):
        yield path, "json", chosen
    else:
        plain = {key: value for key, value in chosen.items() if isinstance(value, str | int | bool)}
        yield path, "copy", "".join(f"{key} = {json.dumps(value)}\n" for key, value in plain.items()) + first
