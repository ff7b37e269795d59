"""Where npm packages come from: the registry, credentials and certificates that the operator set for their own npm.

Only the operator's settings count: the environment, and the `npmrc` of the user and of the system. A `.npmrc` of the
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
    """Say where npm packages come from: `url`, and for those of a scope (`@corp`) the address in `scopes`.

    `default` is the registry of an unconfigured npm, "" before npm was run.
    """

    default: str = ""
    scopes: tuple[tuple[str, str], ...] = ()

    def settings(self) -> bytes:
        """Return an `npmrc` for a step that resolves, credentials and all."""
        lines = [("registry", f"{self.url}/"), *((f"{scope}:registry", f"{url}/") for scope, url in self.scopes)]
        for url in (self.url, *self.extra):
            address = urlsplit(url)
            name, password = self.credentials.get(host_of(address), (BEARER, ""))
            prefix = f"//{address.netloc}{address.path}/"
            if name != BEARER:
                lines.append((f"{prefix}:_auth", base64.b64encode(f"{name}:{password}".encode()).decode()))
            elif password:
                lines.append((f"{prefix}:_authToken", password))
        return "".join(f"{key}={json.dumps(value)}\n" for key, value in dict(lines).items()).encode()

    def own_address(self, url: str) -> str:
        """Return the address of a file as npm requests it: a mirror serves files that are listed at npm's default."""
        address, mine, default = urlsplit(url), urlsplit(self.url), urlsplit(self.default).hostname
        if not default or address.hostname != default or mine.hostname == default:
            return url
        path = address.path if address.path.startswith(f"{mine.path}/") else f"{mine.path}{address.path}"
        return urlunsplit(address._replace(scheme=mine.scheme, netloc=mine.netloc, path=path))


def find_registry(
    environ: Mapping[str, str] | None = None,
    *,
    home: str | None = None,
    systems: tuple[str, ...] = SYSTEM_FOLDERS,
    default: str = "",
) -> Registry:
    """Return the registry that this user configured for npm, else the default.

    `home` and `systems` replace the folders of the configuration files. Raises InvalidRequest for a file that cannot be
    read; the message has no value that may hold a password.
    """
    environ = os.environ if environ is None else environ
    home = os.path.expanduser("~") if home is None else home
    npmrc: dict[str, str] = {}
    origins: dict[str, str] = {}
    for origin, settings in _sources(environ, home, systems):
        for key, value in settings.items():
            if value and key not in npmrc:
                npmrc[key], origins[key] = value, origin
    held: dict[str, tuple[str, str]] = {}
    named = [key for key in npmrc if _SCOPE.fullmatch(key)]
    scopes = {key.removesuffix(":registry"): _clean(npmrc[key], origins[key], held) for key in named}
    url = _clean(npmrc["registry"], origins["registry"], held) if "registry" in npmrc else default
    extra = tuple(dict.fromkeys(address for address in scopes.values() if address != url))
    for address in filter(None, (url, *extra)):
        credentials = _credentials_of(address, npmrc)
        if credentials is not None:
            held[host_of(urlsplit(address))] = credentials
    authorities = (npmrc.get("cafile", ""), *(environ.get(name, "") for name in ("NODE_EXTRA_CA_CERTS", *CA_VARIABLES)))
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
    settings = {}
    for line in text.splitlines():
        key, equals, value = (text.strip() for text in line.partition("="))
        if not equals or key.startswith((";", "#", "[")):
            continue
        quoted = value[:1] == value[-1:] and value[:1] in ("'", '"') and len(value) > 1
        value = value[1:-1] if quoted else re.split(r"\s[;#]", value)[0].rstrip()
        settings[_replaced(key, environ)] = _replaced(value, environ)
    return settings


def _replaced(text: str, environ: Mapping[str, str]) -> str:
    """Put variables of the environment in the place of `${NAME}`."""
    return _REFERENCE.sub(lambda match: environ.get(match[1], "" if match[2] else match[0]), text)


def _clean(url: str, origin: str, held: dict[str, tuple[str, str]]) -> str:
    """Return an address without credentials, which are kept. Raises InvalidRequest."""
    address = split_address(url, f"the registry of {origin}")
    if address.username is not None:
        held[host_of(address)] = (unquote(address.username), unquote(address.password or ""))
    clean = address._replace(netloc=address.netloc.rpartition("@")[2], query="", fragment="")
    return urlunsplit(clean).rstrip("/")


def _credentials_of(url: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the credentials for an address, those of the longest path that it is below."""
    address = urlsplit(url)
    names = {address.netloc, f"{address.hostname}:{address.port or PORTS[address.scheme]}"}
    folders = address.path.strip("/").split("/") if address.path.strip("/") else []
    for depth in range(len(folders), -1, -1):
        for name in sorted(names):
            prefix = "/".join(["/", name, *folders[:depth], ""])
            credentials = _at_place(prefix, settings) or _at_place(prefix.rstrip("/"), settings)
            if credentials is not None:
                return credentials
    return None


def _at_place(prefix: str, settings: Mapping[str, str]) -> tuple[str, str] | None:
    if token := settings.get(f"{prefix}:_authToken"):
        return BEARER, token
    try:
        if encoded := settings.get(f"{prefix}:_auth"):
            name, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
            return name, password
        if name := settings.get(f"{prefix}:username", ""):
            return name, base64.b64decode(settings.get(f"{prefix}:_password", ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise InvalidRequest(f"packages: the credentials for {prefix} in npm's configuration are not base64") from None
    return None
