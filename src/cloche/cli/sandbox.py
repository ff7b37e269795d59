"""`cloche sandbox`: named sandboxes, which live on between commands; `run` and `session` are listed here, too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from cloche.core.errors import InvalidRequest, OutcomeUnknown
from cloche.core.escape import escape_line
from cloche.core.limits import format_size

from ._acts import yes_option
from ._named import NamedCommand, check_may_end, for_each, visit
from ._review import tell_folder
from .app import root
from .exec import run_command, without_dashes
from .options import CommandGroup, argument, flag, folder_options, json_option, option, sandbox_options, users_option
from .output import GuestWriter, say, show, showing_progress
from .run import read_files, read_pairs

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions
    from cloche.core.processes import FileInfo

KEEP = "1h"
STOP_S, ANSWER_S = 10.0, 15.0
# Options end where the command begins.
COMMAND = {"allow_interspersed_args": False}
MOST_PORT, MOST_DIGITS = (1 << 16) - 1, 5


class _Sandboxes(CommandGroup):
    """Hold the commands below, and some of the root's commands."""

    again = ("run", "session")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None."""
        if cmd_name in self.again:
            return root.get_command(ctx, cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names."""
        return [*super().list_commands(ctx), *self.again]


sandboxes = root.group("sandbox", cls=_Sandboxes, help="Named sandboxes, which live on between commands.")(lambda: None)
_name = argument("name", metavar="NAME", help="The sandbox's name: 1 to 63 of a-z, 0-9 and -.")
_names = argument("names", nargs=-1, required=True, metavar="NAME", help="The sandbox's name. Repeatable.")
_force = flag(
    "--force",
    help="Do not ask, even about uncommitted changes to a folder; kill a keeper that does not answer.",
)
_call_timeout = option("--timeout", metavar="TIME", help="Time limit: 30, or 5m. Default: no limit while data flows.")
_command = argument("words", nargs=-1, required=True, metavar="COMMAND", help="The program to run, and its arguments.")
_at_end = option(
    "--at-end",
    metavar="WHAT",
    help="What happens when its time is over: end, pause, or pause-files (no processes).",
)
_no_memory = flag("--no-memory", help="End all processes; it goes on with its files.")
_id = argument("process", metavar="ID", help="A process's id, from `cloche sandbox ps`.")


@sandboxes.command("create")
@_name
@option("--keep", metavar="TIME", default=KEEP, help="How long it lives without a client.")
@option("--lifetime", metavar="TIME", help="How long it lives in total. Default: 24h.")
@option("--idle", metavar="TIME", help="End it after this time without a process or call.")
@_at_end
@option("--file", metavar="SRC[:DST]", multiple=True, help="Copy a file or directory in. Repeatable.")
@option("--snapshot", metavar="FILE", help="Begin with the files of `cloche sandbox snapshot`.")
@sandbox_options()
@users_option()
@folder_options()
def _create(
    name: str, keep: str, lifetime: str | None, idle: str | None, at_end: str | None, file: tuple[str, ...],
    snapshot: str | None,
    options: SandboxOptions,
) -> int:  # fmt: skip
    """Open a named sandbox. --timeout is the time limit of each command in it."""
    from cloche.sync import Sandbox

    with (
        showing_progress(),
        Sandbox(
            name=name,
            keep=keep,
            lifetime=lifetime,
            idle=idle,
            at_end=at_end,
            files=read_files(file),
            snapshot=snapshot,
            **options,
        ) as sandbox,
    ):
        tell_folder(sandbox.notes)
    print(name)
    return 0


@sandboxes.command("list")
@json_option()
def _list(as_json: bool) -> int:
    """List the named sandboxes of this user."""
    from .ps import list_sandboxes

    return list_sandboxes(as_json=as_json)


@sandboxes.command("inspect")
@_name
@json_option()
def _inspect(name: str, as_json: bool) -> int:
    """Show a sandbox's state, times, rules and limits."""
    from cloche.keeper import registry

    from .ps import info, state

    sandbox = registry.find(name)
    answer = info(sandbox)
    facts = {"name": name, "state": state(answer), **sandbox.entry, **answer}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show(
            [{"key": key, "value": value} for key, value in _flat(facts) if value not in (None, "", [])], as_json=False
        )
    return 0


def _flat(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested facts with their dotted keys."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@sandboxes.command("exec", cls=NamedCommand, context_settings=COMMAND)
@_name
@_command
@option("--cwd", metavar="DIR", help="The working directory in the sandbox. Default: /workspace.")
@option("--env", metavar="K=V", multiple=True, help="A variable for the program. Repeatable.")
@option("--timeout", metavar="TIME", help="Wall clock. Default: that of the sandbox.")
@json_option()
def _exec(
    name: str, words: tuple[str, ...], cwd: str | None, env: tuple[str, ...], timeout: str | None, as_json: bool
) -> int:
    """Run a command in a sandbox.

    Output and exit code pass through, as with `cloche run`. Processes that the command leaves behind live on.
    """
    return run_command(
        name, without_dashes(words), reads=False, has_terminal=False, cwd=cwd, user=None, env=env, file=(),
        options={"timeout": timeout}, as_json=as_json,
    )  # fmt: skip


@sandboxes.command("start", cls=NamedCommand, context_settings=COMMAND)
@_name
@_command
@option("--cwd", metavar="DIR", help="The working directory in the sandbox. Default: /workspace.")
@option("--env", metavar="K=V", multiple=True, help="A variable for the program. Repeatable.")
@option("--timeout", metavar="TIME", help="Wall clock. Default: none.")
def _start(name: str, words: tuple[str, ...], cwd: str | None, env: tuple[str, ...], timeout: str | None) -> int:
    """Start a command in the background, and print its id."""
    from cloche.sync import Sandbox

    with (
        Sandbox.attach(name) as sandbox,
        sandbox.start(without_dashes(words), cwd=cwd, env=read_pairs(env), timeout=timeout, keep=True) as process,
    ):
        print(process.id)
    return 0


@sandboxes.command("ps")
@_name
@json_option()
def _ps(name: str, as_json: bool) -> int:
    """List the processes of a sandbox.

    It lists running processes and those that ended recently.
    """
    from cloche.sync import Sandbox

    from .ps import spelled

    with Sandbox.attach(name) as sandbox:
        rows = [
            {
                "id": process.id, "pid": process.pid, "status": str(process.status or "running"),
                "exit_code": process.exit_code,
                "age": round(process.age) if as_json else spelled(round(process.age)), "command": process.command,
            }
            for process in sandbox.processes()
        ]  # fmt: skip
    show(rows, as_json=as_json)
    return 0


@sandboxes.command("logs")
@_name
@_id
def _logs(name: str, process: str) -> int:
    """Print the unread output of a process.

    It prints up to the last 32 KiB of each stream. They remain unread.
    """
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        streams = sandbox.logs(process)
    for fd, data in zip((1, 2), streams, strict=True):
        writer = GuestWriter(fd)
        writer.write(data)
        writer.finish()
    return 0


@sandboxes.command("files")
@_name
@argument("path", required=False, default="/workspace", metavar="PATH", help="A file or folder. Default: /workspace.")
@option("--upload", metavar="SRC", help="Copy this file or folder of this machine to PATH.")
@option("--download", metavar="DST", help="Copy PATH to this path on this machine.")
@option("--depth", type=int, metavar="N", help="List N levels of folders. Default: 1.")
@option("--user", metavar="NAME", help="List with the rights of this user, for example root.")
@_call_timeout
@json_option()
def _files(
    name: str, path: str, upload: str | None, download: str | None, depth: int | None, user: str | None,
    timeout: str | None, as_json: bool,
) -> int:  # fmt: skip
    """List a folder of a sandbox, or copy files in and out."""
    if (upload or download) and (depth is not None or user is not None):
        raise InvalidRequest("--depth and --user are for listing; leave them out")
    if upload and download:
        raise InvalidRequest("--upload and --download exclude each other; give one")
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        if upload:
            sandbox.upload(upload, path, timeout=timeout)
        elif download:
            sandbox.download(path, download, timeout=timeout)
        else:
            entries = sandbox.list_dir(path, depth=depth, user=user, timeout=timeout)
            show([_file_row(entry, as_json=as_json) for entry in entries], as_json=as_json)
    return 0


def _file_row(entry: FileInfo, *, as_json: bool) -> dict[str, Any]:
    """Return a row of a listing."""
    more = {"group": entry.group, "metadata": dict(entry.metadata)} if as_json else {}
    row = {"name": entry.name, "type": entry.type, "size": entry.size, "mode": f"{entry.mode:o}", "owner": entry.owner}
    return {**row, **more}


@sandboxes.command("snapshot")
@_name
@argument("file", metavar="FILE", help="The archive to write, on this machine.")
@_call_timeout
def _snapshot(name: str, file: str, timeout: str | None) -> int:
    """Save all files to an archive, for other sandboxes.

    Its processes stand still meanwhile, and go on. Their memory is not saved.
    """
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        saved = sandbox.snapshot(file, timeout=timeout)
    left_out = f"; {saved.left_out} were left out: sockets, pipes, or unreadable" if saved.left_out else ""
    say(f"{saved.files} files, {format_size(saved.size)}{left_out}")
    return 0


@sandboxes.command("ports")
@_name
@json_option()
def _ports(name: str, as_json: bool) -> int:
    """List the TCP servers in a sandbox, for `forward`."""
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox:
        rows = [{"port": port.port, "address": port.address} for port in sandbox.ports()]
    show(rows, as_json=as_json)
    return 0


@sandboxes.command("forward")
@_name
@argument("ports", metavar="PORT[:HOST_PORT]", help="A port in the sandbox, and one of 127.0.0.1. Default: a free one.")
def _forward(name: str, ports: str) -> int:
    """Forward a port of this machine to a sandbox's, until Ctrl-C."""
    port, host_port = _read_ports(ports)
    from cloche.sync import Sandbox

    with Sandbox.attach(name) as sandbox, sandbox.forward(port, host_port) as forward:
        print(f"127.0.0.1:{forward.host_port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()
    return 0


def _read_ports(text: str) -> tuple[int, int]:
    inside, _, outside = text.partition(":")
    numbers = (inside, outside or "0")
    if not all(number.isdecimal() and len(number) <= MOST_DIGITS and int(number) <= MOST_PORT for number in numbers):
        raise InvalidRequest(f"PORT: {text!r} is not valid; give, for example, 8000 or 8000:9000")
    return int(numbers[0]), int(numbers[1])


@sandboxes.command("cp")
@argument("source", metavar="SRC", help="A file or folder of this machine, or NAME:PATH.")
@argument("target", metavar="DST", help="The destination: NAME:PATH, or a path on this machine.")
@_call_timeout
def _cp(source: str, target: str, timeout: str | None) -> int:
    """Copy a file or a folder into or out of a sandbox.

    A relative PATH starts in /workspace. If the destination is an existing folder, the copy keeps its name in it.
    """
    outward, inward = _read_place(source), _read_place(target)
    if (outward is None) == (inward is None):
        raise InvalidRequest("cp: write one of SRC and DST as NAME:PATH (and ./a:b for a file of this machine)")
    if "-" in (source, target):
        raise InvalidRequest("cp: - is not supported; write ./- for a file of that name")
    from cloche.sync import Sandbox

    if inward is not None:
        with Sandbox.attach(inward[0]) as sandbox:
            is_folder = sandbox.exists(f"{inward[1]}/.", timeout=timeout)
            inside = _in_folder(inward[1], os.path.abspath(source)) if is_folder else inward[1]
            copied = sandbox.upload(source, inside, timeout=timeout)
    else:
        assert outward is not None  # noqa: S101 - one of the two is
        with Sandbox.attach(outward[0]) as sandbox:
            inside = outward[1] if outward[1] != "." else "/workspace"
            outside = _in_folder(target, inside) if os.path.isdir(target) else target
            copied = sandbox.download(inside, outside, timeout=timeout)
    if copied.left_out:
        say(f"left out {copied.left_out}: special files, and links that lead out of the folder")
    return 0


def _read_place(argument: str) -> tuple[str, str] | None:
    """Return the sandbox and the path of NAME:PATH; None for a path of this machine."""
    from cloche.keeper import registry

    name, colon, path = argument.partition(":")
    return (name, path or ".") if colon and registry.is_name(name) and not os.path.lexists(argument) else None


def _in_folder(folder: str, path: str) -> str:
    """Return the path of a copy within a folder, under its own name."""
    name = os.path.basename(path.rstrip("/"))
    return folder if name in ("", ".", "..") else os.path.join(folder, name)


@sandboxes.command("install")
@_name
@argument("packages", nargs=-1, required=True, metavar="PACKAGE", help="A package: rich, or httpx==0.28.1.")
def _install(name: str, packages: tuple[str, ...]) -> int:
    """Install packages in a sandbox, and print them."""
    from cloche.sync import Sandbox

    with showing_progress(), Sandbox.attach(name) as sandbox:
        installed = sandbox.install(*packages)
    for package in installed:
        print(escape_line(package))
    return 0


@sandboxes.command("pause")
@_name
@_no_memory
def _pause(name: str, no_memory: bool) -> int:
    """Stop all processes and clocks of a sandbox.

    It does not end by time until it is resumed.
    """
    visit(name, "pause", memory=not no_memory)
    return 0


@sandboxes.command("resume")
@_name
@_no_memory
def _resume(name: str, no_memory: bool) -> int:
    """Continue the processes and clocks of a sandbox."""
    visit(name, "resume", memory=not no_memory)
    return 0


@sandboxes.command("lifetime")
@_name
@argument("time", metavar="TIME", help="The time that it has left from now on: 90, or 30m.")
@_at_end
def _lifetime(name: str, time: str, at_end: str | None) -> int:
    """Set how much time a sandbox has left, and what happens then."""
    from cloche.core.limits import parse_duration
    from cloche.keeper.attach import check_at_end

    at_end_order = {} if at_end is None else {"at_end": check_at_end(at_end)}
    visit(name, "lifetime", left_s=parse_duration(time, name="TIME"), **at_end_order)
    return 0


@sandboxes.command("stop")
@_names
@_force
@yes_option
def _stop(names: tuple[str, ...], force: bool, yes: bool) -> int:
    """Ask all processes to end, then end sandboxes for good.

    The processes get SIGTERM, and SIGKILL 10 s later. Then the sandbox ends and its files are removed. Unlike a docker
    container it cannot be started again; use pause to halt it.
    """

    def stop(name: str) -> None:
        if not force:
            check_may_end(name, yes=yes)
        with contextlib.suppress(OutcomeUnknown) if force else contextlib.nullcontext():
            visit(name, "stop", grace_s=STOP_S, timeout_s=STOP_S + ANSWER_S)
        _end(name, force)

    return for_each(names, stop)


def _kill(names: tuple[str, ...], force: bool, yes: bool) -> int:
    """End sandboxes at once, with all their processes and files."""

    def kill(name: str) -> None:
        if not force:
            check_may_end(name, yes=yes)
        _end(name, force)

    return for_each(names, kill)


for _verb in ("kill", "rm"):
    sandboxes.command(_verb)(_names(_force(yes_option(_kill))))


def _end(name: str, force: bool) -> None:
    """End a sandbox; with `force`, kill its keeper if it does not answer."""
    try:
        visit(name, "end", timeout_s=ANSWER_S)
    except OutcomeUnknown:
        if not force:
            raise
        _end_keeper(name)


def _end_keeper(name: str) -> None:
    """Kill the keeper of a sandbox; the sandbox ends with it."""
    from cloche.keeper import registry

    for pid in registry.holders(name):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
