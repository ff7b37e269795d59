r"""A shell script that sets the variables of a snapshot, with the same result in dash, bash and zsh for any value.

Every value is in double quotes on one line. `\`, `"`, `$` and the backtick are escaped with a backslash. In double
quotes shells disagree about `\!`, and dash has no `$'\n'`. Therefore `!` is written with its backslash between two
quoted parts, a newline is a variable set at the script's beginning, and other control characters come from `printf`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from cloche.core.errors import Conflict, InvalidRequest
from cloche.core.escape import escape_name, is_visible
from cloche.core.record import dataclass
from cloche.hostfs import new_file, replace

from .environment_variables import KEY

SCRIPT = ".cloche-env-replication.sh"
_NEWLINE = "cloche_newline"
# Variables that shells make read-only, set themselves, or evaluate at their start or prompt.
_OF_SHELLS = frozenset({
    "_", "ARGV0", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND",
    "BASH_COMPAT", "BASH_ENV", "BASH_EXECUTION_STRING", "BASH_LINENO", "BASH_LOADABLES_PATH", "BASH_REMATCH",
    "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "BASH_VERSION", "BASH_XTRACEFD", "CHILD_MAX", "COMP_WORDBREAKS",
    "CPUTYPE", "DIRSTACK", "EGID", "ENV", "EPOCHREALTIME", "EPOCHSECONDS", "ERRNO", "EUID", "EXECIGNORE", "FCEDIT",
    "FUNCNAME", "FUNCNEST", "GID", "GLOBIGNORE", "GROUPS", "HISTCHARS", "HISTCMD", "HISTCONTROL", "HISTFILE",
    "HISTFILESIZE", "HISTSIZE", "IFS", "KEYBOARD_HACK", "LD_AUDIT", "LD_PRELOAD", "LINENO", "MACHTYPE", "MAILCHECK",
    "NULLCMD", "OLDPWD", "OPTARG", "OPTERR", "OPTIND", "OSTYPE", "POSIXLY_CORRECT", "PPID", "PROMPT", "PROMPT2",
    "PROMPT3", "PROMPT4", "PROMPT_COMMAND", "PS0", "PS1", "PS2", "PS3", "PS4", "PWD", "RANDOM", "READNULLCMD", "REPLY",
    "RPROMPT", "RPROMPT2", "RPS1", "RPS2", "SAVEHIST", "SECONDS", "SHELLOPTS", "SHLVL", "SPROMPT", "SRANDOM", "TMOUT",
    "TRY_BLOCK_ERROR", "TRY_BLOCK_INTERRUPT", "TTY", "TTYIDLE", "UID", "USERNAME", "VENDOR", "WATCH", "ZDOTDIR",
    "ZSH_ARGZERO", "ZSH_EVAL_CONTEXT", "ZSH_EXECUTION_STRING", "ZSH_NAME", "ZSH_PATCHLEVEL", "ZSH_SUBSHELL",
    "ZSH_VERSION", "aliases", "argv", "builtins", "cdpath", "commands", "dirstack", "fignore", "fpath", "funcstack",
    "functions", "galiases", "histchars", "history", "jobdirs", "jobstates", "jobtexts", "mailpath", "manpath",
    "module_path", "modules", "nameddirs", "options", "parameters", "path", "patchars", "pipestatus", "prompt",
    "psvar", "reswords", "saliases", "signals", "status", "termcap", "terminfo", "userdirs", "usergroups", "watch",
    "widgets", "zsh_eval_context",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationScript:
    """Hold a script, its number of variables, the names left empty, and the skipped names with the reason."""

    text: str
    variables: int
    placeholders: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return its description in the wire's format."""
        return {
            "path": SCRIPT, "variables": self.variables, "placeholders": list(self.placeholders),
            "skipped": [{"key": key, "reason": reason} for key, reason in self.skipped],
        }  # fmt: skip


def render_script(snapshot: Mapping[str, Any]) -> ReplicationScript:
    """Return the script for a snapshot of `get_snapshot`. A shell sources it: `. ./FILE`."""
    masked = frozenset(snapshot["maskedKeys"])
    env: Mapping[str, str] = snapshot["env"]
    skipped = [(row["key"], row["reason"]) for row in snapshot["skippedEnv"]]
    names = sorted(name for name in env if KEY.fullmatch(name) and name not in _OF_SHELLS and name != _NEWLINE)
    skipped += [(name, "shell") for name in sorted(set(env) - set(names))]
    placeholders = tuple(name for name in names if name in masked)
    plain = [name for name in names if name not in masked]
    lines = [
        *_comments(snapshot),
        "",
        f"{_NEWLINE}=\"$(printf '\\012_')\"",
        f'{_NEWLINE}="${{{_NEWLINE}%_}}"',
        "",
        *(f"export {name}={quote(env[name])}" for name in plain),
        "",
        *(["# Secrets: their values were not kept. Fill them in."] if placeholders else []),
        *(f'export {name}=""' for name in placeholders),
        *(["# Left out:"] if skipped else []),
        *(f"#   {escape_name(name)}: {_REASONS.get(reason, reason)}" for name, reason in skipped),
        f"unset {_NEWLINE}",
    ]
    return ReplicationScript(
        text="\n".join(lines) + "\n", variables=len(plain), placeholders=placeholders, skipped=tuple(skipped)
    )


_REASONS = {
    "name": "a shell cannot have a variable of this name",
    "length": "it is too long",
    "encoding": "a shell cannot hold this value",
    "shell": "shells set it themselves, or react to it",
}


def _comments(snapshot: Mapping[str, Any]) -> Iterator[str]:
    yield "#!/bin/sh"
    yield f"# The environment of snapshot {escape_name(snapshot['id'])}, taken at {escape_name(snapshot['createdAt'])}."
    yield f"# Workspace: {escape_name(snapshot['workspacePath'])}"
    if snapshot["label"]:
        yield f"# Label: {escape_name(snapshot['label'])}"
    yield f"# Read it before you use it; then, in dash, bash or zsh: . ./{SCRIPT}"


def quote(value: str) -> str:
    """Return a value quoted for a line of the script, on which `_NEWLINE` is set."""
    return f'"{"".join(_quoted(value))}"'


def _quoted(value: str) -> Iterator[str]:
    before = ""
    for char in value:
        # In encodings such as GBK, a character's last byte and a backslash may form one character.
        if not before.isascii() and char in '\\"$`':
            yield '""'
        before = char
        if char in '\\"$`':
            yield f"\\{char}"
        elif char == "!":
            yield '"\\!"'
        elif char == "\n":
            yield f"${{{_NEWLINE}}}"
        elif char == "\t" or is_visible(char):
            yield char
        else:
            octal = "".join(f"\\{byte:03o}" for byte in char.encode())
            yield f"$(printf '{octal}')"


def write_script(folder: int, script: ReplicationScript, *, overwrite: bool = False) -> None:
    """Write the script into an open folder, atomically. A link in its place is replaced, not followed.

    Raises Conflict if the name exists and `overwrite` is false, InvalidRequest if it cannot be written.
    """
    data = script.text.encode()
    try:
        if overwrite:
            replace(folder, SCRIPT, data, mode=0o600, permissions=0o600)
            return
        with new_file(folder, 0o600) as (beside, file):
            with file:
                file.write(data)
            os.link(beside, SCRIPT, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            os.unlink(beside, dir_fd=folder)
    except FileExistsError:
        raise Conflict(f"{SCRIPT} exists already; allow to overwrite it (overwrite)") from None
    except OSError as error:
        raise InvalidRequest(f"{SCRIPT} cannot be written: {error.strerror}") from error
