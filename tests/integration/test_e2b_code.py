"""E2B's code interpreter: contexts and cells over HTTP, as its SDKs call them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.harness import e2b

TEXT = {"stdout", "stderr"}


@dataclass
class Interpreter:
    """Hold a sandbox of a service, and speak to its code interpreter."""

    service: e2b.E2BService
    sandbox_id: str
    token: str

    def client(self, **headers: str) -> httpx.Client:
        """Return a client of the interpreter's port."""
        return self.service.http(**{"E2b-Sandbox-Id": self.sandbox_id, "E2b-Sandbox-Port": "49999", **headers})

    def run(self, code: str, **fields: object) -> list[dict[str, Any]]:
        """Run a cell; return its lines without those that keep the connection."""
        with self.client(**{"X-Access-Token": self.token}) as client:
            answer = client.post("/execute", json={"code": code, **fields})
            assert answer.status_code == 200, answer.text
            lines = [json.loads(line) for line in answer.text.splitlines()]
            assert lines[-1] == {"type": "end_of_execution"}
            return [line for line in lines[:-1] if line["type"] != "keepalive"]

    def text(self, code: str, **fields: object) -> str | None:
        """Return the text of a cell's value."""
        return next((line["text"] for line in self.run(code, **fields) if line.get("is_main_result")), None)

    def error(self, code: str, **fields: object) -> dict[str, Any]:
        """Return the error that a cell ends with."""
        return next(line for line in self.run(code, **fields) if line["type"] == "error")


def create(running: e2b.E2BService, **fields: object) -> Interpreter:
    """Create a sandbox."""
    with running.http(**{"X-API-KEY": running.key}) as client:
        body = {"templateID": "code-interpreter-v1", "timeout": 300, **fields}
        answer = client.post("/v2/sandboxes", json=body)
        assert answer.status_code == 201, answer.text
        made = answer.json()
    return Interpreter(service=running, sandbox_id=made["sandboxID"], token=made["envdAccessToken"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[e2b.E2BService]:
    """Serve for this module's tests."""
    with e2b.serving(tmp_path_factory.mktemp("e2b-code")) as running:
        yield running


@pytest.fixture(scope="module")
def interpreter(running: e2b.E2BService) -> Interpreter:
    """Create the sandbox that most tests use."""
    return create(running, envVars={"GIVEN": "at create"})


def test_a_cell_has_its_number_output_displays_and_value_in_order(interpreter: Interpreter) -> None:
    """Lines are the number, then text, displays and the value as they come, with E2B's names of formats."""
    context = interpreter_context(interpreter)
    assert interpreter.text("import os; os.environ['E2B_SANDBOX_ID']", context_id=context) == interpreter.sandbox_id
    code = "import sys\nprint('é')\nsys.stderr.write('w')\ndisplay({'text/html': '<b>'}, raw=True)\n{'a': [1]}"
    number, *texts, shown, value = interpreter.run(code, context_id=context)
    assert number == {"type": "number_of_executions", "execution_count": 2}
    assert {line["type"]: line["text"] for line in texts} == {"stdout": "é\n", "stderr": "w"}
    assert shown == {"type": "result", "is_main_result": False, "extra": {}, "html": "<b>"}
    assert value == {
        "type": "result", "is_main_result": True, "extra": {}, "text": "{'a': [1]}", "json": {"a": [1]},
    }  # fmt: skip
    assert interpreter.run("'text'", context_id=context)[0]["execution_count"] == 3


def interpreter_context(interpreter: Interpreter, **fields: object) -> str:
    """Make a context, and return its id."""
    with interpreter.client() as client:
        answer = client.post("/contexts", json=fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


@pytest.mark.parametrize(
    ("language", "read"),
    [
        ("python", "import os; print(os.environ.get('GIVEN'), os.environ.get('ONE'))"),
        ("js", "console.log(process.env.GIVEN, process.env.ONE ?? 'None')"),
        ("ts", "const one: string = process.env.ONE ?? 'None'; console.log(process.env.GIVEN, one)"),
        ("bash", "echo $GIVEN ${ONE-None}"),
        ("r", 'cat(paste0(Sys.getenv("GIVEN"), " ", Sys.getenv("ONE", "None"), "\\n"))'),
        pytest.param(
            "java",
            'System.out.println(System.getProperty("GIVEN") + " " + System.getProperty("ONE", "None"))',
            marks=pytest.mark.soak,
        ),
    ],
)
def test_variables_of_the_sandbox_stay_and_those_of_a_call_do_not(
    interpreter: Interpreter, language: str, read: str
) -> None:
    """A variable of a call replaces the sandbox's for that cell alone, in each language (in Java, as a property)."""
    if (program := {"r": "Rscript", "java": "jshell"}.get(language)) is not None and shutil.which(program) is None:
        pytest.skip(f"missing: {program}")
    printed = [
        "".join(line["text"] for line in interpreter.run(read, language=language, env_vars=env) if line["type"] in TEXT)
        for env in (None, {"GIVEN": "x'y", "ONE": "1"}, None)
    ]
    assert printed == ["at create None\n", "x'y 1\n", "at create None\n"]


def test_an_error_is_a_line_and_not_text(interpreter: Interpreter) -> None:
    """The traceback is in the error's line, without colours; a cell that ends its interpreter says so."""
    lines = interpreter.run("print('before')\n1 / 0")
    assert [line["type"] for line in lines] == ["number_of_executions", "stdout", "error"]
    assert (lines[-1]["name"], lines[-1]["value"]) == ("ZeroDivisionError", "division by zero")
    assert "----> 2 1 / 0" in lines[-1]["traceback"]
    assert "\x1b" not in lines[-1]["traceback"]
    context = interpreter_context(interpreter)
    error = interpreter.error("import os; os._exit(3)", context_id=context)
    assert error["name"] == "ContextRestarting"
    assert "exit code 3" in error["value"]
    assert interpreter.run("1", context_id=context)[0]["execution_count"] == 1


def test_contexts_are_listed_in_order_restarted_and_removed(interpreter: Interpreter) -> None:
    """Python's and JavaScript's are there from the beginning; a new one has its folder, and loses its variables."""
    context = interpreter_context(interpreter, language="PYTHON", cwd="/tmp")
    assert interpreter.text("import os; x = 1; os.getcwd()", context_id=context) == "/tmp"
    with interpreter.client() as client:
        listed = client.get("/contexts").json()
        assert [row["language"] for row in listed[:2]] == ["python", "javascript"]
        assert listed[-1] == {"id": context, "language": "python", "cwd": "/tmp"}
        assert client.post(f"/contexts/{context}/restart").status_code == 200
        assert interpreter.error("x", context_id=context)["name"] == "NameError"
        assert interpreter.text("import os; os.getcwd()", context_id=context) == "/tmp"
        assert client.delete(f"/contexts/{context}").status_code == 200
        for answer in (client.post(f"/contexts/{context}/restart"), client.delete(f"/contexts/{context}")):
            assert (answer.status_code, answer.text) == (404, f"Context {context} not found")


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"context_id": "nope"}, 404, "Context nope not found"),
        ({"context_id": "a", "language": "python"}, 400, "Only one of context_id or language can be provided"),
        ({"language": "cobol"}, 400, "unknown language 'cobol'"),
        ({"code": None}, 400, "code"),
    ],
)
def test_a_refused_cell_has_a_status_and_plain_text(
    interpreter: Interpreter, fields: dict[str, object], status: int, text: str
) -> None:
    """Refusals come before the stream."""
    with interpreter.client(**{"X-Access-Token": interpreter.token}) as client:
        answer = client.post("/execute", json={"code": "1", **fields})
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
    with interpreter.client() as client:
        assert client.post("/execute", json={"code": "1"}).status_code == 401


def test_a_client_that_disconnects_has_its_cell_interrupted(interpreter: Interpreter) -> None:
    """The context keeps its variables, and takes the next cell soon."""
    context = interpreter_context(interpreter)
    interpreter.run("x = 5", context_id=context)
    with interpreter.client(**{"X-Access-Token": interpreter.token}) as client:
        body = {"code": "import time\nprint('in')\ntime.sleep(300)", "context_id": context}
        with client.stream("POST", "/execute", json=body) as answer:
            assert "in" in next(line for line in answer.iter_lines() if "stdout" in line)
    began = time.monotonic()
    assert interpreter.text("x", context_id=context) == "5"
    assert time.monotonic() - began < 100


def test_a_cell_waits_for_a_client_that_does_not_read(interpreter: Interpreter) -> None:
    """It goes on when the client reads, and all of its output arrives, unbroken within characters."""
    context = interpreter_context(interpreter)
    code = "open('/tmp/begun', 'w')\nfor _ in range(1000): print('é' * 4999)\nopen('/tmp/printed', 'w')"
    asked = "import os; (os.path.exists('/tmp/begun'), os.path.exists('/tmp/printed'))"
    body = {"code": code, "context_id": context}
    with (
        interpreter.client(**{"X-Access-Token": interpreter.token}) as client,
        client.stream("POST", "/execute", json=body) as answer,
    ):
        while interpreter.text(asked) == "(False, False)":
            time.sleep(0.02)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert interpreter.text(asked) == "(True, False)"
            time.sleep(0.1)
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(line["text"] for line in lines if line["type"] == "stdout") == ("é" * 4999 + "\n") * 1000
    assert interpreter.text(asked) == "(True, True)"


def test_modules_of_the_folder_and_new_packages_are_imported(interpreter: Interpreter) -> None:
    """The context's folder comes first; a folder of packages may be made after the interpreter has begun."""
    context = interpreter_context(interpreter)
    interpreter.run("import os, site\nfolder = site.getusersitepackages()\nos.makedirs(folder)", context_id=context)
    written = "open('own.py', 'w').write('a = 1'); open(folder + '/added.py', 'w').write('b = 2')"
    interpreter.run(written, context_id=context)
    assert interpreter.text("import added, own; (own.a, added.b, os.getcwd())", context_id=context) == (
        "(1, 2, '/home/user')"
    )


def test_tables_and_figures_are_data(interpreter: Interpreter) -> None:
    """A table has its columns, a figure its chart; the value comes before the figures of the cell's end."""
    *_, value = interpreter.run(
        "import pandas as pd\npd.DataFrame({'a': [1, 2], 't': pd.to_datetime(['2020-01-01'] * 2)})"
    )
    assert value["data"] == {"a": [1, 2], "t": ["2020-01-01T00:00:00"] * 2}
    _, value, figure = interpreter.run("import matplotlib.pyplot as plt\nplt.bar(['x'], [2])")
    assert (value["is_main_result"], figure["is_main_result"], figure["chart"]["type"]) == (True, False, "bar")
    assert figure["chart"]["elements"] == [{"label": "x", "group": "Group 0", "value": 2.0}]
    assert figure["png"].startswith("iVBOR")


def test_what_is_too_much_is_left_out_and_told(interpreter: Interpreter) -> None:
    """A cell shows 500 outputs at most."""
    *shown, last = interpreter.run("for _ in range(600): display(1)")
    assert (last["type"], last["text"]) == ("stderr", "cloche: further outputs of this cell are left out\n")
    assert len(shown) == 1 + 500
