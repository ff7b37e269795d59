"""The help of every verb is plain text, and the listings of verbs cut nobody's words."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer
from typer.main import get_command

from cloche.cli.app import app
from cloche.cli.skill_verbs import skill
from cloche.cli.typed import Verbs

_COLUMNS = 80


def _verbs() -> Iterator[tuple[str, click.Command]]:
    whole = get_command(app)
    waiting: list[tuple[str, click.Command]] = [("cloche", whole), ("cloche skill", get_command(skill))]
    while waiting:
        name, verb = waiting.pop(0)
        yield name, verb
        if isinstance(verb, click.Group):
            waiting += [(f"{name} {word}", one) for word, one in verb.commands.items()]


VERBS = dict(_verbs())


def _help_of(name: str, verb: click.Command) -> str:
    return verb.get_help(click.Context(verb, info_name=name, terminal_width=_COLUMNS))


def test_every_verb_is_looked_at() -> None:
    """Groups within groups, too."""
    assert {"cloche run", "cloche sandbox run", "cloche audit show", "cloche skill run", "cloche mcp"} <= set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_help_is_plain_and_says_what_everything_is(name: str) -> None:
    """No escapes, nothing twice, a sentence for the verb, each argument and each option."""
    verb = VERBS[name]
    told = _help_of(name, verb)
    assert "\\" not in told
    assert [line for line in told.splitlines() if line.endswith("rguments:")] in ([], ["Arguments:"])
    for param in verb.params:
        assert getattr(param, "help", None), f"{name}: {param.name} is not explained"
    summary = verb.get_short_help_str(limit=1000)
    assert summary.endswith(".")
    assert ". " not in summary


def test_listings_cut_nothing() -> None:
    """Every group's listing has each verb's summary whole."""
    for name, verb in VERBS.items():
        if isinstance(verb, click.Group):
            told = _help_of(name, verb)
            for one in verb.commands.values():
                assert one.get_short_help_str(limit=1000) in told


def test_typers_own_help_has_what_is_taken_out_here() -> None:
    """What the other tests look for is there without our formatting."""

    def verb(count: int = 3) -> None:
        """Count."""

    escaped = typer.Typer(rich_markup_mode=None, add_completion=False)
    escaped.command()(verb)
    plain = Verbs(add_completion=False)
    plain.command()(verb)
    assert "\\[default: 3]" in _help_of("verb", get_command(escaped))
    assert " [default: 3]" in _help_of("verb", get_command(plain))
