"""A stand-in for the package `microsandbox` where there is no KVM: machines are folders, programs run in bubblewrap.

What it is asked for is kept, and held against the package's own description of its calls. Its types, and all that
needs no machine, are the package's own.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import microsandbox as real

HOSTS_OWN = ("/usr", "/bin", "/lib", "/lib64", "/etc")


def described() -> Mapping[str, ast.AsyncFunctionDef | ast.FunctionDef]:
    """Return the package's methods, "Class.method", as it describes them; the native ones tell no signature."""
    text = Path(real.__file__).with_name("_microsandbox.pyi").read_text()
    kinds = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {
        f"{kind.name}.{node.name}": node
        for kind in kinds
        for node in kind.body
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)
    }


DESCRIBED = described()


def check_call(name: str, positional: int, named: Mapping[str, Any]) -> None:
    """Raise TypeError for a call that the package's own description does not allow."""
    found = DESCRIBED[name].args
    places = [one.arg for one in found.args if one.arg != "self"]
    known = {*places, *(one.arg for one in found.kwonlyargs)}
    if positional > len(places):
        raise TypeError(f"{name} takes {len(places)} positional arguments")
    for key in named:
        if key not in known or key in places[:positional]:
            raise TypeError(f"{name} takes no {key}")
    needed = places[positional : len(places) - len(found.defaults)]
    if missing := [one for one in needed if one not in named]:
        raise TypeError(f"{name} lacks {missing}")


class Sink:
    """Be a program's standard input."""

    def __init__(self, pipe: asyncio.StreamWriter):
        self._pipe = pipe

    async def write(self, data: bytes) -> None:
        try:
            self._pipe.write(data)
            await self._pipe.drain()
        except OSError as error:
            raise real.MicrosandboxError(str(error)) from error

    async def close(self) -> None:
        self._pipe.close()


class Handle:
    """Be a program that runs."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._tell())]

    def take_stdin(self) -> Sink | None:
        return Sink(self._process.stdin) if self._process.stdin else None

    async def recv(self) -> Any:
        return await self._events.get()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()

    async def _tell(self) -> None:
        kinds = real.ExecEventType
        await asyncio.gather(
            self._copy(self._process.stdout, kinds.STDOUT), self._copy(self._process.stderr, kinds.STDERR)
        )
        await self._process.wait()
        self._events.put_nowait(SimpleNamespace(event_type=kinds.EXITED, data=None))
        self._events.put_nowait(None)

    async def _copy(self, stream: asyncio.StreamReader | None, kind: Any) -> None:
        while stream and (data := await stream.read(65_536)):
            self._events.put_nowait(SimpleNamespace(event_type=kind, data=data))


class Machine:
    """Be a machine: a folder for each place."""

    def __init__(self, name: str, given: Mapping[str, Any]):
        self.name, self.given = name, given
        self.folder = Path(tempfile.mkdtemp(prefix="cloche-stand-in-"))
        self.running: list[asyncio.subprocess.Process] = []
        for place in given["volumes"]:
            (self.folder / place.strip("/").replace("/", "-")).mkdir(mode=0o777)

    def words(self, user: str, env: Mapping[str, str]) -> list[str]:
        words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-all", "--uid", user, "--gid", user]
        for place in HOSTS_OWN:
            words += ["--ro-bind", place, place]
        words += ["--dev", "/dev", "--proc", "/proc", "--clearenv"]
        for place in self.given["volumes"]:
            words += ["--bind", str(self.folder / place.strip("/").replace("/", "-")), place]
        if user == "0":  # who prepares it may give folders away, which a user namespace does not let anybody do
            words += ["--ro-bind", "/usr/bin/true", "/usr/bin/chown"]
        for name, value in env.items():
            words += ["--setenv", name, value]
        return words

    async def begin(self, words: Sequence[str], stdin: int) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdin=stdin, stdout=pipe, stderr=pipe)
        self.running.append(process)
        return process

    async def exec(self, cmd: str, args: list[str], **named: Any) -> Any:
        check_call("Sandbox.exec", 2, named)
        process = await self.begin([*self.words(named["user"], named["env"]), cmd, *args], asyncio.subprocess.DEVNULL)
        out, err = await process.communicate()
        return SimpleNamespace(exit_code=process.returncode, stdout_bytes=out, stderr_text=err.decode())

    async def exec_stream(self, cmd: str, args: list[str], **named: Any) -> Handle:
        check_call("Sandbox.exec_stream", 2, named)
        limits = [
            f"--{one.resource.value}={one.soft}:{one.hard}" for one in named["rlimits"] if one.resource.value != "nproc"
        ]
        words = [*self.words(named["user"], named["env"]), "/usr/bin/prlimit", *limits, cmd, *args]
        return Handle(await self.begin(words, asyncio.subprocess.PIPE))

    async def kill(self, **named: Any) -> None:
        check_call("Sandbox.kill", 0, named)
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):  # it may end meanwhile
                if process.returncode is None:
                    process.kill()
            await process.wait()

    async def destroy(self, **named: Any) -> None:
        check_call("Sandbox.destroy", 0, named)
        await self.kill()
        Recorded.machines.pop(self.name, None)
        shutil.rmtree(self.folder, ignore_errors=True)


class Recorded:
    """Hold the machines that are there."""

    machines: ClassVar[dict[str, Machine]] = {}


class Sandbox:
    """Make machines."""

    @staticmethod
    async def create(name: str, **named: Any) -> Machine:
        check_call("Sandbox.create", 1, named)
        Recorded.machines[name] = Machine(name, named)
        return Recorded.machines[name]

    @staticmethod
    async def list_with(**named: Any) -> Any:
        check_call("Sandbox.list_with", 0, named)
        rows = []
        for one in Recorded.machines.values():
            labels = one.given["labels"]
            rows.append(
                SimpleNamespace(name=one.name, destroy=one.destroy, config=lambda labels=labels: {"labels": labels})
            )
        return SimpleNamespace(sandboxes=rows, next_cursor=None)


class StandIn:
    """Be the package: its own words, and machines of ours."""

    Sandbox = Sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)
