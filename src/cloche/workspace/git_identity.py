"""Who makes commits on this host: `user.name` and `user.email` of the caller's own git, and nothing else of it.

They are asked of git in the folder, since its location may choose among them (`includeIf`); what the repository itself
says is not read here: inside it wins anyway.
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
    """Return a configuration of git's with name and address of who makes commits here; empty where git has neither."""
    git = shutil.which("git")
    settings: dict[str, str] = {}
    for scope in ("--global", "--system") if git else ():
        if len(settings) < 2:
            settings = {**_read_scope(git or "", folder, scope), **settings}
    rows = (f'\t{key.partition(".")[2]} = "{value.translate(_ESCAPES)}"\n' for key, value in sorted(settings.items()))
    return f"[user]\n{''.join(rows)}" if settings else ""


def _read_scope(git: str, folder: int, scope: str) -> dict[str, str]:
    """Return what one of git's own files says, by key. What cannot be asked is not known."""
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
