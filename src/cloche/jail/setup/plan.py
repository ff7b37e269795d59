"""The order of all set-up steps, compiled to calls: pid 1's building, and each guest's giving up of privileges.

The order matters most: see `mounts`, and "Set-up, in order" in docs/jail.md. Everything here runs in the caller, while
the helper's interpreter is still starting; the reaper makes the calls of `Building.build`, and the guest, which was
forked before the reaper gave anything up, makes those of the guest's lists. `compile_building` is for one run,
`compile_prefork_jail` for many, `compile_resident` for a live sandbox, `compile_clone_mounts` for a clone of a
live session. A jail's network namespace has nothing but a loopback device, and that one is up.
"""

from __future__ import annotations

import os

from ..messages import Building, Run, Spec
from ..steps import (
    ATTACHED_WORKSPACE,
    CALLERS_WORKSPACE,
    INIT_ID,
    MOUNT_NAMESPACE,
    NETWORK_NAMESPACE,
    NEXT_WORKSPACE,
    OOM_PROC,
    OUTSIDE_ID,
    OWN_MOUNTS,
    OWN_WORKSPACE,
    PROCESS_COUNTER,
    SHOWN_WORKSPACE,
    make,
    private_register,
)
from ..syscalls import AT_FDCWD, CLONE_NEWNS, PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, PR_SET_PDEATHSIG, SOCK_DGRAM
from . import mounts, privileges
from .replaced import Replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from ..steps import Call, Step

AF_INET = 2
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
IFREQ_BYTES, IFNAMSIZ = 40, 16


def raise_loopback() -> list[Call]:
    """Bring `lo` up, so that a server and a client of the same run can meet."""
    request = b"lo".ljust(IFNAMSIZ, b"\0") + (IFF_UP | IFF_RUNNING).to_bytes(2, "little")
    return [
        make("socket", AF_INET, SOCK_DGRAM | os.O_CLOEXEC, 0, keep="control"),
        make("ioctl", "control", SIOCSIFFLAGS, request.ljust(IFREQ_BYTES, b"\0")),
        make("close", "control"),
    ]


SIGKILL = 9
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def compile_building(spec: Spec, run: Run, *, has_workspace: bool) -> Building:
    """Return all that happens between a reaper's start and the moment when its guest waits for orders."""
    is_asked = "task_count" in spec.answered  # and the kernel's own count is for where the filter is not heard
    limits, unheard = (_limits(spec, but=COUNTED), _limits(spec, only=COUNTED)) if is_asked else (_limits(spec), [])
    identity, drops, session = _identity(spec, run), _drop_privileges(spec), _lead_session()
    choice = _step("oom_score", "be the first choice of the out-of-memory killer", *_be_first_choice())
    opening, opened = privileges.open_rules(spec, run, but=(OWN_PROC, f"{spec.folder}/"))
    return Building(
        build=_build(spec, run, identity, [*limits, *_affinity(spec), *drops, *opening], has_workspace=has_workspace),
        # The first guest was forked before the reaper gave these up; a later one starts without them.
        first=[*identity, choice, *limits, *drops, session, *opening],
        later=[*identity[-1:], choice, session],
        late=[*_affinity(spec), *_last_restrictions(spec, run, opened)],  # who has been moved, see `run_beside`
        private=run.private,
        seccomp=spec.seccomp,
        unheard=unheard,
    )


def compile_prefork_jail(
    spec: Spec, run: Run, *, keeps_workspace: bool = False, has_workspace: bool = False
) -> Building:
    """Return the same for a prefork jail, whose tree stays; each of its guests makes its own mounts in it.

    One that `keeps_workspace` serves one sandbox: there each guest attaches the workspace, and takes a further mount of
    it for the next. The first one makes it, unless the sandbox `has_workspace`, and takes one for the caller as well.
    """
    steps = PreforkSteps(spec, run, keeps_workspace=keeps_workspace)
    return Building(
        build=steps.build(),
        first=steps.first(has_workspace=has_workspace),
        later=steps.later(),
        late=steps.late,
        private=run.private,
        seccomp=spec.prefork_filter,
        warm_up=[_step("warm_up", "write a file that keeps nothing", *_file_of_nothing())],
    )


def compile_resident(spec: Spec, run: Run) -> Building:
    """Return the same for a live sandbox: pid 1 builds once, and each process goes through `first`.

    Then it becomes its user, and goes through `later` (root through `root_steps`) and `late`, and through `last` when
    it has handed its descriptors to pid 1.
    """
    if spec.level != "jail":
        return _compile_confined_resident(spec, run)
    outer, inner = _binds(run, spec)
    tree = [*mounts.from_rows(spec.mounts), *outer, *inner, *_covers(run), mounts.Proc(spec.masked)]
    open_rules, opened = privileges.opened_ahead(spec.landlock or (), has_all=True)
    return Building(
        build=[
            _open_sources(tree),
            _become_builder(spec),
            _step("dumpable", "keep its /proc entries from guests", privileges.prctl(PR_SET_DUMPABLE, 0)),
            _die_with_parent(),
            _step("descriptors", "have as many descriptors as it may", *privileges.raise_limit("nofile")),
            _open_ucounts(spec.ucounts),
            _step("stage_root", "make the root a tmpfs, for all to read", make("umask", 0o022), *mounts.stage_root()),
            *_without_repetition(_named(tree)),
            _step("oom_score", "open how the out-of-memory killer chooses", *mounts.writable_proc(OOM_PROC)),
            _pivot_root(),
            _loopback(),
            _hostname(spec),
            _ucounts(spec.ucounts),
            _step("bounding", "give up what a program file could grant",
                  *privileges.drop_bounding(but=privileges.ROOT_INSIDE if spec.users else 0)),
            _forbid_new_privileges(),
            *_become_init(spec),
            _step("open_rules", "open what all guests may use, for their Landlock rules", *open_rules),
        ],
        first=[
            _step("oom_score", "be the first choice of the out-of-memory killer", *_be_first_choice()),
            *_limits(spec, beside=-1 if spec.outside is not None else 0, but=HELD_UP),
            *_affinity(spec),
        ],
        later=[
            _step("capabilities", "drop all capabilities", *privileges.drop_own()),
            _die_with_parent(),
            _lead_session(),
        ],
        late=_resident_restrictions(spec, opened),
        last=_limits(spec, only=HELD_UP),
        private=run.private,
        seccomp=spec.seccomp,
    )  # fmt: skip


OWN_PROC = "/proc/self"  # of whoever opens it


def _compile_confined_resident(spec: Spec, run: Run) -> Building:
    """Return the same for a host without namespaces: init builds nothing, and has a separate id if root started it.

    Its effective id is the guests' then, so that it may make guests and inspect them; a guest would need the real or
    the saved one to signal it.
    """
    rules = [*(spec.landlock or ()), *run.readable]
    open_rules, opened = privileges.opened_ahead(rules, has_all=True, but=(OWN_PROC,))
    identity = _drop_callers(spec)
    if spec.outside is not None:
        switch = [
            make("setgroups", 0, None),
            make("setresgid", OUTSIDE_ID, OUTSIDE_ID, OUTSIDE_ID),
            make("setresuid", INIT_ID, OUTSIDE_ID, INIT_ID),
        ]
        switch = privileges.keep_read_search(switch) if run.keep_read_search else switch
        identity = [_step("switch_identity", "become ids of its own", *switch)]
    is_asked = "task_count" in spec.answered  # as for a throwaway run
    held_up = (*HELD_UP, *(COUNTED if is_asked else ()))
    drop = [] if run.keep_read_search else [_step("capabilities", "drop all capabilities", *privileges.drop_own())]
    return Building(
        build=[
            _step("subreaper", "adopt what loses its parent", privileges.prctl(PR_SET_CHILD_SUBREAPER, 1)),
            *identity,
            _step("dumpable", "keep its /proc entries from guests", privileges.prctl(PR_SET_DUMPABLE, 0)),
            _die_with_parent(),
            _step("descriptors", "have as many descriptors as it may", *privileges.raise_limit("nofile")),
            _forbid_new_privileges(),
            _step("open_rules", "open what all guests may use, for their Landlock rules", *open_rules),
        ],
        first=[_offer_to_oom_killer(), *_limits(spec, but=held_up), *_affinity(spec)],
        later=[*drop, _die_with_parent(), _lead_session()],
        late=_resident_restrictions(spec, opened, rules),
        last=_limits(spec, only=HELD_UP),
        seccomp=spec.seccomp,
        unheard=_limits(spec, only=COUNTED) if is_asked else [],
    )


def root_steps() -> list[Step]:
    """List the steps that a process of a live sandbox makes as root inside, in place of dropping all capabilities."""
    return [
        _step("capabilities", "keep those that root inside has", *privileges.keep_own(privileges.ROOT_INSIDE)),
        _die_with_parent(),
        _lead_session(),
    ]


def _become_builder(spec: Spec) -> Step:
    """Return how pid 1 takes the builder's identity: the guest's id if it is the only one, else one without files."""
    if spec.outside is None:
        return _step("switch_identity", f"become uid {spec.inside_id}",
                     *switch_identity(spec.inside_id, can_set_groups=False))  # fmt: skip
    return _step("switch_identity", "become an id that no guest has", *switch_identity(0, can_set_groups=True))


def _become_init(spec: Spec) -> list[Step]:
    """List how pid 1, where id 0 is root's inside, becomes an id that no guest gets, with all its capabilities."""
    if spec.users is None:
        return []
    switch = switch_identity(spec.users[1] - 1, can_set_groups=True)
    return [_step("become_init", "become an id that no guest gets", *privileges.keep_all(switch))]


def _resident_restrictions(
    spec: Spec, opened: Mapping[str, str], rules: Sequence[tuple[str, str]] | None = None
) -> list[Step]:
    """List the last restrictions of a guest; with its own `rules`, its signals reach its own descendants alone."""
    late = [
        _step("directory", f"work in {spec.workspace}", mounts.chdir(spec.workspace)),
        _step("umask", "let others read its files", make("umask", 0o022)),
        _step("dumpable", "own its /proc entries", privileges.prctl(PR_SET_DUMPABLE, 1)),
    ]
    if spec.landlock is not None:
        trees = spec.landlock if rules is None else rules
        calls = privileges.restriction(trees, spec.landlock_abi, opened, is_scoped=rules is not None)
        late.append(_step("landlock", f"restrict files to {len(trees)} trees", *calls))
    return late


# As many descriptors as a process may have open may be on their way between all processes of its user, before it can
# send one. Guests must not keep the next from handing over that of its filter.
HELD_UP = ("nofile",)
COUNTED = ("nproc",)


def _be_first_choice() -> list[Call]:
    return [
        privileges.prctl(PR_SET_DUMPABLE, 1),  # an undumpable process's /proc entries belong to root alone
        make("openat", OOM_PROC, b"self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, 0, keep="score"),
        privileges.prctl(PR_SET_DUMPABLE, 0),
        make("write", "score", b"1000"),
        make("close", "score"),
    ]


class PreforkSteps:
    """Compile the lists of a prefork jail: pid 1's, its first guest's, a later one's, and the last steps of all.

    Steps that the first guest and a later one share are compiled once: as the same object they also travel once.
    """

    def __init__(self, spec: Spec, run: Run, *, keeps_workspace: bool):
        self.spec, self.run, self.keeps_workspace = spec, run, keeps_workspace
        self.outer, self.inner = _binds(run, spec)
        self.own_mounts = {
            register: mounts.Tmpfs(path, size_bytes, inodes, _owned(mode, spec))
            for register, path, size_bytes, inodes, mode in _own_rows(spec)
        }
        self.has_two_ids = spec.outside is not None  # where pid 1 has one that no guest has
        self.become_guest = _step("switch_identity", f"become uid {spec.inside_id}",
                                  *switch_identity(spec.inside_id, can_set_groups=self.has_two_ids))  # fmt: skip
        self.die = _die_with_parent()
        self.open_rules, opened = privileges.opened_ahead(spec.landlock or ())
        self.enter, self.show_again, self.give_up = self._enter(), self._show_again(), self._give_up()
        self.new_workspace, *self.other_mounts = self._make_mounts()
        self.attach = self._attach()
        self.keep = [_keep_workspace(spec, NEXT_WORKSPACE, " for the next")] if keeps_workspace else []
        self.change_directory, *self.late = _last_restrictions(spec, run, opened)

    def build(self) -> list[Step]:
        """List pid 1's steps: the tree that stays, and the common state of all guests."""
        spec, tree = self.spec, self._tree()
        become_pid_1 = _step("switch_identity", "become an id that no guest has",
                             *switch_identity(0, can_set_groups=True))  # fmt: skip
        return [
            _open_sources(tree),
            become_pid_1 if self.has_two_ids else self.become_guest,
            self.die,
            _offer_to_oom_killer(),
            _open_ucounts(spec.prefork_ucounts),
            _step("stage_root", "make the root a tmpfs, for all to read", make("umask", 0o022), *mounts.stage_root()),
            *_without_repetition([
                *_named(tree),
                *(
                    ("mount_point", f"make room for /{own_mount.target}", own_mount.calls()[:-1])
                    for own_mount in self.own_mounts.values()
                ),
            ]),
            _step("process_counter", "open what tells a guest how many processes there were before it",
                  *mounts.process_counter(PROCESS_COUNTER)),
            _pivot_root(),
            _loopback(),
            _hostname(spec),
            _ucounts(spec.prefork_ucounts),
            # Every guest starts without these; this process runs no program, and keeps its own.
            _step("bounding", "give up what a program file could grant", *privileges.drop_bounding()),
            _forbid_new_privileges(),
            _step("open_rules", "open what all guests may use, for their Landlock rules", *self.open_rules),
        ]  # fmt: skip

    def first(self, *, has_workspace: bool) -> list[Step]:
        """List the first guest's steps; it hands the caller a mount of its workspace."""
        spec = self.spec
        lend = [_keep_workspace(spec, CALLERS_WORKSPACE, " for the caller", name="lend_workspace")]
        for_caller = [*(lend if self.keeps_workspace else []), *([] if has_workspace else _shown(spec))]
        return self._guest(self.attach if has_workspace else self.new_workspace, *for_caller)

    def later(self) -> list[Step]:
        """List the steps of each further guest in place of `first`; empty if they are the same."""
        return self._guest(self.attach) if self.keeps_workspace else []

    def _guest(self, workspace: Step, *for_caller: Step) -> list[Step]:
        return [
            *self.enter,
            workspace,
            *self.other_mounts,
            *self.show_again,
            *self.keep,
            *for_caller,
            self.change_directory,  # with capabilities: an earlier guest may have taken its own rights to it away
            *self.give_up,
        ]

    def _tree(self) -> list[mounts.Mount]:
        shared = mounts.from_rows(row for row in self.spec.mounts if not _is_own(row))
        return [*shared, *self.outer, *self.inner, *_covers(self.run), mounts.Proc(self.spec.masked)]

    def _enter(self) -> list[Step]:
        """List how a guest leaves the others' mounts. It opens binds that its own mounts will cover."""
        return [
            _step("unshare", "enter a mount namespace of its own", make("unshare", CLONE_NEWNS)),
            *(_step("open_inner", f"open {bind.source}, which is about to be covered", *mounts.opened_again(bind))
              for bind in self.inner),
        ]  # fmt: skip

    def _make_mounts(self) -> list[Step]:
        return [
            _step("tmpfs", own_mount.describe(), own_mount.calls()[-1], _look_at(own_mount.target, name))
            for name, own_mount in self.own_mounts.items()
        ]

    def _attach(self) -> Step:
        attach = mounts.Attach(ATTACHED_WORKSPACE, self.spec.workspace[1:])
        return _step("attach", attach.describe(), attach.calls()[-1], _look_at(attach.target, OWN_WORKSPACE))

    def _show_again(self) -> list[Step]:
        """List how the opened binds are shown in the guest's own mounts; later files of the guest are private to it."""
        return [
            *(_step("bind", f"{bind.describe()}, in the new place", *mounts.placed_again(bind, self.spec.inside_id))
              for bind in self.inner),
            _step("umask", "keep files to itself", make("umask", 0o077)),
        ]  # fmt: skip

    def _give_up(self) -> list[Step]:
        """List how a guest takes its identity and gives up its capabilities; later steps run without them."""
        return [
            _step("namespace", "let its mounts be taken down by its parent", _look_at_namespace()),
            *_limits(self.spec, beside=-1 if self.has_two_ids else 0),
            *_affinity(self.spec),
            self.become_guest,
            _step("capabilities", "drop all capabilities", *privileges.drop_own()),
            self.die,  # after the id: the kernel forgets it when that changes
            _lead_session(),
        ]


def _file_of_nothing() -> list[Call]:
    return [
        make("openat", AT_FDCWD, os.fsencode(os.devnull), os.O_WRONLY | os.O_CLOEXEC, 0, keep="file"),
        make("write", "file", b"print(1)"),
        make("close", "file"),
    ]


def compile_clone_mounts(spec: Spec, inner: Sequence[str] = ()) -> tuple[list[Step], list[Step]]:
    """Return how a clone of a live session gets its own mounts: the steps outside, and the steps inside.

    The parent's mounts of the host below these mounts, at the paths `inner`, are copied.

    Outside are the namespaces of its parent and a copy of the host's mounts, where file systems can be made; inside
    are its own: of network and mounts, which registers hold. The new mounts cover the old ones, which are locked there:
    no process can unmount them, and the builder checks that the clone holds none of them open.
    """
    own = _own_rows(spec)
    make_mounts = [
        _step("tmpfs", f"make a new /{path}", *mounts.detached_tmpfs(register, size_bytes, inodes, mode))
        for register, path, size_bytes, inodes, mode in own
    ]
    covers = [
        *(_step("take_along", f"take {path} along", *mounts.taken_along(path, f"bind {path}")) for path in inner),
        *(_step("cover", f"cover /{path} with the new one", mounts.move_mount(register, f"/{path}"))
          for register, path, *_ in own),
        *(_step("bind", f"show {path} in the new one", *mounts.put_down(f"bind {path}", path)) for path in inner),
        _step("proc", "cover /proc with its own", mounts.move_mount("proc", "/proc"),
              *mounts.Proc(spec.masked).covers()),
        _step("keep_workspace", "keep a copy of the new workspace's mount",
              mounts.open_tree(spec.workspace, NEXT_WORKSPACE, recursive=False)),
        *_shown(spec),
    ]  # fmt: skip
    inside = [
        _step("proc", "make a /proc of its own", *mounts.detached_proc("proc")),
        _step("setns", "enter its network and its mounts", make("setns", NETWORK_NAMESPACE, 0),
              make("setns", MOUNT_NAMESPACE, 0), mounts.chdir("/")),
        *covers,
        _loopback(),
    ]  # fmt: skip
    return make_mounts, inside


def _is_own(row: tuple[Any, ...]) -> bool:
    """Tell whether each guest must have this mount of the spec separately."""
    return bool(row[0] == "tmpfs")


def _own_rows(spec: Spec) -> list[tuple[str, str, int, int, str]]:
    """Return register, path, bytes, inodes and mode of each separate mount of a guest, the workspace first."""
    other_mounts = [(OWN_MOUNTS[path], path, *settings) for _, path, *settings in filter(_is_own, spec.mounts)]
    return [(OWN_WORKSPACE, spec.workspace[1:], spec.disk_bytes, spec.inodes, "0755"), *other_mounts]


def inner_of(paths: Sequence[str], spec: Spec) -> list[str]:
    """Return those that lie in a mount which each guest has for itself: an environment in /tmp or /workspace, say."""
    own = (f"{spec.workspace}/", *(f"/{row[1]}/" for row in spec.mounts if _is_own(row)))
    return [path for path in paths if path.startswith(own)]


def _owned(mode: str, spec: Spec) -> str:
    """Return a tmpfs's mode with its owner, which is not the process that mounts it."""
    return f"{mode},uid={spec.inside_id},gid={spec.inside_id}"


def _look_at(target: str, register: str) -> Call:
    """Keep a mount open, to find its files when the guest has ended."""
    return make("openat", AT_FDCWD, os.fsencode(f"/{target}"), _FOLDER, 0, keep=register)


def _look_at_namespace() -> Call:
    """Keep the mount namespace: else the last process in it would unmount it before its end is known."""
    return make("openat", AT_FDCWD, b"/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC, 0, keep=MOUNT_NAMESPACE)


def _step(name: str, description: str, *calls: Call) -> Step:
    return name, description, list(calls)


def _named(values: Sequence[mounts.Mount]) -> list[Step]:
    return [(type(value).__name__.lower(), value.describe(), value.calls()) for value in values]


def _open_sources(values: Sequence[mounts.Mount]) -> Step:
    sources = [value for value in values if isinstance(value, mounts.Bind)]
    calls = (call for source in sources for call in source.opening())
    return _step("open_sources", f"open {len(sources)} bind sources as the caller", *calls)


def _pivot_root() -> Step:
    return _step("pivot_root", "make the tree the root, read-only", *mounts.pivot())


def _loopback() -> Step:
    return _step("loopback", "bring the loopback device up", *raise_loopback())


def _hostname(spec: Spec) -> Step:
    host = spec.hostname.encode()
    return _step("hostname", f"call the host {spec.hostname}", make("sethostname", host, len(host)))


def _die_with_parent() -> Step:
    return _step("die_with_parent", "die with the parent", privileges.prctl(PR_SET_PDEATHSIG, SIGKILL))


def _forbid_new_privileges() -> Step:
    return _step("no_new_privs", "forbid new privileges", privileges.forbid_new_privileges())


def _lead_session() -> Step:
    return _step("session", "lead a session of its own, without a terminal", make("setsid"))


def _build(spec: Spec, run: Run, identity: list[Step], given_up: list[Step], *, has_workspace: bool) -> list[Step]:
    """List the set-up. The order matters: see `mounts`, and "Set-up, in order" in docs/jail.md."""
    hide = _step("dumpable", "keep its /proc entries from the guest", privileges.prctl(PR_SET_DUMPABLE, 0))
    if spec.level != "jail":
        adopt = _step("subreaper", "adopt what loses its parent", privileges.prctl(PR_SET_CHILD_SUBREAPER, 1))
        # A reaper that ends its tree by scope must not die with the helper: it detects the end and ends the tree.
        return [hide, adopt, *(identity[:-1] if spec.scope_abi else identity), *given_up]
    values = _tree(spec, run, has_workspace=has_workspace)
    return [
        _open_sources(values),
        *identity,
        hide,
        _open_ucounts(spec.ucounts),
        _step("stage_root", "make the root a tmpfs", *mounts.stage_root()),
        *_without_repetition(_named(values)),
        _pivot_root(),
        _keep_workspace(spec, NEXT_WORKSPACE),
        *([] if has_workspace else _shown(spec)),
        _loopback(),
        _hostname(spec),
        _ucounts(spec.ucounts),
        *given_up,
    ]


def _keep_workspace(spec: Spec, register: str, purpose: str = "", name: str = "keep_workspace") -> Step:
    call = mounts.open_tree(spec.workspace, register, recursive=False)
    return _step(name, f"keep a copy of the mount of {spec.workspace}{purpose}", call)


def _shown(spec: Spec) -> list[Step]:
    """Keep a mount of a new workspace that will show the guest's files as the caller's own."""
    if not spec.is_shown:
        return []
    return [_keep_workspace(spec, SHOWN_WORKSPACE, " for the caller to see", name="show_workspace")]


def _tree(spec: Spec, run: Run, *, has_workspace: bool) -> list[mounts.Mount]:
    """Return the mounts of this run: the spec's own, then the workspace, new or kept.

    The workspace comes last, except for mounts in it: no other mount point is looked up below files of a guest.
    """
    workspace = spec.workspace.lstrip("/")
    binds, inner = _binds(run, spec)
    rows = [*mounts.from_rows(spec.mounts), *binds]
    if has_workspace:
        rows.append(mounts.Attach(ATTACHED_WORKSPACE, workspace))
    else:
        rows.append(mounts.Tmpfs(workspace, spec.disk_bytes, spec.inodes, "0755"))
    return [*rows, *inner, *_covers(run), mounts.Proc(spec.masked)]


def _binds(run: Run, spec: Spec) -> tuple[list[mounts.Bind], list[mounts.Inner]]:
    """Return the shown paths of the host, and those of them that lie in a guest's own mounts."""
    registers = {path: private_register(path) for path in run.private}
    inner = inner_of(run.binds, spec)
    outer = [mounts.Bind(path, path[1:], register=registers.get(path, "")) for path in run.binds if path not in inner]
    return outer, [mounts.Inner(path, path[1:], register=registers.get(path, "")) for path in inner]


def _covers(run: Run) -> list[mounts.Mount]:
    covers: list[mounts.Mount] = [mounts.Cover(path[1:]) for path in run.covered]
    return [*covers, Replaced(run.replaced)] if run.replaced else covers


def _without_repetition(steps: list[Step]) -> list[Step]:
    """Leave out calls that make a folder again."""
    folders: set[Call] = set()
    remaining: list[Step] = []
    for name, description, calls in steps:
        remaining.append((name, description, [call for call in calls if call[0] != "mkdirat" or call not in folders]))
        folders.update(call for call in calls if call[0] == "mkdirat")
    return remaining


def _limits(spec: Spec, *, beside: int = 0, but: Sequence[str] = (), only: Sequence[str] = ()) -> list[Step]:
    """List the per-process limits; `beside` is how many more of our own processes the kernel counts than it would."""
    rows = [
        (name, amount + beside if name == "nproc" else amount)
        for name, amount in spec.rlimits
        if name not in but and (name in only or not only)
    ]
    text = "set " + ", ".join(f"{name}={amount}" for name, amount in rows)
    return [_step("limits", text, *privileges.set_limits(rows))]


def _open_ucounts(amounts: Mapping[str, int]) -> Step:
    return _step("open_ucounts", "open the limits of its user namespace", *privileges.opening(amounts))


def _ucounts(amounts: Mapping[str, int]) -> Step:
    """Limit the charges to the owner of the user namespace, too."""
    text = "limit in its user namespace " + ", ".join(f"{name}={amount}" for name, amount in amounts.items())
    return _step("ucounts", text, *privileges.set_ucounts(amounts))


def _affinity(spec: Spec) -> list[Step]:
    """List the limit on processors, where no control group keeps it."""
    if not spec.cpu_affinity:
        return []
    mask = sum(1 << number for number in sorted(os.sched_getaffinity(0))[: spec.cpu_affinity])
    mask_bytes = mask.to_bytes(128, "little")
    text = f"use at most {spec.cpu_affinity} processors"
    return [_step("affinity", text, make("sched_setaffinity", 0, len(mask_bytes), mask_bytes))]


def _drop_privileges(spec: Spec) -> list[Step]:
    """List how privileges are dropped for good."""
    steps = []
    if spec.level == "jail":
        steps.append(_step("capabilities", "drop all capabilities, the bounding set too", *privileges.drop_all()))
    if spec.level in ("jail", "confined"):
        steps.append(_forbid_new_privileges())
    return steps


def _identity(spec: Spec, run: Run) -> list[Step]:
    """List the change of identity, and the parent-death signal, which the kernel resets at a change of identity."""
    die = _die_with_parent()
    if spec.level == "jail":
        # The namespace has no id 0, so the kernel does not take the capabilities away.
        switch = switch_identity(spec.inside_id, can_set_groups=spec.outside is not None)
        return [_step("switch_identity", f"become uid {spec.inside_id}", *switch), die]
    if spec.outside is not None and spec.level == "confined":
        switch = switch_identity(OUTSIDE_ID, can_set_groups=True)
        switch = privileges.keep_read_search(switch) if run.keep_read_search else switch
        return [_step("switch_identity", "become an outside id of its own", *switch), die]
    return [*_drop_callers(spec), die]


def _drop_callers(spec: Spec) -> list[Step]:
    """List how the capabilities of a caller that is not root are dropped: a service may have some."""
    return [_step("capabilities", "drop all capabilities", *privileges.drop_own())] if spec.level == "confined" else []


def switch_identity(number: int | str, *, can_set_groups: bool) -> list[Call]:
    """Become another user and group: an id, or the register that holds it."""
    return [
        *([make("setgroups", 0, None)] if can_set_groups else []),
        make("setresgid", number, number, number),
        make("setresuid", number, number, number),
    ]


def _last_restrictions(spec: Spec, run: Run, opened: Mapping[str, str] | None = None) -> list[Step]:
    """List the last restrictions, once the sandbox is built; the filter of system calls comes after them."""
    steps = [
        _step("directory", f"work in {spec.workspace}", mounts.chdir(spec.workspace)),
        _step("dumpable", "own its /proc entries", privileges.prctl(PR_SET_DUMPABLE, 1)),
    ]
    if spec.landlock is not None:
        rules = [*spec.landlock, *run.readable]
        calls = privileges.restriction(rules, spec.landlock_abi, opened)
        steps.append(_step("landlock", f"restrict files to {len(rules)} trees", *calls))
    return steps


def _offer_to_oom_killer() -> Step:
    """Return the step that raises the OOM score of pid 1 of a prefork jail: its guests inherit it from their start."""
    return _step(
        "offer_to_oom_killer",
        "make its guests the first choice of the out-of-memory killer",
        privileges.prctl(PR_SET_DUMPABLE, 1),  # an undumpable process's /proc entries belong to root alone
        make("openat", AT_FDCWD, b"/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, 0, keep="score"),
        privileges.prctl(PR_SET_DUMPABLE, 0),
        make("write", "score", b"1000"),
        make("close", "score"),
    )
