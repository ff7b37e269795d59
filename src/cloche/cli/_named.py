"""Named sandboxes in commands: parsing a name, options that an existing sandbox refuses, and ending one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from cloche.core.errors import ClocheError, InvalidRequest
from cloche.core.escape import escape_line, escape_name

from ._acts import require_yes
from .options import Command, spelled
from .output import exit_code_of_error, say


class NamedCommand(Command):
    """Accept options after the first argument, a name, too. With `needs_dashes` it is a name only if -- follows."""

    needs_dashes = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as if these options stood before the name."""
        return super().parse_args(ctx, self.with_options_first(ctx, args))

    def with_options_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments with the options after the first argument moved before it. Raises click.UsageError."""
        before, arguments = self._split(ctx, args)
        following = arguments[1] if arguments[1:] else "-"
        if before[-1:] == ["--"] or following in ("-", "--") or not following.startswith("-"):
            return args
        try:
            options, command = self._split(ctx, arguments[1:])
        except click.UsageError:
            if self.needs_dashes:  # they are a command's own
                return args
            raise
        dashes = ["--"] if options[-1:] == ["--"] else []
        if self.needs_dashes and not dashes:
            return args
        return [*before, *options[: len(options) - len(dashes)], arguments[0], *dashes, *command]

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Return the leading options, with the dashes that end them, and the positional arguments."""
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        positional: list[str] = []
        for param in self.params:
            value = values.get(param.name) if isinstance(param, click.Argument) else None
            positional += [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
        return args[: len(args) - len(positional)], positional


def refuse_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for options that only a new sandbox takes; each command may have its own time-out."""
    for option_name, value in options.items():
        if option_name == "secrets" and value:
            _check_secrets(name, value)
        elif option_name != "timeout" and value is not None and value is not False and value != ():
            raise InvalidRequest(
                f"{spelled(option_name)} is for a new sandbox, and {name!r} exists already; leave "
                "it out, or open another one with it (cloche sandbox create)"
            )


def _check_secrets(name: str, texts: Sequence[str]) -> None:
    """Raise InvalidRequest unless a sandbox has these secrets, by name and hosts; its own values count."""
    from cloche.keeper.attach import find_kept

    find_kept(name, texts)


def lives(name: str) -> bool:
    """Return whether a sandbox with this name exists."""
    from cloche.keeper import registry

    try:
        registry.find(name)
    except ClocheError:
        return False
    return True


def refuse_name(argument: str, form: str) -> None:
    """Raise InvalidRequest if an argument for a throwaway sandbox is the name of an existing one."""
    if not os.path.lexists(argument) and lives(argument):
        raise InvalidRequest(
            f"{argument!r} is the name of a sandbox, and this runs in a throwaway one; write {form} to run there, "
            "or -- before an argument of the program's own"
        )


def for_each(names: Iterable[str], act: Callable[[str], None]) -> int:
    """Call `act` for each sandbox and print its name; report an error and continue. Return the exit code."""
    code = 0
    for name in names:
        try:
            act(name)
        except ClocheError as error:
            say(str(error))
            code = code or exit_code_of_error(error)
        else:
            print(escape_line(name), flush=True)
    return code


def visit(name: str, op: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Send one operation to the keeper of a name and return its answer."""
    from cloche.keeper import attach, registry

    return attach.visit(registry.find(name), op, **arguments)


def check_may_end(name: str, *, yes: bool) -> None:
    """Ask for confirmation unless `yes` is set; ask in any case if uncommitted changes to a folder would be lost.

    Raises InvalidRequest if the answer is no.
    """
    losses, goes_on = _what_is_lost(name), f"{name} goes on"
    if not losses:
        require_yes(f"End {name} for good, with all that is in it?", yes=yes, otherwise=goes_on)
        return
    if not os.isatty(0):
        raise InvalidRequest(
            f"{losses}; cloche diff {name} shows them, cloche commit {name} writes them, --force ends it anyway"
        )
    from ._review import is_confirmed

    if not is_confirmed(f"{losses}. End it anyway? [y/N]: "):
        raise InvalidRequest(goes_on)


def _what_is_lost(name: str) -> str:
    """Describe the uncommitted changes; empty if there are none, or no folder."""
    from cloche.keeper import registry

    policy = registry.find(name).entry.get("policy")
    folder = policy.get("host_folder") if isinstance(policy, Mapping) else None
    if not isinstance(folder, Mapping):
        return ""
    from cloche.sync import Sandbox

    where = escape_name(str(folder.get("path")))
    try:
        with Sandbox.attach(name) as sandbox:
            count = len(sandbox.diff().changes)
    except ClocheError as error:
        return f"{name} may have uncommitted changes to {where} ({error})"
    if not count:
        return ""
    return f"{name} has {count} uncommitted change{'' if count == 1 else 's'} to {where}"
