"""`cloche container`: print the command that starts an agent's container."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from cloche.agent.container import container_arguments
from cloche.core.errors import InvalidRequest
from cloche.core.plain import plain
from cloche.runtime.options import SandboxOptions


def show_arguments(
    folder: str,
    words: Sequence[str],
    *,
    env: Sequence[str],
    user: str | None,
    name: str,
    has_terminal: bool,
    as_json: bool,
    options: SandboxOptions,
) -> int:
    """Print the argument list, quoted for a shell, or as JSON."""
    image, *command = words
    found = container_arguments(
        folder, image, command, env=_variables(env), user=_ids(user), name=name, has_terminal=has_terminal, **options
    )
    line = shlex.join(found)
    if not as_json and plain(line) != line:
        raise InvalidRequest("a name has characters that no terminal should be sent; --json prints the list")
    print(json.dumps(found) if as_json else line)
    return 0


def _variables(words: Sequence[str]) -> dict[str, str | None]:
    """Split K=V; a bare K has its value where docker is called."""
    split = (word.partition("=") for word in words)
    return {name: value if equals else None for name, equals, value in split}


def _ids(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    user, _, group = text.partition(":")
    if not (user.isdecimal() and user.isascii()) or not (group or user).isdecimal():
        raise InvalidRequest(f"--user {text}: give numbers, as UID or UID:GID")
    return int(user), int(group or user)
