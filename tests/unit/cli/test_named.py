"""Words that name a sandbox which lives, where a throwaway one would get them; and options behind names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cloche.cli.app import root
from cloche.keeper import registry


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have a name taken, in a place of this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLOCHE_AUDIT", "off")
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    claimed = registry.claim("box")
    yield claimed.name
    claimed.give_up()


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ("sandbox run box -c 1", "cloche run --in box -c CODE"),
        ("run -c 1 box", "cloche run --in box -c CODE"),
        ("sandbox run box", "cloche run --in box FILE"),
        ("session box", "cloche session --in NAME"),
    ],
)
def test_the_name_of_a_sandbox_is_not_taken_for_something_else(box: str, given: str, form: str) -> None:
    """Nothing runs, and the right form is named."""
    done = CliRunner().invoke(root, given.split())
    assert (done.exit_code, done.stdout, form in done.stderr) == (2, "", True)


@pytest.mark.parametrize("given", ["run -c CODE -- box", "run -c CODE other", "sandbox run box"])
def test_what_is_no_name_runs_in_a_throwaway_sandbox(box: str, given: str) -> None:
    """An argument behind dashes, a word that names none, and a file that is there."""
    code = "print(len(__import__('sys').argv))"
    if given == "sandbox run box":
        Path(box).write_text(f"#!/usr/bin/env python3\n{code}")
    words = [code if word == "CODE" else word for word in given.split()]
    done = CliRunner().invoke(root, words)
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "name", "words", "cwd"),
    [
        ("exec box --cwd /tmp -- ls -l", "box", "-- ls -l", "/tmp"),
        ("exec --cwd / box --env A=b --cwd=/tmp -- ls", "box", "-- ls", "/tmp"),
        ("exec grep --cwd /tmp x -- y", None, "grep --cwd /tmp x -- y", None),
        ("exec ls -l -- x", None, "ls -l -- x", None),
        ("exec -- box --cwd /tmp -- ls", None, "box --cwd /tmp -- ls", None),
        ("sandbox exec box --cwd /tmp -- ls -l", "box", "-- ls -l", "/tmp"),
        ("sandbox exec box --cwd /tmp ls -- -l", "box", "ls -- -l", "/tmp"),
        ("sandbox start box --cwd /tmp ls", "box", "ls", "/tmp"),
        ("sandbox exec --cwd /tmp box -- --cwd", "box", "-- --cwd", "/tmp"),
    ],
)
def test_options_may_stand_behind_the_name(given: str, name: str | None, words: str, cwd: str | None) -> None:
    """Where only options stand between it and the dashes; those of a command stay its own."""
    *groups, verb = given.split()[: 2 if given.startswith("sandbox") else 1]
    context, command = click.Context(root), root.get_command(click.Context(root), (groups or [verb])[0])
    if groups:
        assert isinstance(command, click.Group)
        context = click.Context(command)
        command = command.get_command(context, verb)
    assert command is not None
    params = command.make_context(verb, given.split()[len(groups) + 1 :]).params
    assert (params["name"], " ".join(params["words"]), params["cwd"]) == (name, words, cwd)


@pytest.mark.parametrize("verb", ["exec", "shell"])
def test_several_users_are_an_option(verb: str) -> None:
    """It is a keyword of the sandbox that is opened, and not given where it is not."""
    command = root.get_command(click.Context(root), verb)
    assert command is not None
    words = ["true"] if verb == "exec" else []
    assert command.make_context(verb, ["--users", *words]).params["users"] is True
    assert command.make_context(verb, words).params["users"] is None
