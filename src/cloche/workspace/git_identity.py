"""Read the caller's identity, and how its commits are signed, from the caller's own git configuration.

Git is run in the folder, since `includeIf` may depend on the location. The repository's own configuration is not read
here: inside the sandbox it takes precedence anyway, and on the host a guest may have written it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

PATIENCE_S, MOST_CHARS = 2.0, 1000
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
_VARIABLES = (
    "PATH", "HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM",
)  # fmt: skip


_IDENTITY = r"^user\.(name|email)$"
_SIGNING = r"^(user\.(name|email|signingkey)|commit\.gpgsign|gpg\..*)$"
_FALSE = ("false", "no", "off", "0", "")


def author_config(folder: int) -> str:
    """Return a git configuration with the author's name and address; empty if git has neither."""
    settings = _read(folder, _IDENTITY, enough=2)
    rows = (f'\t{key.partition(".")[2]} = "{value.translate(_ESCAPES)}"\n' for key, value in sorted(settings.items()))
    return f"[user]\n{''.join(rows)}" if settings else ""


def user_settings(folder: int) -> dict[str, str]:
    """Return the caller's settings about identity and signatures by key; empty without git."""
    return _read(folder, _SIGNING)


def author_of(settings: Mapping[str, str]) -> str:
    """Return `NAME <MAIL>`; empty if one of them is missing."""
    name, email = settings.get("user.name"), settings.get("user.email")
    return f"{name} <{email}>" if name and email else ""


def signs_commits(settings: Mapping[str, str]) -> bool:
    """Tell whether the caller wants commits signed."""
    return settings.get("commit.gpgsign", "false").lower() not in _FALSE


def _read(folder: int, pattern: str, *, enough: int = 1 << 30) -> dict[str, str]:
    git = shutil.which("git")
    settings: dict[str, str] = {}
    for scope in ("--global", "--system") if git else ():
        if len(settings) < enough:
            settings = {**_read_scope(git or "", folder, scope, pattern), **settings}
    return settings


def _read_scope(git: str, folder: int, scope: str, pattern: str) -> dict[str, str]:
    """Return the values of one configuration scope by key; empty if git fails. A key alone means true."""
    try:
        completed = subprocess.run(
            [git, "--no-pager", "config", scope, "--includes", "-z", "--get-regexp", pattern],
            cwd=f"/proc/{os.getpid()}/fd/{folder}",
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (row.partition("\n") for row in os.fsdecode(completed.stdout).split("\0") if row)
    values = {key: value if has_value else "true" for key, has_value, value in rows}
    return {key: value for key, value in values.items() if len(value) <= MOST_CHARS and (value or "user." not in key)}
