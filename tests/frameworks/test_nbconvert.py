"""What notebooks' libraries show, with the packages themselves; and a notebook that Jupyter executes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat  # type: ignore[import-not-found]
import pytest

import cloche
from cloche.agent.approval import auto
from cloche.agent.toolbox import Toolbox

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

MOST_BYTES = 200_000  # of all outputs of a cell: plotly alone has 4.8 MB of script
PLOTS = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nline, = ax.plot([1, 2], [3, 4])\n"
ANIMATION = (
    f"{PLOTS}from matplotlib.animation import FuncAnimation\n"
    "def step(i):\n    line.set_ydata([3, i])\n    return (line,)\n"
    "animation = FuncAnimation(fig, step, frames=4)\nanimation"
)
FIGURE = "import plotly.graph_objects as go\nfig = go.Figure(go.Bar(y=[1, 2]))\n"
BOKEH = "from bokeh.plotting import figure, show\np = figure()\np.line([1, 2], [3, 4])\n"
WITHOUT_NBFORMAT = "import sys\nsys.modules['nbformat'] = None\n"
ALTAIR = "import altair\naltair.Chart({'values': [{'a': 1}]}).mark_bar().encode(x='a:Q')"
# A program, the type of what is useful of it, and how many outputs there are.
LIBRARIES = {
    "plotly": (WITHOUT_NBFORMAT + FIGURE + "fig", "text/html", 1),
    "plotly show": (WITHOUT_NBFORMAT + FIGURE + "fig.show()", "text/html", 1),
    "altair": (ALTAIR, "text/html", 1),
    "bokeh": (BOKEH + "show(p)", "text/html", 1),
    "bokeh notebook": ("from bokeh.io import output_notebook\noutput_notebook()\n" + BOKEH + "show(p)", "text/html", 1),
    "seaborn": ("import seaborn\nax = seaborn.lineplot(x=[1, 2], y=[1, 2])", "image/png", 1),
    "pillow": ("from PIL import Image\nImage.new('RGB', (20, 20), 'red')", "image/png", 1),
    "pillow show": ("from PIL import Image\nImage.new('RGB', (20, 20), 'red').show()", "image/png", 1),
    "sympy": ("import sympy\nsympy.Integral(sympy.Symbol('x') ** 2)", "text/latex", 1),
    "polars": ("import polars\npolars.DataFrame({'a': [1, 2]})", "text/html", 1),
    "html": ("from IPython.display import HTML\nHTML('<b>bold</b>')", "text/html", 1),
    "display": ("from IPython.display import Markdown, display\ndisplay(Markdown('*text*'))", "text/markdown", 1),
    "matplotlib": (PLOTS + "plt.show()", "image/png", 1),
    "animation": (ANIMATION, "text/html", 1),
}
BAR = "from tqdm.auto import tqdm\nfor _ in tqdm(range(1000), mininterval=0): pass"
NOTEBOOK = [
    "import cloche\nsandbox = cloche.Sandbox(timeout=60).open()\nsession = sandbox.session()",
    "first = session.run('x = 20')\nassert first.ok",
    "assert session.run('x + 1').value == 21\nassert sandbox.run('print(6 * 7)').stdout == '42\\n'",
    f"result = session.run({FIGURE + 'fig.show()'!r})\nassert len(result.outputs) == 1, result",
    "sandbox.close()\nprint('closed')",
]


@pytest.mark.parametrize("way", ["cell", "run"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_gives_one_useful_output_of_bounded_size(way: str, library: str) -> None:
    """In a session and in a throwaway run, without nbformat where the library asks for it."""
    code, mime, number = LIBRARIES[library]
    with cloche.Sandbox(timeout=120, memory="2g") as sandbox:
        result = sandbox.session().run(code) if way == "cell" else cloche.run(code, timeout=120, memory="2g")
    assert (result.status, result.stderr) == ("ok", "")
    assert len(result.outputs) == number, result.outputs
    assert mime in result.outputs[0].data
    assert sum(len(content) for output in result.outputs for content in output.data.values()) < MOST_BYTES


async def test_a_tool_tells_a_model_what_each_library_shows() -> None:
    """An answer has a figure or text of every one of them, and is short."""
    async with Toolbox(approve=auto("high"), interpreters=True, timeout=120, memory="2g") as tools:
        for library, (code, mime, _) in LIBRARIES.items():
            answer = await tools.call("run_code", {"code": code})
            assert not answer.is_error, (library, answer.text)
            assert bool(answer.images) is (mime == "image/png"), library
            assert len(answer.text) < 20_000
            assert "printed nothing" not in answer.text, (library, answer.text)


def test_a_bar_of_tqdm_is_one_line() -> None:
    """Of a thousand steps the result has the last."""
    with cloche.Sandbox(timeout=60) as sandbox:
        result = sandbox.session().run(BAR)
    assert (result.stderr.count("%"), result.outputs) == (1, ())
    assert "1000/1000" in result.stderr


def test_a_notebook_whose_cells_use_cloche_is_executed(tmp_path: Path) -> None:
    """`jupyter nbconvert --execute` runs a sandbox without a block, and its session, to the end."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK])
    path = tmp_path / "cells.ipynb"
    nbformat.write(notebook, path)
    words = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", str(path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert nbformat.read(tmp_path / "done.ipynb", 4).cells[-1].outputs[0].text == "closed\n"
