"""Contexts of a sandbox: interpreters with a language, a folder and an id, each a session of Cloche.

A context's interpreter starts with its first cell. It ends with this worker: then the id is unknown, and the default
context of a language begins anew.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping

from cloche.core.errors import ClocheError
from cloche.core.events import Sink
from cloche.core.record import dataclass, field
from cloche.core.result import Result
from cloche.wire.attachments import HeldSession
from cloche.wire.problems import Refused
from cloche.wire.uses import Use

from ..calls import Call
from ..errors import E2BError
from ..new_sandbox import environment_of

HOME = "/home/user"
ALIASES: Mapping[str, str] = {"": "python", "js": "javascript", "ts": "typescript"}
# The session's language of each language. JavaScript's session takes the types of TypeScript away.
SESSIONS: Mapping[str, str] = {
    "python": "python", "javascript": "javascript", "typescript": "javascript", "bash": "bash",
    "r": "r", "java": "java",
}  # fmt: skip
DEFAULTS = ("python", "javascript")


def language_of(name: str | None) -> str:
    """Return the language of a name or alias. Raises E2BError (400)."""
    text = (name or "").lower().strip()
    language = ALIASES.get(text, text)
    if language not in SESSIONS:
        raise E2BError(400, f"unknown language {text[:64]!r}; known languages: {', '.join(SESSIONS)}")
    return language


@dataclass(eq=False, slots=True, kw_only=True)
class Context:
    """Hold one context; `held` is its session once it has started."""

    id: str
    language: str
    cwd: str
    env: Mapping[str, str]
    held: HeldSession | None = None
    executions: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # cells run one after the other

    def as_dict(self) -> dict[str, str]:
        """Return the context as E2B describes it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    @property
    def _of_cells(self) -> Mapping[str, str]:
        """Return the variables that each cell gets anew: those of Python itself are for the programs that it starts."""
        is_own = self.language == "python"
        return {name: value for name, value in self.env.items() if is_own and name.startswith("PYTHON")}

    async def begin(self, use: Use) -> None:
        """Have an interpreter that runs. Raises E2BError, ClocheError."""
        if self.held is None:
            self.held = await self._open(use)
        elif not self.held.session.is_alive:
            await self.held.session.restart()
        else:
            return
        self.executions = 0
        await self._go_to_folder()

    async def _open(self, use: Use) -> HeldSession:
        try:
            with use.held.room():
                own = {name: value for name, value in self.env.items() if name not in self._of_cells}
                session = await use.sandbox.session(SESSIONS[self.language], env=own)
                return use.held.add_session(session, has_checkpoints=False)
        except Refused as error:
            if error.status_code != 429:
                raise
            raise E2BError(429, "the sandbox has as many contexts as it may have; remove one") from error

    async def _go_to_folder(self) -> None:
        assert self.held is not None  # noqa: S101 - called after it was opened
        result = await self.held.session.run("", cwd=self.cwd, notebook=True)
        if not result.ok and self.cwd != HOME:
            raise E2BError(500, "Failed to set working directory")

    async def run(self, code: str, env: Mapping[str, str] | None, sink: Sink) -> Result:
        """Run a cell in a context that has begun."""
        assert self.held is not None  # noqa: S101 - as above
        self.executions += bool(code.strip())
        if self.language == "typescript":
            code = f"/* typescript */{code}"
        return await self.held.session.run(code, env={**self._of_cells, **(env or {})}, notebook=True, on_event=sink)

    async def restart(self, use: Use) -> None:
        """Begin anew, without the variables; a cell that runs is ended."""
        if self.held is not None:
            await self.held.session.end()
            async with self.turn:
                await self.begin(use)

    async def close(self, use: Use) -> None:
        """End the interpreter for good."""
        if self.held is not None:
            use.held.sessions.pop(self.held.id, None)
            await self.held.session.close()


class Contexts:
    """Hold the contexts of one sandbox in this worker, in the order in which they were made."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._by_id: dict[str, Context] = {}
        self._defaults: dict[str, Context] = {}
        for language in DEFAULTS:
            self.default(language)

    def new(self, language: str, cwd: str) -> Context:
        """Add a context."""
        context = Context(id=str(uuid.uuid4()), language=language, cwd=cwd, env=self._env)
        self._by_id[context.id] = context
        return context

    def default(self, language: str) -> Context:
        """Return the default context of a language."""
        context = self._defaults.get(language)
        if context is None or context.id not in self._by_id:
            context = self._defaults[language] = self.new(language, HOME)
        return context

    def get(self, context_id: str) -> Context:
        """Return a context. Raises E2BError (404)."""
        context = self._by_id.get(context_id)
        if context is None:
            raise E2BError(404, f"Context {context_id[:64]} not found")
        return context

    async def create(self, use: Use, language: str, cwd: str) -> Context:
        """Add a context whose interpreter runs. Raises E2BError, ClocheError."""
        context = self.new(language, cwd)
        try:
            async with context.turn:
                await context.begin(use)
        except BaseException:
            self._by_id.pop(context.id, None)
            await context.close(use)
            raise
        return context

    async def remove(self, use: Use, context_id: str) -> None:
        """End a context and forget it."""
        context = self.get(context_id)
        del self._by_id[context.id]
        await context.close(use)

    def all(self) -> list[Context]:
        """Return all contexts, oldest first."""
        return list(self._by_id.values())


PART = "e2b.code"


async def contexts_of(call: Call, use: Use) -> Contexts:
    """Return the contexts of a sandbox in this worker."""
    if PART not in use.held.parts:
        facts = await call.facts_of_port()
        use.held.parts.setdefault(PART, Contexts(environment_of(facts)))
    contexts: Contexts = use.held.parts[PART]
    return contexts


def refusal(error: Exception) -> tuple[str, str]:
    """Return name and text of an error of Cloche, for a line."""
    if isinstance(error, E2BError):
        return "ContextError", error.message
    name = type(error).__name__ if isinstance(error, ClocheError | Refused) else "InternalError"
    return name, str(error) if name != "InternalError" else "the service failed; see its log"
