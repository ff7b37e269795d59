"""The docker daemon: connections, its capabilities, its errors, and the removal of containers and volumes.

A container ends when its caller closes its input or is killed: the first process reads the end of file, and the daemon
removes ended containers. Containers left in spite of that are removed here, and so are workspaces: the daemon removes a
volume only together with the container that it was made for.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import socket
import ssl
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cloche.core.errors import BackendUnavailable, StartFailed
from cloche.core.suppressed import suppress_logged

from ..containers.pool import deferral
from ..garbage_collection import Background, is_dead

if TYPE_CHECKING:
    from docker import APIClient

log = logging.getLogger("cloche.docker")
CONNECT_S, TIMEOUT_S = 10, 60
LATE_S = 3  # events up to this time after a container's end are read, as the daemon reports late
OLDEST_API = "1.41"  # Docker 20.10
CONNECTIONS = 64  # maximum in the SDK's pool
OWNER_LABEL = "cloche.owner"
# Labels of volumes with packages (`layers.py`), which outlive their makers: the layer, its folder of layers, the maker.
# MARK_LABEL is on the volume that marks another one as complete.
LAYER_LABEL, STORE_LABEL, MAKER_LABEL = "cloche.packages", "cloche.packages.store", "cloche.packages.maker"
MARK_LABEL = "cloche.packages.whole"

# Connections.
_turn = threading.Lock()
Key = tuple[int, tuple[str, ...]]
_daemons: dict[Key, Daemon] = {}
_VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_CONFIG")

# Remedies.
CERTIFICATES = (
    "DOCKER_CERT_PATH names a folder with ca.pem (who signed the daemon's certificate), cert.pem and key.pem (what it "
    'takes yours to be); a context has its own. See what "docker info" says.'
)
JOIN_THE_GROUP = (
    'Join the group that owns its socket ("sudo usermod -aG docker $USER", then log in again; that makes you as good '
    "as root), or run a rootless daemon and name it in DOCKER_HOST."
)

# Removal.
REMOVED_S, NAP_S, LISTENS_S = 5.0, 0.05, 5
_background = Background("cloche-docker-end", 2 * REMOVED_S)
wait_for_all = _background.wait_for_all


def _joined(pieces: Iterator[bytes], max_bytes: int) -> bytes:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes")
    return bytes(data)


class Daemon:
    """One connection to a daemon; thread-safe."""

    def __init__(self, api: Any, info: Mapping[str, Any], where: str):  # noqa: ANN401 - the SDK's client
        self.api, self.info, self.where = api, info, where

    def check_socket(self, timeout_s: int) -> None:
        """Raise BackendUnavailable if nothing listens at the daemon's socket any more."""
        try:
            _try_socket(self.where, timeout_s)
        except OSError as error:
            raise _unreachable(error, self.where) from error

    @property
    def is_encrypted(self) -> bool:
        """Return whether the connection uses TLS."""
        return str(self.api.base_url).startswith("https:")

    @property
    def is_id_mapped(self) -> bool:
        """Return whether the daemon maps user ids (userns-remap or rootless), which limits their number."""
        return any(option.startswith(("name=userns", "name=rootless")) for option in self._options())

    @property
    def has_seccomp(self) -> bool:
        return any(option.startswith("name=seccomp") for option in self._options())

    @property
    def version(self) -> str:
        return str(self.info.get("ServerVersion", ""))

    def _options(self) -> Sequence[str]:
        return [str(option) for option in self.info.get("SecurityOptions") or ()]

    def create(self, body: Mapping[str, Any]) -> str:
        """Create a container and return its id. Raises StartFailed."""
        try:
            container_id = str(self.api.create_container_from_config(dict(body))["Id"])
        except Exception as error:
            raise StartFailed(f"docker cannot create a container: {explained(error)}", step="create") from error
        log.debug("container %.12s is created", container_id)
        return container_id

    def attach(self, container: str) -> Any:  # noqa: ANN401 - the SDK's idea of a socket
        """Attach to a container's streams before it starts. Raises StartFailed."""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        try:
            return self.api.attach_socket(container, params=params)
        except Exception as error:
            raise StartFailed(f"docker cannot attach to a container: {explained(error)}", step="attach") from error

    def start(self, container: str) -> None:
        """Start a container. Raises StartFailed."""
        try:
            self.api.start(container)
        except Exception as error:
            raise StartFailed(f"docker cannot start a container: {explained(error)}", step="start") from error

    def archive_of(self, container: str, path: str, max_bytes: int) -> bytes:
        """Return a folder of a container as a tar archive of at most `max_bytes`. Raises StartFailed."""
        try:
            return _joined(self.api.get_archive(container, path)[0], max_bytes)
        except Exception as error:
            raise StartFailed(f"{path} of the image cannot be read: {explained(error)}", step="archive") from error

    def file_of(self, container: str, path: str, max_bytes: int) -> tuple[str, bytes] | None:
        """Return the path without links, and the content, of a file of a container; None without a file.

        Raises StartFailed.
        """
        import docker.errors

        try:
            path = self.api.get_archive(container, path)[1].get("linkTarget") or path
            archive = _joined(self.api.get_archive(container, path)[0], max_bytes)
        except docker.errors.NotFound:
            return None
        except Exception as error:
            raise StartFailed(f"{path} of the image cannot be read: {explained(error)}", step="archive") from error
        with tarfile.open(fileobj=io.BytesIO(archive)) as members:
            file = members.extractfile(members.getmembers()[0])
            return (path, file.read()) if file is not None else None

    def put_archive(self, container: str, path: str, pieces: Iterator[bytes]) -> None:
        """Unpack a tar archive into a folder of a container, which need not be started. Raises the SDK's errors."""
        if not self.api.put_archive(container, path, pieces):
            raise ValueError(f"the daemon does not unpack an archive into {path}")

    def make_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Create a volume unless one of that name exists. Raises the SDK's errors."""
        self.api.create_volume(name, driver="local", labels=dict(labels))

    def labelled_volumes(self, label: str) -> list[tuple[str, Mapping[str, str]]]:
        """Return (name, all labels) of the volumes with a label. Raises the SDK's errors."""
        answer = self.api.volumes(filters={"label": [label]})
        return [(str(volume["Name"]), volume.get("Labels") or {}) for volume in answer.get("Volumes") or ()]

    def kill(self, container: str) -> None:
        """Kill a container. A missing container is ignored."""
        with ignoring_absence():
            self.api.kill(container)

    def give_processor(self, container: str, pids: int) -> None:
        """Let a container use one whole processor.

        `pids` is its existing limit on processes. A missing container is ignored.
        """
        url = self.api._url("/containers/{0}/update", container)  # docker-py's update_container has no NanoCpus
        with ignoring_absence():
            self.api._raise_for_status(self.api._post_json(url, data={"NanoCpus": 10**9, "PidsLimit": pids}))

    def remove(self, container: str) -> None:
        """Remove a container even if it runs. A missing container is ignored."""
        with ignoring_absence():
            self.api.remove_container(container, force=True, v=True)

    def remove_volume(self, name: str) -> bool:
        """Remove a volume. Returns False if it is in use or the daemon does not answer."""
        import docker.errors
        import requests

        try:
            self.api.remove_volume(name, force=True)
        except docker.errors.NotFound:
            pass
        except (docker.errors.APIError, requests.exceptions.RequestException) as error:
            log.debug("a volume is not removed: %s", explained(error))
            return False
        return True

    def volume_of(self, container: str) -> str:
        """Return the name of a container's workspace volume. Raises StartFailed."""
        try:
            mounts = self.api.inspect_container(container)["Mounts"]
        except Exception as error:
            raise StartFailed(f"the workspace cannot be found: {explained(error)}", step="inspect") from error
        return str(next(mount["Name"] for mount in mounts if mount["Destination"] == "/workspace"))

    @property
    def is_by_socket(self) -> bool:
        """Return whether the daemon is reached by a Unix socket of this machine."""
        return str(self.api.base_url).startswith("http+docker:")

    def pid_of(self, container: str) -> int:
        """Return the pid of a container's first process on the daemon's machine; 0 if it does not run."""
        return int(self.api.inspect_container(container)["State"]["Pid"])

    def ran_out_of_memory(self, container: str, since: float, until: float) -> bool:
        """Return whether a container ran out of memory between two Unix times, as far as the daemon knows.

        A busy daemon sometimes misses the kernel's notification. A first process that was killed (exit code 137)
        without a request to the daemon therefore counts, too: the guest cannot reach it, so only the kernel's OOM
        killer remains.
        """
        filters = {"container": [container], "event": ["oom", "die", "kill"]}
        events = self.api.events(since=int(since) - 1, until=int(until) + LATE_S, filters=filters, decode=True)
        was_killed = was_asked_for = False
        try:
            for event in events:
                if event["Action"] == "oom":
                    return True
                was_asked_for |= event["Action"] == "kill"
                was_killed |= event["Action"] == "die" and event["Actor"]["Attributes"].get("exitCode") == "137"
        finally:
            events.close()
        return was_killed and not was_asked_for

    def owned(self) -> list[tuple[str, str]]:
        """Return (id, owner) of each container of Cloche."""
        containers = self.api.containers(all=True, filters={"label": [OWNER_LABEL]})
        return [(str(container["Id"]), str(container["Labels"][OWNER_LABEL])) for container in containers]

    def dangling_volumes(self) -> list[tuple[str, str]]:
        """Return (name, owner) of each volume of Cloche that no container uses."""
        answer = self.api.volumes(filters={"label": [OWNER_LABEL], "dangling": ["true"]})
        return [(str(volume["Name"]), str(volume["Labels"][OWNER_LABEL])) for volume in answer.get("Volumes") or ()]


class ignoring_absence:  # noqa: N801 - reads as the statement it is
    """Context manager that ignores a container that is missing or being removed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        import docker.errors
        import requests

        if isinstance(error, docker.errors.APIError):
            return error.status_code in (404, 409)
        if isinstance(error, requests.exceptions.RequestException):
            log.debug("the daemon does not answer, and may keep what is to go: %s", error)
            return True
        return False


def key() -> Key:
    """Return the key of a connection: this process, and the variables that name the daemon."""
    return os.getpid(), tuple(os.environ.get(name, "") for name in _VARIABLES)


def connect(*, timeout_s: int = CONNECT_S) -> Daemon:
    """Return the daemon that DOCKER_HOST or docker's context names. `timeout_s` applies to each of three requests.

    Raises BackendUnavailable with the reason and the remedy.
    """
    named = key()
    with _turn:
        if named not in _daemons:
            _daemons[named] = _connect(timeout_s)
        return _daemons[named]


def close_idle() -> None:
    """Close idle connections; the next call opens new ones."""
    with _turn:
        for daemon in _daemons.values():
            daemon.api.close()


def _forget_after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def _connect(timeout_s: int) -> Daemon:
    try:
        import docker
    except ImportError as error:
        raise BackendUnavailable(
            f'backend "docker": its Python library is not installed ({error}).',
            remedy='Install it with: pip install "cloche[docker]".',
        ) from error
    options = _options()
    where = options.get("base_url") or "unix:///var/run/docker.sock"
    api = None
    try:
        _try_socket(str(where), timeout_s)
        # version="auto" would send a request in the constructor, which leaks its session if that fails.
        api = _without_environment(docker.APIClient(version=OLDEST_API, timeout=timeout_s, **options))
        version, info = api.version(api_version=False)["ApiVersion"], api.info()
        api.close()
        api = _without_environment(
            docker.APIClient(version=version, timeout=TIMEOUT_S, max_pool_size=CONNECTIONS, **options)
        )
        return Daemon(api, info, str(where))
    except Exception as error:
        if api is not None:
            api.close()
        raise _unreachable(error, str(where)) from error


def _without_environment(api: APIClient) -> APIClient:
    """Have a client read the proxy variables once, now, because the caller may change the environment later.

    The trusted authority is not read from the environment: REQUESTS_CA_BUNDLE would override that of DOCKER_CERT_PATH.
    """
    if not api.base_url.startswith("http+docker:"):  # a Unix socket needs no proxy
        api.proxies = api.merge_environment_settings(api.base_url, {}, None, None, None)["proxies"]
    api.trust_env = False
    return api


def _unreachable(error: Exception, where: str) -> BackendUnavailable:
    reason, remedy = _why_not(error, where)
    return BackendUnavailable(f'backend "docker": {reason}', remedy=remedy)


def _try_socket(where: str, timeout_s: int) -> None:
    """Raise OSError if nothing listens at a Unix socket. Without this check the SDK would leak a socket."""
    scheme, _, path = where.partition("://")
    if scheme in ("unix", "http+unix"):
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(timeout_s)
            attempt.connect(path if path.startswith("/") else f"/{path}")


def _options() -> dict[str, Any]:
    """Return the options for reaching the daemon: DOCKER_HOST and its companions, else docker's context.

    Raises BackendUnavailable for a named context that cannot be used: no other daemon takes its place.
    """
    import docker.errors
    import docker.utils

    if not os.environ.get("DOCKER_HOST"):
        return _context_options(os.environ.get("DOCKER_CONTEXT", ""))
    try:
        return dict(docker.utils.kwargs_from_env())
    except docker.errors.TLSParameterError as error:
        reason = f'backend "docker": the certificates for {os.environ["DOCKER_HOST"]} cannot be used: {error}'
        raise BackendUnavailable(
            reason, remedy="DOCKER_CERT_PATH names a folder with ca.pem, cert.pem and key.pem."
        ) from error


def _context_options(name: str) -> dict[str, Any]:
    from docker.context import ContextAPI
    from docker.context.config import get_current_context_name
    from docker.utils.config import find_config_file

    named = name or get_current_context_name()
    if named == "default":
        return {}
    try:  # without docker's folder, the SDK would search the working directory for contexts
        context = ContextAPI.get_context(named) if find_config_file() else None
    except Exception as error:
        raise _no_context(named, f": {error}") from error
    if context is None or not context.Host:
        raise _no_context(named, "; docker's configuration (config.json, contexts) has none of that name")
    return {"base_url": context.Host, "tls": context.TLSConfig}


def _no_context(name: str, why: str) -> BackendUnavailable:
    return BackendUnavailable(
        f'backend "docker": the context {name!r} cannot be used{why}.',
        remedy='See "docker context ls"; "docker context use" and DOCKER_CONTEXT name one, DOCKER_HOST goes before.',
    )


def _why_not(error: Exception, where: str) -> tuple[str, str]:
    """Return the reason and the remedy."""
    # The errno of an SSLError is one of OpenSSL's SSL_ERROR_* codes; SSL_ERROR_SSL (1) would be taken for EPERM.
    numbers = {
        cause.errno for cause in _chain(error) if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)
    }
    if errno.EACCES in numbers or errno.EPERM in numbers:
        return f"you may not talk to the daemon at {where} (permission denied).", JOIN_THE_GROUP
    if numbers & {errno.ENOENT, errno.ECONNREFUSED}:
        return (
            f'the daemon cannot be reached: nobody answers at {where} ("docker info" fails as well).',
            'Start it ("sudo systemctl start docker"), install Docker, or name another daemon in DOCKER_HOST.',
        )
    refusals = [cause for cause in _chain(error) if isinstance(cause, ssl.SSLError) and cause.errno is not None]
    if refusals:
        return f"the daemon at {where} cannot be talked to over TLS: {refusals[-1]}.", CERTIFICATES
    return f"the daemon cannot be reached at {where}: {explained(error)}.", 'See what "docker info" says.'


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all of its causes."""
    pending: list[object] = [error]
    while pending:
        current = pending.pop()
        if isinstance(current, BaseException):
            yield current
            pending += [*current.args, current.__cause__, current.__context__, getattr(current, "reason", None)]


def explained(error: BaseException) -> str:
    """Return the daemon's own message for an error."""
    explanation = getattr(error, "explanation", None)
    text = explanation.decode("utf-8", "replace") if isinstance(explanation, bytes) else explanation
    return str(text or error).strip()


class Removable(Protocol):
    """A container whose input can be closed and which can then be removed."""

    id: str
    daemon: Daemon

    def shutdown(self) -> None:
        """Close its standard input; the container then ends by itself."""
        ...


def release(container: Removable, volume: str = "") -> None:
    """Remove a container in the background, and the workspace `volume` with it."""
    try:
        _background.begin(lambda: _release(container, volume))
    except RuntimeError:  # no thread can start during interpreter shutdown; the container then ends by itself
        container.shutdown()
        raise


def _release(container: Removable, volume: str) -> None:
    deferral.wait()
    container.shutdown()
    _remove(container, volume)


def _remove(container: Removable, volume: str) -> None:
    with suppress_logged(
        log, "there is no daemon to ask; what is left is removed when there is one", BackendUnavailable
    ):
        container.daemon.check_socket(LISTENS_S)
        if not _is_gone(container):
            container.daemon.remove(container.id)
        deadline = time.monotonic() + REMOVED_S
        while volume and not container.daemon.remove_volume(volume) and time.monotonic() < deadline:
            time.sleep(NAP_S)


def _is_gone(container: Removable) -> bool:
    """Wait up to `REMOVED_S` for a container's removal; return whether it was removed."""
    import docker.errors
    import requests

    try:
        container.daemon.api.wait(container.id, timeout=REMOVED_S, condition="removed")
    except docker.errors.NotFound:
        return True
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return False
    return True


def clear(daemon: Daemon) -> list[str]:
    """Remove the containers and volumes of dead processes; return one line for each."""
    import docker.errors
    import requests

    cleared = []
    with suppress_logged(
        log, "what is left over stays", docker.errors.DockerException, requests.exceptions.RequestException
    ):
        for container, owner in daemon.owned():
            if is_dead(owner):
                daemon.remove(container)
                cleared.append(f"container {container[:12]}")
        for name, owner in daemon.dangling_volumes():
            if is_dead(owner) and daemon.remove_volume(name):
                cleared.append(f"volume {name[:12]}")
        leftover = half_made(daemon.labelled_volumes(LAYER_LABEL))
        cleared += [f"volume {name}" for name in leftover if daemon.remove_volume(name)]
    return cleared


def half_made(volumes: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return the names of incomplete package volumes of dead processes, and of marks without a volume."""
    complete = {labels[LAYER_LABEL] for _, labels in volumes if MARK_LABEL in labels}
    present = {labels[LAYER_LABEL] for _, labels in volumes if MARK_LABEL not in labels}
    return [
        name
        for name, labels in volumes
        if labels[LAYER_LABEL] not in (present if MARK_LABEL in labels else complete)
        and is_dead(labels.get(MAKER_LABEL, ""))
    ]
