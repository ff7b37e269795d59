"""The secrets of a sandbox, on the caller's side: their sources, and what the guest gets for them.

A file and a command's output are handed to the egress process as descriptors, and are not read here. The guest gets
placeholders in its environment, and a file of certificates with the authority of its sandbox.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cloche.core.errors import InvalidRequest, StartFailed
from cloche.core.policy import Policy
from cloche.core.record import dataclass, field
from cloche.core.secrets import (
    AWS_KEY,
    HeldSecrets,
    Secret,
    SecretSet,
    as_wire,
    capture_as_wire,
    check_value,
    texts_inside,
)
from cloche.egress.client import (
    OwnNetwork,
    SandboxNetwork,
    module_paths,
    open_network_with_secrets,
    operator_proxies,
)
from cloche.egress.commands import NoOutput, await_end, serve_in_process, serve_in_thread, start
from cloche.egress.placeholders import new_placeholder
from cloche.egress.windows import SharedNetwork
from cloche.jail.steps import AUTHORITY

from .certificates import FOLDER, MARK, files_and_variables, read_certificates
from .layout import ETC_SHOWN, SYSTEM_FOLDERS, Row, is_below

if TYPE_CHECKING:
    from cloche.core.kept_logins import KeptLogin
    from cloche.core.network import NetworkRules

FILE = f"{FOLDER}/authorities.pem"
# Of OpenSSL, Python, curl, git, Node, npm, Deno, cargo, Nix, gRPC, AWS and Codex.
VARIABLES = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS",
    "NPM_CONFIG_CAFILE", "DENO_CERT", "CARGO_HTTP_CAINFO", "NIX_SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    "AWS_CA_BUNDLE", "CODEX_CA_CERTIFICATE",
)  # fmt: skip
# Where distributions keep the one file with all certificates.
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)  # fmt: skip
# Else the clients of AWS send bodies to S3 whose checksum comes last, which no signature of the head has.
WHOLE_BODIES = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}
# What a command that is run for a sandbox with a name has of its caller's environment, which may hold other secrets.
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS",
    "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK",
)  # fmt: skip
AUTHORITY_BYTES = 1024  # room for the certificate of an authority
N = TypeVar("N", SandboxNetwork, OwnNetwork)
Commands = dict[str, subprocess.Popen[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestSecrets:
    """Hold what a guest gets: variables for its environment, and files of its home.

    `authority` is that of its sandbox, in PEM.
    """

    variables: Mapping[str, str]
    texts: Mapping[str, str] = field(default_factory=dict)
    authority: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the rows of its file tree, if nobody else has it."""
        return (("shown text", FILE, f"{trusted_here()}\n{self.authority}", _bundles()),) if self.authority else ()

    def authority_block(self) -> bytes:
        """Return what the file of `authority_row` begins with."""
        return self.authority.encode("ascii").ljust(AUTHORITY_BYTES, b"\n")


async def open_shared_with_secrets(policy: Policy) -> tuple[SharedNetwork, GuestSecrets]:
    """Open a network with a policy's secrets that several runs use. Raises as `open_with_secrets` does."""
    network, secrets = await open_with_secrets(policy)
    return SharedNetwork(network, policy.network_rules()), secrets


async def open_with_secrets(policy: Policy) -> tuple[SandboxNetwork, GuestSecrets]:
    """Open a network with a policy's secrets. Raises InvalidRequest for a wrong source or value, StartFailed."""
    network, commands = _sent_to(policy, open_network_with_secrets)
    return network, await _filled(policy.secrets, network, commands, network.close)


class ContainerSecrets:
    """Hold the secrets of a sandbox of several containers, each of which has a network of its own."""

    def __init__(self, network: SandboxNetwork, guest: GuestSecrets):
        self._network, self.guest = network, guest

    @classmethod
    async def open(cls, policy: Policy) -> Self:
        """Read the secrets of a policy. Raises as `open_with_secrets` does."""
        return cls(*await open_with_secrets(policy))

    def new_network(self) -> SandboxNetwork:
        """Return a network for one container. Raises StartFailed."""
        try:
            return self._network.again()
        except OSError as error:
            raise _failed(error) from error

    def close(self) -> None:
        """Let the egress process forget the values, once the networks are closed, too."""
        self._network.close()


async def open_own_with_secrets(policy: Policy) -> tuple[OwnNetwork, GuestSecrets]:
    """Open a network with secrets for a sandbox that a keeper holds. Raises as `open_with_secrets` does."""
    own, commands = _sent_to(policy, OwnNetwork)
    return own, await _filled(policy.secrets, own.network, commands, own.end)


def open_waiting_network(rules: NetworkRules) -> SandboxNetwork:
    """Open a network for one sandbox with secrets after the other. Raises OSError."""
    return open_network_with_secrets(rules, authorities=operator_authorities(), proxies=operator_proxies())


async def fill_network(policy: Policy, network: SandboxNetwork) -> GuestSecrets:
    """Give a network a policy's secrets in place of those before. Raises as `open_with_secrets` does."""
    try:
        authority = await network.next_authority()
        with _sources(_own(policy), outlives_caller=False) as (rows, values, commands):
            number = network.give_secrets(rows, values, is_answered=bool(values))
    except OSError as error:
        raise _failed(error) from error
    if values:
        return await _filled(policy.secrets, network, commands, lambda: None, number)
    placeholders = {row["name"]: row["placeholder"] for row in rows if "placeholder" in row}
    return _for_guest(placeholders, authority, texts_inside(policy.secrets, placeholders))


def _own(policy: Policy) -> SecretSet:
    if isinstance(policy.secrets, SecretSet):
        return policy.secrets
    raise InvalidRequest(
        "secrets: only the process that opened this sandbox can open a session with checkpoints in it, which needs "
        "the values again; leave checkpoints out"
    )


def _sent_to(policy: Policy, open_network: Callable[..., N]) -> tuple[N, Commands]:
    """Open a network with secrets whose values are on their way, and return the commands that write some of them."""
    with _sources(_own(policy), outlives_caller=open_network is OwnNetwork) as (rows, values, commands):
        try:
            network = open_network(
                policy.network_rules(), secrets=rows, values=values, authorities=operator_authorities(),
                proxies=operator_proxies(), asks=policy.on_network == "ask",
            )  # fmt: skip
        except OSError as error:
            raise _failed(error) from error
        return network, commands


async def _filled(
    secrets: SecretSet | HeldSecrets | None, network: SandboxNetwork, commands: Commands, end: Callable[[], None],
    number: int = 0,
) -> GuestSecrets:  # fmt: skip
    """Return what a network's guest gets for its secrets; without all values, `end` the network."""
    try:
        body = await network.await_secrets(number)
        for name, process in commands.items():
            await _check_end(name, process)
        if body["error"]:
            raise InvalidRequest(body["error"])
    except BaseException as error:
        await asyncio.to_thread(end)
        for process in commands.values():
            process.kill()
        if isinstance(error, OSError):
            raise _failed(error) from error
        raise
    return _for_guest(body["variables"], body["authority"], texts_inside(secrets, body["variables"]))


def held_by_others(secrets: SecretSet | HeldSecrets) -> GuestSecrets:
    """Return what a program gets in a sandbox that another process has opened, where the certificates are."""
    assert isinstance(secrets, HeldSecrets)  # noqa: S101 - this process has no others of it
    return GuestSecrets(variables=_variables(secrets.placeholders))


def _failed(error: OSError) -> StartFailed:
    return StartFailed(f"cannot open the network: {error.strerror or error}", step="network", errno=error.errno)


@contextmanager
def _sources(
    secrets: SecretSet, *, outlives_caller: bool
) -> Iterator[tuple[list[dict[str, Any]], list[int], Commands]]:
    """Yield rows, descriptors of files and outputs, which are closed at the end, and the processes of commands.

    The first descriptor is a link to who has the files of kept logins, the last one to who runs the commands again, if
    there are some.
    """
    rows: list[dict[str, Any]] = []
    fds: list[int] = []
    commands: Commands = {}
    env = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ} if outlives_caller else None
    try:
        if kept := secrets.kept_logins:
            fds.append(_serve_logins(kept))
        for name, secret in secrets.rows:
            value: bytes | None = None
            if secret.file is not None:
                fds.append(_opened(name, secret.file))
            elif secret.command is not None:
                commands[name], output = _started(name, secret.command, env)
                fds.append(output)
            else:
                value = _value(name, secret)
            placeholder = "" if value is None else new_placeholder(name, check_value(name, value))
            rows.append({**as_wire(name, secret), "value": value, "placeholder": placeholder})
        if commands:
            again = {name: str(secret.command) for name, secret in secrets.rows if name in commands}
            fds.append(serve_in_process(again, env) if env is not None else serve_in_thread(again))
        rows += [capture_as_wire(name, capture) for name, capture in secrets.captures]
        yield rows, fds, commands
    except BaseException:
        for process in commands.values():
            process.kill()
            process.wait()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def _serve_logins(kept: Mapping[str, KeptLogin]) -> int:
    from cloche.egress import login_server  # needed by few sandboxes

    return login_server.serve(kept, module_paths("cryptography"))


def _value(name: str, secret: Secret) -> bytes:
    value = secret.value if secret.env is None else os.environ.get(secret.env)
    if value is None:
        of = "" if secret.env == name else f", which has the value of {name},"
        raise InvalidRequest(f"secrets: the variable {secret.env}{of} is not set; set it, or give another source")
    return value.encode("utf-8", "surrogateescape")


def _opened(name: str, path: str) -> int:
    try:
        return os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidRequest(f"secrets: the file of {name} cannot be opened: {error.strerror}") from None


def _started(name: str, command: str, env: Mapping[str, str] | None) -> tuple[subprocess.Popen[bytes], int]:
    try:
        return start(command, env)
    except NoOutput as error:
        raise InvalidRequest(f"secrets: the command of {name} {error}") from None


async def _check_end(name: str, process: subprocess.Popen[bytes]) -> None:
    try:
        await asyncio.to_thread(await_end, process)
    except NoOutput as error:
        raise InvalidRequest(f"secrets: the command of {name} {error}") from None


@functools.cache
def operator_authorities() -> str:
    """Return the certificates that the operator's SSL_CERT_FILE names for OpenSSL; empty for this machine's own."""
    path = os.environ.get("SSL_CERT_FILE", "")
    return read_certificates(path) if path else ""


@functools.cache
def trusted_here() -> str:
    """Return the certificates that guests with a network trust."""
    texts = [
        read_certificates(path) for path in (ssl.get_default_verify_paths().openssl_cafile, *BUNDLES) if _is_file(path)
    ]
    return "\n".join(dict.fromkeys([*texts[:1], *(row[2] for row in files_and_variables()[0])]))


def _is_file(path: str) -> bool:
    return os.path.isfile(path)


def _for_guest(placeholders: Mapping[str, str], authority: str, texts: Mapping[str, str]) -> GuestSecrets:
    if MARK not in authority or len(authority) > AUTHORITY_BYTES:
        raise StartFailed("the egress process has made no authority", step="network")
    return GuestSecrets(variables=_variables(placeholders), texts=texts, authority=authority)


@functools.cache
def authority_row() -> Row:
    """Return the row of a file tree that one sandbox after the other gets, with room for an authority."""
    return ("shown text", FILE, "\n" * AUTHORITY_BYTES + trusted_here(), _bundles(), {"register": AUTHORITY})


def _bundles() -> list[str]:
    paths = dict.fromkeys(map(os.path.realpath, filter(_is_file, BUNDLES)))
    return [path[1:] for path in paths if _is_shown(path)]


def _variables(placeholders: Mapping[str, str]) -> dict[str, str]:
    added = WHOLE_BODIES if AWS_KEY in placeholders else {}
    return {**dict.fromkeys(VARIABLES, f"/{FILE}"), **added, **placeholders}


def _is_shown(path: str) -> bool:
    return any(is_below(path, folder) for folder in (*SYSTEM_FOLDERS, *ETC_SHOWN))
