"""Code mode: one tool for a model, which runs programs that call all the other tools.

A model that has ten tools needs a turn for each call, and reads each result. With one tool that runs a program, it
writes the calls, loops and filters itself, and reads what the program prints.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from cloche.config.options import SandboxOptions
from cloche.core.errors import PolicyDenied
from cloche.core.limits import Limits
from cloche.execution.run import arun
from cloche.execution.secrets import read_with_settings
from cloche.functions.tool import ToolLimits, read_tools, stubs

from .answers import python_text
from .approval import Approver
from .catalog import text_of_secrets

if TYPE_CHECKING:
    from cloche.execution.tools import ToolsArgument

_ABOUT = """Run a Python program in a sandbox, and return what it prints.

`code` is the whole program. It can call these functions, which run outside of the sandbox; there is no other way to
reach what they reach. Do all steps in one program where you can, and print only what you need to know."""


def code_mode(
    tools: ToolsArgument,
    *,
    tool_limits: ToolLimits | None = None,
    approve: Approver | None = None,
    **options: Unpack[SandboxOptions],
) -> Callable[[str], Coroutine[Any, Any, str]]:
    """Return an async function `run_program(code)`, whose docstring has the tools' stubs, as the one tool of a model.

    Every framework that takes functions as tools takes it. The text that it returns is that of `run_python_code`. The
    other keywords are those of `cloche.run`; the docstring has the variables of `secrets`, too. Raises InvalidRequest
    for what is no tool.
    """
    bound = read_tools(tools, tool_limits)
    given: Any = bound  # which `arun` takes as it is

    async def run_program(code: str) -> str:
        try:
            result = await arun(code, tools=given, approve=approve, **options)
        except PolicyDenied as error:
            return f"Error (PolicyDenied): {error}"
        return python_text(result, Limits(**result.meta["limits"]))

    told = text_of_secrets(_hosts_of_secrets(options))
    run_program.__doc__ = "\n\n".join(filter(None, (_ABOUT, told, stubs(bound))))
    return run_program


def _hosts_of_secrets(options: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    if not options.get("secrets"):
        return {}
    named = {name: value for name, value in options.items() if name != "backend" or isinstance(value, str)}
    return read_with_settings(named, getattr(options.get("backend"), "name", None))[0].hosts_by_name
