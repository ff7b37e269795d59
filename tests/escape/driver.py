"""Run code in a sandbox from a process of its own, for callers with a terminal and for neighbours that must be killed.

Argument: the keywords of `cloche.run` as JSON. Output: the result as one line of JSON or, with `stream`, the guest's
own output as it comes.
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
    result = cloche.run(**request)
    report = {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.exit_code}
    print(json.dumps({**report, "status": str(result.status), "seconds": result.duration}))


main()
