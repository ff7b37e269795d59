"""What stands before `--` in `cloche exec`, and what cannot be said of a live sandbox already."""

from __future__ import annotations

from typing import Any

import click
import pytest

from cloche.cli.app import root
from cloche.cli.exec import run_command
from cloche.cli.options import sandbox_options, spelled
from cloche.core.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "name", "words"),
    [
        ("box -- bash", "box", "-- bash"),
        ("-it --env A=b --cwd=-- box -- ls -- -l", "box", "-- ls -- -l"),
        ("--user root box -- -x", "box", "-- -x"),
        ("ls -- -l", "ls", "-- -l"),
        ("box --", "box", "--"),
        ("-- bash", None, "bash"),
        ("-- ls -- -l", None, "ls -- -l"),
        ("-it -- box -- bash", None, "box -- bash"),
        ("-- -- x", None, "-- x"),
        ("-i tr a-z A-Z", None, "tr a-z A-Z"),
        ("git checkout -- x", None, "git checkout -- x"),
        ("box", None, "box"),
    ],
)
def test_one_word_right_before_dashes_is_a_name(given: str, name: str | None, words: str) -> None:
    """The first after the options, whoever lives; dashes right after the options leave all to the command."""
    command = root.get_command(click.Context(root), "exec")
    assert command is not None
    params = command.make_context("exec", given.split()).params
    assert (params["name"], " ".join(params["words"])) == (name, words)


def _sandbox_options() -> list[str]:
    def none() -> None:
        """Do nothing."""

    return [param.name for param in vars(sandbox_options()(none))["__click_params__"] if param.expose_value]


@pytest.mark.parametrize("option", ["file", *(name for name in _sandbox_options() if name != "timeout")])
def test_what_opens_a_sandbox_is_refused_with_a_name(option: str) -> None:
    """Each option but the time-out, by its name, before anything is looked for."""
    values: dict[str, Any] = {} if option == "file" else {option: 0}
    with pytest.raises(InvalidRequest, match=rf"^{spelled(option)} .* 'box' .*leave it out.*sandbox create"):
        run_command(
            "box", ["true"], reads=False, has_terminal=False, cwd=None, user=None, env=(),
            file=("no such file",) if option == "file" else (), options=values,  # type: ignore[arg-type]
        )  # fmt: skip
