"""The commands of the command line, whose help says what each argument is.

Typer 0.20 loses the help of arguments where click is 8.5 or later, and escapes the brackets of defaults for Rich though
Rich does not write the help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo, CommandFunctionType


class Formatter(click.HelpFormatter):
    """Write the help as it will be read."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, text.replace("\\[", "[")) for name, text in rows], col_max, col_spacing)


class _Context(click.Context):
    formatter_class = Formatter


class Command(TyperCommand):
    """Be one verb."""

    context_class = _Context

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        hints = get_type_hints(self.callback, include_extras=True) if self.callback is not None else {}
        for param in self.params:
            if isinstance(param, TyperArgument) and not param.help:
                said = [one for one in getattr(hints.get(param.name or ""), "__metadata__", ()) if _is_argument(one)]
                param.help = said[0].help if said else None
        super().format_options(ctx, formatter)


def _is_argument(said: object) -> bool:
    return isinstance(said, ArgumentInfo)


class Verbs(typer.Typer):
    """Be a group of verbs."""

    def command(
        self,
        name: str | None = None,
        *,
        cls: type[TyperCommand] | None = Command,
        **settings: Any,  # noqa: ANN401 - Typer's own
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=cls, **settings)
