"""Builds of templates: the steps of E2B's builder, done in a new sandbox whose files are saved at the end.

Theory of operation: each step continues a chain of hashes that begins with the template below. A ready build whose
whole chain is the beginning of this one is where this one begins; so the same steps are not done twice, and steps that
were added are done on top. A step with `force`, and all after it, are done again. The archive is written before the
start command runs, for its traces are not to be in new sandboxes; that it starts and becomes ready is tried all the
same. A build that fails changes no tag, so the version before stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from cloche.core.record import dataclass, replace
from cloche.execution.sandbox import AsyncSandbox
from cloche.records import templates as records
from cloche.records.ids import moment
from cloche.records.templates import BuildFacts
from cloche.wire.callers import Caller
from cloche.wire.held import Terms

from ..sandboxes import BUILD_LABEL
from .build_files import uploaded
from .build_steps import StepContext, StepFailed, do_step
from .calls import E2B, Call, E2BModel
from .errors import E2BError, as_e2b
from .network import network_options
from .new_sandbox import NewSandbox
from .start_commands import start_and_wait
from .templates import Template, find_template, of_build, of_own, own_templates

BUILD_S, READY_S = 1_800.0, 300.0
AT_ONCE, MOST_WAITING, MOST_OF_KEY = 2, 32, 24
MOST_STEPS, MOST_ENTRIES, MOST_KEPT_ENTRIES = 500, 10_000, 1_000
MOST_MESSAGE = 4_096  # characters of one entry of the log
BASE, FINALIZE = "base", "finalize"  # names of steps beside the numbers, which begin at 1
USER, WORKDIR = "user", "/home/user"


class Step(E2BModel):
    """One instruction."""

    type: Literal["COPY", "ENV", "RUN", "WORKDIR", "USER"]
    args: Annotated[list[str], Field(max_length=1_000)] = Field(default_factory=list)
    force: bool | None = None
    files_hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    force_upload: bool | None = None
    resolve_symlinks: bool | None = None
    gzip: bool | None = None


class BuildOrder(E2BModel):
    """What to build: what it begins with, and the steps."""

    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool | None = None
    steps: Annotated[list[Step], Field(max_length=MOST_STEPS)] = Field(default_factory=list)
    start_cmd: str | None = None
    ready_cmd: str | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Build:
    """Hold a build of this worker: its log, and its task."""

    id: str
    template_id: str
    entries: list[dict[str, Any]]
    key: str | None = None  # of its caller
    status: str = records.WAITING
    reason: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None

    def log(self, message: str, level: str = "info", step: str | None = None) -> None:
        """Add an entry; the last one of a full log says so."""
        if len(self.entries) >= MOST_ENTRIES:
            return
        if len(self.entries) == MOST_ENTRIES - 1:
            message, level = "the log is full; further lines are left out", "warn"
        entry = {"timestamp": moment(time.time()), "level": level, "message": message[:MOST_MESSAGE]}
        self.entries.append(entry | ({"step": step} if step is not None else {}))

    def kept_log(self) -> dict[str, Any]:
        """Return the end of the log for the row, and the number of its first entry."""
        return {"logs": self.entries[-MOST_KEPT_ENTRIES:], "logsFrom": max(0, len(self.entries) - MOST_KEPT_ENTRIES)}


class Builds:
    """Hold the builds of this worker. Two run at once; others wait."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.running: dict[str, Build] = {}

    def cancel(self, template_id: str) -> None:
        """Cancel the builds of a template."""
        for build in list(self.running.values()):
            if build.template_id == template_id and build.task is not None:
                build.task.cancel()


def builds_in(e2b: E2B) -> Builds:
    """Return the builds of this worker."""
    builds: Builds = e2b.parts.setdefault("builds", Builds())
    return builds


def begin(call: Call, caller: Caller, facts: BuildFacts, order: BuildOrder) -> None:
    """Begin a build in the background. Raises E2BError (409, 429)."""
    builds = builds_in(call.e2b)
    if facts.status != records.WAITING or facts.id in builds.running:
        raise E2BError(409, f"build {facts.id} was started already; ask for another one")
    own = sum(build.key == caller.key_id for build in builds.running.values())
    if len(builds.running) >= MOST_WAITING or own >= MOST_OF_KEY:
        most = f"{MOST_WAITING} builds, or {MOST_OF_KEY} of one key, are the most that may wait"
        raise E2BError(429, most, headers={"Retry-After": "10"})
    build = builds.running[facts.id] = Build(id=facts.id, template_id=facts.template_id, entries=[], key=caller.key_id)
    call.service.in_background(_run(call, caller, facts, order, build))


async def _run(call: Call, caller: Caller, facts: BuildFacts, order: BuildOrder, build: Build) -> None:
    """Do a build, and record how it ended."""
    build.task = asyncio.current_task()
    building = _Building(call=call, caller=caller, facts=facts, order=order, build=build)
    try:
        async with builds_in(call.e2b).turns:
            await _note(call, build, records.BUILDING)
            try:
                async with asyncio.timeout(BUILD_S):
                    await building.do()
            except TimeoutError:
                raise StepFailed(f"the build took more than {BUILD_S:g} s") from None
        build.status = records.READY
    except asyncio.CancelledError:
        await asyncio.shield(_fail(call, build, "the build was cancelled", building.step))
        raise
    except Exception as error:
        message = str(error) if isinstance(error, StepFailed) else as_e2b(error).message
        await _fail(call, build, message, building.step)
    finally:
        builds_in(call.e2b).running.pop(build.id, None)


async def _note(call: Call, build: Build, status: str, **more: Any) -> None:  # noqa: ANN401 - JSON
    build.status = status
    await call.service.templates.write(partial(records.note_build, build_id=build.id, status=status, **more))


async def _fail(call: Call, build: Build, message: str, step: str) -> None:
    build.log(message, "error", step)
    last = [entry for entry in build.entries if entry.get("step") == step][-20:]
    reason = {"message": message[:MOST_MESSAGE], "step": step, "logEntries": last}
    await _note(call, build, records.ERROR, reason=reason, **build.kept_log())
    await call.service.templates.remove_archives([build.id])
    build.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class _Building:
    """Do one build. `step` is what is being done."""

    call: Call
    caller: Caller
    facts: BuildFacts
    order: BuildOrder
    build: Build
    step: str = BASE

    async def do(self) -> None:
        """Do the steps in a new sandbox, and save its files. Raises StepFailed, E2BError, ClocheError."""
        base = await self._base()
        chain = chain_of(base, self.order)
        begins, done = await self._cached(base, chain)
        self._log_done(done)
        context = StepContext(
            user=begins.user or USER, workdir=begins.workdir or WORKDIR, env=dict(begins.env),
            log=self._log, files=partial(uploaded, self.call, self.caller, self.facts.template_id),
        )  # fmt: skip
        async with self._sandbox(begins) as sandbox:
            for index, step in enumerate(self.order.steps[done:], done + 1):
                self.step = str(index)
                self._log(f"[builder {index}/{len(self.order.steps)}] {step.type} {' '.join(step.args)}")
                await do_step(sandbox, step.type, step.args, step.files_hash, context)
            await self._finish(sandbox, base, context, chain)

    def _log(self, message: str, level: str = "info") -> None:
        for line in message.splitlines() or [""]:
            self.build.log(line, level, self.step)

    def _log_done(self, done: int) -> None:
        for index, step in enumerate(self.order.steps[:done], 1):
            self.step = str(index)
            self._log(f"CACHED [builder {index}/{len(self.order.steps)}] {step.type} {' '.join(step.args)}")

    async def _base(self) -> Template:
        """Return what the build begins with. Raises E2BError."""
        order = self.order
        self._log(f"[base] FROM {order.from_image or order.from_template}")
        if order.from_image_registry is not None:
            raise E2BError(501, "fromImageRegistry: no image is pulled here, so there is no use for its credentials")
        if (order.from_image is None) == (order.from_template is None):
            raise E2BError(400, "give fromImage or fromTemplate")
        if order.from_template is not None:
            return await find_template(self.call, self.caller, order.from_template)
        own = await asyncio.to_thread(own_templates(self.call.e2b).of_image, order.from_image or "")
        return await of_own(self.call, own)

    async def _cached(self, base: Template, chain: Sequence[str]) -> tuple[Template, int]:
        """Return what the build may begin with instead, and how many steps that has behind it."""
        if self.order.force:
            return base, 0
        forced = next((index for index, step in enumerate(self.order.steps) if step.force), len(self.order.steps))
        steps = {link: index for index, link in enumerate(chain[1 : forced + 1], 1)}
        ready = await self.call.service.templates.read(partial(records.ready_builds, project=self.caller.project))
        own = [build for build in ready if build.document.get("owner") == self.caller.key_id]
        known = [build for build in own if build.document.get("chain") in steps]
        if not known:
            return base, 0
        best = max(known, key=lambda build: steps[build.document["chain"]])
        template = await self.call.service.templates.read(partial(records.find_any, template_id=best.template_id))
        if template is None:
            return base, 0
        found = await of_build(self.call, template, best)
        return replace(found, start=base.start, ready=base.ready), steps[best.document["chain"]]

    def _sandbox(self, begins: Template) -> _Sandbox:
        size = self.facts.document.get("size", {})
        return _Sandbox(call=self.call, caller=self.caller, template=begins, build_id=self.build.id, size=size)

    async def _finish(self, sandbox: AsyncSandbox, base: Template, context: StepContext, chain: Sequence[str]) -> None:
        """Save the files, and try the start command in this sandbox, which ends then."""
        self.step = FINALIZE
        start, ready = self.order.start_cmd, self.order.ready_cmd
        if start is None and ready is None:
            start, ready = base.start, base.ready
        result = Template(
            id="", env=context.env, workdir=context.workdir, user=context.user, start=start, ready=ready, base=base.base
        )
        self._log("[finalize] saving the files")
        templates = self.call.service.templates
        size = await templates.write_archive(sandbox, self.facts, project=self.caller.project)
        if start is not None or ready is not None:
            self._log(f"[start] {start or ''}; ready: {ready or ''}")
            await start_and_wait(sandbox, result, context.env, ready_s=READY_S)
        self._log("the build is ready")
        document = {key: value for key, value in result.as_build().items() if key != "size"}
        await templates.make_ready(
            self.facts, archive_bytes=size, **document, chain=chain[-1], owner=self.caller.key_id,
            **self.build.kept_log(),
        )  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False)
class _Sandbox:
    """Open the sandbox of a build, which E2B's lists do not have; it ends with the body."""

    call: Call
    caller: Caller
    template: Template
    build_id: str
    size: Mapping[str, Any]
    sandbox_id: str = ""
    holding: Any = None

    async def __aenter__(self) -> AsyncSandbox:
        asked = NewSandbox(template_id=self.template.id)
        options = {**self.template.options, **self.size}
        options |= await network_options(self.call, self.caller, asked)
        document = {
            "name": None, "labels": {BUILD_LABEL: self.build_id}, "lifetime": BUILD_S, "idle": None, "lease": None,
        }  # fmt: skip
        facts = await self.call.service.sandboxes.create(
            project=self.caller.project, api_key=self.caller.key_id, terms=Terms(lifetime_s=BUILD_S),
            document=document, options=options, files=None,
        )  # fmt: skip
        self.sandbox_id = facts.id
        self.holding = self.call.service.sandboxes.held(facts.id, self.caller.project)
        sandbox: AsyncSandbox = (await self.holding.__aenter__()).sandbox
        return sandbox

    async def __aexit__(self, *raised: object) -> None:
        await self.holding.__aexit__(*raised)
        ending = self.call.service.sandboxes.end(self.sandbox_id, self.caller.project, why="the build has ended")
        await asyncio.shield(ending)


def chain_of(base: Template, order: BuildOrder) -> list[str]:
    """Return the hashes of a build before its first step and after each. Pure."""
    below = {key: value for key, value in base.options.items() if key != "snapshot"}
    link = hashlib.sha256(json.dumps([base.base, base.chain or base.id, below], default=str).encode()).hexdigest()
    chain = [link]
    for step in order.steps:
        link = hashlib.sha256(json.dumps([link, step.type, step.args, step.files_hash]).encode()).hexdigest()
        chain.append(link)
    return chain
