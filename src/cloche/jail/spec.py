"""What the helper must build and run, as plain data: written by the caller, read by the helper.

A sandbox is opened once with a `Spec`; every run in it sends a `Run`. Both travel as dicts of plain values.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Record:
    """Hold the fields its class declares, given by keyword; defaults are the class's own values."""

    def __init__(self, **values: Any):
        unknown = values.keys() - self.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.__dict__.update(values)

    def as_wire(self) -> dict[str, Any]:
        """Return every field as plain data."""
        return {name: getattr(self, name) for name in self.__annotations__}


class Spec(_Record):
    """Describe a sandbox.

    `level` is `jail`, `confined`, `process` or `none`. `workspace` and `tmp` are the guest's paths; below level
    jail they are folders of the host inside `folder`, which the helper makes and removes. `outside` is None, or the
    first and the number of the outside ids to claim one from. `mounts` are the rows of `mounts.from_rows`.
    `landlock` and `seccomp` are None where that wall is not used. `cgroup` is None or version, folders and amounts.
    `accounting` says how memory is summed: `cgroup`, `tree`, or empty for not at all.
    """

    level: str = "jail"
    inside_id: int = 1000
    outside: tuple[int, int] | None = None
    workspace: str = "/workspace"
    tmp: str = "/tmp"
    folder: str = ""
    mounts: list[tuple[Any, ...]] = []
    masked: list[str] = []
    disk_bytes: int = 0
    inodes: int = 0
    hostname: str = "cloche"
    rlimits: list[tuple[str, int]] = []
    landlock: list[tuple[str, str]] | None = None
    seccomp: bytes | None = None
    cgroup: dict[str, Any] | None = None
    accounting: str = ""
    memory_bytes: int = 0
    pids: int = 0
    cpu_affinity: int = 0


class Run(_Record):
    """Describe one run in an open sandbox.

    `commands` are run one after the other until one fails; none at all only writes `files` (rows of path, mode,
    data). `python` is None, or what the helper's own interpreter needs to become the guest after the commands.
    `build` is a fresh folder for compilers, `generated` maps absolute paths in it to text.
    `binds` are the toolchain's paths to show besides the spec's mounts, `private` those of them whose files only the
    caller may read (shown through an id-mapped mount), `readable` the rules Landlock needs for them,
    `keep_read_search` that Landlock alone must decide what can be read (see `caps.become_keeping_read_search`).
    """

    commands: list[list[str]] = []
    python: dict[str, Any] | None = None
    env: dict[str, str] = {}
    files: list[tuple[str, int, bytes]] = []
    build: str = ""
    generated: dict[str, str] = {}
    timeout_s: float = 30.0
    binds: list[str] = []
    private: list[str] = []
    readable: list[tuple[str, str]] = []
    keep_read_search: bool = False
