"""`cloche keys`: the keys of the service, created directly in its database, without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cloche.core.escape import escape_name

from ._acts import audit_log, require_yes, yes_option
from ._records import opened
from .app import root
from .options import argument, flag, json_option, option
from .output import show

if TYPE_CHECKING:
    from cloche.records.keys import KeyFacts

keys = root.group("keys", help="Keys of the service (`cloche serve`).")(lambda: None)
_database = option("--database", metavar="FILE", help="The database file. Default: in the user's state folder.")
_e2b = flag("--e2b", "is_e2b", help="Give it the form that E2B's SDKs accept, for `cloche serve --e2b`.")
_id = argument("key_id", metavar="ID", help="A key's id, from `cloche keys list`.")


@keys.command("create")
@argument("name", metavar="NAME", help="The name of its owner.")
@option("--scope", metavar="SCOPE", multiple=True, help="run, read, approve or admin. Repeatable. Default: run, read.")
@option("--lifetime", metavar="TIME", help="How long it is valid. Default: until it is revoked.")
@option("--sha256", metavar="HEX", help="Store a key that its owner has made at random, by the SHA-256 of its text.")
@_e2b
@_database
@json_option()
def _create(
    name: str, scope: tuple[str, ...], lifetime: str | None, sha256: str | None, is_e2b: bool, database: str | None,
    as_json: bool,
) -> int:  # fmt: skip
    """Make a key and print it; it cannot be shown again. With --sha256 its id is printed."""
    from cloche.core.limits import parse_duration
    from cloche.records.keys import create_key, store_key

    lifetime_s = None if lifetime is None else parse_duration(lifetime, name="lifetime")
    facts: Any = {
        "name": name, "scopes": scope or ("run", "read"), "lifetime_s": lifetime_s, "audit": audit_log(),
    }  # fmt: skip
    digest = None if sha256 is None else _digest(sha256)
    with opened(database) as records:
        if digest is None:
            return _print_made(*create_key(records, **facts, is_e2b=is_e2b), as_json=as_json)
        key = store_key(records, digest, **facts)
    print(json.dumps(key.as_dict()) if as_json else key.id)
    return 0


def _digest(text: str) -> bytes:
    from cloche.config.readers import parse_sha256

    return bytes.fromhex(parse_sha256(text, name="--sha256"))


def _print_made(key: KeyFacts, text: str, *, as_json: bool) -> int:
    print(json.dumps({**key.as_dict(), "key": text}) if as_json else text)
    return 0


@keys.command("list")
@_database
@json_option()
def _list(database: str | None, as_json: bool) -> int:
    """List the keys without their secrets."""
    from cloche.records.keys import list_keys

    with opened(database) as records:
        rows = [key.as_dict() for key in list_keys(records)]
    if not rows and not as_json:
        print("there are no keys; `cloche keys create NAME` makes one")
        return 0
    show(rows, as_json=as_json)
    return 0


@keys.command("rotate")
@_id
@_e2b
@_database
@yes_option
@json_option()
def _rotate(key_id: str, is_e2b: bool, database: str | None, yes: bool, as_json: bool) -> int:
    """Replace a key by a new one, and print that."""
    from cloche.records.keys import rotate_key

    require_yes(f"Rotate {escape_name(key_id)}? The old key is refused from then on.", yes=yes)
    with opened(database) as records:
        key, text = rotate_key(records, key_id, audit=audit_log(), is_e2b=is_e2b)
    return _print_made(key, text, as_json=as_json)


@keys.command("revoke")
@_id
@_database
@yes_option
def _revoke(key_id: str, database: str | None, yes: bool) -> int:
    """Revoke a key; a running service refuses it within a second."""
    from cloche.records.keys import revoke_key

    require_yes(f"Revoke {escape_name(key_id)}? It is refused from then on.", yes=yes)
    with opened(database) as records:
        print(f"revoked {revoke_key(records, key_id, audit=audit_log()).id}")
    return 0
