"""Groups and verbs as typer makes them, with a help that is plain text, and the options that go together.

typer escapes brackets for Rich wherever Rich is installed, also where its help is printed without Rich; and the help of
arguments is lost to a click (8.5) that has one of its own. Both are put right where the help is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function


class Verb(TyperCommand):
    """Be a command with a plain help. One that takes --config takes --env-file."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:  # noqa: ANN401 - click's own
        super().__init__(*arguments, **settings)
        at = next((number for number, one in enumerate(self.params, 1) if "--config" in one.opts), 0)
        if at:
            self.params.insert(at, _env_file())

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, arguments' included."""
        _find_help(self)
        return _plain(super().get_help(ctx))

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Leave to typer what click 8.5 would write a second time."""


class _Group(TyperGroup):
    """Be a group with a plain help."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help."""
        return _plain(super().get_help(ctx))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that is meant. Raises UsageError with what is near, which typer and click 8.4 both add."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if "Did you mean" in error.message:
                vars(error)["possibilities"] = None
            raise


class Verbs(typer.Typer):
    """Hold verbs, each of which has a plain help."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(**{"cls": _Group, "rich_markup_mode": None, "no_args_is_help": True, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Add a verb."""
        return super().command(name, **{"cls": Verb, **settings})


def _env_file() -> click.Option:
    """Return the option that is CLOCHE_ENV_FILE for this process: whatever reads settings reads that file."""

    def name_it(_: click.Context, __: click.Parameter, file: str | None) -> None:
        if file:
            os.environ["CLOCHE_ENV_FILE"] = file

    told = "Read Cloche's own variables from this .env, as if you had set them. The program gets none of it."
    return click.Option(["--env-file"], metavar="FILE", help=told, expose_value=False, callback=name_it)


def _plain(text: str) -> str:
    return text.replace("\\[", "[")


def _find_help(verb: click.Command) -> None:
    """Give arguments the help back that they were declared with."""
    lacking = [one for one in verb.params if isinstance(one, TyperArgument) and not one.help]
    if not lacking or verb.callback is None:
        return
    declared = get_params_from_function(verb.callback)
    for one in lacking:
        one.help = getattr(declared[one.name or ""].default, "help", None) or ""
