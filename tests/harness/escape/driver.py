"""Run code in a sandbox from a process of its own, for callers with a terminal and for neighbours that must be killed.

Argument: the keywords of `cloche.run` as JSON; with `cells`, those of `cloche.Sandbox`, and the cells are run in a
session of it or, with `is_fork`, in a fork; `sandbox` has those of a sandbox that the code is run in. Output: the
(last) result as one line of JSON or, with `stream`, the guest's own output as it comes.
"""

import json
import os
import sys
from typing import Any

import cloche


def main() -> None:
    """Run and report."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    if request.pop("stream", False):
        request["on_output"] = lambda _, data: os.write(1, data)
    cells, is_fork = request.pop("cells", ()), request.pop("is_fork", False)
    sandbox = request.pop("sandbox", None)
    if cells:
        result = run_cells(cells, request, is_fork=is_fork)
    elif sandbox is not None:
        result = run_in_sandbox(sandbox, request)
    else:
        result = cloche.run(**request)
    report = {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.exit_code}
    print(json.dumps({**report, "status": str(result.status), "seconds": result.duration}))


def run_in_sandbox(keywords: dict[str, Any], request: dict[str, Any]) -> cloche.Result:
    """Run in a sandbox with these keywords."""
    with cloche.Sandbox(**keywords) as sandbox:
        return sandbox.run(**request)


def run_cells(cells: list[str], keywords: dict[str, Any], *, is_fork: bool) -> cloche.Result:
    """Run cells one after the other, and return the last one's result."""
    with cloche.Sandbox(live=False, **keywords) as sandbox:
        session = sandbox.session()
        if is_fork:
            (session,) = session.fork(1)
        return [session.run(cell) for cell in cells][-1]


main()
