"""Commands that start servers (`cloche mcp`, `cloche serve`); no other module of the command line imports one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import click

from cloche.core.errors import InvalidRequest

from .app import root
from .options import Command, debug_option, flag, folder_options, no_sandbox_option, option, sandbox_options
from .output import log_to_stderr

if TYPE_CHECKING:
    from cloche.config.options import SandboxOptions


class _Mcp(Command):
    """Serve; with the first argument `install`, run that command instead."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any,  # noqa: ANN401
    ) -> click.Context:  # fmt: skip
        """Return the context of the command that is meant."""
        if args[:1] == ["install"]:
            from ._mcp_install import install

            return install.make_context(f"{info_name} install", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@root.command("mcp", cls=_Mcp)
@flag("--http", "over_http", help="Serve HTTP instead of standard input and output.")
@option("--host", metavar="HOST", default="127.0.0.1", help="With --http: the address to listen on.")
@option("--port", metavar="N", default=8000, help="With --http: the port; 0 takes a free one.")
@option("--path", metavar="PATH", default="/mcp", help="With --http: the endpoint.")
@option("--token-file", metavar="FILE", help="With --http: bearer tokens, one per line. Or CLOCHE_MCP_TOKEN.")
@option(
    "--allow-host", metavar="NAME", multiple=True, help="A host name that clients may use for this server. Repeatable."
)
@option("--allow-origin", metavar="URL", multiple=True, help="An origin whose web pages may connect. Repeatable.")
@option(
    "--approve", metavar="WHO", default="client",
    help="client: ask the client's user; high: allow all but critical calls; deny: refuse.",
)  # fmt: skip
@option("--approvals", metavar="FILE", help="Let another process decide through this queue.")
@option("--patience", metavar="TIME", default="5m", help="How long to wait for an approval.")
@option("--tool", metavar="NAME", multiple=True, help="Offer this tool only. Repeatable. Default: all.")
@option("--root", "roots", metavar="/memory=DIR", multiple=True, help="A folder for the file tools. Repeatable.")
@option(
    "--interpreters", metavar="N", type=click.IntRange(min=0), default=16,
    help="How many interpreters keep their state between calls; 0: each call gets a new one.",
)  # fmt: skip
@sandbox_options(but=("fallback", "trusted"))
@folder_options("workspace_at", "workspace_read")
@no_sandbox_option()
@debug_option()
def _mcp(
    over_http: bool,
    host: str,
    port: int,
    path: str,
    token_file: str | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    approve: str,
    approvals: str | None,
    patience: str,
    tool: tuple[str, ...],
    roots: tuple[str, ...],
    interpreters: int,
    no_sandbox: bool,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Serve the tools of an agent as an MCP server.

    Your options define the sandbox; no argument of a tool can widen it. --timeout is the upper limit for the time-out
    of a call. With tier 3, the default, the client's user is asked before code runs. `cloche mcp install CLIENT` adds
    the server to a client's configuration.
    """
    from cloche.audit.log import switch_on
    from cloche.core.limits import parse_duration
    from cloche.mcp.command import McpCommand, serve

    from ._review import without_folder
    from .run import with_backend

    rules, folder = without_folder(with_backend(options, no_sandbox=no_sandbox))
    command = McpCommand(
        over_http=over_http, host=host, port=port, path=path, token_file=token_file, allowed_hosts=allow_host,
        allowed_origins=allow_origin, approve=approve, approvals=approvals,
        patience_s=parse_duration(patience, name="patience"), tools=tool, roots=read_roots(roots),
        interpreters=interpreters, options=cast("SandboxOptions", rules), folder=folder or {},
    )  # fmt: skip
    if sandbox_debug:
        log_to_stderr()
    switch_on("mcp")
    return serve(command)


class _Serve(Command):
    """Serve; with the first argument `link`, run that command instead."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any,  # noqa: ANN401
    ) -> click.Context:  # fmt: skip
        """Return the context of the command that is meant."""
        if args[:1] == ["link"]:
            return _link.make_context(f"{info_name} link", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("link", cls=Command)
@option("--url", metavar="URL", help="The service's address. Default: cloche.url of your configuration, else loopback.")
@option("--key-file", metavar="FILE", help="A file with a key of scope admin. Default: cloche.api_key.")
def _link(url: str | None, key_file: str | None) -> int:
    """Make a login link of a running service for one browser, and print it.

    It works once, within ten minutes.
    """
    from ._service import ask_service

    service, link = ask_service("POST", "/api/login-links", url=url, key_file=key_file)
    print(f"{service}{link['path']}")
    return 0


@root.command("serve", cls=_Serve)
@option("--host", metavar="HOST", default="127.0.0.1", help="The address to listen on.")
@option("--port", metavar="N", default=8470, help="The port; 0 takes a free one.")
@option("--database", metavar="FILE", help="The database file. Default: in the user's state folder.")
@option("--tls-certificate", metavar="FILE", help="Serve TLS with this certificate (PEM).")
@option("--tls-key", metavar="FILE", help="The certificate's key.")
@option(
    "--self-signed", metavar="DIR",
    help="Serve TLS with a certificate that is made in this private folder, and print its SHA-256.",
)  # fmt: skip
@flag("--allow-public", "allow_public", help="Allow --host to be more than loopback without TLS.")
@option(
    "--allow-host", metavar="NAME", multiple=True, help="A host name that clients may use for this server. Repeatable."
)
@option("--allow-origin", metavar="URL", multiple=True, help="An origin whose web pages may connect. Repeatable.")
@option(
    "--trusted-proxy", metavar="ADDRESS", multiple=True,
    help="Trust X-Forwarded-For and -Proto from this proxy address or network. Repeatable.",
)  # fmt: skip
@option(
    "--root-path", metavar="/PATH", default="", help="The path prefix of the service behind a proxy, such as /cloche."
)
@option(
    "--workspace-root", "roots", metavar="DIR[:rw]", multiple=True,
    help="A host folder that the API may read, with :rw also write. Repeatable. Default: none.",
)  # fmt: skip
@option("--queue", metavar="N", type=click.IntRange(min=1), default=256, help="How many runs may wait.")
@option("--queue-deadline", metavar="TIME", default="30s", help="How long a run may wait.")
@option("--drain", metavar="TIME", default="30s", help="How long runs may continue when the service stops.")
@option(
    "--worker-address", metavar="https://HOST:PORT",
    help="The address for workers on other machines. Default: only this machine, by a Unix socket.",
)  # fmt: skip
@option("--keep-runs", metavar="TIME", default="30d", help="How long to keep records of runs; 100,000 at most.")
@option(
    "--keep-sandboxes", metavar="TIME", default="10m",
    help="How long sandboxes live without a client and without a service of this database.",
)  # fmt: skip
@flag("--end-sandboxes", "end_sandboxes", help="End the sandboxes of this service when it stops.")
@option(
    "--sandboxes", metavar="N", type=click.IntRange(min=1), default=64,
    help="How many sandboxes may live at once, as far as memory, processes and files suffice.",
)  # fmt: skip
@option(
    "--spare-sandboxes", metavar="N", type=click.IntRange(min=0, max=64),
    help="How many sandboxes are open ahead of need, of each kind that was used last. Default: 2 with --e2b, else 0.",
)  # fmt: skip
@flag(
    "--sandbox-fusion", "sandbox_fusion",
    help="Answer /run_code and /run_jupyter as SandboxFusion does, with a key in the address.",
)  # fmt: skip
@flag("--e2b", "e2b", help="Answer E2B's SDKs, on a port of its own.")
@option("--e2b-port", metavar="N", default=3000, help="With --e2b: its port; 0 takes a free one.")
@option("--e2b-templates", metavar="FILE", help="With --e2b: templates by name, and images that stand for them.")
@option("--domain", metavar="NAME", help="With --e2b: ports of sandboxes have host names PORT-ID.NAME, over TLS.")
@flag("--agents", "agents", help="Show this user's coding agents on the page, and write their changes from there.")
@option(
    "--secrets-key", metavar="FILE",
    help="The key that encrypts stored secrets, 32 bytes in base64. Without one, none are stored.",
)  # fmt: skip
@option("--secrets-from", metavar="DIR", help="A folder with secrets that callers use by name: a file for each value.")
@option("--snapshots-disk", metavar="SIZE", default="20g", help="For snapshots of sandboxes and templates together.")
@sandbox_options(but=("fallback", "trusted", "secrets"))
@debug_option()
def _serve(
    host: str,
    port: int,
    database: str | None,
    tls_certificate: str | None,
    tls_key: str | None,
    self_signed: str | None,
    allow_public: bool,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    trusted_proxy: tuple[str, ...],
    root_path: str,
    roots: tuple[str, ...],
    queue: int,
    queue_deadline: str,
    drain: str,
    keep_runs: str,
    keep_sandboxes: str,
    end_sandboxes: bool,
    sandboxes: int,
    spare_sandboxes: int | None,
    worker_address: str | None,
    sandbox_fusion: bool,
    e2b: bool,
    e2b_port: int,
    e2b_templates: str | None,
    domain: str | None,
    agents: bool,
    secrets_key: str | None,
    secrets_from: str | None,
    snapshots_disk: str,
    sandbox_debug: bool,
    options: SandboxOptions,
) -> int:
    """Serve the REST API and the page.

    Without configuration it listens on 127.0.0.1, makes a key, and prints the address to open. The options of a sandbox
    apply to every run; only callers with scope admin may exceed them. While the service runs, `cloche serve link`
    prints another link. With --self-signed it prints one line of JSON when it serves: its address, the SHA-256 of its
    certificate for `cloche.certificate` of its callers, and its process id.
    """
    from cloche.audit.log import switch_on
    from cloche.config.settings import given_options
    from cloche.core.limits import parse_duration, parse_size
    from cloche.server.command import ServeCommand, serve
    from cloche.server.e2b.options import E2BOptions
    from cloche.server.e2b.own_templates import read_templates

    command = ServeCommand(
        host=host, port=port, database=database, certificate=tls_certificate, key=tls_key,
        self_signed=self_signed, allows_public=allow_public, allowed_hosts=allow_host,
        allowed_origins=allow_origin, trusted_proxies=trusted_proxy, root_path=root_path, roots=roots,
        queue_limit=queue,
        queue_deadline_s=parse_duration(queue_deadline, name="queue-deadline"),
        drain_s=parse_duration(drain, name="drain"),
        keep_runs_s=parse_duration(keep_runs, name="keep-runs"),
        keep_sandboxes_s=parse_duration(keep_sandboxes, name="keep-sandboxes"), ends_sandboxes=end_sandboxes,
        most_sandboxes=sandboxes, worker_address=worker_address,
        spare_sandboxes=(2 if e2b else 0) if spare_sandboxes is None else spare_sandboxes,
        is_debugging=sandbox_debug,
        has_sandbox_fusion=sandbox_fusion, has_agents=agents, secrets_key=secrets_key or "",
        secrets_from=secrets_from or "", snapshots_bytes=parse_size(snapshots_disk, name="snapshots-disk"),
        e2b=E2BOptions(
            host=host, port=e2b_port, domain=domain, trusted_proxies=trusted_proxy,
            templates=read_templates(e2b_templates),
        ) if e2b else None,
        options=cast("SandboxOptions", given_options(options)),
    )  # fmt: skip
    switch_on("server")
    return serve(command)


def read_roots(specs: tuple[str, ...]) -> dict[str, str]:
    """Return the folders of --root by name. Raises InvalidRequest."""
    roots = {}
    for spec in specs:
        name, equals, folder = spec.partition("=")
        if not (name and equals and folder):
            raise InvalidRequest(f"--root {spec}: write it as /memory=FOLDER or /configs=FOLDER")
        roots[name] = folder
    return roots
