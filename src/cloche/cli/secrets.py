"""`cloche secrets`: the secrets that a running service holds for its callers."""

from __future__ import annotations

import os
import sys
from urllib.parse import quote

from cloche.core.errors import InvalidRequest
from cloche.core.escape import escape_name

from ._acts import require_yes, yes_option
from .app import root
from .options import argument, flag, json_option, option
from .output import show

secrets = root.group("secrets", help="Secrets that a service uses for its callers.")(lambda: None)
_name = argument("name", metavar="NAME", help="The variable that sandboxes have it in.")
_url = option("--url", metavar="URL", help="The service's address. Default: cloche.url of your configuration.")
_key_file = option("--key-file", metavar="FILE", help="A file with a key of scope admin. Default: cloche.api_key.")
MOST_READ = 64 << 10


@secrets.command("set")
@_name
@option("--host", metavar="HOST", multiple=True, help="A host that gets it. Repeatable. Default: those of a provider.")
@option("--env", "variable", metavar="VARIABLE", help="Take the value from this variable, not from standard input.")
@option("--format", "format_", metavar="TEXT", default="", help='How a header has it: "Bearer {}".')
@flag("--foreign", help="Permit other credentials to these hosts.")
@_url
@_key_file
@json_option()
def _set(
    name: str,
    host: tuple[str, ...],
    variable: str | None,
    format_: str,
    foreign: bool,
    url: str | None,
    key_file: str | None,
    as_json: bool,
) -> int:
    """Store a secret at the service, or replace it. Its value comes from standard input.

    The service must have been started with --secrets-key. Nobody can read the value from it.
    """
    from ._service import ask_service

    body = {
        "value": _value(variable), "hosts": list(host), "format": format_, "foreign": "allow" if foreign else "refuse"
    }  # fmt: skip
    _, row = ask_service("PUT", f"/api/secrets/{quote(name, safe='')}", url=url, key_file=key_file, body=body)
    show([row], as_json=True) if as_json else print(f"stored {row['name']} for {', '.join(row['hosts'])}")
    return 0


def _value(variable: str | None) -> str:
    """Return the value, without a line's end. Raises InvalidRequest."""
    if variable is not None:
        if variable not in os.environ:
            raise InvalidRequest("--env: there is no such variable")
        return os.environ[variable].strip()
    if sys.stdin.isatty():
        from getpass import getpass

        return getpass("Value: ").strip()
    return sys.stdin.read(MOST_READ).strip()


@secrets.command("list")
@_url
@_key_file
@json_option()
def _list(url: str | None, key_file: str | None, as_json: bool) -> int:
    """List the secrets of the service, without their values."""
    from ._service import ask_service

    _, page = ask_service("GET", "/api/secrets", url=url, key_file=key_file)
    rows = [{**row, "hosts": ", ".join(row["hosts"])} for row in page["items"]]
    if not rows and not as_json:
        print("the service holds no secrets; `cloche secrets set NAME` stores one")
        return 0
    show(page["items"] if as_json else rows, as_json=as_json)
    return 0


@secrets.command("remove")
@_name
@_url
@_key_file
@yes_option
def _remove(name: str, url: str | None, key_file: str | None, yes: bool) -> int:
    """Remove a secret from the service. Sandboxes that have it keep it until they end."""
    from ._service import ask_service

    require_yes(f"Remove {escape_name(name)}? Runs that name it are refused from then on.", yes=yes)
    ask_service("DELETE", f"/api/secrets/{quote(name, safe='')}", url=url, key_file=key_file)
    print(f"removed {escape_name(name)}")
    return 0
