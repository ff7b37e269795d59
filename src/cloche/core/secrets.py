"""Secrets that a sandbox uses and never reads: where a value comes from, for which hosts it is, and its placeholder.

Inside, a program has the placeholder of a secret. The egress process (`egress/opened.py`) puts the value in its place,
in requests to the hosts of the secret alone. `PROVIDERS` are rows of known services: with one, a name is enough. A
`Capture` names where a host's answer has secrets; these are placeholders before the program has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, get_args

from .errors import InvalidRequest
from .hosts import normalize_host, parse_address
from .kept_logins import KeptLogin
from .limits import parse_duration
from .record import dataclass, field, replace

Foreign = Literal["refuse", "allow"]
Source = Literal["env", "file", "command", "value"]
HostsByName = Mapping[str, Sequence[str]]
LEAST_CHARS, MOST_BYTES, LEAST_RANDOM = 12, 16 << 10, 10
LEAST_LIFE_S = 60
MOST_SECRETS, MOST_HOSTS, MOST_FIELDS, MOST_FILES = 32, 32, 16, 16
MOST_TEMPLATE_CHARS = 64 << 10
PORT = 443  # the only one at which a secret is used
LEFT = "the placeholder of "  # how the row of one that has left for another host begins
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"[\x21-\x7e]+")
_FORMAT = re.compile(r"[\x21-\x7e ]*\{\}[\x21-\x7e ]*")
_JWT = re.compile(r"eyJ[A-Za-z0-9_-]+\.eyJ[A-Za-z0-9_-]+\.")
_TEXT = re.compile(r"(?s)([^=@]+)(?:=(env|file|cmd|login):(.*?))?(?:@([^@+]*)((?:\+[^@+]+)*))?")
_PLACE = re.compile(r"headers|(query|body)(:[\x21-\x7e]{1,100})?")
_FIELD = re.compile(r"[\x21-\x7e]{1,100}")
_URL = re.compile(r"https://[A-Za-z0-9.-]+/[\x21\x24-\x3e\x40-\x7e]*")  # no query, no fragment
_INSIDE = re.compile(r"~/[^\0\n]{1,250}")
_OWN = {"PATH", "HOME", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"}
_CLASSES = ("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789")
TOKENS = ("access_token", "refresh_token", "id_token")
# Signed with, never sent: egress/aws.py.
AWS_KEY_ID, AWS_KEY, AWS_TOKEN = AWS_NAMES = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
# A subprotocol of a web socket that begins so goes on with a credential.
CREDENTIAL_PROTOCOLS = ("openai-insecure-api-key.",)
# Of a host without a row, and of every other one, too.
CREDENTIAL_HEADERS = frozenset(
    ("authorization", "proxy-authorization", "x-api-key", "api-key", "x-auth-token", "private-token", "x-nuget-apikey")
)


def _hosts(hosts: object) -> tuple[str, ...]:
    if isinstance(hosts, str | bytes) or not isinstance(hosts, Iterable):
        raise InvalidRequest("hosts must be a list of names")
    checked = tuple(dict.fromkeys(map(_host, hosts)))
    if len(checked) > MOST_HOSTS:
        raise InvalidRequest(f"hosts: {len(checked)} are given; a secret has {MOST_HOSTS} at most")
    return checked


def _host(host: object) -> str:
    try:
        if isinstance(host, str) and parse_address(host) is None and "*" not in host:
            return normalize_host(host)
    except ValueError:
        pass
    raise InvalidRequest(
        f"hosts: {str(host)[:100]!r} is not the name of a host; give whole names, without port or wildcard"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Say where the answers of a host have secrets, such as the tokens of a login.

    Answers of exactly `url`, which has no query, are searched for the fields `answer`, at any depth of their JSON or
    form. The program gets placeholders for the texts there, and `hosts` get the values in their headers. `request` are
    the fields of a later request to `url` in which a placeholder may stand, and nothing else. `provider` names a row of
    `PROVIDERS`, instead of all these. With `kept` the secrets outlive the sandbox; a request to the path `revoke` of
    the same host, with a placeholder in the field `token`, ends that.
    """

    url: str = ""
    hosts: tuple[str, ...] = ()
    answer: tuple[str, ...] = TOKENS
    request: tuple[str, ...] = ("refresh_token",)
    provider: str = ""
    revoke: str = ""
    kept: KeptLogin | None = None

    def __post_init__(self) -> None:
        if bool(self.provider) == bool(self.url):
            raise InvalidRequest("Capture: give either a url with hosts, or a provider")
        if not self.provider and not _URL.fullmatch(self.url):
            raise InvalidRequest("Capture: url must be https, a host without port, and a path without query")
        object.__setattr__(self, "hosts", _hosts(self.hosts))
        if bool(self.provider) == bool(self.hosts):
            raise InvalidRequest("Capture: hosts must name those that get the values; those of a provider are known")
        for name in ("answer", "request"):
            object.__setattr__(self, name, _fields(name, getattr(self, name)))
        _ = self.host  # which raises for another form

    @property
    def host(self) -> str:
        """Return the host of the answers."""
        return _host(self._parts[0]) if self.url else ""

    @property
    def path(self) -> str:
        """Return the path of the answers."""
        return self._parts[1] if self.url else ""

    @property
    def _parts(self) -> tuple[str, str]:
        host, _, path = self.url.removeprefix("https://").partition("/")
        return host, f"/{path}"


def _fields(what: str, names: object) -> tuple[str, ...]:
    fields = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else ()
    if not all(isinstance(name, str) and _FIELD.fullmatch(name) for name in fields) or len(fields) > MOST_FIELDS:
        raise InvalidRequest(f"Capture: {what} must be names of at most {MOST_FIELDS} fields")
    return tuple(dict.fromkeys(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretProvider:
    """Describe a service: the names of its secrets, its hosts, and where its credentials stand in a request.

    `headers` are those beside `CREDENTIAL_HEADERS`. A request with one of the keys `query`, with one of `form` in a
    body that is a form, or with one of `json` in its object is refused; bodies are read for `body_hosts`, or for all
    hosts. A placeholder keeps a prefix of `prefixes`, the longest that the value has. `captures` are those of logins.
    """

    names: tuple[str, ...]
    hosts: tuple[str, ...] = ()  # none for registries of packages, which every user configures
    headers: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    form: tuple[str, ...] = ()
    json: tuple[str, ...] = ()
    body_hosts: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    captures: tuple[Capture, ...] = ()


_OF_GITLAB = ("private_token", "access_token", "job_token", "token", "client_secret", "refresh_token", "password")
PROVIDERS: Mapping[str, SecretProvider] = {
    "Anthropic": SecretProvider(
        names=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"), hosts=("api.anthropic.com",),
        prefixes=("sk-ant-api03-", "sk-ant-oat01-", "sk-ant-ort01-", "sk-ant-"),
        captures=tuple(
            Capture(url=f"https://{host}/v1/oauth/token", hosts=("api.anthropic.com",))
            for host in ("platform.claude.com", "console.anthropic.com", "api.anthropic.com")
        ),
    ),
    "OpenAI": SecretProvider(
        names=("OPENAI_API_KEY", "CODEX_API_KEY"), hosts=("api.openai.com",),
        prefixes=("sk-proj-", "sk-svcacct-", "sk-"),
        captures=(Capture(
            url="https://auth.openai.com/oauth/token", hosts=("api.openai.com", "chatgpt.com"),
            request=("refresh_token", "subject_token"), revoke="/oauth/revoke",
        ),),
    ),
    "Google": SecretProvider(
        names=("GEMINI_API_KEY", "GOOGLE_API_KEY"), hosts=("generativelanguage.googleapis.com",),
        headers=("x-goog-api-key",),
        query=("key", "access_token", "oauth_token", "ct"),  # `$ct` replaces the type of the body
        form=("key", "access_token", "oauth_token"), prefixes=("AIza", "ya29."),
        captures=(Capture(
            url="https://oauth2.googleapis.com/token", revoke="/revoke",
            hosts=("cloudcode-pa.googleapis.com", "oauth2.googleapis.com", "www.googleapis.com"),
        ),),
    ),
    "GitHub": SecretProvider(
        names=("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_PERSONAL_ACCESS_TOKEN"), hosts=("api.github.com", "github.com"),
        query=("access_token", "client_secret", "refresh_token"), form=("client_secret", "refresh_token", "password"),
        json=("client_secret", "refresh_token"), body_hosts=("github.com",),
        prefixes=("github_pat_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        captures=(
            Capture(url="https://github.com/login/oauth/access_token", hosts=("api.github.com", "github.com")),
        ),
    ),
    "GitLab": SecretProvider(
        names=("GITLAB_TOKEN",), hosts=("gitlab.com",), headers=("job-token", "deploy-token", "x-sentry-auth"),
        query=_OF_GITLAB, form=_OF_GITLAB, json=_OF_GITLAB, prefixes=("glpat-", "gldt-", "glcbt-"),
    ),
    "npm": SecretProvider(
        names=("NPM_TOKEN", "NODE_AUTH_TOKEN"), prefixes=("npm_",)
    ),
    "PyPI": SecretProvider(
        names=("PYPI_TOKEN", "UV_PUBLISH_TOKEN", "TWINE_PASSWORD"), prefixes=("pypi-",),
    ),
    "Hugging Face": SecretProvider(
        names=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), hosts=("huggingface.co",),
        form=("client_secret", "refresh_token", "password"), prefixes=("hf_",),
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
    A command is run again when a host refuses its value with status 401, at most once a minute, and after `life`.

    `hosts` are names without wildcards; they may be left out for a name of a known provider. `format` is the text that
    a credential's header must have, with `{}` for the value, such as "Bearer {}"; without one, that is the value alone,
    or behind one word. With `foreign="allow"` requests to these hosts may also have credentials of the guest's own.

    `places` are the parts of a request where the value may stand: "headers", "query" or "body", the values of a query,
    and the texts of a body that is JSON or a form; "query:NAME" and "body:NAME" are those of one name. `files_inside`
    are files of the sandbox, paths that begin with "~/", and their texts, in which the placeholder stands for `{}`,
    and those of other secrets for their names, as in `{OTHER}`.
    """

    env: str | None = None
    file: str | None = None
    command: str | None = None
    life: float | str | None = None
    value: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    format: str = ""
    foreign: Foreign = "refuse"
    places: tuple[str, ...] = ("headers",)
    files_inside: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in get_args(Source) if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"Secret: {' and '.join(given)} are given; give one source of the value")
        for name in given:
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise InvalidRequest(f"Secret: {name} must be a text that is not empty")
        if self.life is not None:
            object.__setattr__(self, "life", _life(self.life, self.command))
        if self.foreign not in get_args(Foreign):
            raise InvalidRequest('Secret: foreign must be "refuse" or "allow"')
        if self.format and not _FORMAT.fullmatch(self.format):
            raise InvalidRequest('Secret: format needs {} once for the value, as in "Bearer {}"')
        object.__setattr__(self, "hosts", _hosts(self.hosts))
        object.__setattr__(self, "places", _places(self.places))
        object.__setattr__(self, "files_inside", _files_inside(self.files_inside))

    @staticmethod
    def login(provider: str) -> Capture:
        """Return, in place of a secret, the logins of a known provider: "anthropic", "openai", "google" or "github"."""
        return Capture(provider=provider)

    @staticmethod
    def capture(
        url: str, *, hosts: Sequence[str], answer: Sequence[str] = TOKENS, request: Sequence[str] = ("refresh_token",)
    ) -> Capture:
        """Return, in place of a secret, those that the answers of `url` bring, which are placeholders inside.

        `url` is exact, without a query. The texts of the fields `answer`, at any depth of JSON or in a form, are the
        secrets. `hosts` get them in their headers. `request` are the fields of later requests to `url` where they may
        stand.
        """
        return Capture(url=url, hosts=hosts, answer=answer, request=request)  # type: ignore[arg-type]

    @property
    def source(self) -> Source:
        """Return the kind of the source; "env" for a secret without one, whose variable is its name."""
        return next((name for name in get_args(Source) if getattr(self, name) is not None), "env")

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a Secret stays in its process: it cannot be pickled or copied")


def _life(life: object, command: str | None) -> float:
    seconds = parse_duration(life, name="Secret: life")
    if command is None or seconds < LEAST_LIFE_S:
        raise InvalidRequest(f"Secret: life is that of a command's output, and at least {LEAST_LIFE_S} s")
    return seconds


def _places(places: object) -> tuple[str, ...]:
    checked = (places,) if isinstance(places, str) else tuple(places) if isinstance(places, Iterable) else ()
    if not checked or len(checked) > MOST_FIELDS:
        raise InvalidRequest(f"Secret: places must have 1 to {MOST_FIELDS} of them")
    for place in checked:
        if not isinstance(place, str) or not _PLACE.fullmatch(place):
            raise InvalidRequest(
                f'Secret: {str(place)[:100]!r} is no place of a request; use "headers", "query", "body", "query:NAME" '
                'or "body:NAME"'
            )
    return tuple(dict.fromkeys(checked))


def _files_inside(files: object) -> dict[str, str]:
    if not isinstance(files, Mapping) or len(files) > MOST_FILES:
        raise InvalidRequest(f"Secret: files_inside must be a mapping of at most {MOST_FILES} paths to texts")
    for path, text in files.items():
        if not isinstance(path, str) or not _INSIDE.fullmatch(path) or {"", ".", ".."} & set(path.split("/")):
            raise InvalidRequest(f'Secret: files_inside: {str(path)[:100]!r} must be a path such as "~/.npmrc"')
        if not isinstance(text, str) or "{}" not in text or len(text) > MOST_TEMPLATE_CHARS:
            raise InvalidRequest(
                f"Secret: files_inside: the text of {path} needs {{}} for the placeholder, and has at most "
                f"{MOST_TEMPLATE_CHARS} characters"
            )
    return dict(files)


class SecretSet:
    """Hold the secrets of a sandbox by name. No text of it has more than the names, and no copy leaves the process.

    Without any, it says that connections are opened for the network's rules with methods and paths.
    """

    __slots__ = ("captures", "rows")

    def __init__(self, rows: Iterable[tuple[str, Secret]], captures: Iterable[tuple[str, Capture]] = ()):
        self.rows, self.captures = tuple(rows), tuple(captures)

    def __repr__(self) -> str:
        return f"<secrets: {', '.join(dict.fromkeys(name for name, _ in (*self.rows, *self.captures)))}>"

    def __deepcopy__(self, _: object) -> SecretSet:
        return self

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("secrets stay in their process: they cannot be pickled")

    @property
    def hosts_by_name(self) -> dict[str, list[str]]:
        """Return the hosts of each secret."""
        return {name: list(secret.hosts) for name, secret in self.rows}

    @property
    def has_files(self) -> bool:
        """Tell whether files of the sandbox have placeholders."""
        return any(secret.files_inside for _, secret in self.rows)

    @property
    def kept_logins(self) -> dict[str, KeptLogin]:
        """Return the logins that outlive the sandbox, by name."""
        return {name: capture.kept for name, capture in self.captures if capture.kept is not None}

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the network rules that allow the hosts of these secrets."""
        hosts = [host for _, secret in self.rows for host in secret.hosts]
        hosts += [host for _, capture in self.captures for host in (capture.host, *capture.hosts)]
        return tuple(dict.fromkeys(f"{host}:{PORT}" for host in hosts))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSecrets:
    """Describe the secrets of a sandbox that another process has opened: their hosts and placeholders, by name."""

    hosts_by_name: HostsByName
    placeholders: Mapping[str, str]

    __hash__ = object.__hash__


def noun_of(secrets: SecretSet | HeldSecrets) -> str:
    """Name what a sandbox has these for."""
    is_empty = not secrets.hosts_by_name and not (isinstance(secrets, SecretSet) and secrets.captures)
    return "network rules with methods and paths" if is_empty else "secrets"


def check_same(sandbox: str, held: HostsByName, given: HostsByName) -> None:
    """Raise InvalidRequest unless a call names the secrets that a sandbox has. Values are not compared."""
    if {name: set(hosts) for name, hosts in held.items()} != {name: set(hosts) for name, hosts in given.items()}:
        raise InvalidRequest(
            f"secrets: sandbox {sandbox!r} has {_spelled(held)}, and this call names {_spelled(given)}; leave secrets "
            "out to use those that it has, or open another sandbox"
        )


def _spelled(hosts_by_name: HostsByName) -> str:
    return "; ".join(f"{name} for {', '.join(hosts)}" for name, hosts in hosts_by_name.items()) or "no secrets"


_MAPPING = 'a mapping such as {"API_KEY": Secret(hosts=["api.example.com"])}'
GivenSecrets = Mapping[str, Secret | Capture] | Sequence[str]


def read_secrets(given: object) -> SecretSet:
    """Read the keyword `secrets`: a mapping of names to `Secret`s, or texts of `--secret`. Raises InvalidRequest."""
    rows: Iterable[tuple[object, object]]
    if isinstance(given, Mapping):
        rows = given.items()
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        rows = map(read_text, given)
    else:
        raise InvalidRequest(f"secrets must be {_MAPPING}")
    named = [(_checked_name(name), secret) for name, secret in rows]
    if len(named) > MOST_SECRETS:
        raise InvalidRequest(f"secrets: {len(named)} are given; a sandbox has {MOST_SECRETS} at most")
    if len({name for name, _ in named}) < len(named):
        raise InvalidRequest("secrets: a name is given twice; use one secret with several hosts")
    captures = [(name, row) for name, given in named if isinstance(given, Capture) for row in _expanded(name, given)]
    secrets = [_named(name, secret) for name, secret in named if not isinstance(secret, Capture)]
    _check_files(secrets)
    _check_aws(dict(secrets))
    return SecretSet(secrets, captures)


def _check_aws(secrets: Mapping[str, Secret]) -> None:
    """Raise InvalidRequest for keys of AWS that cannot sign."""
    given = [name for name in AWS_NAMES if name in secrets]
    if given and (given[:2] != [AWS_KEY_ID, AWS_KEY] or len({frozenset(secrets[name].hosts) for name in given}) > 1):
        raise InvalidRequest(
            f"secrets: {' and '.join(given)} cannot sign; give {AWS_KEY_ID} and {AWS_KEY}, with the same hosts, and "
            f"{AWS_TOKEN} for temporary keys"
        )
    for name in given:
        if secrets[name].format or secrets[name].places != ("headers",):
            raise InvalidRequest(f"secrets: {name} signs requests, and is put into none; leave format and places out")


def is_secret_name(name: object) -> bool:
    """Tell whether a secret can have this name: that of a variable, other than those of every sandbox."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in _OWN


def read_secret(name: object, secret: Secret) -> Secret:
    """Return one of the secrets of a sandbox, with its source and hosts. Raises InvalidRequest."""
    return _named(_checked_name(name), secret)[1]


def _checked_name(name: object) -> str:
    if isinstance(name, str) and is_secret_name(name):
        return name
    if name in _OWN:
        raise InvalidRequest(f"secrets: {name} cannot be the name of a secret: each sandbox has its own")
    text = str(name)
    shown = repr(text if len(text) < LEAST_CHARS else f"{text[:4]}...")  # the rest may be of a value
    raise InvalidRequest(
        f"secrets: {shown} cannot be the name of a secret; use that of a variable, such as API_KEY, and no value"
    )


def _expanded(name: str, capture: Capture) -> tuple[Capture, ...]:
    """Return the rows of a provider, or the one that was given."""
    if not capture.provider:
        return (capture,)
    known = {key.lower(): provider.captures for key, provider in PROVIDERS.items() if provider.captures}
    if capture.provider.lower() not in known:
        raise InvalidRequest(
            f"secrets: {name}: {capture.provider[:100]!r} is no provider whose logins are known; these are "
            f"{', '.join(known)}; for another one, give its url and hosts"
        )
    return tuple(replace(row, kept=capture.kept) for row in known[capture.provider.lower()])


def _check_files(secrets: Sequence[tuple[str, Secret]]) -> None:
    paths = [path for _, secret in secrets for path in secret.files_inside]
    if len(set(paths)) < len(paths):
        raise InvalidRequest("secrets: a file inside is given twice; name the other secret in its text, as in {OTHER}")


def _named(name: str, secret: object) -> tuple[str, Secret]:
    if not isinstance(secret, Secret):
        raise InvalidRequest(f'secrets: {name} must be a cloche.Secret, such as Secret(hosts=["api.example.com"])')
    if secret.hosts:
        return name, _with_source(name, secret)
    provider = _BY_NAME.get(name)
    if provider is None or not provider.hosts:
        why = "it is not the name of a known provider's secret" if provider is None else "its service is not known"
        raise InvalidRequest(f"secrets: {name} needs hosts: {why}; name them, as in {name}@HOST or Secret(hosts=[...])")
    return name, _with_source(name, replace(secret, hosts=provider.hosts))


def _with_source(name: str, secret: Secret) -> Secret:
    return replace(secret, env=name) if secret.source == "env" and secret.env is None else secret


def read_text(text: object) -> tuple[str, Secret | Capture]:
    """Read a text of `--secret`: NAME[=env:VARIABLE|file:PATH|cmd:COMMAND][@HOST,...[+PLACE...]], NAME=login:PROVIDER.

    Raises InvalidRequest.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"secrets must be {_MAPPING}, or a list of texts such as API_KEY@api.example.com")
    match = _TEXT.fullmatch(text)
    if match is None:  # whose words may be a value that somebody gave by mistake
        raise InvalidRequest(
            "--secret: use NAME, NAME@HOST[,HOST][+PLACE], NAME=env:VARIABLE@HOST, NAME=file:PATH@HOST, "
            "NAME=cmd:COMMAND@HOST or NAME=login:PROVIDER; a value itself cannot be given, since other users can read "
            "a command line"
        )
    name, kind, source, hosts, places = match.groups()
    if kind == "login":
        if hosts or places:
            raise InvalidRequest(f"secrets: {name}: a login has the hosts of its provider; leave others and places out")
        return name, Capture(provider=source)
    named: dict[str, Any] = {{"cmd": "command"}.get(kind, kind): source} if kind else {}
    named |= {"places": tuple(places.split("+")[1:])} if places else {}
    return name, Secret(hosts=tuple(filter(None, (hosts or "").split(","))), **named)


def check_value(name: str, data: bytes) -> str:
    """Return the value that was read for a secret. Raises InvalidRequest, without any of it."""
    value = data.decode("latin-1").strip()
    if len(value) < LEAST_CHARS:
        raise InvalidRequest(
            f"secrets: the value of {name} has fewer than {LEAST_CHARS} characters, too few to search answers for"
        )
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"secrets: the value of {name} is longer than {MOST_BYTES} bytes")
    if not _VALUE.fullmatch(value):
        raise InvalidRequest(
            f"secrets: the value of {name} has a blank, a line break, or a character other than printable ASCII; give "
            "the key alone"
        )
    return value


def kept_chars(value: str) -> int:
    """Return how many first characters of a value its placeholder has, too: a known prefix, or a web token's claims."""
    token = _JWT.match(value)
    return token.end() if token else len(next((prefix for prefix in _PREFIXES if value.startswith(prefix)), ""))


def is_web_token(value: str) -> bool:
    """Tell whether a value is a JSON web token, whose claims clients read."""
    return _JWT.match(value) is not None


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
            f"secrets: the value of {name} has fewer than {LEAST_RANDOM} letters and digits behind its prefix, too few "
            "for a placeholder"
        )
    while True:
        chosen = "".join(choose(alphabet) if character in alphabet else character for character in rest)
        if chosen != rest:
            return value[:kept] + chosen


def as_wire(name: str, secret: Secret) -> dict[str, Any]:
    """Return what the egress process must know of a secret beside its value, as plain values."""
    return {
        "name": name, "hosts": list(secret.hosts), "format": secret.format,
        "is_foreign_allowed": secret.foreign == "allow", "places": list(secret.places),
        "renews": secret.command is not None, "life_s": secret.life,
    }  # fmt: skip


def capture_as_wire(name: str, capture: Capture) -> dict[str, Any]:
    """Return a capture as plain values, as a row among those of secrets."""
    return {
        "name": name, "value": b"", "url": capture.url, "hosts": list(capture.hosts), "answer": list(capture.answer),
        "request": list(capture.request), "revoke": capture.revoke, "is_kept": capture.kept is not None,
        "takes_login": capture.kept is not None and capture.kept.takes_login,
    }  # fmt: skip


def capture_from_wire(row: Mapping[str, Any]) -> Capture:
    """Return the capture of such a row."""
    return Capture(**{name: row[name] for name in ("url", "hosts", "answer", "request", "revoke")})


def texts_inside(secrets: object, placeholders: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a sandbox, paths below its home and texts, with placeholders by the names of secrets."""
    texts = {}
    for name, secret in secrets.rows if isinstance(secrets, SecretSet) else ():
        for path, text in secret.files_inside.items():
            known = {"{}": placeholders[name], **{f"{{{other}}}": mark for other, mark in placeholders.items()}}
            marks = re.compile("|".join(map(re.escape, known)))
            texts[path.removeprefix("~/")] = marks.sub(partial(_known_mark, known), text)
    return texts


def _known_mark(known: Mapping[str, str], match: re.Match[str]) -> str:
    return known[match[0]]
