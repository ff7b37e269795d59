"""The code interpreter: cells, contexts, languages, results."""

from __future__ import annotations

from typing import Any

from e2b import InvalidArgumentException, NotFoundException, TimeoutException
from e2b_code_interpreter.models import Context

from .both import Both
from .rows import shows

PLOT = """
import matplotlib.pyplot as plt
plt.bar(["one", "two"], [1, 2])
plt.title("Counts"); plt.xlabel("name"); plt.ylabel("count")
plt.show()
"""


@shows("Sandbox.run_code")
async def cells(sdk: Both) -> None:
    """Values, output and errors of cells that share their names; a cell's own variables end with it."""
    sandbox = await sdk.shared()
    await sdk(sandbox.run_code("number = 20"))
    execution = await sdk(sandbox.run_code("number += 1\nnumber * 2"))
    assert (execution.text, execution.error) == ("42", None)
    assert execution.execution_count
    out: list[Any] = []
    results: list[Any] = []
    errors: list[Any] = []
    execution = await sdk(
        sandbox.run_code(
            "import sys\nprint('ö€')\nprint('e', file=sys.stderr)\n'text'",
            on_stdout=out.append, on_stderr=out.append, on_result=results.append,
        )
    )  # fmt: skip
    assert ("".join(execution.logs.stdout), "".join(execution.logs.stderr)) == ("ö€\n", "e\n")
    assert {message.line for message in out} == {"ö€\n", "e\n"}
    assert (results[0].text, execution.text, results[0].is_main_result) == ("text", "text", True)
    execution = await sdk(sandbox.run_code("1/0", on_error=errors.append))
    assert (execution.error.name, execution.error.value) == ("ZeroDivisionError", "division by zero")
    assert "ZeroDivisionError" in execution.error.traceback
    assert errors[0].name == "ZeroDivisionError"
    assert "ZeroDivisionError" in execution.to_json()
    execution = await sdk(sandbox.run_code("import os\nos.environ.get('ONE')", envs={"ONE": "1"}))
    assert execution.text == "1"
    assert (await sdk(sandbox.run_code("os.environ.get('ONE')"))).text in (None, "None")
    assert (await sdk(sandbox.run_code("!echo shell-$((40+2))"))).logs.stdout[0].strip() == "shell-42"
    await sdk.raises(
        InvalidArgumentException,
        lambda: sandbox.run_code("1", language="python", context=Context("x", "python", "/")),
    )


@shows("Sandbox.run_code", is_long=True)
async def languages(sdk: Both) -> None:
    """JavaScript, TypeScript and Bash; each has the variables of the sandbox."""
    sandbox = await sdk.create(timeout=300, envs={"GIVEN": "yes"})
    for language, code in (
        ("javascript", "console.log(process.env.GIVEN, [1, 2].map(x => x * 2).join())"),
        ("typescript", "const x: number = 4; console.log(process.env.GIVEN, [2, x].join())"),
        ("bash", "echo $GIVEN 2,4"),
        ("python", "import os; print(os.environ['GIVEN'], '2,4')"),
    ):
        execution = await sdk(sandbox.run_code(code, language=language))
        assert execution.error is None, (language, execution.error)
        assert "".join(execution.logs.stdout) == "yes 2,4\n", language
    execution = await sdk(sandbox.run_code("await Promise.resolve(5)", language="js"))
    assert execution.text == "5"


@shows("Sandbox.run_code", is_long=True)
async def results(sdk: Both) -> None:
    """A picture and its chart, a table, and what the code shows by itself."""
    sandbox = await sdk.shared()
    execution = await sdk(sandbox.run_code(PLOT))
    assert execution.error is None, execution.error
    (result,) = [item for item in execution.results if item.png]
    chart = result.chart
    assert (chart.type, chart.title, chart.x_label, chart.y_label) == ("bar", "Counts", "name", "count")
    assert [(item.label, item.value) for item in chart.elements] == [("one", "1"), ("two", "2")] or [
        (item.label, float(item.value)) for item in chart.elements
    ] == [("one", 1.0), ("two", 2.0)]
    execution = await sdk(sandbox.run_code("import pandas\npandas.DataFrame({'a': [1, 2]})"))
    assert execution.results[0].data == {"a": [1, 2]}
    assert "<table" in execution.results[0].html
    execution = await sdk(
        sandbox.run_code("from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))\n{'k': 1}")
    )
    assert [item.html for item in execution.results if item.html] == ["<b>x</b>"]
    assert [item.json for item in execution.results if item.json] == [{"k": 1}]


@shows(
    "Sandbox.create_code_context", "Sandbox.list_code_contexts", "Sandbox.remove_code_context",
    "Sandbox.restart_code_context", "Sandbox.run_code",
)  # fmt: skip
async def contexts(sdk: Both) -> None:
    """Names are a context's own; it has a language and a folder, is restarted empty, and is gone once removed."""
    sandbox = await sdk.shared()
    context = await sdk(sandbox.create_code_context(language="python", cwd="/tmp"))
    assert (context.language, context.cwd) == ("python", "/tmp")
    await sdk(sandbox.run_code("mine = 1", context=context))
    assert (await sdk(sandbox.run_code("import os; (mine, os.getcwd())", context=context))).text == "(1, '/tmp')"
    assert (await sdk(sandbox.run_code("mine"))).error.name == "NameError"
    listed = await sdk(sandbox.list_code_contexts())
    assert listed[-1].id == context.id
    assert {"python", "javascript"} <= {item.language for item in listed}
    await sdk(sandbox.restart_code_context(context.id))
    assert (await sdk(sandbox.run_code("mine", context=context))).error.name == "NameError"
    await sdk(sandbox.remove_code_context(context))
    assert context.id not in [item.id for item in await sdk(sandbox.list_code_contexts())]
    await sdk.raises(NotFoundException, lambda: sandbox.run_code("1", context=context))


@shows("Sandbox.run_code", is_long=True)
async def interrupted(sdk: Both) -> None:
    """A cell that is late is interrupted, and the context goes on with its names."""
    sandbox = await sdk.create(timeout=300)
    await sdk(sandbox.run_code("kept = 1"))
    await sdk.raises(TimeoutException, lambda: sandbox.run_code("import time\ntime.sleep(500)", timeout=1))
    assert (await sdk(sandbox.run_code("kept", timeout=30))).text == "1"
