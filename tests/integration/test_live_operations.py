"""Every operation of init, beside the worst that a guest can make of processes, sockets and files."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cloche.backends.live import LiveSandbox
from cloche.backends.local import LocalBackend
from cloche.core.errors import ClocheError, InvalidRequest, SandboxFileError, StartFailed
from cloche.core.limits import MIB, Limits
from cloche.core.policy import Policy
from cloche.core.processes import ProcessRequest
from cloche.core.protocols import OpenProcess
from cloche.core.result import Status
from cloche.init import files, server
from tests.harness.programs import worst_tree

PROGRAM = Path(worst_tree.__file__).read_text()
PIDS, BESIDE = 800, 40  # processes of the sandbox; commands of its owner's that end at the same moment
# For an operation, and a command beside it, with so many times as long as a command takes on a calm sandbox here: what
# had no bound took minutes, or the sandbox was lost. An operation on files has the sandbox's own time-out, too.
BOUND_S, CALM, FILE_S = 10.0, 200, 20.0
WORST, ENDING = "/tmp/worst", ("pause", "stop", "end")


@dataclass
class Scene:
    """Hold a sandbox, and the process that makes the worst of it."""

    sandbox: LiveSandbox
    worst: OpenProcess
    bound_s: float = BOUND_S
    late: list[str] = field(default_factory=list)

    async def ask(self, op: str, **arguments: object) -> None:
        """Do what has no more than an answer."""
        await self.sandbox.ask(op, **arguments)

    async def command(self, *argv: str, timeout_s: float | None = None) -> Status | None:
        """Run a command; return None where the guest has left no room for it, which is said at once."""
        try:
            process = await self.sandbox.start_process(ProcessRequest(argv=argv, timeout_s=timeout_s))
        except StartFailed:
            return None
        try:
            return (await process.result()).status
        finally:
            await process.close()


async def control(scene: Scene) -> None:
    """Reach a process without its output."""
    process = await scene.sandbox.control_process({"id": scene.worst.id})
    process.signal(0)
    await process.close()


async def attach(scene: Scene) -> None:
    """Come back to a process that goes on."""
    process = await scene.sandbox.start_process(ProcessRequest(argv=("sleep", "1000"), kept=True))
    process.detach()
    found = await scene.sandbox.attach_process({"id": process.id})
    await scene.ask("output", id=process.id)
    await found.close()


async def kill(scene: Scene) -> None:
    """Have many commands end at the same moment by their time-outs, then all that the worst one has made."""
    commands = [scene.command("sleep", "1000", timeout_s=1.0) for _ in range(BESIDE)]
    assert {*await asyncio.gather(*commands)} - {None} == {Status.TIMEOUT}
    scene.worst.kill()
    assert (await scene.worst.result()).status is Status.SIGNALED


async def connect(scene: Scene) -> None:
    """Connect to a port where many may listen, and to one where nobody does."""
    for port in (1024, 65_000):
        with contextlib.suppress(ConnectionError):
            (await scene.sandbox.connect(port)).close()


async def pause(scene: Scene) -> None:
    """Have all stand still for a moment."""
    await scene.ask("pause")
    await scene.ask("resume")


async def refresh(scene: Scene) -> None:
    """Refresh the view of a folder, of which there is none here."""
    with contextlib.suppress(InvalidRequest):
        await scene.ask("refresh", at="/workspace", before_ns=0, paths=[], apart=[])


async def all_files(scene: Scene) -> None:
    """Do each operation on files."""
    for name, operation in FILES.items():
        await measure(scene, f"files: {name}", lambda scene, do=operation: do(scene.sandbox))  # type: ignore[misc]


async def collect(sandbox: LiveSandbox) -> None:
    """Look for what matches."""
    await sandbox.collect_files(["**/*9"], since=1, timeout_s=FILE_S, max_bytes=MIB)


async def drop(pieces: AsyncIterator[bytes]) -> None:
    """Read all of it."""
    async for _ in pieces:
        pass


async def watch(sandbox: LiveSandbox) -> None:
    """Begin to watch, and end."""
    async with sandbox.watch_path(WORST, recursive=True):
        pass


def archive() -> bytes:
    """Return one that is as deep as it is allowed, and wide."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number in range(5_000):
            tar.addfile(tarfile.TarInfo(f"{'d/' * 60}{number}"))
    return packed.getvalue()


FILES: dict[str, Callable[[LiveSandbox], Awaitable[object]]] = {
    "read": lambda sandbox: sandbox.read_path("/proc/self/maps", max_bytes=MIB),
    "write": lambda sandbox: sandbox.write_path(f"{WORST}/{'deep/' * 200}f", bytes(MIB)),
    "write_many": lambda sandbox: sandbox.write_paths([(f"{WORST}/many/{n}", b"1") for n in range(100)]),
    "stat": lambda sandbox: sandbox.stat_path(f"{WORST}/1"),
    "list": lambda sandbox: sandbox.list_path(WORST, recursive=True),
    "make_folder": lambda sandbox: sandbox.make_folder(f"{WORST}/{'more/' * 300}"),
    "chmod": lambda sandbox: sandbox.chmod_path(f"{WORST}/1", 0o600),
    "pack": lambda sandbox: sandbox.pack_path(WORST, lambda _: None),
    "collect": collect,
    "unpack": lambda sandbox: sandbox.unpack_path(f"{WORST}/unpacked", archive()),
    "watch": watch,
    "changes": lambda sandbox: drop(
        sandbox.changes_stream("/tmp", since=1, max_bytes=MIB, max_entries=10_000, note_answer=lambda _: None)
    ),
    "space": lambda sandbox: sandbox.disk_used(),
    "save": lambda sandbox: drop(
        sandbox.save_stream(max_bytes=64 * MIB, max_entries=10_000, note_answer=lambda _: None)
    ),
    "restore": lambda sandbox: sandbox.restore(archive(), max_entries=100),
    "compose": lambda sandbox: sandbox.compose_path(f"{WORST}/all", [f"{WORST}/{n}" for n in range(2000, 3000)]),
    "remove_all": lambda sandbox: sandbox.file("remove_all", WORST, paths=[str(n) for n in range(2000)]),
    "move": lambda sandbox: sandbox.move_path(WORST, "/dev/shm/worst"),
    "remove": lambda sandbox: sandbox.remove_path(WORST, recursive=True),
}
MEASURED: dict[str, Callable[[Scene], Awaitable[object]]] = {
    "start": lambda scene: asyncio.gather(*(scene.command("true") for _ in range(BESIDE))),
    "attach": attach,
    "control": control,
    "output": lambda scene: scene.ask("output", id=scene.worst.id),
    "processes": lambda scene: scene.sandbox.list_processes(),
    "usage": lambda scene: scene.ask("usage"),
    "ports": lambda scene: scene.sandbox.list_ports(),
    "connect": connect,
    "clock": lambda scene: scene.ask("clock"),
    "refresh": refresh,
    "limits": lambda scene: scene.ask("limits", ends_in_s=3600.0, idle_s=3600.0),
    "files": all_files,
    "pause": pause,
    "resume": lambda scene: scene.ask("resume"),
    "kill": kill,
    "stop": lambda scene: scene.ask("stop", grace_s=1.0),
    "end": lambda scene: scene.ask("end"),
}


def test_every_operation_is_measured() -> None:
    """Whoever adds one to init says in `MEASURED`, or `FILES`, how it is measured beside the worst of a guest."""
    assert {*MEASURED} == {*server.OPERATIONS}
    assert {*FILES} == {*files.OPERATIONS}


@pytest.mark.soak
@pytest.mark.both_users
@pytest.mark.parametrize("kind", [*worst_tree.KINDS])
def test_no_operation_holds_up_others(kind: str) -> None:
    """Each ends in time, whatever the guest has made, and a command that is started meanwhile does, too."""

    async def main() -> list[str]:
        limits = Limits(timeout_s=FILE_S, pids=PIDS, memory_bytes=2048 * MIB, disk_bytes=256 * MIB, inodes=100_000)
        async with LocalBackend().open_live(Policy(), limits) as sandbox:
            assert isinstance(sandbox, LiveSandbox)
            request = ProcessRequest(argv=("python3", "-c", PROGRAM, kind))
            scene = Scene(sandbox, await sandbox.start_process(request))
            began = time.monotonic()
            for _ in range(5):
                await scene.command("true")
            scene.bound_s += CALM * (time.monotonic() - began) / 5
            await scene.worst.write(b"\n")
            async for piece in scene.worst.stdout:
                if b"up" in piece:
                    break
            for name, operation in MEASURED.items():
                await measure(scene, name, operation)
            return scene.late

    assert not asyncio.run(main())


async def measure(scene: Scene, name: str, operation: Callable[[Scene], Awaitable[object]]) -> None:
    """Do one operation, while one command after the other is run, and note what was late."""
    doing, slowest = asyncio.ensure_future(operation(scene)), 0.0
    began = time.monotonic()
    while True:
        beside = time.monotonic()
        try:
            status = await scene.command("true")
        except ClocheError:  # nothing can be started after these: how late that is said is what is measured
            assert name in ENDING
        else:
            assert status in (Status.OK, None) or name in ENDING
        slowest = max(slowest, time.monotonic() - beside)
        if doing.done():
            break
    said = ""
    try:
        await doing
    except SandboxFileError as error:  # what is too much is said, in time
        said = f" ({error})"
    took = time.monotonic() - began
    print(f"{name}: {took:.2f} s, a command beside it {slowest:.2f} s{said}")
    bound_s = scene.bound_s + (FILE_S if name.startswith("files: ") else 0.0)
    if max(took, slowest) > bound_s and name != "files":  # which has many
        scene.late.append(f"{name}: {took:.1f} s, a command beside it {slowest:.1f} s")
