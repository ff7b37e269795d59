"""Lines that are no Python, and what they do."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.interpreter.cell_magics import duration
from cloche.interpreter.command_line import SList, UsageError, expand
from cloche.interpreter.magics import cell_magic, rewrite
from tests.harness.processes import wait_for_end
from tests.unit.interpreter.notebook import Notebook, parsed

LINE, OUTPUT, SYSTEM = "get_ipython().run_line_magic", "get_ipython().getoutput", "get_ipython().system"


# --- rewriting


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("!ls -l | wc", f"{SYSTEM}('ls -l | wc')"),
        ("!!ls", f"{OUTPUT}('ls')"),
        ("%matplotlib inline", f"{LINE}('matplotlib', 'inline')"),
        ("%pwd", f"{LINE}('pwd', '')"),
        ("%time x = f(1)  ", f"{LINE}('time', 'x = f(1)')"),
        ("x = !ls *.py", f"x = {OUTPUT}('ls *.py')"),
        ("a.b['k'] = !ls", f"a.b['k'] = {OUTPUT}('ls')"),
        ("a, *b = !ls", f"a, *b = {OUTPUT}('ls')"),
        ("x = %timeit -o f(a=1)", f"x = {LINE}('timeit', '-o f(a=1)')"),
        ("x=%pwd", f"x = {LINE}('pwd', '')"),
        ("df.head?", f"{LINE}('pinfo', 'df.head')"),
        ("df.a[0]??", f"{LINE}('pinfo2', 'df.a[0]')"),
        ("?print", f"{LINE}('pinfo', 'print')"),
        ("?? print", f"{LINE}('pinfo2', 'print')"),
        ("!echo it's", f"""{SYSTEM}("echo it's")"""),
        ("!echo 'a = !b'", f"""{SYSTEM}("echo 'a = !b'")"""),
        ("!test $x != 1", f"{SYSTEM}('test $x != 1')"),
    ],
)
def test_lines_that_are_rewritten(source: str, rewritten: str) -> None:
    """Commands, magics, assignments and questions become calls, within the code around them."""
    assert rewrite(source, 1) == rewritten
    assert rewrite(f"a = 1\nif a:\n    {source}\nb = 2", 3) == f"a = 1\nif a:\n    {rewritten}\nb = 2"


@pytest.mark.parametrize(
    "source",
    [
        "print 'x'",
        "x = a ! b",
        "x != !y",
        "f(a=!ls)",
        "x == %y",
        "% time",
        "%",
        "!",
        "?",
        "5?",
        "x = !",
        "%%time",
        "x =",
    ],
)
def test_lines_that_are_not(source: str) -> None:
    """What is merely wrong stays wrong."""
    assert rewrite(source, 1) is None


@pytest.mark.parametrize("lineno", [0, -1, 3, 100])
def test_lines_that_do_not_exist(lineno: int) -> None:
    """A line number outside of the cell is nothing of ours."""
    assert rewrite("!ls\n!pwd", lineno) is None


def test_one_line_alone_is_rewritten() -> None:
    """Strings that look like commands are not touched, and one line is done at a time."""
    source = 's = """\n!ls\n"""\n!pwd\n!ls'
    assert rewrite(source, 4) == f's = """\n!ls\n"""\n{SYSTEM}(\'pwd\')\n!ls'


@pytest.mark.parametrize("lineno", [2, 3, 4])
def test_continued_lines(lineno: int) -> None:
    """A backslash continues a command, wherever in it the compiler stopped; later lines keep their numbers."""
    assert rewrite("x = 1\n!echo a \\\n  b \\\n c\ny", lineno) == f"x = 1\n{SYSTEM}('echo a   b  c')\n\n\ny"


def test_line_ends_of_other_systems() -> None:
    """Carriage returns end lines, as they do for the compiler."""
    assert rewrite("a = 1\r\n!ls\r\n", 2) == f"a = 1\n{SYSTEM}('ls')\n"


@pytest.mark.parametrize(
    "source",
    [
        "for i in range(2):\n    !echo {i}\nelse:\n\t%pwd",
        "def f():\n    x = !ls\n    return x\nprint(f()?)".replace("print(f()?)", "f?"),
        "try:\n    %cd (nowhere\nexcept OSError:\n    !echo ')' \"it's\n",
        "if a:\n    !cat <<< '{' | head\n    y = %env HOME\n%time [i for i in range(3)]",
        "!echo '''\nx = 1\n!echo (\n%ls )",
        "async def f():\n    await g()\n    !ls\n\n%config InlineBackend.figure_format = 'svg'",
        "x = 1;\n!echo \"unfinished\n%time 'also\n?x",
    ],
)
def test_cells_that_compile_in_the_end(source: str) -> None:
    """Each failing line in turn, until there is none."""
    assert parsed(source)


@given(st.text(alphabet="ab!%?='\"()[]{}\\\n \t$#:,", max_size=60))
def test_rewriting_comes_to_an_end(source: str) -> None:
    """Whatever a cell holds, it compiles or is refused after a few rounds, and keeps its number of lines."""
    for _ in range(source.count("\n") + 2):
        try:
            compile(source, "<cell>", "exec", dont_inherit=True)
            return
        except SyntaxError as error:
            rewritten = rewrite(source, error.lineno or 0)
        except ValueError:
            return
        if rewritten is None:
            return
        assert rewritten.count("\n") == source.count("\n")
        source = rewritten
    pytest.fail("it went on")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("%%time\nf()\n", ("time", "", "f()\n")),
        ("\n\n%%bash -e  \nls\n\nls", ("bash", "-e", "ls\n\nls")),
        ("%%html", ("html", "", "")),
        ("%%writefile a b.txt\r\nx\r\n", ("writefile", "a b.txt", "x\n")),
        ("x = 1\n%%time", None),
        ("%time\nx", None),
        ("%% time", None),
        ("", None),
    ],
)
def test_cell_magics_are_recognised(source: str, found: Any) -> None:
    """The first line that is not empty says what a cell is."""
    assert cell_magic(source) == found


# --- interpolation


@pytest.mark.parametrize(
    ("line", "expanded"),
    [
        ("echo {x} $x", "echo 5 5"),
        ("echo {x + 1} {d['k']!r} {f:.2f} {d['k']!r:>5}", "echo 6 'v' 1.50   'v'"),
        ("echo {{x}} $$x", "echo {x} $x"),
        ("echo $HOME ${x} $1 $$ {nothing} {}", "echo $HOME ${x} $1 $$ {nothing} {}"),
        ("awk '{print $1}' $x.txt $s.real", "awk '{print $1}' 5.txt $s.real"),
        ('echo \'$x\' "$x" "don\'t $x"', 'echo \'$x\' "5" "don\'t 5"'),
        ('echo {"a": {"b": 1}}', 'echo {"a": {"b": 1}}'),
        ("echo {a,b}.txt {1..3} {x", "echo {a,b}.txt {1..3} {x"),
        ("echo $o.real.imag $o.nothing", "echo 0 7.nothing"),
        ("echo $print", "echo $print"),
        ("plain", "plain"),
    ],
)
def test_values_within_commands(line: str, expanded: str) -> None:
    """Expressions and names are replaced where they have a value, and left for the shell where they have none."""
    assert expand(line, {"x": 5, "d": {"k": "v"}, "f": 1.5, "o": 7}) == expanded


def test_commands_see_local_names(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> None:
    """Within a function its own names count."""
    notebook.cell("x = 1\ndef f(x):\n    y = !echo {x}\n    !echo $x-{y[0]}\nf(2)")
    assert capfd.readouterr().out == "2-2\n"


# --- commands


def test_commands_print_where_programs_do(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> None:
    """Output goes to the descriptors, after what was printed before; the exit code is kept."""
    notebook.cell("print('first')\n!echo second; echo third >&2; exit 3")
    out, err = capfd.readouterr()
    assert (out, err) == ("first\nsecond\n", "third\n")
    assert notebook.namespace["_exit_code"] == 3
    notebook.cell("!kill -KILL $BASHPID")
    assert notebook.namespace["_exit_code"] == -9


def test_commands_have_no_input(notebook: Notebook) -> None:
    """A command that reads finds nothing, instead of waiting or of taking the session's input."""
    assert notebook.cell("x = !cat; echo done\nx") == ["done"]


def test_output_as_a_value(notebook: Notebook) -> None:
    """Lines, errors among them, with the forms that IPython gives them."""
    lines = notebook.cell("x = !echo 'a 1'; echo 'b 2' >&2\nx")
    assert isinstance(lines, SList)
    assert (lines, lines.n, lines.s) == (["a 1", "b 2"], "a 1\nb 2", "a 1 b 2")
    assert (lines.l, lines.grep("B"), lines.fields(1), lines.fields()) == (
        ["a 1", "b 2"],
        ["b 2"],
        ["1", "2"],
        [["a", "1"], ["b", "2"]],
    )
    assert notebook.cell("!!echo hi") == ["hi"]


@pytest.mark.parametrize("cell", ["!sleep 60", "x = !sleep 60", "%%bash\nsleep 60"])
def test_an_interrupt_while_a_command_starts_ends_it(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, cell: str
) -> None:
    """It runs before whoever started it knows of it, and is ended all the same."""
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **settings: Any):
            super().__init__(*words, **settings)
            started.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # which is interrupted, unless interrupts are put off

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        notebook.cell(cell)
    wait_for_end(started)


def test_output_follows_a_replaced_stream(notebook: Notebook) -> None:
    """Where a program put something else in the place of standard output, a command writes there."""
    notebook.cell("import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as kept:\n    !echo caught")
    assert notebook.cell("kept.getvalue()") == "caught\n"


@pytest.mark.parametrize("cell", ["!{command}", "x = !{command}", "%%bash\n{command}"])
def test_an_interrupt_ends_the_command_too(notebook: Notebook, tmp_path: Path, cell: str) -> None:
    """What a command started, even if it ignores interrupts, is gone when the interrupt arrives."""
    ids = tmp_path / "ids"
    command = f"(trap '' INT; echo $BASHPID >> {ids}; while :; do sleep 0.1; done) & echo $BASHPID >> {ids}; wait"

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not ids.exists() or ids.read_text().count("\n") < 2):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not has_heard.wait(0.1):  # one that comes just before main waits in the kernel wakes nobody
            signal.pthread_kill(main, signal.SIGWINCH)

    has_heard, main = threading.Event(), threading.get_ident()
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            notebook.cell(cell.replace("{command}", command))
    finally:
        has_heard.set()
        thread.join()
        signal.signal(signal.SIGWINCH, before)
    wait_for_end(int(pid) for pid in ids.read_text().split())


# --- magics


def test_unknown_magics(notebook: Notebook) -> None:
    """An error in one line says what is unknown and what is known."""
    with pytest.raises(UsageError, match=r"^there is no line magic %nothing\. Known: %autoreload .*%whos$"):
        notebook.cell("%nothing at all")
    with pytest.raises(UsageError, match=r"^there is no cell magic %%nothing\. Known: %%HTML .*%%writefile$"):
        notebook.cell("%%nothing\n")
    with pytest.raises(UsageError, match="there is a cell magic %%bash"):
        notebook.cell("%bash ls")
    with pytest.raises(UsageError, match="there is a line magic %pwd"):
        notebook.cell("%%pwd\n")


def test_lsmagic(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """All names are listed."""
    notebook.cell("%lsmagic")
    out = capsys.readouterr().out
    assert "%timeit" in out
    assert "%%capture" in out


def test_time(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """A line or a cell is run once, in the namespace, and its value is the magic's."""
    assert notebook.cell("%time 1 + 1") == 2
    assert notebook.cell("y = %time 5\ny") == 5
    assert notebook.cell("%%time\nx = 3\nx * 2") == 6
    assert notebook.namespace["x"] == 3
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("CPU times: user ")
    assert lines[1].startswith("Wall time: ")
    with pytest.raises(ZeroDivisionError):
        notebook.cell("%time 1 / 0")
    with pytest.raises(UsageError):
        notebook.cell("%time")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (1.5e-9, "1.5 ns"),
        (2e-6, "2 μs"),
        (0.0123, "12.3 ms"),
        (1, "1 s"),
        (59.94, "59.9 s"),
        (3725, "1h 2min 5s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """A time has three digits and a unit, a long one several units."""
    assert duration(seconds) == text


def test_timeit(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """A statement is run many times; options choose how many, and the result can be had."""
    notebook.cell("def f(): return 1\nresult = %timeit -n 10 -r 3 -o f()")
    assert "(mean ± std. dev. of 3 runs, 10 loops each)" in capsys.readouterr().out
    result = notebook.namespace["result"]
    assert (result.loops, result.repeat, len(result.timings)) == (10, 3, 3)
    assert result.best * (1 - 1e-9) <= result.average <= result.worst * (1 + 1e-9)
    assert notebook.cell("%%timeit -n2 -r1 -q n = 0\nn += 1") is None
    assert "n" not in notebook.namespace
    notebook.cell("import time\n%timeit -r 2 time.sleep(0.25)")
    assert "2 runs, 1 loop each" in capsys.readouterr().out
    with pytest.raises(UsageError, match="unknown option -z"):
        notebook.cell("%timeit -z f()")


def test_folders(notebook: Notebook, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`%cd` goes to a folder, and back; `%pwd` returns it; `%ls` is the shell's."""
    (tmp_path / "a b").mkdir()
    notebook.cell("%cd 'a b'")
    assert notebook.cell("%pwd") == str(tmp_path / "a b")
    notebook.cell("%cd -q -\nname = 'a b'\n%cd {name}\n%cd -q ..\n%ls")
    assert capfd.readouterr().out.splitlines() == [str(tmp_path / "a b")] * 2 + ["a b/"]
    with pytest.raises(UsageError, match="cannot go to nowhere: No such file"):
        notebook.cell("%cd nowhere")


def test_environment(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """Variables are set, with values of the program's, and read."""
    notebook.cell("v = 'a b'\n%env FIRST=$v\n%set_env SECOND two words\n%env THIRD=x=y")
    assert [os.environ[name] for name in ("FIRST", "SECOND", "THIRD")] == ["a b", "two words", "x=y"]
    assert capsys.readouterr().out.splitlines()[0] == "env: FIRST=a b"
    assert notebook.cell("%env SECOND") == "two words"
    assert notebook.cell("x = %env\nx['FIRST']") == "a b"
    with pytest.raises(UsageError, match="no variable MISSING"):
        notebook.cell("%env MISSING")


def test_names(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's own names are listed, without those of the session; resetting removes them."""
    notebook.cell(
        "import numpy as np\nnumbers, text, array, _private = [1, 2], 'x' * 200, np.zeros((2, 3)), 0\nOut[1] = 5"
    )
    assert notebook.cell("%who_ls") == ["array", "np", "numbers", "text"]
    assert notebook.cell("%who_ls list str") == ["numbers", "text"]
    notebook.cell("%who")
    assert capsys.readouterr().out == "array\t np\t numbers\t text\n"
    notebook.cell("%whos")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["Variable", "Type", "Data/Info"]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["array", "ndarray"], ["np", "module"], ["numbers", "list"], ["text", "str"]
    ]  # fmt: skip
    assert lines[2].endswith("shape 2x3")
    assert lines[5].endswith("<...>")
    notebook.cell("display = 5\n%reset -f")
    assert "numbers" not in notebook.namespace
    assert "_private" not in notebook.namespace
    assert notebook.namespace["Out"] == {}
    assert callable(notebook.namespace["display"])
    notebook.cell("%who")
    assert capsys.readouterr().out == "Interactive namespace is empty.\n"


def test_running_a_file(notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file runs as a program of its own with arguments, and its names come over."""
    (tmp_path / "other.py").write_text("value = 7")
    (tmp_path / "program.py").write_text(
        "import sys, __main__, other\nargs = sys.argv[1:]\nseen = 'mine' in globals()\n"
        "main = __main__.__file__\nname = __name__\nv = other.value\nif 'fail' in args: sys.exit(3)\n"
    )
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    notebook.cell("mine = 1\n%run program.py a 'b c'")
    names = notebook.namespace
    assert (names["args"], names["seen"], names["main"], names["name"], names["v"]) == (
        ["a", "b c"],
        False,
        "program.py",
        "__main__",
        7,
    )
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    notebook.cell("%run -i -n program fail")
    assert (names["seen"], names["name"]) == (True, "program")
    assert capsys.readouterr().err == "program.py ended with exit code 3\n"
    assert names["__name__"] == "__main__"
    with pytest.raises(UsageError, match=r"cannot read nothing\.py: No such file"):
        notebook.cell("%run nothing.py")


def test_history(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells that were run, all or some."""
    notebook.cell("a = 1")
    notebook.cell("b = 2")
    notebook.cell("%history")
    assert capsys.readouterr().out == "a = 1\nb = 2\n%history\n"
    notebook.cell("%history -n 1-2")
    assert capsys.readouterr().out == "   1: a = 1\n   2: b = 2\n"
    notebook.cell("%hist -l 1")
    assert capsys.readouterr().out == "%hist -l 1\n"


def test_questions(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """A question describes an object, two marks show its source."""
    notebook.cell("import textwrap\nn = 5\ntextwrap.dedent?")
    out = capsys.readouterr().out
    assert "Signature: dedent(text)" in out
    assert "Remove any common leading whitespace" in out
    notebook.cell("textwrap.dedent??")
    assert "def dedent(text)" in capsys.readouterr().out
    notebook.cell("?n")
    assert "Type: int\nString form: 5\n" in capsys.readouterr().out
    notebook.cell("missing?")
    assert capsys.readouterr().out == "Object `missing` not found.\n"


def test_magics_that_only_answer(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """What notebooks begin with does no harm, and what cannot be done is said without stopping the cell."""
    notebook.cell("%matplotlib inline\n%load_ext autoreload\n%matplotlib")
    assert capsys.readouterr() == ("", "")
    notebook.cell("%autoreload 2\n%pip install requests\n%conda list\n%matplotlib qt\n%load_ext sql\nx = 1")
    out, err = capsys.readouterr()
    assert out == ""
    assert "%pip: a sandbox has no package manager" in err
    assert len(err.splitlines()) == 5
    assert notebook.namespace["x"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "Completer.use_jedi = False",
        "",
        "InlineBackend.nothing = 1",
        "InlineBackend.figure_format = 'bmp'",
        "InlineBackend.rc = x",
    ],
)
def test_configuration_that_does_not_exist(notebook: Notebook, line: str) -> None:
    """Only known options of `InlineBackend` can be set, to known values."""
    with pytest.raises(UsageError):
        notebook.cell(f"%config {line}")


def test_configuration(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """Options are shown, and settings for matplotlib reach it."""
    assert notebook.cell("%config InlineBackend.figure_format") == "png"
    notebook.cell("%config InlineBackend")
    assert "InlineBackend.close_figures=True" in capsys.readouterr().out
    notebook.cell("%config InlineBackend.rc = {'figure.figsize': (3, 2)}\nimport matplotlib")
    assert notebook.cell("matplotlib.rcParams['figure.figsize']") in ((3, 2), [3, 2])
    notebook.cell("matplotlib.rcdefaults()\n%config InlineBackend.close_figures = False")
    notebook.cell("import matplotlib.pyplot as plt\nplt.plot([1])")
    notebook.cell("plt.title('more')")
    notebook.cell("1")
    assert len(notebook.sent) == 2
    notebook.cell("plt.close('all')")


def test_precision(notebook: Notebook) -> None:
    """Floats are shown with as many digits as were asked for."""
    notebook.cell("_ = get_ipython().run_line_magic('precision', '2')\ndisplay(3.14159, [2.0])")
    notebook.cell("_ = get_ipython().run_line_magic('precision', '')\ndisplay(3.14159)")
    assert [data["text/plain"] for data, _ in notebook.sent] == ["3.14", "[2.00]", "3.14159"]
    with pytest.raises(UsageError):
        notebook.cell("%precision many")


# --- cell magics


def test_scripts(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> None:
    """A cell is a program's input; its output can be kept, and its failure is an error."""
    notebook.cell("%%bash\nx=5\necho $x")
    notebook.cell("%%sh -s one\necho $1")
    notebook.cell("%%python\nprint(__name__)")
    notebook.cell("%%script cat\nas it is")
    assert capfd.readouterr().out == "5\none\n__main__\nas it is"
    notebook.cell("%%bash --out kept --err=wrong\necho out; echo err >&2")
    assert (notebook.namespace["kept"], notebook.namespace["wrong"]) == ("out\n", "err\n")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 2"):
        notebook.cell("%%bash\nexit 2")
    notebook.cell("%%bash --no-raise-error\nexit 2")
    assert notebook.namespace["_exit_code"] == 2
    with pytest.raises(UsageError, match="there is no surely-missing in this sandbox"):
        notebook.cell("%%script surely-missing\n")


def test_files(notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell is written to a file as it stands, or added to its end."""
    notebook.cell("name = 'x.txt'")
    notebook.cell("%%writefile {name}\n%time {not expanded}\n")
    notebook.cell("%%writefile -a x.txt\nmore")
    assert (tmp_path / "x.txt").read_text() == "%time {not expanded}\nmore"
    notebook.cell("%%writefile 'x.txt'\nnew\n")
    assert (tmp_path / "x.txt").read_text() == "new\n"
    assert capsys.readouterr().out == "Writing x.txt\nAppending to x.txt\nOverwriting x.txt\n"
    with pytest.raises(UsageError):
        notebook.cell("%%writefile\nx")


def test_capture(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """Output, commands, displays, figures and the value are kept, and can be shown later."""
    notebook.cell(
        "%%capture kept\nimport sys, matplotlib.pyplot as plt\nprint('out')\n!echo command\n"
        "print('err', file=sys.stderr)\ndisplay(1)\nplt.plot([1])\nplt.show()\n'value'"
    )
    assert capsys.readouterr() == ("", "")
    assert notebook.sent == []
    kept = notebook.namespace["kept"]
    assert (kept.stdout, kept.stderr) == ("out\ncommand\n", "err\n")
    assert [sorted(data) for data, _ in kept.outputs] == [["text/plain"], ["image/png", "text/plain"], ["text/plain"]]
    notebook.cell("kept()")
    assert capsys.readouterr() == ("out\ncommand\n", "err\n")
    assert len(notebook.sent) == 3


def test_capture_lets_through_what_it_is_told(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    """Options name what is not kept; without a name all is dropped; an error puts the streams back."""
    notebook.cell("%%capture kept --no-stdout\nprint('seen')\ndisplay(1)")
    notebook.cell("%%capture --no-display\nprint('dropped')\ndisplay(2)")
    assert capsys.readouterr().out == "seen\n"
    assert [data["text/plain"] for data, _ in notebook.sent] == ["2"]
    streams = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError):
        notebook.cell("%%capture kept\nprint('before')\n1 / 0")
    assert (sys.stdout, sys.stderr) == streams
    assert notebook.namespace["kept"].stdout == "before\n"


@pytest.mark.parametrize(
    ("name", "mime"),
    [
        ("html", "text/html"),
        ("markdown", "text/markdown"),
        ("latex", "text/latex"),
        ("svg", "image/svg+xml"),
        ("javascript", "application/javascript"),
        ("js", "application/javascript"),
    ],
)
def test_cells_in_other_formats(notebook: Notebook, name: str, mime: str) -> None:
    """A cell is shown as what it is."""
    notebook.cell(f"%%{name}\n<x>{{y}}")
    assert notebook.sent == [({mime: "<x>{y}"}, {})]
