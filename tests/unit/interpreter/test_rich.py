"""What values look like: bundles, `display`, figures, and programs that import from IPython."""

import json
import subprocess
import sys
import textwrap
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from cloche.interpreter import rich
from cloche.interpreter.pretty import MAX_TEXT_BYTES, bounded, text_of
from cloche.interpreter.rich import MAX_BUNDLE_BYTES, Display, bundle
from tests.unit.interpreter.notebook import Notebook

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + (4).to_bytes(4, "big") + (2).to_bytes(4, "big")
SOURCES = Path(rich.__file__).parents[1]


def run_apart(program: str, *, path: str = "") -> str:
    """Run a program in an interpreter of its own that finds the package as guests do, and return its output."""
    preamble = f"import sys\nsys.path.insert(0, {str(SOURCES)!r})\n" + (
        f"sys.path.insert(1, {path!r})\n" if path else ""
    )
    command = [sys.executable, "-W", "error", "-c", preamble + textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        ("it's", '"it\'s"'),
        ([1, "a", None], "[1, 'a', None]"),
        ((1,), "(1,)"),
        ({"b": 1, "a": [2]}, "{'b': 1, 'a': [2]}"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (set(), "set()"),
        (frozenset({2, 1}), "frozenset({1, 2})"),
        (int, "int"),
        (OrderedDict, "collections.OrderedDict"),
        (defaultdict(list, a=[1]), "defaultdict(list, {'a': [1]})"),
        (Counter("aab"), "Counter({'a': 2, 'b': 1})"),
        (OrderedDict(a=1), "OrderedDict({'a': 1})"),
        (deque([1], maxlen=3), "deque([1], maxlen=3)"),
        (namedtuple("P", "x")(1), "P(x=1)"),
        (Enum("Color", "RED"), "<enum 'Color'>"),
        (len, "<built-in function len>"),
        (run_apart, f"<function {__name__}.run_apart(program: str, *, path: str = '') -> str>"),
    ],
)
def test_text_of_plain_values(value: object, text: str) -> None:
    """A short value's text is its repr, without addresses of memory for classes and functions."""
    assert text_of(value) == text


def test_a_long_container_has_one_line_for_each_item() -> None:
    """What does not fit on a line is broken at the outermost container first."""
    value = {"first": list(range(30)), "second": [1, 2]}
    lines = text_of(value).splitlines()
    assert lines[:2] == ["{'first': [0,", "  1,"]
    assert lines[-1] == " 'second': [1, 2]}"
    assert eval(text_of(value)) == value


def test_an_object_of_several_lines_keeps_its_shape_within_a_container() -> None:
    """The lines of an inner repr are indented like its place."""

    class Table:
        def __repr__(self) -> str:
            return "a b\n1 2"

    assert text_of([Table()]) == "[a b\n 1 2]"


def test_text_is_bounded_with_head_and_tail() -> None:
    """A huge text keeps both ends, and says how much is gone."""
    text = text_of("x" * 1_000_000 + "END")
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert text.startswith("'xxx")
    assert text.endswith("END'")
    assert "bytes left out" in text


def test_bounds_count_bytes_and_cut_no_character() -> None:
    """Text of many bytes for each character is bounded in bytes and stays text."""
    text = bounded("€" * 100_000)
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert set(text.split("\n")[0]) == {"€"}


def test_huge_containers_stop_early() -> None:
    """The text of a list of lists of millions shows its beginning, quickly."""
    huge = [[0] * 1000] * 100_000
    text = text_of(huge)
    assert "..." in text
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert text_of(list(range(5000))).endswith("999,\n ...]")


def test_containers_that_hold_themselves() -> None:
    """A cycle is shown as one, and deep nesting does not exhaust the stack."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert text_of(loop) == "[1, [...]]"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "..." in text_of(deep)
    while deep:  # taken apart here: the interpreter would do it by recursion
        deep = deep[0]


def test_a_failing_repr_becomes_text() -> None:
    """An object whose repr fails is shown as that, also among others."""

    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    assert text_of(Broken()) == "<Broken object whose repr failed: ValueError: no repr>"
    assert text_of([1, Broken()]).startswith("[1, <Broken object whose repr failed")


def test_a_repr_that_is_no_text_becomes_text() -> None:
    """A repr of a wrong type, or with an error whose own text fails, is said to have failed."""

    class Odd:
        def __repr__(self) -> str:
            return 5  # type: ignore[return-value]

    class Worse:
        def __repr__(self) -> str:
            raise type("Mean", (Exception,), {"__str__": lambda _: 1 / 0})

    assert "repr failed: TypeError" in text_of(Odd())
    assert "repr failed: Mean: (its text failed too)" in text_of(Worse())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_within_a_repr_passes(error: type[BaseException]) -> None:
    """Only ordinary exceptions become text."""

    class Interrupted:
        def __repr__(self) -> str:
            raise error

        def _repr_html_(self) -> str:
            raise error

    with pytest.raises(error):
        text_of(Interrupted())
    with pytest.raises(error):
        bundle(Interrupted())


def test_text_that_utf8_cannot_hold_is_escaped() -> None:
    """A lone surrogate in a value does not reach the wire."""
    data, _ = bundle({"text": "\udc80"})
    assert str(data["text/plain"]).encode()

    class Page:
        def _repr_html_(self) -> str:
            return "<b>\udc80</b>"

    assert bundle(Page())[0]["text/html"] == "<b>\\udc80</b>"


def test_own_pretty_printing() -> None:
    """`_repr_pretty_` writes through the printer's methods, and a failing one is said to have failed."""

    class Tree:
        def __init__(self, *children: "Tree") -> None:
            self.children = children

        def _repr_pretty_(self, p: Any, cycle: bool) -> None:
            with p.group(5, "Tree(", ")"):
                for at, child in enumerate(self.children):
                    if at:
                        p.text(",")
                        p.breakable()
                    p.pretty(child)

    class Broken:
        def _repr_pretty_(self, p: Any, cycle: bool) -> None:
            p.begin_group(1, "<")
            raise ValueError("midway")

    assert text_of(Tree(Tree(), Tree(Tree()))) == "Tree(Tree(), Tree(Tree()))"
    assert "\n     Tree(" in text_of(Tree(*[Tree()] * 20))
    assert "ValueError: midway" in text_of([Broken(), 1])
    assert text_of([Broken(), 1]).endswith(", 1]")


# --- bundles


class Rich:
    """Offers several formats, with metadata for one."""

    def _repr_html_(self) -> str:
        return "<b>rich</b>"

    def _repr_markdown_(self) -> None:
        return None

    def _repr_json_(self) -> dict[str, int]:
        return {"a": 1}

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return PNG, {"width": 4}

    def _repr_jpeg_(self) -> bytes:
        return b"\xff\xd8\xff"

    def __repr__(self) -> str:
        return "rich"


def test_every_format_a_value_offers() -> None:
    """A bundle has text, each format that was not None, JSON as text, and metadata; one picture is enough."""
    data, metadata = bundle(Rich())
    assert data == {"text/html": "<b>rich</b>", "application/json": '{"a": 1}', "image/png": PNG, "text/plain": "rich"}
    assert metadata == {"image/png": {"width": 4}}


def test_plain_values_have_text_alone() -> None:
    """What offers nothing is text."""
    assert bundle(42) == ({"text/plain": "42"}, {})


def test_filters() -> None:
    """`include` and `exclude` choose formats, text among them."""
    assert list(bundle(Rich(), include=["text/html"])[0]) == ["text/html"]
    assert list(bundle(Rich(), include=["image/jpeg"])[0]) == ["image/jpeg"]
    assert sorted(bundle(Rich(), exclude=["image/png", "image/jpeg", "text/plain"])[0]) == [
        "application/json",
        "text/html",
    ]


@pytest.mark.parametrize("has_metadata", [False, True])
def test_a_bundle_of_its_own_comes_first(has_metadata: bool) -> None:
    """`_repr_mimebundle_` wins over single methods and over the repr, whose other formats are added."""

    class Own(Rich):
        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
            data = {
                "text/plain": "own",
                "text/html": "<i>",
                "application/vnd.x+json": {"deep": [1]},
                "image/png": "aGk=",
            }
            return (data, {"text/html": {"isolated": True}}) if has_metadata else data

    data, metadata = bundle(Own())
    assert (data["text/plain"], data["text/html"], data["image/png"]) == ("own", "<i>", b"hi")
    assert json.loads(data["application/vnd.x+json"]) == {"deep": [1]}
    assert metadata == ({"text/html": {"isolated": True}} if has_metadata else {})


def test_a_failing_format_is_reported_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The other formats go on, the traceback begins in the program's code, and NotImplementedError says nothing."""

    class Half:
        def _repr_html_(self) -> str:
            raise ValueError("half")

        def _repr_latex_(self) -> str:
            raise NotImplementedError

        def _repr_svg_(self) -> str:
            return "<svg/>"

    # A thread of its own: tests that interrupt at each instruction leave an exception behind in theirs.
    with ThreadPoolExecutor(1) as pool:
        assert sorted(pool.submit(bundle, Half()).result()[0]) == ["image/svg+xml", "text/plain"]
    errors = capsys.readouterr().err
    assert "ValueError: half" in errors
    assert errors.count("Traceback") == 1
    assert "rich.py" not in errors.replace("test_rich.py", "")


def test_classes_and_objects_with_any_attribute_are_not_asked() -> None:
    """A class has its instances' methods, and a mock answers to every name: both are text."""
    assert list(bundle(Rich)[0]) == ["text/plain"]
    assert list(bundle(MagicMock())[0]) == ["text/plain"]


def test_attributes_that_fail_or_are_no_methods_are_not_there() -> None:
    """A property that raises, and a format that is a plain value, leave the text."""

    class Odd:
        _repr_png_ = b"not a method"

        @property
        def _repr_html_(self) -> str:
            raise RuntimeError

        def __repr__(self) -> str:
            return "odd"

    assert bundle(Odd()) == ({"text/plain": "odd"}, {})


def test_parts_that_are_too_large_are_left_out() -> None:
    """The size counts base64; the largest part goes, and the text says so."""

    class Large:
        def _repr_html_(self) -> str:
            return "<b>small</b>"

        def _repr_png_(self) -> bytes:
            return bytes(MAX_BUNDLE_BYTES * 3 // 4)

        def __repr__(self) -> str:
            return "large"

    data, _ = bundle(Large())
    assert sorted(data) == ["text/html", "text/plain"]
    assert data["text/plain"] == "large\n[image/png left out: 8.0 MiB, with at most 8 MiB a result]"


def test_content_of_wrong_types_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """What no wire can carry is reported, and the rest is shown."""

    class Wrong:
        def _repr_mimebundle_(self, **_: Any) -> Any:
            return {1: "a", "text/x": object(), "text/html": b"<b>", "application/json": [1]}, {"text/html": object()}

    data, metadata = bundle(Wrong())
    assert {mime: data[mime] for mime in data if mime != "text/plain"} == {
        "text/html": "<b>",
        "application/json": "[1]",
    }
    assert metadata == {}
    assert "not JSON serializable" in capsys.readouterr().err


def test_tables_of_pandas() -> None:
    """A DataFrame is HTML and text, a Series text."""
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2]})
    data, _ = bundle(frame)
    assert "<table" in str(data["text/html"])
    assert data["text/plain"] == repr(frame)
    assert list(bundle(frame.a)[0]) == ["text/plain"]


def test_pictures_of_pillow() -> None:
    """An image is a PNG."""
    from PIL import Image

    data, _ = bundle(Image.new("RGB", (2, 2)))
    assert sorted(data) == ["image/png", "text/plain"]
    assert bytes(data["image/png"]).startswith(b"\x89PNG")  # type: ignore[arg-type]


# --- display


def test_display_sends_each_object(notebook: Notebook) -> None:
    """Several objects are several bundles; metadata is added to each."""
    notebook.cell("display(1, 'a', metadata={'m': 1})")
    assert notebook.sent == [({"text/plain": "1"}, {"m": 1}), ({"text/plain": "'a'"}, {"m": 1})]


def test_raw_bundles(notebook: Notebook) -> None:
    """`raw` sends a dict as it is, and nothing but dicts."""
    notebook.cell("display({'text/html': '<b>', 'image/png': 'aGk='}, raw=True, metadata={'x': 2})")
    assert notebook.sent == [({"text/html": "<b>", "image/png": b"hi"}, {"x": 2})]
    with pytest.raises(TypeError, match="dicts of MIME type"):
        notebook.cell("display('<b>', raw=True)")


def test_objects_that_display_themselves(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """`_ipython_display_` replaces everything else, and its failure is reported."""
    notebook.cell(
        "class Own:\n    def _ipython_display_(self): display({'text/html': 'own'}, raw=True)\n"
        "class Bad:\n    def _ipython_display_(self): raise ValueError('bad')\n"
        "display(Own(), Bad(), 1)"
    )
    assert [data for data, _ in notebook.sent] == [{"text/html": "own"}, {"text/plain": "1"}]
    assert "ValueError: bad" in capsys.readouterr().err


def test_updates_replace_what_is_there(notebook: Notebook) -> None:
    """Of many updates of a place the last one is what is shown there, also of one in a later cell."""
    notebook.cell("h = display(0, display_id=True)\nfor i in range(1, 100): h.update(i)\nprint(h)")
    assert [data["text/plain"] for data, _ in notebook.sent] == ["99"]
    notebook.cell("display(5, display_id='mine')\nfrom IPython.display import update_display\n")
    notebook.cell("update_display(6, display_id='mine')")
    assert [data["text/plain"] for data, _ in notebook.sent] == ["99", "6"]


# --- figures


def test_open_figures_are_sent_when_a_cell_ends(notebook: Notebook) -> None:
    """Each open figure is a PNG, in order, and none is open afterwards."""
    notebook.cell(
        "import matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1)); plt.plot([1])\n"
        "plt.figure(); plt.plot([2])\nplt.figure(1)"
    )
    assert notebook.mimes() == [["image/png", "text/plain"]] * 2
    assert notebook.sent[0][0]["text/plain"] == "<Figure size 200x100 with 1 Axes>"
    assert notebook.cell("plt.get_fignums()") == []
    notebook.cell("1")
    assert len(notebook.sent) == 2


def test_show_sends_figures_at_that_point(notebook: Notebook) -> None:
    """`plt.show()` sends and closes without a warning, whichever backend the program chose."""
    notebook.cell(
        "import matplotlib; matplotlib.use('svg')\nimport matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()\n"
        "display('after')\nplt.plot([2])\nplt.show(block=False)"
    )
    assert notebook.mimes() == [["image/png", "text/plain"], ["text/plain"], ["image/png", "text/plain"]]


def test_empty_figures_are_not_sent(notebook: Notebook) -> None:
    """A figure with nothing in it is closed alone."""
    notebook.cell("import matplotlib.pyplot as plt\n_ = plt.figure()")
    assert notebook.sent == []
    assert notebook.cell("plt.get_fignums()") == []


def test_a_figure_is_a_value(notebook: Notebook) -> None:
    """A figure that was shown by name is not sent again when its cell ends, unless it changed."""
    notebook.cell("import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1])\ndisplay(fig)")
    assert notebook.mimes() == [["image/png", "text/plain"]]
    notebook.cell("fig, ax = plt.subplots()\nax.plot([1])\ndisplay(fig)\nax.set_title('new')")
    assert len(notebook.sent) == 3
    data, _ = bundle(notebook.namespace["fig"])
    assert bytes(data["image/png"]).startswith(b"\x89PNG")  # type: ignore[arg-type]


def test_a_figure_that_cannot_be_drawn(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of a cell its traceback is printed, the others are sent, all are closed; `show` raises why."""
    notebook.cell(
        "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.set_title('$\\\\nonsense$')\n"
        "fig, ax = plt.subplots()\nax.plot([1])"
    )
    assert notebook.mimes() == [["image/png", "text/plain"]]
    errors = capsys.readouterr().err
    assert "Traceback" in errors
    assert "nonsense" in errors
    assert notebook.cell("plt.get_fignums()") == []
    with pytest.raises(ValueError, match="nonsense"):
        notebook.cell("ax = plt.figure().add_subplot()\nax.set_title('$\\\\nonsense$')\nplt.show()")


def test_a_loop_of_updates_sends_few_of_them() -> None:
    """What replaces other output is sent a few times, and always the last, however often there is more."""
    sent: list[str] = []
    display = Display(lambda data, *_: sent.append(str(data["text/plain"])))
    handle = display.display(0, display_id=True)
    assert handle is not None
    for number in range(1, 1000):
        handle.update(number)
    for number in range(1000, 2000):
        display.clear_output(wait=True)
        display.display(number)
    display.flush_figures()
    assert (sent[0], sent[-1]) == ("0", "1999")
    assert len(sent) < 500


@pytest.mark.parametrize(
    ("choice", "mimes"),
    [
        ("%config InlineBackend.figure_formats = ['svg']", ["image/svg+xml", "text/plain"]),
        ("%config InlineBackend.figure_format = 'jpeg'", ["image/jpeg", "text/plain"]),
        ("%config InlineBackend.figure_formats = {'png', 'pdf'}", ["application/pdf", "image/png", "text/plain"]),
        (
            "from matplotlib_inline.backend_inline import set_matplotlib_formats\nset_matplotlib_formats('svg', 'png')",
            ["image/png", "image/svg+xml", "text/plain"],
        ),
        ("from IPython.display import set_matplotlib_formats as f\nf('svg')", ["image/svg+xml", "text/plain"]),
        (
            "get_ipython().run_line_magic('config', 'InlineBackend.figure_format=\"svg\"')",
            ["image/svg+xml", "text/plain"],
        ),
    ],
)
def test_formats_of_figures(notebook: Notebook, choice: str, mimes: list[str]) -> None:
    """All the ways in which notebooks choose formats."""
    notebook.cell(choice)
    notebook.cell("import matplotlib.pyplot as plt\nplt.plot([1])")
    assert notebook.mimes() == [mimes]


def test_twice_the_dots(notebook: Notebook) -> None:
    """A `retina` figure has twice the dots, and says how large it is meant to be."""
    notebook.display.figure_formats = ("retina",)
    notebook.cell("import matplotlib.pyplot as plt\nplt.plot([1])")
    data, metadata = notebook.sent[0]
    width = int.from_bytes(data["image/png"][16:20], "big")
    assert metadata["image/png"]["width"] == width // 2
    with pytest.raises(ValueError, match="unknown figure format bmp"):
        notebook.display.figure_formats = ("bmp",)


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_matplotlib_may_come_before_or_after(is_preloaded: bool) -> None:
    """Figures are captured wherever matplotlib is loaded, and a child process finds no settings of ours."""
    loading = "import matplotlib; matplotlib.use('agg'); import matplotlib.pyplot" if is_preloaded else ""
    out = run_apart(
        f"""
        import os
        {loading}
        from interpreter.rich import Display
        from interpreter.ipython import install
        sent, names = [], {{}}
        display = Display(lambda data, *_: sent.append(sorted(data)))
        environment = dict(os.environ)
        install(display, names)
        exec("from matplotlib.pyplot import plot, show, get_backend\\nplot([1])\\nshow()\\nplot([1])", names)
        display.flush_figures()
        print(sent, names["get_backend"](), dict(os.environ) == environment)
        """
    )
    assert out == "[['image/png', 'text/plain'], ['image/png', 'text/plain']] agg True\n"


def test_nothing_heavy_is_loaded() -> None:
    """A session that uses none of it loads neither matplotlib nor the larger parts of the standard library."""
    out = run_apart(
        """
        before = set(sys.modules)
        from interpreter import cell_magics, line_magics
        from interpreter.rich import Display
        from interpreter.ipython import install
        display = Display(print)
        install(display, {})
        display.flush_figures()
        new = {name.partition(".")[0] for name in set(sys.modules) - before} - {"interpreter", "__future__"}
        print(sorted(new))
        """
    )
    assert out == "[]\n"


def test_the_look_of_a_value_loads_no_session() -> None:
    """A script's figure waits for what it needs, in a process that has loaded nothing of ours."""
    out = run_apart(
        """
        import interpreter.rich
        print(sorted(name for name in sys.modules if name.partition(".")[0] == "interpreter"))
        """
    )
    assert out == "['interpreter', 'interpreter.pretty', 'interpreter.rich']\n"


def test_everything_is_loaded_at_once() -> None:
    """It all works after the package has been forgotten, as it is in a jail before the code runs."""
    out = run_apart(
        """
        from interpreter import cell_magics, ipython, line_magics, magics, rich
        for name in [name for name in sys.modules if name.startswith("interpreter")]:
            del sys.modules[name]
        del sys.path[0]
        names = {}
        class Host:
            namespace, history = names, [""]
            display = rich.Display(lambda data, *_: print(data))
            def run_cell(self, source): exec(source, names)
        ipython.install(Host.display, names)
        host = magics.Magics(Host(), line_magics.LINE_MAGICS, cell_magics.CELL_MAGICS)
        exec("from IPython.display import HTML, ProgressBar\\ndisplay(HTML('<b>'))", names)
        host.run_cell("capture", "kept", "display(1)")
        exec("for _ in ProgressBar(2): pass", names)
        host.run_line("time", "pass")
        host.run_line("pinfo", "display")
        host.system("true")
        """
    )
    assert out.startswith("{'text/html': '<b>'")
    assert "Wall time" in out


# --- IPython


def test_stand_in_display_classes(notebook: Notebook) -> None:
    """Without IPython, a program imports its display classes all the same."""
    (Path.cwd() / "dot.png").write_bytes(PNG)
    notebook.cell(
        "from IPython.display import (display, HTML, Markdown, Image, SVG, JSON, Latex, Math, Javascript, Pretty,"
        " clear_output, update_display, Audio, IFrame, Code, FileLink, Video, YouTubeVideo, GeoJSON)\n"
        "clear_output(wait=True)\n"
        "display(HTML('<b>'), Markdown('# a'), Latex('$x$'), Math('x^2'), Javascript('f()'), SVG('<?x?><svg></svg>'))\n"
        "display(JSON({'a': [1]}), Pretty('as is'), Image('dot.png', width=3), Image(url='http://x/y.png'))\n"
        "display(Audio([0, 1, -1], rate=8000), IFrame('page', 1, 2), Code('x < 1'), FileLink('dot.png'))"
    )
    shown = [{mime: data[mime] for mime in data if mime != "text/plain"} for data, _ in notebook.sent]
    assert shown[:7] == [
        {"text/html": "<b>"},
        {"text/markdown": "# a"},
        {"text/latex": "$x$"},
        {"text/latex": "$\\displaystyle x^2$"},
        {"application/javascript": "f()"},
        {"image/svg+xml": "<svg></svg>"},
        {"application/json": '{"a": [1]}'},
    ]
    assert notebook.sent[7][0] == {"text/plain": "as is"}
    assert notebook.sent[8] == (
        {"image/png": PNG, "text/plain": "<IPython.core.display.Image object>"},
        {"image/png": {"width": 3}},
    )
    assert shown[9] == {"text/html": '<img src="http://x/y.png"/>'}
    assert str(shown[10]["text/html"]).startswith('<audio controls src="data:audio/wav;base64,')
    assert 'src="page"' in str(shown[11]["text/html"])
    assert shown[12] == {"text/html": "<pre><code>x &lt; 1</code></pre>"}
    assert 'href="dot.png"' in str(shown[13]["text/html"])


def test_pictures_that_are_none() -> None:
    """A name that is no file, and a format that browsers do not show, are errors that say so."""
    from cloche.interpreter.ipython_display import Image

    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        Image("missing.png")
    with pytest.raises(ValueError, match="SVG"):
        Image(data=b"<svg>", format="svg")


def test_display_in_one_format(notebook: Notebook) -> None:
    """`display_html` and its like send that format alone, raw content too."""
    notebook.cell(
        "import IPython\nIPython.display.display_html(IPython.display.HTML('<b>'))\n"
        "from IPython.core.display import display_svg\ndisplay_svg('<svg/>', raw=True)"
    )
    assert [data for data, _ in notebook.sent] == [{"text/html": "<b>"}, {"image/svg+xml": "<svg/>"}]


def test_a_stand_in_is_no_ipython(notebook: Notebook) -> None:
    """What the stand-in lacks is an error that says why, and packages that are not there stay missing."""
    with pytest.raises(AttributeError, match="IPython is not installed here"):
        notebook.cell("import IPython\nIPython.embed()")
    with pytest.raises(ImportError):
        notebook.cell("from IPython import start_ipython")
    with pytest.raises(ModuleNotFoundError):
        notebook.cell("import IPython.terminal")
    assert notebook.cell("from IPython import get_ipython as g\ng() is get_ipython()") is True
    assert notebook.cell("hasattr(IPython, '__path__'), hasattr(IPython, 'Application')") == (True, False)


def test_pyplot_after_the_stand_in(notebook: Notebook) -> None:
    """matplotlib, which looks for IPython among the loaded modules, is content with the stand-in."""
    notebook.cell("import IPython\nimport matplotlib.pyplot as plt\nplt.ion()\nplt.plot([1])\nplt.show()\nplt.ioff()")
    assert notebook.mimes() == [["image/png", "text/plain"]]


# A package with the places where the real one keeps its functions; the real one cannot be installed beside the tests.
REAL_IPYTHON = {
    "__init__.py": "from .core.getipython import get_ipython\nversion_info = (8, 12)\n",
    "core/__init__.py": "",
    "core/getipython.py": "def get_ipython(): return None\n",
    "core/display_functions.py": "def display(*objects, **options): print('lost')\n"
    "def publish_display_data(data, metadata=None, **options): print('lost')\n",
    "core/display.py": "from .display_functions import display, publish_display_data\n"
    "class HTML:\n    def __init__(self, data): self.data = data\n    def _repr_html_(self): return self.data\n",
    "display.py": "from .core.display import *\nfrom .core.display_functions import *\n",
}


@pytest.mark.parametrize("is_preloaded", [False, True])
def test_the_real_ipython_is_led_to_our_display(tmp_path: Path, is_preloaded: bool) -> None:
    """Where IPython is installed, its display functions send to the session, loaded before or after."""
    for name, text in REAL_IPYTHON.items():
        (tmp_path / "IPython" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "IPython" / name).write_text(text)
    out = run_apart(
        f"""
        {"import IPython.display" if is_preloaded else ""}
        from interpreter.rich import Display
        from interpreter.ipython import install
        sent, names = [], {{}}
        display = Display(lambda data, *_: sent.append(data))
        install(display, names)
        program = '''
        from IPython.display import display, HTML, publish_display_data
        from IPython import get_ipython as real
        display(HTML("<b>"), exclude=["text/plain"])
        publish_display_data({{"text/html": "<i>"}})
        print(real() is get_ipython(), HTML.__module__)
        '''
        exec(program.replace("\\n        ", "\\n"), names)
        print(sent)
        """,
        path=str(tmp_path),
    )
    assert out == "True IPython.core.display\n[{'text/html': '<b>'}, {'text/html': '<i>'}]\n"


def test_programs_find_the_shell(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> None:
    """`get_ipython()` has what programs call, and events at the end of a cell."""
    notebook.cell(
        "ip = get_ipython()\nip.push({'x': 5})\nlines = ip.getoutput('echo {x}')\nip.system('echo $x')\n"
        "ip.events.register('post_execute', lambda: print('post'))\n"
        "ip.display_pub.publish({'text/html': '<b>'})"
    )
    assert notebook.namespace["lines"] == ["5"]
    assert capfd.readouterr().out == "5\npost\n"
    assert notebook.sent == [({"text/html": "<b>"}, {})]
    assert notebook.cell("ip.run_line_magic('pwd', '') == ip.magic('%pwd'), ip.ev('x + 1')") == (True, 6)


def test_own_magics(notebook: Notebook) -> None:
    """A program adds magics of its own, with and without a name."""
    notebook.cell(
        "from IPython.core.magic import register_line_magic, register_cell_magic\n"
        "@register_line_magic\ndef double(line): return line * 2\n"
        "@register_cell_magic('upper')\ndef _(line, cell): return cell.upper()"
    )
    assert notebook.cell("y = %double ab\ny") == "abab"
    assert notebook.cell("%%upper\nbody") == "BODY"
