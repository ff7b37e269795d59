"""Where packages come from: the index, credentials and certificates that the operator set for their own pip and uv.

Only the operator's settings count: the environment, and the files of pip and uv in the user's and the system's own
folders. A `uv.toml`, `pyproject.toml` or `pip.conf` of the working directory came with a checkout, and is never read.
Credentials are kept apart from addresses, in an object that shows none of them.

With several indexes a package is taken from the first that has its name, as uv does. Their order is fixed, so that no
public index can take the place of a private one: those with credentials, then others, then the default of the client;
among equals further indexes come before *the* index, as written. With an unsafe `index-strategy` of uv the operator
permits otherwise: then the order is as written, and the strategy uv's.
"""

from __future__ import annotations

import configparser
import netrc
import os
import ssl
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from cloche.core.errors import InvalidRequest
from cloche.core.network import parse_address
from cloche.core.record import dataclass, field, replace

PORTS = {"https": 443, "http": 80}
# The operator named this host as an index, so by their own resolver it is what they mean: whatever address it has, but
# those that egress never allows (loopback, link-local, metadata).
ANY_ADDRESS = "0.0.0.0/0,::/0"
MOST_FILE_BYTES = 1 << 20
MOST_CA_BYTES = 8 << 20
UNSAFE = ("unsafe-first-match", "unsafe-best-match")  # strategies by which a package may come from any index
_PIP_SECTIONS = ("install", "download", "global")  # what stands in an earlier one wins
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class Credentials(Mapping[str, tuple[str, str]]):
    """Hold a name and a password by host and port, and show neither."""

    __slots__ = ("_held",)

    def __init__(self, held: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        self._held = dict(held)

    def __getitem__(self, host: str) -> tuple[str, str]:
        return self._held[host]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def hide(self, text: str) -> str:
        """Return a text without the passwords, however they are spelled in an address."""
        for _, password in self._held.values():
            for spelled in filter(None, {password, quote(password, safe="")}):
                text = text.replace(spelled, "****")
        return text

    def __repr__(self) -> str:
        return f"Credentials({', '.join(self._held)}: hidden)" if self._held else "Credentials()"

    __str__ = __repr__


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Say where packages come from.

    `url` is the index, "" for the default of the client (`defaults` knows it); `extra` are further ones, which are
    asked before it. `strategy` is one of uv's that are unsafe, "" for none of these. `file_hosts` are further
    hosts ("host:port") of their files that the operator named, `listed_hosts` those that the client's default named
    itself. None of the addresses has credentials in it. `ca_file` is the operator's bundle of certificates, "" for that
    of the system. `origin` says who set it.
    """

    url: str = ""
    extra: tuple[str, ...] = ()
    file_hosts: tuple[str, ...] = ()
    listed_hosts: tuple[str, ...] = ()
    credentials: Credentials = field(default_factory=Credentials)
    ca_file: str = ""
    origin: str = "default"
    strategy: str = ""

    def in_order(self, default: str) -> Index:
        """Return the same indexes in the order of lookup; `default` is the client's default index."""
        if self.strategy or not self.url:
            return self

        def rank(url: str) -> tuple[bool, bool]:
            host = host_of(urlsplit(url))
            return host == host_of(urlsplit(default)), host not in self.credentials

        *extra, url = sorted((*self.extra, self.url), key=rank)
        return replace(self, url=url, extra=tuple(extra))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return "host:port" of all hosts that serve packages or their files."""
        own = (host_of(urlsplit(url)) for url in (self.url, *self.extra) if url)
        return tuple(dict.fromkeys((*own, *self.file_hosts, *self.listed_hosts)))

    @property
    def network_allow(self) -> tuple[str, ...]:
        """Return the network rules of a download. Hosts that only an index lists must have public addresses."""
        own = {*self.hosts} - ({*self.listed_hosts} - {*self.file_hosts})
        return tuple(
            f"{host}@{ANY_ADDRESS}" if host in own and parse_address(host.rpartition(":")[0]) is None else host
            for host in self.hosts
        )

    def with_credentials(self, url: str) -> str:
        """Return an address as uv takes it in its environment, with the credentials for its host."""
        address = urlsplit(url)
        credentials = self.credentials.get(host_of(address))
        if credentials is None:
            return url
        name, password = (quote(text, safe="") for text in credentials)
        return urlunsplit(address._replace(netloc=f"{name}:{password}@{address.netloc}"))

    def ca_bundle(self) -> bytes:
        """Return the certificates that this host trusts. Raises InvalidRequest where the operator's cannot be read."""
        paths = ssl.get_default_verify_paths()
        path = self.ca_file or paths.cafile or paths.openssl_cafile
        if not self.ca_file and not os.path.exists(path):
            return b""
        try:
            with open(path, "rb") as file:
                data = file.read(MOST_CA_BYTES + 1)
        except OSError as error:
            raise InvalidRequest(f"packages: cannot read the certificates in {path}: {error.strerror}") from None
        if len(data) > MOST_CA_BYTES:
            raise InvalidRequest(f"packages: {path} is larger than {MOST_CA_BYTES} bytes, the maximum for a bundle")
        return data


def host_of(address: SplitResult) -> str:
    """Return "host:port" of a split address."""
    name = (address.hostname or "").lower()
    return f"{f'[{name}]' if ':' in name else name}:{address.port or PORTS[address.scheme]}"


def split_address(url: str, origin: str) -> SplitResult:
    """Return the parts of an operator's address. Raises InvalidRequest, without any of it: it may have a password."""
    try:
        address = urlsplit(url.strip())
        if address.hostname and host_of(address):
            return address
    except (KeyError, ValueError):  # whose words are parts of the address
        pass
    raise InvalidRequest(
        f"packages: {origin} is not an address that begins with https:// or http://; "
        "write special characters of a password as %XX"
    )


@dataclass(slots=True)
class _Found:
    """Gather the settings of all sources, the strongest first: a value once set stays."""

    url: str = ""
    origin: str = ""
    extra: list[str] = field(default_factory=list)
    credentials: dict[str, tuple[str, str]] = field(default_factory=dict)
    ca_file: str = ""
    strategy: str = ""
    is_settled: bool = False  # by uv's configuration: then pip's names no index

    def take(self, url: str, extra: Sequence[str], origin: str) -> None:
        if self.is_settled:
            return
        if url and not self.url:
            self.url, self.origin = self._clean(url, origin), origin
        if not self.extra:
            self.extra = [self._clean(address, origin) for address in extra if not address.startswith("file:")]

    def note_strategy(self, strategy: object) -> None:
        if isinstance(strategy, str) and strategy and not self.strategy:
            self.strategy = strategy

    def _clean(self, url: str, origin: str) -> str:
        """Return an address without credentials, which are kept."""
        address = split_address(url, f"the index of {origin}")
        host = host_of(address)
        if address.username is not None:
            self.credentials.setdefault(host, (unquote(address.username), unquote(address.password or "")))
        return urlunsplit(address._replace(netloc=address.netloc.rpartition("@")[2], fragment="")).rstrip("/")


def find_index(
    environ: Mapping[str, str] | None = None, *, home: str | None = None, system: str = "/etc", default: str = ""
) -> Index:
    """Return the index that this user configured for uv, else for pip, else the default.

    `home` and `system` replace the folders of the configuration files. Raises InvalidRequest for a file that cannot be
    read; the message has no value that may hold a password.
    """
    environ = os.environ if environ is None else environ
    home = os.path.expanduser("~") if home is None else home
    sources = _Found()
    _take_uv(sources, environ, home, system)
    sources.is_settled = bool(sources.url or sources.extra)
    _take_pip(sources, environ, home, system)
    for variable in CA_VARIABLES:
        sources.ca_file = sources.ca_file or environ.get(variable, "")
    index = Index(
        url=sources.url or default, extra=tuple(dict.fromkeys(sources.extra)), origin=sources.origin or "default",
        ca_file=sources.ca_file, strategy=sources.strategy if sources.strategy in UNSAFE else "",
    )  # fmt: skip
    credentials = {**_from_netrc(index, environ, home), **sources.credentials}
    mine = {host: pair for host, pair in credentials.items() if host in index.hosts}
    return replace(index, credentials=Credentials(mine))


def _take_uv(sources: _Found, environ: Mapping[str, str], home: str, system: str) -> None:
    sources.note_strategy(environ.get("UV_INDEX_STRATEGY"))
    url = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL") or ""
    extra = (environ.get("UV_INDEX") or environ.get("UV_EXTRA_INDEX_URL") or "").split()
    named = {name: value for entry in extra for name, _, value in [entry.rpartition("=")] if "://" in value and name}
    sources.take(
        url.partition("=")[2] if _has_name(url) else url,
        [entry.partition("=")[2] if _has_name(entry) else entry for entry in extra], "the environment (uv)",
    )  # fmt: skip
    for name, value in named.items():
        _note_named(sources, name, value, environ)
    for path in _uv_files(environ, home, system):
        _take_uv_file(sources, path, environ)


def _has_name(index: str) -> bool:
    """Tell whether an index is written as `name=address`."""
    name, equals, _ = index.partition("=")
    return bool(equals) and name.replace("-", "").replace("_", "").replace(".", "").isalnum()


def _uv_files(environ: Mapping[str, str], home: str, system: str) -> Iterator[str]:
    if os.path.isabs(named := environ.get("UV_CONFIG_FILE", "")):
        yield named
        return
    configured = environ.get("XDG_CONFIG_HOME", "")
    yield os.path.join(configured if os.path.isabs(configured) else f"{home}/.config", "uv/uv.toml")
    yield from (f"{system}/xdg/uv/uv.toml", f"{system}/uv/uv.toml")


def _take_uv_file(sources: _Found, path: str, environ: Mapping[str, str]) -> None:
    text = read_own_file(path)
    if text is None:
        return
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"packages: {path} is not TOML: {error}") from None
    pip = settings.get("pip") if isinstance(settings.get("pip"), dict) else {}
    listed = [
        entry for entry in settings.get("index", ()) if isinstance(entry, dict) and isinstance(entry.get("url"), str)
    ]
    default = next((entry["url"] for entry in listed if entry.get("default") is True), "")
    extra = [entry["url"] for entry in listed if entry.get("default") is not True and entry.get("explicit") is not True]
    sources.note_strategy(settings.get("index-strategy", (pip or {}).get("index-strategy")))
    older = settings.get("extra-index-url", (pip or {}).get("extra-index-url", ()))
    sources.take(
        default or _text(settings.get("index-url", (pip or {}).get("index-url"))),
        [*extra, *(entry for entry in older if isinstance(entry, str))], path,
    )  # fmt: skip
    for entry in listed:
        _note_named(sources, str(entry.get("name", "")), entry["url"], environ)


def _note_named(sources: _Found, name: str, url: str, environ: Mapping[str, str]) -> None:
    """Take the credentials that uv's variables give for an index with a name."""
    stem = "UV_INDEX_" + "".join(char if char.isalnum() else "_" for char in name.upper())
    user, password = environ.get(f"{stem}_USERNAME", ""), environ.get(f"{stem}_PASSWORD", "")
    if name and (user or password):
        address = split_address(url, f"the index {name!r} of uv's configuration")
        sources.credentials.setdefault(host_of(address), (user, password))


def _take_pip(sources: _Found, environ: Mapping[str, str], home: str, system: str) -> None:
    url, extra = environ.get("PIP_INDEX_URL", ""), environ.get("PIP_EXTRA_INDEX_URL", "").split()
    sources.take(url, extra, "the environment (pip)")
    for path in _pip_files(environ, home, system):
        text = read_own_file(path)
        if text is None:
            continue
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(text)
        except configparser.Error as error:
            raise InvalidRequest(
                f"packages: {path} is not a configuration file of pip: {type(error).__name__}"
            ) from None
        settings = {
            key.replace("_", "-"): value
            for section in reversed(_PIP_SECTIONS) if parser.has_section(section)
            for key, value in parser.items(section)
        }  # fmt: skip
        sources.take(settings.get("index-url", ""), settings.get("extra-index-url", "").split(), path)
        if os.path.isabs(settings.get("cert", "")) and not any(environ.get(name) for name in CA_VARIABLES):
            sources.ca_file = sources.ca_file or settings["cert"]


def _pip_files(environ: Mapping[str, str], home: str, system: str) -> Iterator[str]:
    """Yield pip's files, the strongest first, as pip reads them: its environment's, the user's, the system's."""
    named = environ.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        return
    if os.path.isabs(named):
        yield named
    configured = environ.get("XDG_CONFIG_HOME", "")
    yield f"{sys.prefix}/pip.conf"
    yield os.path.join(configured if os.path.isabs(configured) else f"{home}/.config", "pip/pip.conf")
    yield f"{home}/.pip/pip.conf"
    yield from (f"{system}/pip.conf", f"{system}/xdg/pip/pip.conf")


def _from_netrc(index: Index, environ: Mapping[str, str], home: str) -> dict[str, tuple[str, str]]:
    """Return the entries of the user's netrc for the hosts of an index."""
    path = environ.get("NETRC") or f"{home}/.netrc"
    if not os.path.isabs(path) or not os.path.exists(path):
        return {}
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError) as error:
        raise InvalidRequest(f"packages: {path} cannot be read: {type(error).__name__}") from None
    pairs = {}
    for host in index.hosts:
        entry = entries.hosts.get(host.partition(":")[0])  # never the default entry: that is for any host
        if entry is not None:
            pairs[host] = (entry[0] or "", entry[2] or "")
    return pairs


def read_own_file(path: str) -> str | None:
    """Return a configuration file of the operator; None if it does not exist."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        raise InvalidRequest(f"packages: {path} cannot be read: {error.strerror}") from None
    if len(data) > MOST_FILE_BYTES:
        raise InvalidRequest(
            f"packages: {path} is larger than {MOST_FILE_BYTES} bytes, the maximum for a configuration file"
        )
    return data.decode("utf-8", "replace")


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
