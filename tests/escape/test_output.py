"""Attempts to hurt the host by what it reads: floods, broken text, terminal commands."""

from functools import partial

from tests.harness.escape.attempts import BOTH, Attempt
from tests.harness.escape.checks import captures_at_most, prints_to_terminal, returns_by
from tests.harness.escape.controls import Controls

HELD = 1 << 20
flood = partial(Attempt, family="output", levels=BOTH, check=captures_at_most(HELD), limits={"timeout": 15})
broken = partial(Attempt, family="output", levels=BOTH)
command = partial(Attempt, family="output", check=prints_to_terminal, terminal=True)

ATTEMPTS = (
    flood(
        name="flood standard output",
        code="""
        for _ in range(128):
            os.write(1, b"x" * 65536)
        """,
    ),
    flood(
        name="flood standard error",
        code="""
        for _ in range(128):
            os.write(2, b"x" * 65536)
        """,
    ),
    flood(
        name="flood both by turns",
        code="""
        for _ in range(128):
            os.write(1, b"x" * 65536)
            os.write(2, b"y" * 65536)
        """,
    ),
    flood(
        name="flood by many children",
        code="""
        for _ in range(8):
            if os.fork() == 0:
                for _ in range(16):
                    os.write(1, b"x" * 65536)
                os._exit(0)
        for _ in range(8):
            os.wait()
        """,
    ),
    flood(
        name="flood with lines without end",
        code="""
        for _ in range(1 << 11):
            os.write(1, b"\\n" * 4096)
        """,
    ),
    flood(
        name="flood past every bound",
        code="""
        for _ in range(1 << 11):
            os.write(1, b"x" * 65536)
        """,
    ),
    flood(
        name="flood from a shell",
        language="bash",
        code="""
        head -c 8388608 /dev/zero
        """,
    ),
    Attempt(
        name="flood without end",
        family="output",
        levels=BOTH,
        limits={"timeout": 0.6},
        check=returns_by(2.0),
        code="""
        import signal
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)
        import time
        if os.fork() == 0:
            time.sleep(T["lingers_s"])
            os._exit(0)
        while True:
            try:
                os.write(1, b"x" * 65536)
            except OSError:
                pass
            time.sleep(0.001)
        """,
    ),
    broken(name="text that is not UTF-8", code="""os.write(1, b"\\xff\\xfe\\x80 CONTAINED?\\n")"""),
    broken(name="errors that are not UTF-8", code="""os.write(2, b"\\xc3\\x28\\n")"""),
    broken(name="half a character at the end", code="""os.write(1, b"CONTAINED\\n\\xe2\\x82"); os._exit(0)"""),
    broken(name="an encoded surrogate", code="""os.write(1, b"\\xed\\xa0\\x80\\n")"""),
    broken(
        name="a flood that is not UTF-8",
        code="""
        for _ in range(64):
            os.write(1, b"\\xf0\\x9f\\x98" * 1024)
        os.write(1, b"\\n")
        """,
    ),
    command(name="retitle the terminal", code="""os.write(1, b"\\x1b]0;escaped\\x07")"""),
    command(name="write the clipboard", code="""os.write(1, b"\\x1b]52;c;ZXNjYXBlZA==\\x07")"""),
    command(name="ask the terminal to answer", code="""os.write(2, b"\\x1b[6n\\x1b[c\\x1bP$q q\\x1b\\\\")"""),
    command(name="clear the screen", code="""os.write(1, b"\\x1b[2J\\x1b[1;1H\\x1bc")"""),
    command(name="commands of one byte", code="""os.write(1, b"\\xc2\\x9b2J \\x9d0;escaped\\x9c")"""),
)


def test_contained(attempt: Attempt, where: str, controls: Controls) -> None:
    """Output is data: bounded, always text, and never a command."""
    controls.assert_contained(attempt, where)
