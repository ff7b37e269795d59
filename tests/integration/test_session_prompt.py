"""`cloche session` as a person at a terminal meets it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.terminals import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"
FIGURE = "import matplotlib.pyplot as plt; plt.plot([1, 2]); None"

# Sessions and the pipe are tried as the ordinary user too.
pytestmark = pytest.mark.usefixtures("settings_of_nobody_at_a_terminal")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Return a way to open prompts, which are closed in any case."""
    opened: list[Terminal] = []

    def open_one(*words: str) -> Terminal:
        opened.append(Terminal(*words))
        opened[-1].see("In [1]: ")
        return opened[-1]

    yield open_one
    for one in opened:
        with one:
            pass


def test_state_stays_and_values_are_numbered(terminal: Callable[..., Terminal]) -> None:
    """What one cell defines the next one finds; its value has the number of its cell."""
    at = terminal()
    at.enter("x = 20")
    assert "Out[2]: 21\n" in at.enter("x + 1")
    assert "Out[3]: [20, 21]\n" in at.enter("[x, Out[2]]")
    assert "Out" not in at.enter("x;")
    assert "Out" not in at.enter("None")


def test_blocks_go_on_until_a_blank_line(terminal: Callable[..., Terminal]) -> None:
    """A block is typed on several lines; brackets and strings end by themselves."""
    at = terminal()
    at.enter("def double(n):", "    if n:", "        return n * 2", "    return 'none'", "")
    assert "Out[2]: (4, 'none')\n" in at.enter("(double(2),", " double(0))")
    assert "Out[3]: 'a\\n\\nb'\n" in at.enter("'''a", "", "b'''")
    assert "Out[4]: 3\n" in at.enter("import asyncio; await asyncio.sleep(0, 3)")
    assert "hi 1\n" in at.enter("%%bash", "echo hi $((0 + 1))", "")


def test_output_comes_while_the_cell_runs(terminal: Callable[..., Terminal]) -> None:
    """Both streams are shown at once, and a line that was left open ends before the prompt."""
    at = terminal()
    at.type("import sys, time; print('fir' + 'st', flush=True); time.sleep(600)\r")
    at.see("first\n")
    at.type(CTRL_C)
    at.see("KeyboardInterrupt")
    at.see("In [2]: ")
    assert at.enter("print('no', 'end', sep='-', end='')").endswith("no-end\n")
    assert "Out[3]: 'v'\n" in at.enter("print('no', 'end', sep='-', end=''); 'v'")


def test_ctrl_c_interrupts_the_cell_and_keeps_the_state(terminal: Callable[..., Terminal]) -> None:
    """The cell ends as by Ctrl-C in any interpreter; at the prompt it gives up what was typed."""
    at = terminal()
    at.enter("kept = 'still here'")
    at.type("print('up' + '!', flush=True)\rprint('lo' + 'ops', flush=True); all(True for _ in iter(int, 1))\r")
    at.see("up!\n")
    at.see("In [3]: ")
    at.see("loops\n")
    at.type(CTRL_C)
    at.see("KeyboardInterrupt")
    at.see("In [4]: ")
    assert "Out[4]: 'still here'\n" in at.enter("kept")
    at.type("unfinished = (")
    at.see("unfinished = (")
    for _ in range(8):  # it is heard by a prompt that waits for a key
        time.sleep(0.5)
        at.type(CTRL_C)
        if at.shows("In [5]: ", patience_s=1):
            break
    assert "Out[5]: False\n" in at.enter("'unfinished' in globals()")


def test_a_second_ctrl_c_ends_the_session(terminal: Callable[..., Terminal]) -> None:
    """Code that resists is killed at once, and how to go on is said."""
    at = terminal()
    at.enter("import time")
    resisting = "        try: print('r', 'up', sep='', flush=True); time.sleep(600)"
    at.enter("def resist():", "    while True:", resisting, "        except BaseException: pass", "")
    at.type("resist()\r")
    at.see("rup\n")
    at.type(CTRL_C)
    for _ in range(8):  # on a busy machine the first two may be far apart
        time.sleep(0.2)
        at.type(CTRL_C)
        if at.shows("the second Ctrl-C ends the session\n", patience_s=0.2):
            break
    at.see(":restart starts a new interpreter")
    at.see("In [3]: ")
    assert "this session has ended" in at.enter("1")
    at.enter(":restart", prompt="In [1]: ")
    assert "Out[1]: 5\n" in at.enter("5")


def test_a_timeout_keeps_the_state_or_says_that_it_is_lost(terminal: Callable[..., Terminal]) -> None:
    """The time limit holds for each cell; where it cost the state, that and the way on are said."""
    at = terminal("--timeout", "3")
    at.enter("x = 1")
    assert "timeout: the code was stopped at its time limit" in at.enter("import time; time.sleep(60)")
    assert "Out[3]: 1\n" in at.enter("x")
    resisting = ["while True:", "    try: time.sleep(9)", "    except BaseException: pass", ""]
    shown = at.enter(*resisting)
    assert "its state is lost\n" in shown
    assert ":restart starts a new interpreter" in shown


def test_checkpoints_go_back(terminal: Callable[..., Terminal]) -> None:
    """Memory, files and numbers are those of the checkpoint; without a name the latest one is meant."""
    at = terminal()
    at.enter("x = 1")
    assert "checkpoint before" in at.enter(":checkpoint before")
    at.enter("x = 2; open('f', 'w').write('2')")
    assert "checkpoint 2" in at.enter(":checkpoint")
    at.enter("x = 3")
    assert "back at checkpoint 2" in at.enter(":rollback")
    assert "Out[3]: 2\n" in at.enter("x")
    at.enter(":rollback before", prompt="In [2]: ")
    assert "Out[2]: (1, [])\n" in at.enter("import os; (x, os.listdir())")
    assert "no checkpoint '2'" in at.enter(":rollback 2")
    assert "there is: before" in at.enter(":rollback nowhere")
    at.enter("import os; os._exit(1)")
    at.enter(":rollback before", prompt="In [2]: ")
    assert "Out[2]: 1\n" in at.enter("x")


def test_forks_are_switched_to(terminal: Callable[..., Terminal]) -> None:
    """Each fork goes on by itself, under its number; what blocks a rollback can be closed."""
    at = terminal()
    at.enter("x = 'first'")
    at.enter(":checkpoint c")
    assert "fork 1 2" in at.enter(":fork 2")
    at.enter(":switch 2", prompt="[fork 2] In [2]: ")
    at.enter("x = 'fork'; open('mine', 'w').write('m')", prompt="[fork 2] In [3]: ")
    assert "mine\n" in at.enter(":files", prompt="[fork 2] In [3]: ")
    at.enter(":switch 0", prompt="\nIn [2]: ")
    assert "Out[2]: 'first'\n" in at.enter("x")
    assert "mine" not in at.enter(":files")
    shown = at.enter(":forks")
    assert "* 0  the first one, 2 cells" in shown
    assert "  2  forked from 0, 2 cells" in shown
    assert "close it first" in at.enter(":rollback c")
    at.enter(":close 1")
    at.enter(":switch 2", prompt="[fork 2] In [3]: ")
    at.enter(":close 2", prompt="\nIn [3]: ")
    assert "back at checkpoint c" in at.enter(":rollback c")
    assert "there is no session 2" in at.enter(":switch 2")


def test_words_help_and_refuse(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Every word is in the help; unknown and wrongly used ones say what is right."""
    at = terminal("--memory", "200m")
    known = ":help :history :restart :checkpoint :rollback :fork :forks :switch :close :files :save :limits :quit"
    assert f":nonsense is not a command; commands: {known}" in at.enter(":nonsense")
    shown = at.enter(":help")
    assert all(word in shown for word in known.split())
    assert "write it as :switch N" in at.enter(":switch")
    assert "'x' is not a number" in at.enter(":switch x")
    assert "No closing quotation" in at.enter(":save 'x")
    assert "200MiB" in at.enter(":limits")
    at.enter("import os; os.mkdir('d'); open('d/a b.txt', 'w').write('text')")
    assert "d/a b.txt (4B)" not in at.enter(":files")
    assert "out/a b.txt (4B)" in at.enter(":save 'd/a b.txt' out")
    assert (tmp_path / "out" / "a b.txt").read_text() == "text"
    assert "cloche: " in at.enter(":save nothing out")
    assert "os.mkdir" in at.enter(":history")


def test_rich_outputs_are_announced_or_saved(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """An image is a file in --out; without it one line says what there was."""
    at = terminal()
    shown = at.enter(FIGURE)
    assert shown.count("image/png (") == 1
    assert "start with --out DIR" in shown
    at = terminal("--out", "results")
    at.enter("open('made.txt', 'w').write('made')")
    assert "is in results/cell-2.png\n" in at.enter(FIGURE)
    assert (tmp_path / "results" / "cell-2.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "results" / "made.txt").read_text() == "made"
    assert "is in results/cell-3.html\n" in at.enter("import pandas; pandas.DataFrame({'a': [1]})")
    assert "<table" in (tmp_path / "results" / "cell-3.html").read_text()


def test_tracebacks_are_red_and_nothing_of_the_guest_is_obeyed(terminal: Callable[..., Terminal]) -> None:
    """Colours are ours alone: escapes in output, values and names are shown, not sent to the terminal."""
    at = terminal()
    at.enter("1/0")
    assert b"\x1b[31mTraceback" in at.raw
    before = len(at.raw)
    at.enter("print('\\x1b]0;owned\\x07', '\\x9b2J')")
    at.enter("class R:", "    def __repr__(self): return '\\x1b[2Jcleared'", "")
    at.enter("R()")
    at.enter("_ = open('\\x1b[2Jname\\n', 'w').write('')")
    at.enter(":files")
    assert "\\x1b]0;owned\\x07 \\x9b2J\n" in at.text
    assert "\\x1b[2Jcleared\n" in at.text
    assert "\\x1b[2Jname\\n\n" in at.text
    assert not re.search(rb"\x1b\]0;owned|\x1b\[2J|\x9b", at.raw[before:])


def test_lines_are_edited_and_remembered(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """The arrow keys bring back earlier lines, those of the last session too, from a private file."""
    at = terminal()
    at.enter("'remember' + ' me'")
    at.type("\x1b[A\r")
    at.see("Out[2]: 'remember me'\n")
    at.enter(":quit", prompt="\n")
    assert at.leave() == 0
    (file,) = (tmp_path / "state" / "cloche").glob("history-*")
    assert file.name == "history-python"
    assert file.stat().st_mode & 0o077 == 0
    again = terminal()
    again.type("\x1b[A\x1b[A\r")
    again.see("Out[1]: 'remember me'\n")


def test_ctrl_d_leaves(terminal: Callable[..., Terminal]) -> None:
    """The end of the input is the end of the session, with exit code 0."""
    at = terminal()
    at.enter("1/0")
    at.type(CTRL_D)
    assert at.leave() == 0


def test_an_idle_session_expires(terminal: Callable[..., Terminal]) -> None:
    """It ends while nobody types, says so at the next cell, and can be begun anew."""
    at = terminal("--idle-timeout", "1s")
    time.sleep(4)
    shown = at.enter("1")
    assert "has expired" in shown
    assert ":restart starts a new interpreter" in shown
    at.enter(":restart")
    assert "Out[1]: 7\n" in at.enter("7")


def test_bash_keeps_its_state_too(terminal: Callable[..., Terminal]) -> None:
    """Lines go on while a quote, a loop or a function is open."""
    at = terminal("--language", "bash")
    at.enter("for i in 1 2; do", '  say="$i', '$i"', "done")
    assert "\n2\n2\n" in at.enter('echo "$say"')
    at.enter("double() {", "echo $(($1 * 2))", "}")
    assert "\n8\n" in at.enter("double 4")


@pytest.mark.toolchain
def test_javascript_shows_its_values(terminal: Callable[..., Terminal]) -> None:
    """A value is shown as JSON, or as the engine puts it into words."""
    at = terminal("--language", "javascript")
    at.enter("function double(n) {", "  return n * 2", "}")
    assert "Out[2]: 42\n" in at.enter("double(21)")
    assert "Out[3]: [Function: double]\n" in at.enter("double")
    assert "Out" not in at.enter("undefined")
