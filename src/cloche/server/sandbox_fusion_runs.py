"""Run the programs and cells of SandboxFusion's callers: at once in a fresh sandbox, or in steps in one.

A program that is not compiled, and of which no file is fetched, is one run of `arun`. For all others a sandbox is
opened: the compiler and the program are commands in it, each with its own time-out, and files are read at the end.
"""

from __future__ import annotations

import asyncio
import base64
import posixpath
import time
from collections.abc import Mapping
from typing import Any

from cloche.config.options import SandboxOptions
from cloche.core.errors import InvalidRequest, LanguageUnavailable, SandboxFileError, SandboxFileTooLarge
from cloche.core.languages import Engine, Language, render, render_env, render_generated
from cloche.core.record import replace
from cloche.core.result import Result, Status, output_as_dict
from cloche.execution.registry import engine_here
from cloche.execution.run import arun
from cloche.execution.sandbox import AsyncSandbox, AsyncSession
from cloche.wire.exec_options import decoded

from .sandbox_fusion import (
    MOST_FETCHED,
    MOST_OUTPUT,
    CodeRequest,
    FusionAnswer,
    FusionRequest,
    JupyterRequest,
    cell_size,
    is_compiled,
)

BUILD = ".cloche-build"  # in the workspace
TRACEBACK = "Traceback (most recent call last):"  # CPython's
FETCH_S = 10.0  # for all files of an answer


async def input_files(request: FusionRequest) -> dict[str, bytes]:
    """Return the files of a request by path, decoded in a thread. Raises InvalidRequest."""
    given = {path: text for path, text in request.files.items() if text is not None}
    if not given:
        return {}
    return await asyncio.to_thread(lambda: {path: decoded(text, f"files: {path}") for path, text in given.items()})


async def run_code(
    request: CodeRequest, language: Language, files: Mapping[str, bytes], options: SandboxOptions,
    seconds: Mapping[str, float],
) -> FusionAnswer:  # fmt: skip
    """Run a program, after compiling it where its language needs that. Raises ClocheError; then nothing ran."""
    options = {**options, "timeout": seconds["run_timeout"]}
    if not (is_compiled(language) or request.fetch_files):
        result = await arun(
            request.code, language=language.name, stdin=request.stdin or "", files=files or None, **options
        )
        return FusionAnswer(ran=result)
    async with _opened(files, options) as sandbox:
        if is_compiled(language):
            answer = await _compile_and_run(sandbox, request, language, seconds)
        else:
            ran = await sandbox.run(request.code, language=language.name, stdin=request.stdin or "")
            answer = FusionAnswer(ran=ran)
        await _fetch(sandbox, request.fetch_files, answer)
    return answer


def _opened(files: Mapping[str, bytes], options: SandboxOptions) -> AsyncSandbox:
    return AsyncSandbox(files=dict(files) or None, **options)


async def _compile_and_run(
    sandbox: AsyncSandbox, request: CodeRequest, language: Language, seconds: Mapping[str, float]
) -> FusionAnswer:
    engine, programs, variables = await _toolchain(sandbox, language)
    workspace = (await sandbox.run(argv=["pwd"])).stdout.strip()
    build, name = posixpath.join(workspace, BUILD), "cloche-code" + language.suffixes[0]
    source = posixpath.join(workspace, name)
    await sandbox.write_file(name, request.code)
    for path, text in {posixpath.join(build, "empty"): "", **render_generated(engine, source, build)}.items():
        await sandbox.write_file(posixpath.relpath(path, workspace), text)
    *compiling, running = render(engine, programs, source, build)
    env = {**render_env(engine, source, build), **variables}
    answer = FusionAnswer()
    for command in compiling:
        answer.compiled = await sandbox.run(argv=command, env=env, timeout=seconds["compile_timeout"])
        if not answer.compiled.ok:
            return answer
    answer.ran = await sandbox.run(argv=running, env=env, stdin=request.stdin or "", timeout=seconds["run_timeout"])
    return answer


async def _toolchain(sandbox: AsyncSandbox, language: Language) -> tuple[Engine, Mapping[str, str], Mapping[str, str]]:
    """Return the engine, its programs and its variables. Raises LanguageUnavailable."""
    if sandbox.backend == "local":
        return await asyncio.to_thread(engine_here, language)
    engine = next(engine for engine in language.engines if engine.name == language.image_engine)
    looked = await sandbox.run(argv=["sh", "-c", 'for p; do command -v "$p" || exit 1; done', "sh", *engine.programs])
    if not looked.ok:
        raise LanguageUnavailable(f"{language.name} cannot run here: there is no {', '.join(engine.programs)}")
    return engine, {}, {}


async def _fetch(sandbox: AsyncSandbox, paths: list[str], answer: FusionAnswer) -> None:
    """Add the files that a program left. Files that are missing, refused or beyond the bounds are left out."""
    ends, left = time.monotonic() + FETCH_S, MOST_FETCHED
    for path in dict.fromkeys(paths):
        try:
            data = await sandbox.read_file(path, max_bytes=max(1, left), timeout=max(0.1, ends - time.monotonic()))
        except (SandboxFileTooLarge, InvalidRequest) as error:
            answer.notes.append(f"fetch_files: {error}")
            continue
        except SandboxFileError:  # not a file
            continue
        left -= len(data)
        answer.files[path] = await asyncio.to_thread(lambda content: base64.b64encode(content).decode(), data)


async def run_cells(
    request: JupyterRequest, files: Mapping[str, bytes], options: SandboxOptions, total_s: float
) -> FusionAnswer:
    """Run cells in one interpreter until one is late or the output is too much. Raises ClocheError; nothing ran."""
    begun = time.monotonic()
    async with _opened(files, {**options, "timeout": total_s}) as sandbox:
        session = await sandbox.session()
        answer = FusionAnswer(cells=[])
        await _run_each(session, request, total_s, answer)
        is_early = len(answer.cells or ()) < len(request.cells) or not session.is_alive
        answer.ran = _driver(answer.ran, time.monotonic() - begun, is_early=is_early)
        await _fetch(sandbox, request.fetch_files, answer)
    return answer


async def _run_each(session: AsyncSession, request: JupyterRequest, total_s: float, answer: FusionAnswer) -> None:
    ends, kept = time.monotonic() + total_s, 0
    for cell in request.cells:
        left_s = max(0.001, ends - time.monotonic())
        limit_s = min(left_s, request.cell_timeout) if request.cell_timeout else left_s
        try:
            answer.ran = await session.run(cell, timeout=limit_s)
        except InvalidRequest as error:  # the interpreter has ended
            answer.notes.append(str(error))
            break
        shown = cell_answer(answer.ran)
        assert answer.cells is not None  # noqa: S101 - the caller's
        answer.cells.append(shown)
        kept += cell_size(shown)
        if answer.ran.status is Status.TIMEOUT:
            break
        if kept > MOST_OUTPUT:
            answer.notes.append(f"the cells wrote more than {MOST_OUTPUT} bytes; later ones did not run")
            break


def cell_answer(result: Result) -> dict[str, Any]:
    """Return a cell's result in their words; the traceback is a part of the error, and not of the stream."""
    error, errors, stderr = result.meta.get("error"), [], result.stderr
    if error:
        stderr, mark, trace = result.stderr.partition(TRACEBACK)
        name, message = str(error.get("name", "")), str(error.get("message", ""))
        errors = [{"ename": name, "evalue": message, "traceback": (mark + trace).splitlines()}]
    display = [output_as_dict(output)["data"] for output in result.outputs]
    return {"stdout": result.stdout, "stderr": stderr, "display": display, "error": errors}


def _driver(last: Result | None, duration_s: float, *, is_early: bool) -> Result:
    """Return the result of all cells: late if the last one was, failed if they ended early, else ended with 0."""
    if last is None:
        return Result("", "", 0, duration_s)
    is_failed = is_early or last.status is Status.TIMEOUT
    return replace(
        last, stdout="", stderr="", stdout_bytes=b"", stderr_bytes=b"", duration=duration_s, outputs=(), files=(),
        exit_code=last.exit_code or 1 if is_failed else 0,
        status=Status.TIMEOUT if last.status is Status.TIMEOUT else Status.ERROR if is_failed else Status.OK,
    )  # fmt: skip
