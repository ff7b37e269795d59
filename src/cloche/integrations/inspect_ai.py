"""Inspect AI: the sandbox environment `cloche`, for `Task(sandbox="cloche")` and `inspect eval --sandbox cloche`.

    Task(dataset=..., solver=..., scorer=..., sandbox=("cloche", "cloche.yaml"))

Needs `cloche[inspect]`; Inspect finds it by the entry point. Each sample has a sandbox, whose commands run side by
side. Its configuration is a file of Cloche's, as above, or keywords of `cloche.Sandbox` as a `ClocheConfig`:
`SandboxEnvironmentSpec("cloche", ClocheConfig(memory="1g"))`. Unless a configuration says otherwise, it has several
users (`users=True`) where this host has ids for them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import posixpath
from collections.abc import Mapping
from typing import Any, Literal, overload

from cloche.core.errors import BackendUnavailable, InvalidRequest, SandboxFileTooLarge
from cloche.core.result import Result, Status
from cloche.execution.sandbox import AsyncSandbox

from .environment import GONE, WORKING_DIR, Environment

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from inspect_ai.util._sandbox.environment import SandboxUnavailableError
    from pydantic import BaseModel, ConfigDict
except ImportError as error:
    raise BackendUnavailable(
        "The sandbox environment needs the package inspect-ai, 0.3.262 or later.",
        remedy='Install it with "pip install cloche[inspect]".',
    ) from error

log = logging.getLogger("cloche.inspect")
CANNOT_RUN, NO_TIME_LIMIT_S = 126, 366 * 24 * 3600


class ClocheConfig(BaseModel):
    """Hold the keywords of `cloche.Sandbox` for the sandboxes of a task."""

    model_config = ConfigDict(extra="allow", frozen=True)


@sandboxenv(name="cloche")
class ClocheSandboxEnvironment(SandboxEnvironment):
    """Be one sandbox of one sample."""

    def __init__(self, environment: Environment):
        super().__init__()
        self._environment = environment

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Open the sandbox of a sample."""
        return {"default": cls(await _open(config))}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Close what `sample_init` opened."""
        for environment in environments.values():
            await environment.as_type(cls)._environment.close()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log holds."""
        return ClocheConfig(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; a program that is missing ends with 127."""
        if user is not None and not await self._environment.use(_has_users):
            raise SandboxUserUnsupportedError(f"user: {user!r} cannot be had; this sandbox has one user")
        folder = posixpath.join(WORKING_DIR, cwd or "")
        try:
            result = await self._environment.use(
                lambda sandbox: sandbox.exec(
                    cmd, stdin=input or b"", cwd=folder, env=env, user=user, timeout=timeout or NO_TIME_LIMIT_S
                )
            )
        except InvalidRequest as error:
            if user is None or not str(error).startswith("user: "):
                raise
            return ExecResult(False, CANNOT_RUN, "", str(error))
        except GONE as error:
            raise SandboxUnavailableError(str(error)) from error
        _check(result, cmd)
        return ExecResult(result.exit_code == 0, result.exit_code, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with the folders above it."""
        await self._environment.use(lambda sandbox: sandbox.write_file(file, contents))

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return a file of at most the bytes that Inspect allows."""
        max_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self._environment.use(lambda sandbox: sandbox.read_file(file, max_bytes=max_bytes))
        except SandboxFileTooLarge as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        return data.decode("utf-8") if text else data


async def _open(config: SandboxEnvironmentConfigType | None) -> Environment:
    """Open a sandbox with its configuration; without a setting of users, it has several."""
    options: dict[str, Any] = {}
    if isinstance(config, str):
        return await _opened({"config": config})
    if config is not None:
        options = config.model_dump(exclude_unset=True)
    if options.get("users") is not None:
        return await _opened(options)
    try:
        return await _opened({**options, "users": True})
    except BackendUnavailable as error:
        log.info("a sandbox with one user: %s", error)
        return await _opened(options)


async def _opened(options: Mapping[str, Any]) -> Environment:
    environment = Environment(**options)
    await environment.use(_has_users)
    return environment


async def _has_users(sandbox: AsyncSandbox) -> bool:
    return sandbox.policy.users


def _check(result: Result, cmd: list[str]) -> None:
    """Raise what Inspect wants raised in place of a result."""
    if result.status is Status.TIMEOUT:
        raise TimeoutError(f"{cmd[0]}: the command was killed as it was over its time-out")
    max_bytes = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    is_over = max(len(result.stdout_bytes), len(result.stderr_bytes)) > max_bytes
    if is_over or result.truncated or result.status is Status.OUTPUT_LIMIT:
        text = result.stdout_bytes[:max_bytes].decode("utf-8", "replace")
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, text)
    if result.exit_code == CANNOT_RUN and "permission denied" in result.stderr.lower():
        raise PermissionError(result.stderr.strip())
