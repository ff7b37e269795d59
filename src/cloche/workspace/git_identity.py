"""Read `user.name` and `user.email` from the caller's own git configuration, and nothing else.

Git is run in the folder, since `includeIf` may depend on the location. The repository's own configuration is not read
here: inside the sandbox it takes precedence anyway.
"""

from __future__ import annotations

import os
import shutil
import subprocess

PATIENCE_S, MOST_CHARS = 2.0, 1000
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"})
_VARIABLES = (
    "PATH", "HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM",
)  # fmt: skip


def author_config(folder: int) -> str:
    """Return a git configuration with the author's name and address; empty if git has neither."""
    git = shutil.which("git")
    settings: dict[str, str] = {}
    for scope in ("--global", "--system") if git else ():
        if len(settings) < 2:
            settings = {**_read_scope(git or "", folder, scope), **settings}
    rows = (f'\t{key.partition(".")[2]} = "{value.translate(_ESCAPES)}"\n' for key, value in sorted(settings.items()))
    return f"[user]\n{''.join(rows)}" if settings else ""


def _read_scope(git: str, folder: int, scope: str) -> dict[str, str]:
    """Return the values of one configuration scope by key; empty if git fails."""
    try:
        completed = subprocess.run(
            [git, "--no-pager", "config", scope, "--includes", "-z", "--get-regexp", r"^user\.(name|email)$"],
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
    rows = (row.partition("\n") for row in os.fsdecode(completed.stdout).split("\0"))
    return {key: value for key, _, value in rows if key and value and len(value) <= MOST_CHARS}
