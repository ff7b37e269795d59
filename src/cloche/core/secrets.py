"""Secrets that a sandbox uses and never reads: where a value comes from, for which hosts it is, and its placeholder.

Inside, a program has the placeholder of a secret. The egress process (`egress/opened.py`) puts the value in its place,
in requests to the hosts of the secret alone. `PROVIDERS` are rows of known services: with one, a name is enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

from .errors import InvalidRequest
from .hosts import normalize_host, parse_address
from .record import dataclass, field, replace

Foreign = Literal["refuse", "allow"]
Source = Literal["env", "file", "command", "value"]
HostsByName = Mapping[str, Sequence[str]]
LEAST_CHARS, MOST_BYTES, LEAST_RANDOM = 12, 16 << 10, 10
MOST_SECRETS, MOST_HOSTS = 32, 32
PORT = 443  # the only one at which a secret is used
LEFT = "the placeholder of "  # how the row of one that has left for another host begins
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"[\x21-\x7e]+")
_FORMAT = re.compile(r"[\x21-\x7e ]*\{\}[\x21-\x7e ]*")
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]+\.eyJ[A-Za-z0-9_-]+\.")
_TEXT = re.compile(r"(?s)([^=@]+)(?:=(env|file|cmd):(.*?))?(?:@([^@]*))?")
_OWN = {"PATH", "HOME", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"}
_CLASSES = ("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789")
# Signed with, never sent: egress/aws.py.
AWS_KEY_ID, AWS_KEY, AWS_TOKEN = AWS_NAMES = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
# Of a host without a row, and of every other one, too.
CREDENTIAL_HEADERS = frozenset(
    ("authorization", "proxy-authorization", "x-api-key", "api-key", "x-auth-token", "private-token")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretProvider:
    """Describe a service: the names of its secrets, its hosts, and where its credentials stand in a request.

    `headers` are those beside `CREDENTIAL_HEADERS`. A query with one of the keys `query` is refused. A placeholder
    keeps a prefix of `prefixes`, the longest that the value has.
    """

    names: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # none for registries of packages, which every user configures
    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()


PROVIDERS: Mapping[str, SecretProvider] = {
    "Anthropic": SecretProvider(
        names=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"), hosts=("api.anthropic.com",),
        prefixes=("sk-ant-api03-", "sk-ant-oat01-", "sk-ant-"),
    ),
    "OpenAI": SecretProvider(
        names=("OPENAI_API_KEY", "CODEX_API_KEY"), hosts=("api.openai.com",),
        prefixes=("sk-proj-", "sk-svcacct-", "sk-"),
    ),
    "Google": SecretProvider(
        names=("GEMINI_API_KEY", "GOOGLE_API_KEY"), hosts=("generativelanguage.googleapis.com",),
        headers=("x-goog-api-key",), query=("key", "access_token", "oauth_token"), prefixes=("AIza",),
    ),
    "GitHub": SecretProvider(
        names=("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_PERSONAL_ACCESS_TOKEN"), hosts=("api.github.com", "github.com"),
        query=("access_token", "client_secret"),
        prefixes=("github_pat_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    ),
    "GitLab": SecretProvider(
        names=("GITLAB_TOKEN",), hosts=("gitlab.com",), headers=("job-token", "deploy-token"),
        query=("private_token", "access_token", "job_token"), prefixes=("glpat-", "gldt-", "glcbt-"),
    ),
    "npm": SecretProvider(
        names=("NPM_TOKEN", "NODE_AUTH_TOKEN"), prefixes=("npm_",)
    ),
    "PyPI": SecretProvider(
        names=("PYPI_TOKEN", "UV_PUBLISH_TOKEN", "TWINE_PASSWORD"), prefixes=("pypi-",),
    ),
    "Hugging Face": SecretProvider(
        names=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), hosts=("huggingface.co",), prefixes=("hf_",),
    ),
    "AWS": SecretProvider(
        names=AWS_NAMES, prefixes=("AKIA", "ASIA"),
    ),
}  # fmt: skip
_BY_NAME = {name: provider for provider in PROVIDERS.values() for name in provider.names}
_BY_HOST = {host: provider for provider in PROVIDERS.values() for host in provider.hosts}
_PREFIXES = sorted((prefix for provider in PROVIDERS.values() for prefix in provider.prefixes), key=len, reverse=True)


def provider_of(host: str) -> SecretProvider | None:
    """Return the row of a host, if it has one."""
    return _BY_HOST.get(host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Say where the value of a secret comes from, and which hosts get it.

    Give one source: `env`, a variable of this process; `file`, a path; `command`, whose output is the value; `value`.
    Without one it is the variable with the secret's name. White space at both ends of a file or an output is left out.
    A value has 12 characters or more of printable ASCII. The egress process itself reads a file or a command's output.

    `hosts` are names without wildcards; they may be left out for a name of a known provider. `format` is the text that
    a credential's header must have, with `{}` for the value, such as "Bearer {}"; without one, that is the value alone,
    or behind one word. With `foreign="allow"` requests to these hosts may also have credentials of the guest's own.
    """

    env: str | None = None
    file: str | None = None
    command: str | None = None
    value: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    format: str = ""
    foreign: Foreign = "refuse"

    def __post_init__(self) -> None:
        given = [name for name in get_args(Source) if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"Secret: {' and '.join(given)} are given; give one source of the value")
        for name in given:
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidRequest(f"Secret: {name} must be a text that is not empty")
        if self.foreign not in get_args(Foreign):
            raise InvalidRequest('Secret: foreign must be "refuse" or "allow"')
        if self.format and not _FORMAT.fullmatch(self.format):
            raise InvalidRequest('Secret: format needs {} once for the value, as in "Bearer {}"')
        object.__setattr__(self, "hosts", _hosts(self.hosts))

    @property
    def source(self) -> Source:
        """Return the kind of the source; "env" for a secret without one, whose variable is its name."""
        return next((name for name in get_args(Source) if getattr(self, name) is not None), "env")

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a Secret stays in its process: it cannot be pickled or copied")


class SecretSet:
    """Hold the secrets of a sandbox by name. No text of it has more than the names, and no copy leaves the process.

    Without any, it says that connections are opened for the network's rules with methods and paths.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: Iterable[tuple[str, Secret]]):
        self.rows = tuple(rows)

    def __repr__(self) -> str:
        return f"<secrets: {', '.join(name for name, _ in self.rows)}>"

    def __deepcopy__(self, _: object) -> SecretSet:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("secrets stay in their process: they cannot be pickled")

    @property
    def hosts_by_name(self) -> dict[str, list[str]]:
        """Return the hosts of each secret."""
        return {name: list(secret.hosts) for name, secret in self.rows}

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the network rules that allow the hosts of these secrets."""
        return tuple(dict.fromkeys(f"{host}:{PORT}" for _, secret in self.rows for host in secret.hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSecrets:
    """Describe the secrets of a sandbox that another process has opened: their hosts and placeholders, by name."""

    hosts_by_name: HostsByName
    placeholders: Mapping[str, str]

    __hash__ = object.__hash__


def noun_of(secrets: SecretSet | HeldSecrets) -> str:
    """Name what a sandbox has these for."""
    return "secrets" if secrets.hosts_by_name else "network rules with methods and paths"


def check_same(sandbox: str, held: HostsByName, given: HostsByName) -> None:
    """Raise InvalidRequest unless a call names the secrets that a sandbox has. Values are not compared."""
    if {name: set(hosts) for name, hosts in held.items()} != {name: set(hosts) for name, hosts in given.items()}:
        raise InvalidRequest(
            f"secrets: sandbox {sandbox!r} has {_spelled(held)}, and this call names {_spelled(given)}; leave secrets "
            "out to use those that it has, or open another sandbox"
        )


def _spelled(hosts_by_name: HostsByName) -> str:
    return "; ".join(f"{name} for {', '.join(hosts)}" for name, hosts in hosts_by_name.items()) or "no secrets"


GivenSecrets = Mapping[str, Secret] | Sequence[str]


def _hosts(hosts: object) -> tuple[str, ...]:
    if isinstance(hosts, str | bytes) or not isinstance(hosts, Iterable):
        raise InvalidRequest("Secret: hosts must be a list of names")
    checked = tuple(dict.fromkeys(map(_host, hosts)))
    if len(checked) > MOST_HOSTS:
        raise InvalidRequest(f"Secret: {len(checked)} hosts; a secret has {MOST_HOSTS} at most")
    return checked


def _host(host: object) -> str:
    try:
        if isinstance(host, str) and parse_address(host) is None and "*" not in host:
            return normalize_host(host)
    except ValueError:
        pass
    raise InvalidRequest(
        f"Secret: {str(host)[:100]!r} is not the name of a host; give whole names, without port or wildcard"
    )


def read_secrets(given: object) -> SecretSet:
    """Read the keyword `secrets`: a mapping of names to `Secret`s, or texts of `--secret`. Raises InvalidRequest."""
    rows: Iterable[tuple[object, object]]
    if isinstance(given, Mapping):
        rows = given.items()
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        rows = map(_read_text, given)
    else:
        raise InvalidRequest('secrets must be a mapping such as {"API_KEY": Secret(hosts=["api.example.com"])}')
    secrets = [_named(name, secret) for name, secret in rows]
    if len(secrets) > MOST_SECRETS:
        raise InvalidRequest(f"secrets: {len(secrets)} are given; a sandbox has {MOST_SECRETS} at most")
    if len({name for name, _ in secrets}) < len(secrets):
        raise InvalidRequest("secrets: a name is given twice; use one secret with several hosts")
    _check_aws({name: frozenset(secret.hosts) for name, secret in secrets})
    return SecretSet(secrets)


def _check_aws(hosts: Mapping[str, frozenset[str]]) -> None:
    """Raise InvalidRequest for keys of AWS that cannot sign."""
    given = [name for name in AWS_NAMES if name in hosts]
    if given and (given[:2] != [AWS_KEY_ID, AWS_KEY] or len({hosts[name] for name in given}) > 1):
        raise InvalidRequest(
            f"secrets: {' and '.join(given)} cannot sign; give {AWS_KEY_ID} and {AWS_KEY}, with the same hosts, and "
            f"{AWS_TOKEN} for temporary keys"
        )


def _named(name: object, secret: object) -> tuple[str, Secret]:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _OWN:
        raise InvalidRequest(f"secrets: {str(name)[:100]!r} cannot be the name of a secret; use that of a variable")
    if not isinstance(secret, Secret):
        raise InvalidRequest(f"secrets: {name} must be a cloche.Secret")
    if secret.hosts:
        return name, _with_source(name, secret)
    provider = _BY_NAME.get(name)
    if provider is None or not provider.hosts:
        why = "it is not the name of a known provider's secret" if provider is None else "write those that you use"
        raise InvalidRequest(f"secrets: {name} needs hosts: {why}")
    return name, _with_source(name, replace(secret, hosts=provider.hosts))


def _with_source(name: str, secret: Secret) -> Secret:
    return replace(secret, env=name) if secret.source == "env" and secret.env is None else secret


def _read_text(text: object) -> tuple[str, Secret]:
    """Read NAME[=env:VARIABLE|file:PATH|cmd:COMMAND][@HOST,...]."""
    match = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if match is None:  # whose words may be a value that somebody gave by mistake
        raise InvalidRequest(
            "--secret: use NAME, NAME=env:VARIABLE@HOST[,HOST], NAME=file:PATH@HOST or NAME=cmd:COMMAND@HOST; "
            "a value itself cannot be given, since other users can read a command line"
        )
    name, kind, source, hosts = match.groups()
    named: dict[str, Any] = {{"cmd": "command"}.get(kind, kind): source} if kind else {}
    return name, Secret(hosts=tuple(filter(None, (hosts or "").split(","))), **named)


def check_value(name: str, data: bytes) -> str:
    """Return the value that was read for a secret. Raises InvalidRequest, without any of it."""
    value = data.decode("latin-1").strip()
    if len(value) < LEAST_CHARS:
        raise InvalidRequest(
            f"secrets: the value of {name} has fewer than {LEAST_CHARS} characters, too few to search answers for"
        )
    if len(data) > MOST_BYTES or not _VALUE.fullmatch(value):
        raise InvalidRequest(
            f"secrets: the value of {name} is longer than {MOST_BYTES} bytes, or has characters that no header can have"
        )
    return value


def kept_chars(value: str) -> int:
    """Return how many first characters of a value its placeholder has, too: a known prefix, or a web token's claims."""
    token = _JWT.match(value)
    return token.end() if token else len(next((prefix for prefix in _PREFIXES if value.startswith(prefix)), ""))


def make_placeholder(name: str, value: str, choose: Callable[[str], str]) -> str:
    """Return a text of the same length, prefix and alphabet, whose other letters and digits are chosen anew.

    `choose` returns a random character of a text. Of a JSON web token the header and the claims stay, which clients
    read. Raises InvalidRequest for a value with too few of them to tell its placeholder from other text.
    """
    kept = kept_chars(value)
    rest = value[kept:]
    alphabet = "".join(letters for letters in _CLASSES if any(character in letters for character in rest))
    if sum(character in alphabet for character in rest) < LEAST_RANDOM:
        raise InvalidRequest(
            f"secrets: the value of {name} has fewer than {LEAST_RANDOM} letters and digits of its own"
        )
    while True:
        chosen = "".join(choose(alphabet) if character in alphabet else character for character in rest)
        if chosen != rest:
            return value[:kept] + chosen


def as_wire(name: str, secret: Secret) -> dict[str, Any]:
    """Return what the egress process must know of a secret beside its value, as plain values."""
    return {
        "name": name, "hosts": list(secret.hosts), "format": secret.format,
        "is_foreign_allowed": secret.foreign == "allow",
    }  # fmt: skip
