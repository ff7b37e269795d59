"""Help is plain text whose listings cut nobody's words, and a command is one file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cloche.cli.app import ORDER, root

_COLUMNS = 80
HELLO = '''
from cloche.cli.app import root
from cloche.cli.options import argument, json_option, sandbox_options

@root.command("hello")
@argument("name", metavar="NAME", help="Who is greeted.")
@sandbox_options("memory")
@json_option()
def _hello(name, options, as_json):
    """Greet somebody."""
    print(f"hello {name}", options["memory"], as_json)
    return 3
'''


def _commands() -> Iterator[tuple[str, click.Command]]:
    waiting: list[tuple[str, click.Command]] = [("cloche", root)]
    while waiting:
        name, command = waiting.pop(0)
        yield name, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            found = [(word, command.get_command(context, word)) for word in command.list_commands(context)]
            waiting += [(f"{name} {word}", one) for word, one in found if one is not None]


COMMANDS = dict(_commands())


def _help_of(name: str, command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name=name, terminal_width=_COLUMNS))


def test_every_command_is_looked_at() -> None:
    """Groups within groups, too, and none of those whose place in the listing is named is missing."""
    assert {"cloche run", "cloche sandbox run", "cloche audit show", "cloche skill run", "cloche mcp"} <= set(COMMANDS)
    assert [name.split()[1] for name in COMMANDS if name.count(" ") == 1] == list(ORDER)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_plain_and_says_what_everything_is(name: str) -> None:
    """No escapes, nothing twice, a sentence for the command, each argument and each option."""
    command = COMMANDS[name]
    told = _help_of(name, command)
    assert "\\" not in told
    assert [line for line in told.splitlines() if line.endswith("rguments:")] in ([], ["Arguments:"])
    for param in command.params:
        explained = getattr(param, "help", None) or getattr(param, "text", None)
        assert explained, f"{name}: {param.name} is not explained"
        assert explained.split()[0] in told
    summary = command.get_short_help_str(limit=1000)
    assert summary.endswith(".")
    assert ". " not in summary


def test_listings_cut_nothing() -> None:
    """Every group's listing has each command's summary whole."""
    for name, command in COMMANDS.items():
        if isinstance(command, click.Group):
            told = _help_of(name, command)
            for word, one in COMMANDS.items():
                if word.rpartition(" ")[0] == name:
                    assert one.get_short_help_str(limit=1000) in told


def test_what_belongs_together_is_declared_once() -> None:
    """Options of `run`, `session` and `skill run` say the same, but for those of which each has its own."""
    texts: dict[str, set[str | None]] = {}
    for name in ("cloche run", "cloche session", "cloche skill run"):
        for param in COMMANDS[name].params:
            if isinstance(param, click.Option):
                texts.setdefault(str(param.name), set()).add(param.help)
    assert {name for name, told in texts.items() if len(told) > 1} == {"language", "out", "as_json", "sandbox_debug"}


def test_a_command_is_added_in_one_file(tmp_path: Path) -> None:
    """A new module in the folder is found by its name, listed at the end, and its number is the exit code."""
    tmp_path.joinpath("hello.py").write_text(HELLO)
    start = f"import sys, cloche.cli as c; c.__path__.append({str(tmp_path)!r}); sys.argv[0] = 'cloche'; c.main()"
    shown = subprocess.run([sys.executable, "-c", start, "--help"], capture_output=True, check=False, text=True)
    assert shown.stdout.splitlines()[-1].split() == ["hello", "Greet", "somebody."]
    command = [sys.executable, "-c", start, "hello", "you", "--memory", "1g"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "hello you 1g False\n", "")


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["--version"], ["click", "typing", "re", "cloche.core"]),
        (["run", "--help"], ["rich", "yaml", "asyncio", "cloche.sync", "cloche.cli.audit"]),
        (["--help"], ["rich", "yaml", "asyncio", "cloche.sync", "cloche.config.settings"]),
    ],
    ids=["version", "run --help", "help"],
)
def test_what_is_not_needed_is_not_imported(words: list[str], unneeded: list[str]) -> None:
    """A command that starts often imports what it uses, and nothing else."""
    script = (
        f"import atexit, sys; sys.argv = ['cloche', *{words}]; before = set(sys.modules)\n"
        f"atexit.register(lambda: print([name for name in {unneeded} if name in set(sys.modules) - before]))\n"
        "from cloche.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]"
