"""The steps of a build, in its sandbox: RUN, COPY, ENV, WORKDIR, USER. Paths and texts are the client's."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from cloche.core.events import Event, OutputChunk
from cloche.core.loops import finish
from cloche.core.record import dataclass
from cloche.core.result import Result
from cloche.execution.sandbox import AsyncSandbox

STEP_S = "30m"  # the build's own time is shorter or as long
MOST_OUTPUT = 2_000  # characters of a failed step's output in its error
PIECE, MOST_LINE = 1 << 18, 1 << 12
ROOT = "root"
OF_ROOT = {"npm_config_prefix": "/.venv"}  # the system's folders are read-only; this one has its programs on PATH
IS_APT = re.compile(r"\b(apt|apt-get|dpkg|apk|yum|dnf|pacman)\b").search
NO_APT = (
    "the command (the system's folders are read-only here, so the system's packages cannot be installed; use "
    "`packages` of the operator's templates, or a container backend)"
)
# Arguments: the folder with the files, the pattern, the target, the owner, the mode.
COPY = r"""
set -e
cd "$1"
shopt -s nullglob dotglob globstar
IFS=
case "$2" in .|./) set -- "$1" . "$3" "$4" "$5"; entries=(.) ;; *) entries=($2) ;; esac
[ ${#entries[@]} -gt 0 ] || { echo "no uploaded file matches $2" >&2; exit 1; }
is_folder=
case "$3" in */) is_folder=1 ;; esac
[ ${#entries[@]} -eq 1 ] || is_folder=1
[ ! -d "$3" ] || is_folder=1
for entry in "${entries[@]}"; do
  [ -z "$4" ] || chown -hR "$4" "$entry"
  [ -z "$5" ] || find "$entry" ! -type l -exec chmod "$5" {} +
  if [ -d "$entry" ] && [ ! -L "$entry" ]; then
    made "$3"; cp -a "$entry/." "$3"
  elif [ -n "$is_folder" ]; then
    made "$3"; cp -a "$entry" "$3"
  else
    made "$(dirname "$3")"; cp -a --remove-destination "$entry" "$3"
  fi
done
"""
# A folder that is missing is made with the owner of the files.
MADE = """
made() {
  [ -d "$1" ] && return
  made "$(dirname "$1")"
  mkdir "$1"
  [ -z "$owner" ] || chown "$owner" "$1"
}
owner="$4"
"""


class StepFailed(Exception):
    """Report that a step could not be done, in words for the client."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepContext:
    """Hold what each step changes for those after it. `files` returns the path of an upload by its hash."""

    user: str
    workdir: str
    env: dict[str, str]
    log: Callable[[str, str], None]
    files: Callable[[str], Awaitable[str]]


async def do_step(
    sandbox: AsyncSandbox, kind: str, arguments: Sequence[str], files_hash: str | None, context: StepContext
) -> None:
    """Do one step. Raises StepFailed, ClocheError."""
    if kind == "RUN":
        await _run(sandbox, arguments, context)
    elif kind == "COPY":
        await _copy(sandbox, arguments, files_hash, context)
    elif kind == "ENV":
        context.env.update(_variables(arguments))
    elif kind == "WORKDIR":
        await _change_folder(sandbox, arguments, context)
    else:
        await _change_user(sandbox, arguments, context)


async def _run(sandbox: AsyncSandbox, arguments: Sequence[str], context: StepContext) -> None:
    if not 1 <= len(arguments) <= 2 or not arguments[0].strip():
        raise StepFailed("RUN: give a command, and a user or none")
    user = arguments[1] if len(arguments) == 2 and arguments[1] else context.user
    lines = _Lines(context.log)
    env = {**(OF_ROOT if user == ROOT else {}), **context.env}
    result = await sandbox.exec(
        ["/bin/bash", "-l", "-c", arguments[0]], user=user, cwd=context.workdir, env=env, timeout=STEP_S,
        on_event=lines.take,
    )  # fmt: skip
    lines.end()
    _check(result, NO_APT if IS_APT(arguments[0]) else "the command")


async def _copy(sandbox: AsyncSandbox, arguments: Sequence[str], files_hash: str | None, context: StepContext) -> None:
    if len(arguments) < 2 or files_hash is None:
        raise StepFailed("COPY: give a source, a target and filesHash")
    source, target, owner, mode = (*arguments[:4], "", "")[:4]
    if posixpath.isabs(source) or ".." in source.split("/"):
        raise StepFailed(f"COPY: {source[:200]!r} leads out of the uploaded files")
    archive = await context.files(files_hash)
    folder = f"/var/tmp/.cloche-copy-{files_hash[:16]}"
    owner = owner or context.user
    owner = owner if ":" in owner else f"{owner}:"
    place = posixpath.join(context.workdir, target)
    place = place + "/" if target.endswith(("/", "/.")) or target in (".", "") else place
    try:
        await _as_root(sandbox, 'mkdir -m 755 "$1" "$1/files"', folder)
        await sandbox._require_live("COPY").write_path(f"{folder}.tar", _pieces(archive))
        await _as_root(sandbox, 'tar -x --no-same-owner -C "$1/files" -f "$1.tar"', folder)
        await _as_root(sandbox, MADE + COPY, f"{folder}/files", posixpath.normpath(source), place, owner, mode)
    finally:
        await _as_root(sandbox, 'rm -rf -- "$1" "$1.tar"', folder)


async def _pieces(path: str) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(open, path, "rb") as file:
        while piece := await finish(asyncio.to_thread(file.read, PIECE)):
            yield piece


def _variables(arguments: Sequence[str]) -> Mapping[str, str]:
    if len(arguments) % 2:
        raise StepFailed("ENV: give names and values in turn")
    variables = dict(zip(arguments[::2], arguments[1::2], strict=True))
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise StepFailed(f"ENV: {name[:64]!r} cannot be a variable of a process")
    return variables


async def _change_folder(sandbox: AsyncSandbox, arguments: Sequence[str], context: StepContext) -> None:
    if len(arguments) != 1 or not arguments[0]:
        raise StepFailed("WORKDIR: give a folder")
    folder = posixpath.normpath(posixpath.join(context.workdir, arguments[0]))
    await _as_root(sandbox, MADE.replace('"$4"', '"$2"') + 'made "$1"', folder, f"{context.user}:")
    context.workdir = folder


async def _change_user(sandbox: AsyncSandbox, arguments: Sequence[str], context: StepContext) -> None:
    if len(arguments) != 1 or not arguments[0]:
        raise StepFailed("USER: give a user")
    await _as_root(sandbox, 'id -u -- "$1"', arguments[0])
    context.user = arguments[0]


async def _as_root(sandbox: AsyncSandbox, script: str, *arguments: str) -> None:
    command = ["/bin/bash", "-c", script, "cloche", *arguments]
    _check(await sandbox.exec(command, user=ROOT, cwd="/", timeout=STEP_S), script.strip().split(" ")[0])


def _check(result: Result, what: str) -> None:
    if not result.ok:
        output = (result.stdout + result.stderr).strip()[-MOST_OUTPUT:]
        how = f"exit status {result.exit_code}" if result.status == "error" else str(result.status).replace("_", " ")
        raise StepFailed(f"{what} failed: {how}" + (f": {output}" if output else ""))


class _Lines:
    """Log output line by line, as it comes."""

    def __init__(self, log: Callable[[str, str], None]):
        self._log, self._rest = log, {"stdout": b"", "stderr": b""}

    def take(self, event: Event) -> None:
        """Take a piece of output."""
        if not isinstance(event, OutputChunk):
            return
        *lines, rest = (self._rest[event.stream] + event.data).split(b"\n")
        self._rest[event.stream] = rest[-MOST_LINE:]
        for line in lines:
            self._tell(event.stream, line)

    def end(self) -> None:
        """Log what has no line feed."""
        for stream, rest in self._rest.items():
            if rest:
                self._tell(stream, rest)

    def _tell(self, stream: str, line: bytes) -> None:
        self._log(f"[{stream}]: {line[-MOST_LINE:].decode(errors='replace')}", "info")
