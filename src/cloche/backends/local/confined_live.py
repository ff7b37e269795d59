"""A live sandbox of the local backend at level `confined`: without namespaces, with its files in host folders.

Its init and the reapers of its processes are `jail/confined_resident.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, NoReturn

from cloche.core.enforcement import Enforcement, Level
from cloche.core.errors import BackendUnavailable
from cloche.core.limits import Limits
from cloche.core.policy import Policy
from cloche.core.protocols import Keeping
from cloche.jail.messages import Spec
from cloche.jail.user_namespaces import claim_outside_id

from ..enforcement import with_life_confined
from ..file_operations import FileWatch
from ..host import Host
from ..network import variables_without_namespace
from .live import LocalLiveSandbox
from .plan import REAPERS, build_spec, filter_for, guest_paths_below
from .session import LocalSession

SCOPES_ABI = 6  # the Landlock ABI from which a domain can block signals to outside processes (landlock(7))
ONE_UID = (
    "a live sandbox at level confined needs an id of its own or Landlock's scopes (Linux 6.12 or later): this "
    "host gives an ordinary user one id, and its kernel allows programs with the same id to signal each other"
)
NO_SERVERS = "a sandbox at level confined has no servers: a port that a program listens on would be the host's own"
_ELSEWHERE = "Use a host, or pods, that give level jail."
NO_WATCHES = "watch: level confined cannot watch files: inotify would report files of the host as well"
NO_CLONES = "checkpoints: level confined has none, because a clone needs namespaces"


def why_no_life(host: Host) -> str:
    """Return the reason why no sandbox can live at level confined here; empty if one can."""
    return "" if host.owns_ids or host.landlock_abi >= SCOPES_ABI else ONE_UID


class ConfinedLiveSandbox(LocalLiveSandbox):
    """Hold open processes that share a workspace and an id; see core.protocols.OpenLiveSandbox."""

    def __init__(
        self, *, policy: Policy, limits: Limits, enforcement: Enforcement, host: Host, keeping: Keeping | None = None
    ):
        held = with_life_confined(enforcement)  # which says so once
        super().__init__(policy=policy, limits=limits, enforcement=held, host=host, keeping=keeping)
        self._pool = None
        self._has_home = self._has_environment = False
        self.writable = (self._paths.workspace, self._paths.tmp)

    def absolute(self, path: str) -> str:
        """Return a path as programs see it; /workspace and /tmp are replaced by the folders that serve as such."""
        for name, folder in (("/workspace", self._paths.workspace), ("/tmp", self._paths.tmp)):
            if path == name or (path.startswith(f"{name}/") and not path.startswith(self._paths.folder)):
                return folder + path[len(name) :]
        return path if path.startswith("/") else f"{self._paths.workspace}/{path}"

    def _greeting(self) -> dict[str, str]:
        return {"folder": self._paths.folder}

    def _note_greeting(self, greeting: Mapping[str, Any]) -> None:
        self._paths = guest_paths_below(str(greeting["folder"]), Level.CONFINED)
        self.writable = (self._paths.workspace, self._paths.tmp)

    def _own_mounts(self) -> list[str]:
        return [*self.writable]

    def _network_variables(self) -> Mapping[str, str]:
        return {**super()._network_variables(), **variables_without_namespace(self._policy)}

    def _spec(self) -> Spec:
        spec = build_spec(self.enforcement.level, self._policy, self.limits, self._host, self._paths)
        if spec.outside is not None:
            self._claim = claim_outside_id(*spec.outside, spec.ids[2])
            spec.outside = (self._claim.outside_id, 1)
            # Its reapers count for another id: that of init.
            spec.rlimits = [(name, amount - REAPERS * (name == "nproc")) for name, amount in spec.rlimits]
        if spec.seccomp is not None:
            kind = {"resident": True, "one_uid": not self._host.owns_ids, "network": spec.network is not None}
            is_counted, version = bool(self._host.cgroup_version), self._host.landlock_abi
            spec.seccomp = filter_for(confined=True, counted=is_counted, landlock=version, **kind)
        if spec.landlock is not None:
            spec.landlock = [*spec.landlock, ("/dev/tty", "device")]
        return spec

    async def connect(self, port: int) -> NoReturn:
        """Raise BackendUnavailable: there are no servers inside."""
        raise BackendUnavailable(f"port {port}: {NO_SERVERS}.", remedy=_ELSEWHERE)

    async def list_ports(self) -> NoReturn:
        """Raise BackendUnavailable: listening ports in this network namespace are the host's."""
        raise BackendUnavailable(f"{NO_SERVERS}.", remedy=_ELSEWHERE)

    @contextlib.asynccontextmanager
    async def watch_path(self, path: str, **_: Any) -> AsyncIterator[FileWatch]:  # noqa: ARG002, ANN401 - as there
        """Raise BackendUnavailable: inotify is refused."""
        raise BackendUnavailable(f"{NO_WATCHES}.", remedy="List the folder again, or use a host that gives level jail.")
        yield  # type: ignore[unreachable]  # pragma: no cover

    async def open_session_apart(self, language: str, env: Mapping[str, str]) -> LocalSession:  # noqa: ARG002
        """Raise BackendUnavailable: a session that can be cloned needs namespaces."""
        raise BackendUnavailable(
            f"{NO_CLONES}.", remedy="Open the session without checkpoints, or use a host that gives level jail."
        )
