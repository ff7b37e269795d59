"""Cloche runs code that a language model wrote, so that it cannot hurt the machine it runs on.

In: code or a command, and keywords that say how it is confined. Out: a `Result`, even for code that failed or was
killed; an exception only if Cloche itself failed. The layers, lowest first; each imports only from the layers before
it, and each folder's `__init__.py` describes its content:

- `core`: values and rules. `hostfs.py`: host files by descriptor.
- `functions`: functions of the caller that a program may call.
- `jail`: the native sandbox of the kernel. `interpreter`: runs the guest's code inside a sandbox. `forkserver`: warm
  starts.
- `backends`: local, docker, gvisor, microvm, microsandbox, and their shared modules.
- `config`: settings. `audit`: log and redaction. `blocking`: asyncio for blocking callers.
- `execution`: from keywords to a run. `sync_run.py`, `sync_batch.py`, `sync.py`: the blocking API.
- `agent`: tools and approvals.
- `skills`, `autofix`; then the front ends `cli`, `mcp`, `bench`, `integrations`. `testing`: for authors of backends.

Every name below is imported when it is first used, so that `import cloche` costs next to nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent.functions import run_python_code
    from .core.enforcement import Level
    from .core.errors import (
        ApprovalDenied,
        BackendUnavailable,
        ClocheError,
        InternalError,
        InvalidRequest,
        OutcomeUnknown,
        PolicyDenied,
        SandboxFileError,
        StartFailed,
    )
    from .core.limits import Limits
    from .core.policy import placement
    from .core.protocols import CodeSandbox
    from .core.result import ExecutionResult, Result, Status
    from .core.secrets import Secret
    from .execution.batch import amap
    from .execution.grading import acheck
    from .execution.run import arun
    from .execution.sandbox import AsyncSandbox
    from .functions.tool import Tool
    from .sync import DockerSandbox, E2BSandbox, LocalSandbox, Sandbox, check, get_sandbox
    from .sync_batch import map  # noqa: A004 - the public name
    from .sync_run import run

__version__ = "0.1.0"

_HOMES = {
    "run": "sync_run",
    "arun": "execution.run",
    "map": "sync_batch",
    "amap": "execution.batch",
    "check": "sync",
    "acheck": "execution.grading",
    "get_sandbox": "sync",
    "Sandbox": "sync",
    "AsyncSandbox": "execution.sandbox",
    "CodeSandbox": "core.protocols",
    "LocalSandbox": "sync",
    "DockerSandbox": "sync",
    "E2BSandbox": "sync",
    "Result": "core.result",
    "ExecutionResult": "core.result",
    "Status": "core.result",
    "Limits": "core.limits",
    "Secret": "core.secrets",
    "Level": "core.enforcement",
    "ClocheError": "core.errors",
    "InvalidRequest": "core.errors",
    "PolicyDenied": "core.errors",
    "ApprovalDenied": "core.errors",
    "BackendUnavailable": "core.errors",
    "StartFailed": "core.errors",
    "OutcomeUnknown": "core.errors",
    "InternalError": "core.errors",
    "SandboxFileError": "core.errors",
    "Tool": "functions.tool",
    "placement": "core.policy",
    "run_python_code": "agent.functions",
}

__all__ = [
    "ApprovalDenied",
    "AsyncSandbox",
    "BackendUnavailable",
    "ClocheError",
    "CodeSandbox",
    "DockerSandbox",
    "E2BSandbox",
    "ExecutionResult",
    "InternalError",
    "InvalidRequest",
    "Level",
    "Limits",
    "LocalSandbox",
    "OutcomeUnknown",
    "PolicyDenied",
    "Result",
    "Sandbox",
    "SandboxFileError",
    "Secret",
    "StartFailed",
    "Status",
    "Tool",
    "__version__",
    "acheck",
    "amap",
    "arun",
    "check",
    "get_sandbox",
    "map",
    "placement",
    "run",
    "run_python_code",
]


def __getattr__(name: str) -> object:
    """Import the home of a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if sys.platform == "win32" and not _HOMES[name].startswith("core."):
        from .core.other_systems import refuse_on_windows

        return refuse_on_windows
    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
