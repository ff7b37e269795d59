"""Where packages of npm come from: the registry, credentials and certificates that the operator set for their own npm.

Only what the operator wrote counts: the environment, and the `npmrc` of the user and of the system. A `.npmrc` of the
working directory came with a checkout, and is never read.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from cloche.core.errors import InvalidRequest
from cloche.core.record import dataclass

from .index import CA_VARIABLES, PORTS, Credentials, Index, host_of, read_own_file, split_address

SYSTEM_FOLDERS = ("/usr/local/etc", "/usr/etc", "/etc")
_VARIABLE = "npm_config_"
_SCOPE = re.compile(r"@[A-Za-z0-9][A-Za-z0-9._-]*:registry")
_REFERENCE = re.compile(r"\$\{([^}?]+)(\?)?\}")
BEARER = ""  # the name of whom a token speaks for: it says that itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Index):
    """Say where packages of npm come from: `url`, and for those of a scope (`@corp`) the address in `scopes`.

    `default` is the registry of an npm that nobody configured, "" where nobody asked npm.
    """

    default: str = ""
    scopes: tuple[tuple[str, str], ...] = ()

    def settings(self) -> bytes:
        """Return an `npmrc` for a step that resolves, credentials and all."""
        lines = [("registry", f"{self.url}/"), *((f"{scope}:registry", f"{url}/") for scope, url in self.scopes)]
        for url in (self.url, *self.extra):
            parts = urlsplit(url)
            name, word = self.credentials.get(host_of(parts), (BEARER, ""))
            place = f"//{parts.netloc}{parts.path}/"
            if name != BEARER:
                lines.append((f"{place}:_auth", base64.b64encode(f"{name}:{word}".encode()).decode()))
            elif word:
                lines.append((f"{place}:_authToken", word))
        return "".join(f"{key}={json.dumps(value)}\n" for key, value in dict(lines).items()).encode()

    def own_address(self, url: str) -> str:
        """Return the address of a file as npm takes it: a mirror has what is listed to be at npm's default."""
        parts, mine, default = urlsplit(url), urlsplit(self.url), urlsplit(self.default).hostname
        if not default or parts.hostname != default or mine.hostname == default:
            return url
        path = parts.path if parts.path.startswith(f"{mine.path}/") else f"{mine.path}{parts.path}"
        return urlunsplit(parts._replace(scheme=mine.scheme, netloc=mine.netloc, path=path))


def find_registry(
    environ: Mapping[str, str] | None = None,
    *,
    home: str | None = None,
    systems: tuple[str, ...] = SYSTEM_FOLDERS,
    default: str = "",
) -> Registry:
    """Return the registry that this user configured for npm, else the default.

    `home` and `systems` replace the folders in which files are looked for. Raises InvalidRequest, without a value that
    may hold a password, where something there cannot be read.
    """
    environ = os.environ if environ is None else environ
    home = os.path.expanduser("~") if home is None else home
    said: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, settings in _sources(environ, home, systems):
        for key, value in settings.items():
            if value and key not in said:
                said[key], origins[key] = value, origin
    held: dict[str, tuple[str, str]] = {}
    named = [key for key in said if _SCOPE.fullmatch(key)]
    scopes = {key.removesuffix(":registry"): _clean(said[key], origins[key], held) for key in named}
    url = _clean(said["registry"], origins["registry"], held) if "registry" in said else default
    extra = tuple(dict.fromkeys(one for one in scopes.values() if one != url))
    for one in filter(None, (url, *extra)):
        known = _credentials_of(one, said)
        if known is not None:
            held[host_of(urlsplit(one))] = known
    authorities = (said.get("cafile", ""), *(environ.get(name, "") for name in ("NODE_EXTRA_CA_CERTS", *CA_VARIABLES)))
    return Registry(
        url=url, default=default, extra=extra, scopes=tuple(sorted(scopes.items())), credentials=Credentials(held),
        ca_file=next((path for path in authorities if os.path.isabs(path)), ""),
        origin=origins.get("registry", "default"),
    )  # fmt: skip


def _sources(environ: Mapping[str, str], home: str, systems: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what each source says, the strongest first."""
    variables = {
        _key_of(name[len(_VARIABLE) :]): value
        for name, value in environ.items() if name.lower().startswith(_VARIABLE)
    }  # fmt: skip
    yield "the environment (npm)", variables
    named, of_all = variables.get("userconfig", ""), variables.get("globalconfig", "")
    paths = [named if os.path.isabs(named) else f"{home}/.npmrc"]
    paths += [of_all] if os.path.isabs(of_all) else [f"{folder}/npmrc" for folder in systems]
    for path in paths:
        text = read_own_file(path)
        if text is not None:
            yield path, _read_npmrc(text, environ)


def _key_of(name: str) -> str:
    """Return the key that a variable of the environment sets, as npm reads it."""
    return name if name.startswith("//") else re.sub(r"(?<!^)_", "-", name).lower()


def _read_npmrc(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key.startswith((";", "#", "[")):
            continue
        quoted = value[:1] == value[-1:] and value[:1] in ("'", '"') and len(value) > 1
        value = value[1:-1] if quoted else re.split(r"\s[;#]", value)[0].rstrip()
        found[_replaced(key, environ)] = _replaced(value, environ)
    return found


def _replaced(text: str, environ: Mapping[str, str]) -> str:
    """Put variables of the environment in the place of `${NAME}`."""
    return _REFERENCE.sub(lambda match: environ.get(match[1], "" if match[2] else match[0]), text)


def _clean(url: str, origin: str, held: dict[str, tuple[str, str]]) -> str:
    """Return an address without credentials, which are kept. Raises InvalidRequest."""
    parts = split_address(url, f"the registry of {origin}")
    if parts.username is not None:
        held[host_of(parts)] = (unquote(parts.username), unquote(parts.password or ""))
    clean = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    return urlunsplit(clean).rstrip("/")


def _credentials_of(url: str, said: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the credentials for an address, those of the longest path that it is below."""
    parts = urlsplit(url)
    names = {parts.netloc, f"{parts.hostname}:{parts.port or PORTS[parts.scheme]}"}
    folders = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    for depth in range(len(folders), -1, -1):
        for name in sorted(names):
            place = "/".join(["/", name, *folders[:depth], ""])
            known = _at_place(place, said) or _at_place(place.rstrip("/"), said)
            if known is not None:
                return known
    return None


def _at_place(place: str, said: Mapping[str, str]) -> tuple[str, str] | None:
    if token := said.get(f"{place}:_authToken"):
        return BEARER, token
    try:
        if whole := said.get(f"{place}:_auth"):
            name, _, word = base64.b64decode(whole, validate=True).decode().partition(":")
            return name, word
        if name := said.get(f"{place}:username", ""):
            return name, base64.b64decode(said.get(f"{place}:_password", ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidRequest(f"packages: the credentials for {place} in npm's configuration are not base64") from None
    return None
