"""The tool that is a plain function of the package: for agents whose tools are functions (R6)."""

from __future__ import annotations

from math import inf

from cloche.core.errors import PolicyDenied
from cloche.core.limits import Limits, parse_duration
from cloche.sync_run import run

from .answers import python_text


def run_python_code(code: str, timeout: float = 30) -> str:
    """Run a Python program in the sandbox that the settings choose, and return its output, as text for a model.

    `code` is the whole program; each call runs in a new throwaway sandbox. `timeout` is in seconds of wall clock;
    SANDBOX_TIMEOUT_SEC and the operator's ceilings go before it. Backend, limits and policy are those of the
    configuration and the environment (SANDBOX_TYPE), as for `cloche.run`.

    With exit code 0 the text is standard output. Else it is `Error (exit_code=N): ` and standard error, then the cause
    and the next step; the exit code is -1 after a time-out and 128+n after signal n. Either stream is cut to 8,000
    characters, head and tail. Code that the policy refuses is not run: the text is `Error (PolicyDenied): ` and the
    reason. A function call is no tool call of a `Toolbox`: it needs no approval.

    Raises InvalidRequest for a wrong argument or setting, BackendUnavailable and StartFailed where there is no sandbox:
    no other program would mend that.
    """
    asked_s = parse_duration(timeout, name="timeout")
    try:
        result = run(code, timeout=asked_s)
    except PolicyDenied as error:
        return f"Error (PolicyDenied): {error}"
    limits = Limits(**result.meta["limits"])
    is_cut = limits.timeout_s < asked_s  # then more time cannot be had by asking for it
    return python_text(result, limits, most_s=limits.timeout_s if is_cut else inf)
