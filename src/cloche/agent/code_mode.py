"""Code mode: one tool for a model, which runs programs that call all the other tools.

A model that has ten tools needs a turn for each call, and reads each result. With one tool that runs a program, it
writes the calls, loops and filters itself, and reads what the program prints.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Unpack

from cloche.config.options import SandboxOptions
from cloche.core.errors import PolicyDenied
from cloche.core.limits import Limits
from cloche.execution.run import arun
from cloche.functions.tool import ToolLimits, read_tools, stubs

from .answers import python_text
from .approval import Approver

if TYPE_CHECKING:
    from cloche.execution.tools import ToolsArgument

_ABOUT = """Run a Python program in a sandbox, and return what it prints.

`code` is the whole program. It can call these functions, which run outside of the sandbox; there is no other way to
reach what they reach. Do all steps in one program where you can, and print only what you need to know.

"""


def code_mode(
    tools: ToolsArgument,
    *,
    tool_limits: ToolLimits | None = None,
    approve: Approver | None = None,
    **options: Unpack[SandboxOptions],
) -> Callable[[str], Coroutine[Any, Any, str]]:
    """Return an async function `run_program(code)`, whose docstring has the tools' stubs, as the one tool of a model.

    Every framework that takes functions as tools takes it. The text that it returns is that of `run_python_code`. The
    other keywords are those of `cloche.run`. Raises InvalidRequest for what is no tool.
    """
    bound = read_tools(tools, tool_limits)
    given: Any = bound  # which `arun` takes as it is

    async def run_program(code: str) -> str:
        try:
            result = await arun(code, tools=given, approve=approve, **options)
        except PolicyDenied as error:
            return f"Error (PolicyDenied): {error}"
        return python_text(result, Limits(**result.meta["limits"]))

    run_program.__doc__ = _ABOUT + stubs(bound)
    return run_program
