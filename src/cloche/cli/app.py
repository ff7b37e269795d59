"""The verbs and options of the command line. Each imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, cast

import typer

from cloche import __version__

from .agent_verbs import approvals, tools
from .audit_verbs import verbs as audit
from .exits import guarded
from .typed import Verbs

if TYPE_CHECKING:
    from cloche.runtime.options import SandboxOptions

_SETTINGS = {"help_option_names": ["-h", "--help"]}

app = Verbs(
    help="Run code that a language model wrote, so that it cannot hurt this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
sandbox = Verbs(help="The same verbs under one word.")
config = Verbs(help="Look at the configuration.")
images = Verbs(help="Build what backends run in.")
app.add_typer(sandbox, name="sandbox")
app.add_typer(config, name="config")
app.add_typer(images, name="images")
app.add_typer(audit, name="audit")
app.add_typer(tools, name="tools")
app.add_typer(approvals, name="approvals")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile = Annotated[str | None, typer.Option("--config", metavar="FILE", help="Use this configuration file.")]
BackendName = Annotated[str | None, typer.Option("--backend", metavar="NAME", help="A name of `cloche backends`.")]
Runtime = Annotated[
    str | None,
    typer.Option("--runtime", metavar="NAME", help="runc: docker's own runtime, never gVisor's. Else as --backend."),
]
Preference = Annotated[
    str | None, typer.Option("--prefer", metavar="WHAT", help="strongest or fastest: choose among the backends here.")
]
Fallback = Annotated[
    str | None, typer.Option("--fallback", metavar="WHAT", help="process: what trusted code may fall back to; or none.")
]
Trusted = Annotated[bool, typer.Option("--trusted", help="The code is your own, not a model's: it may fall back.")]
PresetName = Annotated[str | None, typer.Option("--preset", metavar="NAME", help="A name of `cloche presets`.")]
Image = Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image, for backends that use images.")]
Require = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A level or control that must hold; less is an error. Repeatable."),
]
BestEffort = Annotated[list[str] | None, typer.Option(metavar="NAME", help="A control that may be absent. Repeatable.")]
Timeout = Annotated[str | None, typer.Option(metavar="TIME", help="Wall clock: seconds, or 500ms, 30s, 5m.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory: bytes, or 256m, 1g.")]
Cpus = Annotated[float | None, typer.Option(metavar="N", help="CPUs, for example 0.5.")]
Pids = Annotated[int | None, typer.Option(metavar="N", help="Processes and threads at once.")]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="Size of the workspace.")]
OutputLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="Output kept in the result, per stream.")]
Network = Annotated[str | None, typer.Option(metavar="MODE", help="off, allowlist or open.")]
Variables = Annotated[list[str] | None, typer.Option(metavar="K=V", help="A variable for the program. Repeatable.")]
InputFiles = Annotated[
    list[str] | None, typer.Option(metavar="SRC[:DST]", help="Copy a file or directory in. Repeatable.")
]
NoSandbox = Annotated[bool, typer.Option("--no-sandbox", help="Child process with limits, no isolation.")]
Screen = Annotated[
    str | None,
    typer.Option("--screen", metavar="MODE", help="Look at Python code first: off, warn, block (with --no-sandbox)."),
]
TierNumber = Annotated[int | None, typer.Option("--tier", metavar="N", help="Tier of trust, 1 to 4.")]


def _finish(work: Callable[[], int], *, debug: bool = False, as_json: bool = False) -> None:
    raise typer.Exit(guarded(work, debug=debug, as_json=as_json))


def _joined(words: list[str] | None) -> str | None:
    """Make one list of a repeated option, each of whose values may be a list with commas."""
    return ",".join(words) if words else None


def _choice(prefer: str | None, fallback: str | None, trusted: bool, screen: str | None = None) -> SandboxOptions:
    """Return the options that say which backend may run it, and what reads it first; settings check the words."""
    chosen = {"prefer": prefer, "fallback": fallback, "trusted": trusted or None, "screen": screen}
    return cast("SandboxOptions", chosen)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cloche {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run code that a language model wrote, so that it cannot hurt this machine."""


@app.command("run", no_args_is_help=True, context_settings=_SETTINGS)
@sandbox.command("run", no_args_is_help=True, context_settings=_SETTINGS)
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE|-", help="The file to run (- is stdin), then -- and its arguments."),
    ] = None,
    code: Annotated[str | None, typer.Option("-c", metavar="CODE", help="Run CODE instead of a file.")] = None,
    language: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: by file name or first line, else python.")
    ] = None,
    backend: BackendName = None,
    runtime: Runtime = None,
    prefer: Preference = None,
    fallback: Fallback = None,
    trusted: Trusted = False,
    image: Image = None,
    require: Require = None,
    best_effort: BestEffort = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    config_file: ConfigFile = None,
    timeout: Timeout = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    disk: Disk = None,
    output_limit: OutputLimit = None,
    network: Network = None,
    screen: Screen = None,
    env: Variables = None,
    file: InputFiles = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Copy created and changed files to DIR.")] = None,
    spill: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write the full output to DIR/stdout.txt and DIR/stderr.txt.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Send a failing program to the configured model, run what it answers.")
    ] = False,
    max_fix: Annotated[
        int | None, typer.Option("--max-fix", metavar="N", help="Ask at most N times. Default: 4.")
    ] = None,
    save_fix: Annotated[
        str | None, typer.Option("--save-fix", metavar="FILE", help="Write the program that --fix repaired to FILE.")
    ] = None,
    as_json: AsJson = False,
    no_sandbox: NoSandbox = False,
    sandbox_debug: Annotated[
        bool, typer.Option("--sandbox-debug", help="Print debug log and the jail's plan.")
    ] = False,
) -> None:
    """Run a program in a throwaway sandbox.

    Its output and its exit code pass through. Cloche's own: 124 time-out, 137 out of memory, 125 Cloche failed,
    2 wrong usage.
    """

    def work() -> int:
        from .run import RunCommand, run_command

        return run_command(
            RunCommand(
                words=tuple(words or ()), code=code, language=language, env=tuple(env or ()),
                files=tuple(file or ()), fix=fix, max_fix=max_fix, save_fix=save_fix,
                out=out, spill=spill, as_json=as_json, no_sandbox=no_sandbox, debug=sandbox_debug,
                options={
                    "backend": backend, "runtime": runtime, "image": image, "require": _joined(require),
                    "best_effort": _joined(best_effort) or (),
                    "preset": preset, "tier": tier, "config": config_file, "timeout": timeout,
                    "memory": memory, "cpus": cpus, "pids": pids, "disk": disk, "network": network,
                    "output_limit": output_limit,
                    **_choice(prefer, fallback, trusted, screen),
                },
            )
        )  # fmt: skip

    _finish(work, debug=sandbox_debug, as_json=as_json)


@app.command("session", context_settings=_SETTINGS)
@sandbox.command("session", context_settings=_SETTINGS)
def session(
    language: Annotated[str, typer.Option(metavar="NAME", help="python, javascript or bash.")] = "python",
    idle_timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="End it when it was not used for so long, for example 30m.")
    ] = None,
    backend: BackendName = None,
    runtime: Runtime = None,
    prefer: Preference = None,
    fallback: Fallback = None,
    trusted: Trusted = False,
    image: Image = None,
    require: Require = None,
    best_effort: BestEffort = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    config_file: ConfigFile = None,
    timeout: Timeout = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    disk: Disk = None,
    output_limit: OutputLimit = None,
    network: Network = None,
    screen: Screen = None,
    env: Variables = None,
    file: InputFiles = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Copy files that cells make, and images and HTML, to DIR.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per cell that is piped in.")] = False,
    no_sandbox: NoSandbox = False,
    sandbox_debug: Annotated[bool, typer.Option("--sandbox-debug", help="Print debug log.")] = False,
) -> None:
    """Open a prompt whose cells share one interpreter.

    What one cell defines, the next one finds. :help at its prompt says more.

    Cells that are piped in are separated by lines that begin with # %%. They run until one fails; its exit code is the
    command's, as with run. The time limit holds for each cell.
    """

    def work() -> int:
        from .session import SessionCommand, session_command

        return session_command(
            SessionCommand(
                language=language, idle_timeout=idle_timeout, env=tuple(env or ()), files=tuple(file or ()), out=out,
                as_json=as_json, no_sandbox=no_sandbox, debug=sandbox_debug,
                options={
                    "backend": backend, "runtime": runtime, "image": image, "require": _joined(require),
                    "best_effort": _joined(best_effort) or (),
                    "preset": preset, "tier": tier, "config": config_file, "timeout": timeout,
                    "memory": memory, "cpus": cpus, "pids": pids, "disk": disk, "network": network,
                    "output_limit": output_limit,
                    **_choice(prefer, fallback, trusted, screen),
                },
            )
        )  # fmt: skip

    _finish(work, debug=sandbox_debug, as_json=as_json)


@app.command("mcp", context_settings=_SETTINGS)
def mcp(
    over_http: Annotated[bool, typer.Option("--http", help="Serve HTTP instead of standard input and output.")] = False,
    host: Annotated[str, typer.Option(metavar="HOST", help="With --http: where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="With --http: the port; 0 takes a free one.")] = 8000,
    path: Annotated[str, typer.Option(metavar="PATH", help="With --http: the endpoint.")] = "/mcp",
    token_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --http: bearer tokens, one a line. Or CLOCHE_MCP_TOKEN."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name that clients may call this host. Repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An origin whose web pages may connect. Repeatable.")
    ] = None,
    approve: Annotated[
        str, typer.Option(metavar="WHO", help="client: its user is asked; high: all but critical calls pass; deny.")
    ] = "client",
    approvals: Annotated[
        str | None, typer.Option(metavar="FILE", help="Have another process decide, through this queue.")
    ] = None,
    patience: Annotated[str, typer.Option(metavar="TIME", help="How long an approval is waited for.")] = "5m",
    tool: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Offer this tool only. Repeatable. Default: all.")
    ] = None,
    root: Annotated[
        list[str] | None, typer.Option(metavar="/memory=DIR", help="A folder for the file tools. Repeatable.")
    ] = None,
    interpreters: Annotated[
        int, typer.Option(metavar="N", min=0, help="How many go on between calls at once; 0: each call begins anew.")
    ] = 16,
    backend: BackendName = None,
    runtime: Runtime = None,
    prefer: Preference = None,
    image: Image = None,
    require: Require = None,
    best_effort: BestEffort = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    config_file: ConfigFile = None,
    timeout: Timeout = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    disk: Disk = None,
    output_limit: OutputLimit = None,
    network: Network = None,
    screen: Screen = None,
    no_sandbox: NoSandbox = False,
    sandbox_debug: Annotated[bool, typer.Option("--sandbox-debug", help="Print debug log.")] = False,
) -> None:
    """Serve the tools of an agent as an MCP server.

    The sandbox is yours: no argument of a tool can widen it. --timeout is the most that a call may ask for. Tier 3, the
    default, asks the client's user before code runs.
    """

    def work() -> int:
        from cloche.core.units import parse_duration

        from .doors import McpCommand, read_roots, serve_mcp
        from .run import with_backend

        options: SandboxOptions = {
            "backend": backend, "runtime": runtime, "image": image, "require": _joined(require),
            "best_effort": _joined(best_effort) or (),
            "preset": preset, "tier": tier, "config": config_file, "timeout": timeout, "memory": memory, "cpus": cpus,
            "pids": pids, "disk": disk, "network": network, "output_limit": output_limit,
            **_choice(prefer, None, trusted=False, screen=screen),
        }  # fmt: skip
        command = McpCommand(
            over_http=over_http, host=host, port=port, path=path, token_file=token_file,
            allowed_hosts=tuple(allow_host or ()), allowed_origins=tuple(allow_origin or ()), approve=approve,
            approvals=approvals, patience_s=parse_duration(patience, name="patience"), tools=tuple(tool or ()),
            roots=read_roots(tuple(root or ())), interpreters=interpreters,
            options=with_backend(options, no_sandbox=no_sandbox),
        )  # fmt: skip
        return serve_mcp(command, debug=sandbox_debug)

    _finish(work, debug=sandbox_debug)


@app.command("container", no_args_is_help=True, context_settings=_SETTINGS)
def container(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder that is its /workspace.")],
    words: Annotated[
        list[str], typer.Argument(metavar="IMAGE", help="The image, then -- and what to run in it. Default: its own.")
    ],
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K[=V]", help="A variable; K alone has its value where docker is called. Repeatable."),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="UID[:GID]", help="Who it runs as. Default: the folder's owner.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What docker calls the container.")] = "",
    tty: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")] = False,
    runtime: Annotated[
        str | None, typer.Option("--runtime", metavar="NAME", help="runc, or gvisor. Default: the daemon's own.")
    ] = None,
    require: Require = None,
    preset: PresetName = None,
    config_file: ConfigFile = None,
    memory: Memory = None,
    cpus: Cpus = None,
    pids: Pids = None,
    network: Annotated[str | None, typer.Option(metavar="MODE", help="off or open.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the docker run that starts an agent's own container.

    It is as hard as the container of a run, but for its folder, which is yours: DIR. Nothing is started.
    """

    def work() -> int:
        from .container import show_arguments

        return show_arguments(
            folder, words, env=tuple(env or ()), user=user, name=name, has_terminal=tty, as_json=as_json,
            options={
                "runtime": runtime, "require": _joined(require), "preset": preset, "config": config_file,
                "memory": memory, "cpus": cpus, "pids": pids, "network": network,
            },
        )  # fmt: skip

    _finish(work, as_json=as_json)


@app.command("languages")
def languages(as_json: AsJson = False) -> None:
    """List the languages, and what runs them."""

    def work() -> int:
        from .tables import show_languages

        return show_languages(as_json=as_json)

    _finish(work, as_json=as_json)


@app.command("presets")
def presets(as_json: AsJson = False) -> None:
    """List the presets."""

    def work() -> int:
        from .tables import show_presets

        return show_presets(as_json=as_json)

    _finish(work, as_json=as_json)


@app.command("backends")
def backends(as_json: AsJson = False) -> None:
    """List the backends, and which can be used here."""

    def work() -> int:
        from .tables import show_backends

        return show_backends(as_json=as_json)

    _finish(work, as_json=as_json)


@app.command("gc")
def gc(as_json: AsJson = False) -> None:
    """Remove what dead processes left behind.

    Containers, workspaces, their folders and control groups.
    """

    def work() -> int:
        from .gc import clear

        return clear(as_json=as_json)

    _finish(work, as_json=as_json)


@images.command("build")
def images_build(
    backend: Annotated[str, typer.Option(metavar="NAME", help="The backend that runs in it.")] = "microvm",
    package: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A package of the distribution's to add. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build what virtual machines start from.

    A kernel and a root disk, from the distribution's packages. Needs no root.
    """

    def work() -> int:
        from .images import build

        return build(backend, tuple(package or ()), as_json=as_json)

    _finish(work, as_json=as_json)


@config.command("show")
def config_show(
    config_file: ConfigFile = None,
    preset: PresetName = None,
    tier: TierNumber = None,
    backend: BackendName = None,
    runtime: Runtime = None,
    prefer: Preference = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting, its value and where it came from."""

    def work() -> int:
        from .tables import show_settings

        return show_settings(
            {
                "config": config_file, "preset": preset, "tier": tier, "backend": backend, "runtime": runtime,
                "prefer": prefer,
            },
            as_json=as_json,
        )  # fmt: skip

    _finish(work, as_json=as_json)


@app.command("doctor")
def doctor(as_json: AsJson = False) -> None:
    """Measure what this host can enforce, and say how to get more."""

    def work() -> int:
        from .doctor import examine

        return examine(as_json=as_json)

    _finish(work, as_json=as_json)


@app.command("conformance")
def conformance(
    backend: Annotated[str, typer.Option(metavar="NAME", help="A name of `cloche backends`.")] = "local",
    level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Default: the strongest the backend has here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Try every promise of the interface against a backend. Exit code 1 when one is broken."""

    def work() -> int:
        from .conformance import check

        return check(backend, level, as_json=as_json)

    _finish(work, as_json=as_json)


@app.command("bench")
def bench(
    rounds: Annotated[int, typer.Option(metavar="N", help="Turns of every contestant.")] = 50,
    runs: Annotated[
        int | None, typer.Option(metavar="N", help="Runs from four threads. Default: ten per round.")
    ] = None,
    sessions: Annotated[int, typer.Option(metavar="N", help="Live sessions at once; 0 leaves that out.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all figures to FILE as JSON.")
    ] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw them to FILE, .png or .svg; needs matplotlib.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Let other sandboxes that are installed take part.")] = False,
    peers_folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where they are. Default: ~/.cache/cloche-bench.")
    ] = None,
) -> None:
    """Measure what runs cost here.

    Turn by turn with a plain subprocess. Exit code 1 when something is left behind.
    """

    def work() -> int:
        from .bench import BenchCommand
        from .bench import bench as measure_and_print

        return measure_and_print(
            BenchCommand(
                rounds=rounds, runs=runs, sessions=sessions, json_file=json_file, plot_file=plot_file,
                peers=peers, peers_folder=peers_folder,
            )
        )  # fmt: skip

    _finish(work)
