"""The root of the command line.

A command is looked for in the module of its name (`-` is written `_`), then in all modules of this folder. So a command
is added in one file: any module here may declare it with `@root.command`.
"""

from __future__ import annotations

from importlib import import_module, util

import click

from cloche import __version__

from .options import CommandGroup

# The order of the listing; other commands come last.
ORDER = (
    "agent", "run", "batch", "check", "exec", "shell", "session", "mcp", "serve", "node", "fleet", "keys", "secrets",
    "debug", "container", "languages", "presets", "backends", "gc", "doctor", "conformance", "bench", "sandbox", "ps",
    "diff", "commit", "discard", "config", "network", "images", "packages", "audit", "tools",
    "approvals", "skill", "snapshot", "workspace-snapshot", "devenv", "repro",
)  # fmt: skip


class _Root(CommandGroup):
    """Import the module of a command when the command is called, and all modules when they are listed."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's own
        """Return a command, or None."""
        name = cmd_name.replace("-", "_")
        if cmd_name not in self.commands and name.isidentifier():
            module = f"{__package__}.{name}"
            if util.find_spec(module) is not None:
                import_module(module)
        if cmd_name not in self.commands:
            _import_all()
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's own
        """Return the names of all commands."""
        _import_all()
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _import_all() -> None:
    """Import every module of this folder that holds commands: no packages, no names with a leading `_`."""
    import pkgutil

    for module in pkgutil.iter_modules(import_module(str(__package__)).__path__):
        if not module.ispkg and not module.name.startswith("_"):
            import_module(f"{__package__}.{module.name}")


@click.group(cls=_Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", message="%(prog)s %(version)s", help="Print the version.")
def root() -> None:
    """Run code that a language model wrote, so that it cannot hurt this machine."""
