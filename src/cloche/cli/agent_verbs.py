"""The verbs about an agent's tools and their approvals. Each imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from .commands import Verbs
from .exits import guarded

if TYPE_CHECKING:
    from cloche.runtime.options import SandboxOptions

tools = Verbs(help="List an agent's tools, or call one.", no_args_is_help=False, rich_markup_mode=None)
approvals = Verbs(help="See what waits for approval, and decide.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Queue = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="The queue. Default: $CLOCHE_APPROVALS, else one in your state folder."),
]
Number = Annotated[int, typer.Argument(metavar="NUMBER", help="As `cloche approvals list` shows it.")]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Told to whoever asked, the model included.")]
TierNumber = Annotated[int | None, typer.Option("--tier", metavar="N", help="Tier of trust, 1 to 4. Default: 3.")]


def _finish(work: Callable[[], int], *, as_json: bool = False) -> None:
    raise typer.Exit(guarded(work, as_json=as_json))


@tools.callback(invoke_without_command=True)
def list_(
    context: typer.Context,
    tier: TierNumber = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORM",
            help="table, json, openai, openai-strict, openai-responses or anthropic.",
            show_default=False,
        ),
    ] = "table",
) -> None:
    """List the tools of a tier with their risks, or export them for a provider's `tools=`."""
    if context.invoked_subcommand is not None:
        return

    def work() -> int:
        from .tools import list_tools

        return list_tools(tier, form)

    _finish(work, as_json=form != "table")


@tools.command("call")
def call(
    name: Annotated[str, typer.Argument(metavar="TOOL", help="A name of `cloche tools`.")],
    arguments: Annotated[
        str, typer.Argument(metavar="JSON", help="Its arguments; - is stdin.", show_default=False)
    ] = "{}",
    approve: Annotated[
        str, typer.Option(metavar="WHO", help="terminal, queue, auto:high (or low, medium), deny.")
    ] = "terminal",
    queue: Queue = None,
    patience: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long an answer is waited for.")] = None,
    tier: TierNumber = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="A name of `cloche backends`.")] = None,
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Use this configuration file.")
    ] = None,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="The most that a call may take.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Write figures to DIR.")] = None,
) -> None:
    """Call one tool as a model would, and print its answer.

    TOOL is a name of `cloche tools`, JSON its arguments as a model passes them, or - for stdin. The answer is what the
    model would be told; exit code 1 when that is an error.
    """

    def work() -> int:
        from .tools import call_tool

        options: SandboxOptions = {"tier": tier, "backend": backend, "config": config_file, "timeout": timeout}
        return call_tool(name, arguments, approve=approve, queue=queue, patience_s=patience, out=out, options=options)

    _finish(work)


@approvals.command("list")
def list_approvals(
    is_all: Annotated[bool, typer.Option("--all", help="Show what was decided or expired, too.")] = False,
    queue: Queue = None,
    as_json: AsJson = False,
) -> None:
    """List the calls that wait for a decision, the oldest first."""

    def work() -> int:
        from .approvals import list_approvals

        return list_approvals(queue, is_all=is_all, as_json=as_json)

    _finish(work, as_json=as_json)


@approvals.command("show")
def show(number: Number, queue: Queue = None, as_json: AsJson = False) -> None:
    """Show one call: its code, the rules, what changed."""

    def work() -> int:
        from .approvals import show_approval

        return show_approval(queue, number, as_json=as_json)

    _finish(work, as_json=as_json)


@approvals.command("watch")
def watch(queue: Queue = None) -> None:
    """Ask here about each call as it comes, until Ctrl-C."""

    def work() -> int:
        from .approvals import watch

        return watch(queue)

    _finish(work)


@approvals.command("approve")
def approve(
    number: Number,
    is_remembered: Annotated[
        bool, typer.Option("--remember", help="Do not ask again for the same high call under the same rules.")
    ] = False,
    reason: Reason = "",
    queue: Queue = None,
) -> None:
    """Let a call through. A critical one asks once more."""

    def work() -> int:
        from .approvals import decide

        return decide(queue, number, is_approved=True, reason=reason, is_remembered=is_remembered)

    _finish(work)


@approvals.command("deny")
def deny(number: Number, reason: Reason = "", queue: Queue = None) -> None:
    """Refuse a call."""

    def work() -> int:
        from .approvals import decide

        return decide(queue, number, is_approved=False, reason=reason)

    _finish(work)
