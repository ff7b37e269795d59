"""Programs and functions of tests that run in namespaces of another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class NamespaceCalls:
    """Run what tests need in namespaces; `command` and `environment` say how. Nodes have numbers."""

    folder: Path
    python = sys.executable
    first = 0
    stderr = ""

    def command(self, words: Sequence[str], number: int) -> list[str]:
        """Return the command that runs a program on a node."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return all variables of such a program."""
        raise NotImplementedError

    def run(self, words: Sequence[str], number: int | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program on a node to its end, and return what it printed."""
        settings: dict[str, Any] = {"env": self.environment(), "timeout": 200, "check": False, "cwd": ROOT} | options
        command = self.command(words, self.first if number is None else number)
        return subprocess.run(command, capture_output=True, text=True, **settings)  # noqa: PLW1510

    def call(
        self,
        function: Callable[..., Any],
        *values: Any,
        number: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Any:
        """Call a function of a module of tests on a node, with further variables; return its answer, which is JSON.

        Meanwhile it may ask for something to be done here: see `order`.
        """
        text = f"import json, sys; from {function.__module__} import {function.__name__} as function"
        text += "; print(json.dumps({'answer': function(*json.loads(sys.argv[1]))}))"
        words = [self.python, "-c", text, json.dumps(values)]
        command = self.command(words, self.first if number is None else number)
        with (self.folder / "stderr").open("w+") as stderr, subprocess.Popen(
            command, cwd=ROOT, env=self.environment() | dict(variables or {}), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            answer: dict[str, Any] = {}
            for line in process.stdout:
                answer = json.loads(line)
                if "do" in answer:
                    getattr(self, answer["do"])(*answer["with"])
                    print(file=process.stdin, flush=True)
            code = process.wait()
            stderr.seek(0)
            self.stderr = stderr.read()
        assert code == 0, self.stderr[-4000:]
        return answer["answer"]


def order(verb: str, *values: Any) -> None:
    """Have something done by the test that has called this process in a namespace; return when it is done."""
    print(json.dumps({"do": verb, "with": values}), flush=True)
    sys.stdin.readline()
