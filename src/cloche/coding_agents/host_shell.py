"""The commands of an agent that runs on the host: they run in a sandbox of the project, and both see one folder.

Theory of operation: the agent edits the host's files. A command runs in the project's sandbox, on a view of them.
Before it, the view shows the host's current files; after it, its harmless changes are written to them
(`AsyncSandbox.share`). What needs a decision stays in the sandbox, and the agent is told so by a sentence on standard
error, once. Commands of several processes share one after the other.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from cloche import hostfs
from cloche.core.changes import Change, Shared
from cloche.core.escape import escape, escape_name
from cloche.execution.registry import prefixes_for
from cloche.execution.sandbox import AsyncSandbox

from . import plan
from .launch import Launch, opened
from .places import AgentPlace, project_folder
from .row import CodingAgent

SHELL = CodingAgent(name="shell", title="The commands of agents on this host", program="bash")
# Programs that are shown inside if the user's PATH has them elsewhere than in the system's folders.
TOOLS = ("node", "npm", "pnpm", "yarn", "bun", "deno", "uv", "go", "cargo", "rustc", "java", "mvn", "ruby", "rg")
SYSTEM = ("/usr/", "/bin/", "/sbin/")  # which every sandbox shows
OPENING, SHARING, TOLD = "open.lock", "share.lock", "told"
MOST_NAMED, MOST_TOLD_BYTES = 10, 4096


def prepare(cwd: str, *, hosts: Sequence[str] = (), secrets: Sequence[str] = ()) -> Launch:
    """Decide how the sandbox for a folder's project is opened. Raises InvalidRequest."""
    place = AgentPlace(agent=SHELL.name, folder=project_folder(cwd))
    return Launch(
        row=SHELL, place=place, program=plan.Program(words=("bash",), toolchains=_toolchains()),
        options=plan.AgentOptions(hosts=tuple(hosts), secrets=tuple(secrets)), cwd=os.path.realpath(cwd),
        home=os.path.realpath(os.path.expanduser("~")),
    )  # fmt: skip


def _toolchains() -> tuple[str, ...]:
    """Return the folders of the user's tools that the sandbox does not show anyway."""
    paths = [path for tool in TOOLS if (path := shutil.which(tool)) and not path.startswith(SYSTEM)]
    return tuple(dict.fromkeys(prefix for path in paths for prefix in prefixes_for(path) if os.path.isdir(prefix)))


@asynccontextmanager
async def opened_once(launch: Launch, tell: Callable[[str], None]) -> AsyncIterator[AsyncSandbox]:
    """Open the project's sandbox, or attach to it: of commands that come at once, the first opens it."""
    os.makedirs(launch.place.state, mode=0o700, exist_ok=True)
    async with AsyncExitStack() as stack:
        lock = await asyncio.to_thread(_take_lock, launch.place.state, OPENING)
        try:
            sandbox = await stack.enter_async_context(opened(launch, tell))
        finally:
            os.close(lock)
        yield sandbox


@asynccontextmanager
async def sharing(sandbox: AsyncSandbox, place: AgentPlace) -> AsyncIterator[list[str]]:
    """Show the host's files inside, and after the block write the harmless changes.

    The list then has the sentences for the agent. Nothing is written if the block raises: the next command does it.
    """
    sentences = await _share(sandbox, place)
    yield sentences
    sentences += [sentence for sentence in await _share(sandbox, place) if sentence not in sentences]


async def _share(sandbox: AsyncSandbox, place: AgentPlace) -> list[str]:
    lock = await asyncio.to_thread(_take_lock, place.state, SHARING)
    try:
        shared = await sandbox.share()
        return await asyncio.to_thread(_news, place.state, list(sentences_about(shared, place.sandbox)))
    finally:
        os.close(lock)


def _take_lock(state: str, name: str) -> int:
    folder = hostfs.open_folder(state)
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    finally:
        os.close(folder)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _news(state: str, sentences: list[str]) -> list[str]:
    """Return the sentences that were not told last time."""
    digests = [hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for text in sentences]
    folder = hostfs.open_folder(state)
    try:
        told = _read(folder).decode("ascii", "replace").split()
        if told != digests:
            hostfs.replace(folder, TOLD, " ".join(digests).encode(), mode=0o600, permissions=0o600)
    finally:
        os.close(folder)
    return [text for text, digest in zip(sentences, digests, strict=True) if digest not in told]


def _read(folder: int) -> bytes:
    try:
        fd, _ = hostfs.open_regular(TOLD, folder)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        return file.read(MOST_TOLD_BYTES)


def sentences_about(shared: Shared, name: str) -> Iterator[str]:
    """Yield a sentence for each kind of change that was not written, for the model that ran the command."""
    if shared.held:
        yield (
            f"held in the sandbox and not written to the project, since these files run or steer programs on the host: "
            f"{_listed(shared.held)}. If the change is wanted, make it with your file tools, or ask the user to run: "
            f"cloche agent review {name}"
        )
    if shared.conflicts:
        yield (
            f"not written to the project, since the host has changed these files, too: {_listed(shared.conflicts)}. "
            f"Commands still see the sandbox's version; for the project's: cloche discard {name} PATH --yes"
        )
    left = {path: why for path, why in shared.left.items() if not path.startswith(".git/")}
    for path, why in list(left.items())[:MOST_NAMED]:
        yield f"not written to the project: {escape_name(path)}: {escape(why)}"
    if shared.ignored:
        paths = ", ".join(map(escape_name, shared.ignored[:MOST_NAMED]))
        yield f"git ignores these, so they are in the sandbox alone, where commands see them: {paths}"
    if shared.is_git_renewed:
        yield "the project's branch has moved on the host: git in the sandbox shows the project's repository again"
    for ref in shared.refs:
        yield f"commits made in the sandbox are {escape(ref)} in the project's repository; its branches are unchanged"


def _listed(changes: Sequence[Change]) -> str:
    rows = [
        escape_name(change.path) + (f" ({change.dangers[0]})" if change.dangers else "")
        for change in changes[:MOST_NAMED]
    ]
    return "; ".join(rows) + (f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else "")
