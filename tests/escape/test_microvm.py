"""The attempts of every module once more, in virtual machines: whole batches of them in a few shared ones.

Emulated, a machine takes seconds to boot and each run in it one more, so nearly all are run many at once. Each has
its own verdict, and its control is run outside as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import cloche
from tests.harness.escape.attempts import JAIL, Attempt, Verdict, judge, key_of, run_check
from tests.harness.escape.batch import Batch, BatchOutput, build_program
from tests.harness.escape.checks import COMMANDS, LAST_WORD
from tests.harness.escape.controls import Controls, all_attempts
from tests.harness.escape.runners import run_on_terminal, show_on_terminal
from tests.harness.escape.targets import Canaries
from tests.harness.machines import monitors

pytestmark = [pytest.mark.root, pytest.mark.soak, pytest.mark.timeout(900)]

VM = "microvm"
SLOWNESS = 4.0
MACHINE = {"backend": VM, "require": "vm", "cpus": 2, "timeout": 120}
SMALL = {"memory": "48m", "disk": "16m", "pids": 24}  # what the attempts at limits ask for
# What the jail holds and a machine does not, for inside it is a kernel that nobody else has; none of it is the host's.
# docs/limitations/microvm.md says so too.
OWN_KERNEL = "there is no filter of system calls in a machine: the call reaches the machine's own kernel"
OWN_SYS = "/sys is the machine's own"
OWN_MOUNTS = "/sys and /sys/fs/cgroup are shown, the machine's own"
OWN_PROCESS = "it is done to a process of the same run"
EXECUTES = "what may be written may be executed, also without a name"
OWN_MEMORY = "it is memory of the machine's own kernel, and the machine's memory is its limit"
SOCKETS = "the machine's own kernel gives it, with no network device behind"
NOT_HELD = {
    "attack/a protocol whose module the host loads on demand": SOCKETS,
    "attack/take the host's supply of asynchronous events": OWN_KERNEL,
    "files/any kernel setting at all": "ns_last_pid can be opened by everybody, and its writing asks for rights",
    "files/change the times of the host's device": "/dev is the machine's own",
    "files/the kernel's objects in sys": OWN_SYS,
    "leaks/the host's mounts": OWN_MOUNTS,
    "leaks/the host's mounts, by pid 1": OWN_MOUNTS,
    "leaks/the machine's hardware": OWN_SYS,
    "resources/access control lists, which the kernel keeps in memory that nothing counts": OWN_MEMORY,
    "resources/filters of packets, for which the kernel has one supply of memory for all users": OWN_MEMORY,
    "system calls/32-bit entry": OWN_KERNEL,
    "system calls/add an encryption key": OWN_KERNEL,
    "system calls/add_key": OWN_KERNEL,
    "system calls/hint how long a file's data will live": OWN_KERNEL,
    "system calls/mbind": OWN_KERNEL,
    "system calls/remove an encryption key": OWN_KERNEL,
    "system calls/execute a deleted file by execveat": EXECUTES,
    "system calls/execute from memory": EXECUTES,
    "system calls/fanotify_init": OWN_KERNEL,
    "system calls/io_uring_enter": OWN_KERNEL,
    "system calls/io_uring_register": OWN_KERNEL,
    "system calls/io_uring_setup": OWN_KERNEL,
    "system calls/kcmp of itself": OWN_PROCESS,
    "system calls/keyctl": OWN_KERNEL,
    "system calls/modify_ldt": OWN_KERNEL,
    "system calls/personality: no random addresses": OWN_PROCESS,
    "system calls/personality: readable is executable": OWN_PROCESS,
    "system calls/pidfd_getfd of itself": OWN_PROCESS,
    "system calls/process_vm_readv of itself": OWN_PROCESS,
    "system calls/ptrace a child": OWN_PROCESS,
    "system calls/ptrace itself": OWN_PROCESS,
    "system calls/quotas": OWN_KERNEL,
    "system calls/request_key": OWN_KERNEL,
    "system calls/see the host's namespaces": "the first user namespace has the same number in every kernel",
    "system calls/socket: netlink: audit": SOCKETS,
    "system calls/socket: netlink: connector": SOCKETS,
    "system calls/socket: netlink: generic": SOCKETS,
    "system calls/socket: netlink: kernel events": SOCKETS,
    "system calls/socket: netlink: socket diagnosis": SOCKETS,
    "system calls/socket: vsock": SOCKETS,
    "system calls/userfaultfd for user mode": OWN_KERNEL,
}


def attempts() -> list[Attempt]:
    """Return what a jail must hold and this user can show to work."""
    return [attempt for attempt in all_attempts() if JAIL in attempt.levels and attempt.has_control_here]


def check_of(attempt: Attempt) -> str:
    """Return the name of an attempt's check."""
    return getattr(attempt.check, "__qualname__", "").partition(".")[0]


def kind_of(attempt: Attempt) -> str:
    """Say how an attempt is run here."""
    check = check_of(attempt)
    if attempt.terminal:
        return "shown" if check else "typed"
    if attempt.first:
        return "residue"
    if attempt.limits.get("cpus", 2) < 1:
        return "slow"
    if set(SMALL) & set(attempt.limits):
        return "small alone" if check else "small"
    if check == "saved":
        return "files out"
    if check == "_touches":  # of a read or a write of files
        return "files"
    return check or "plain"


def of_kind(kind: str) -> list[Attempt]:
    """Return the attempts that are run in this way."""
    return [attempt for attempt in attempts() if kind_of(attempt) == kind]


class Machines:
    """Run all of them, and remember the verdicts."""

    def __init__(self, canaries: Canaries) -> None:
        self.canaries = canaries
        self.verdicts: dict[str, Verdict] = {}

    def run(self) -> None:
        """Open the machines, one or two at a time, and run."""
        with cloche.Sandbox(live=False, **MACHINE) as sandbox:
            wide = Batch(sandbox, self.canaries, slowness=SLOWNESS)
            self.verdicts |= wide.verdicts(of_kind("plain"), believed=tuple(NOT_HELD))
            self._prepared(wide, of_kind("outlives"))
            self._prepared(wide, [*of_kind("files out"), *of_kind("files")])
            for kind in ("saved_over", "races", "captures_at_most", "returns_by"):
                for attempt in of_kind(kind):
                    self._alone(wide, attempt)
            with cloche.Sandbox(live=False, **MACHINE, **SMALL) as other:
                small = Batch(other, self.canaries, slowness=SLOWNESS)
                self.verdicts |= small.verdicts(of_kind("small"), believed=tuple(NOT_HELD))
                for attempt in of_kind("small alone"):
                    self._alone(small, attempt)
            self._residue(wide)
        with cloche.Sandbox(live=False, **{**MACHINE, "cpus": 0.25}) as sandbox:
            self.verdicts |= Batch(sandbox, self.canaries, slowness=SLOWNESS).verdicts(of_kind("slow"))
        self._typed(of_kind("typed"))
        self._shown(of_kind("shown"))

    def _alone(self, runner: Batch, attempt: Attempt) -> None:
        self.verdicts[key_of(attempt)] = run_check(attempt, runner, self.canaries)

    def _prepared(self, runner: Batch, those: Sequence[Attempt]) -> None:
        runner.prepare(those)
        for attempt in those:
            self._alone(runner, attempt)

    def _residue(self, runner: Batch) -> None:
        """Run the first programs in another machine, which goes on with what they left, and then the second ones."""
        those, all_done = of_kind("residue"), threading.Event()
        program = build_program(those, self.canaries.targets, slowness=SLOWNESS, is_first=True, stays=True, waits=True)
        firsts: dict[str, Verdict] = {}
        output = BatchOutput(
            program, lambda attempt, seen: firsts.__setitem__(key_of(attempt), judge(seen, self.canaries))
        )

        def receive(stream: str, data: bytes) -> None:
            output.receive(stream, data)
            if output.is_over:
                all_done.set()

        def live(sandbox: cloche.Sandbox) -> None:
            with suppress(cloche.ClocheError):  # it is ended with its machine
                sandbox.run(program.code, timeout=600, on_output=receive)
            all_done.set()

        with cloche.Sandbox(live=False, **MACHINE) as sandbox:
            thread = threading.Thread(target=live, args=(sandbox,))
            thread.start()
            assert all_done.wait(120), "the first programs take too long"
            assert output.is_over, "the first programs did not all end"
            self.verdicts |= runner.verdicts(those)
            assert thread.is_alive(), "what the first programs had left was gone too early"
        thread.join()
        self.verdicts |= {key: one for key, one in firsts.items() if one.breach or not one.stopped_by}

    def _typed(self, those: Sequence[Attempt]) -> None:
        """Run from a process that has a terminal."""
        program = build_program(those, self.canaries.targets, slowness=SLOWNESS)
        seen = run_on_terminal({**MACHINE, "code": program.code}, "", patience_s=120)
        BatchOutput(program, self._take).receive("stdout", seen.stdout.encode())

    def _take(self, attempt: Attempt, seen: Any) -> None:
        self.verdicts[key_of(attempt)] = judge(seen, self.canaries)

    def _shown(self, those: Sequence[Attempt]) -> None:
        """Run as a person would, on a terminal, and look for commands among what the terminal gets."""
        program = build_program(those, self.canaries.targets, slowness=SLOWNESS, is_shown=True)
        file = self.canaries.folder("/tmp") / "shown.py"
        file.write_text(program.code)
        words = [sys.executable, "-m", "cloche", "run", f"--backend={VM}", "--timeout=120", str(file)]
        seen = show_on_terminal(words)
        found = [repr(command) for command in COMMANDS if command in seen]
        is_whole = seen.count(LAST_WORD) == len(those)
        verdict = Verdict(
            breach=f"the terminal got {found}" if found else "",
            stopped_by="no command reached the terminal" if is_whole else "",
            trace=seen.decode(errors="replace")[-2000:],
        )
        self.verdicts |= {key_of(attempt): verdict for attempt in those}


@pytest.fixture(scope="module")
def verdicts(controls: Controls, microvm_image: Path) -> Iterator[dict[str, Verdict]]:
    """Run everything; afterwards no machine is left."""
    before = monitors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
        patch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
        machines = Machines(controls.canaries)
        machines.run()
        yield machines.verdicts
    assert monitors() <= before


@pytest.mark.parametrize("attempt", [pytest.param(one, id=f"{one.family}: {one.name}") for one in attempts()])
def test_a_machine_holds_it(controls: Controls, verdicts: dict[str, Verdict], attempt: Attempt) -> None:
    """What works outside does not work in a machine."""
    controls.control(attempt)
    verdict = verdicts[key_of(attempt)]
    why = NOT_HELD.get(key_of(attempt))
    if why is not None:
        assert verdict.breach, f"held after all, although {why}; take it off the list"
        return
    assert not verdict.breach, f"escaped from a virtual machine: {verdict.breach}"
    assert verdict.stopped_by, f"broke instead of trying: {verdict.trace}"


def test_a_sandbox_that_lives_holds_it(
    controls: Controls, microvm_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs no preparation, beside the first process that serves them all; its filter has no 32-bit entry."""
    before = monitors()
    monkeypatch.setenv("CLOCHE_MICROVM_IMAGE", str(microvm_image))
    monkeypatch.setenv("XDG_CACHE_HOME", str(microvm_image.parents[2]))
    those = of_kind("plain")
    for attempt in those:
        controls.control(attempt)
    with cloche.Sandbox(**MACHINE, live=True) as sandbox:
        found = Batch(sandbox, controls.canaries, slowness=SLOWNESS).verdicts(those, believed=tuple(NOT_HELD))
        assert sandbox.exec(["echo", "well"]).stdout == "well\n"
    not_held = found.keys() & NOT_HELD.keys() - {"system calls/32-bit entry"}
    assert {key: one.breach for key, one in found.items() if one.breach and key not in not_held} == {}
    assert {key: one.trace for key, one in found.items() if not one.breach and not one.stopped_by} == {}
    assert {key for key in not_held if not found[key].breach} == set()
    assert monitors() <= before


def test_what_is_named_is_there() -> None:
    """The table names attempts that exist."""
    known = {key_of(attempt) for attempt in all_attempts()}
    assert set(NOT_HELD) <= known
