"""The limit on processes where the kernel counts too many: each new process notifies, and the tree is counted.

`RLIMIT_NPROC` counts all processes of a user on the host. In a container that includes those of every other container
with the same uid, and processes started elsewhere would keep a guest from forking. So where a guest has its user's own
uid and no control group counts, its filter notifies before each fork, and the reaper's descendants are counted here.

The tree is walked when the forks that the last walk allowed are used up, not for each: processes that end meanwhile
only make more room. But if parents end during a walk, it is repeated for each fork, since some may have been missed:
they move to a part that was walked before. A process that was allowed and has not been made yet is not seen, so the
limit may be passed by as many as are being made while a walk lasts.

A signal that is handled before the question is received interrupts `fork`, with EINTR for a handler without SA_RESTART
(signal(7); kernel/seccomp.c waits interruptibly until then). No other fork fails so, and shells do not try again. dash
and busybox handle SIGCHLD without that flag, so the second part of a pipeline met the end of the first one: "Cannot
fork". Their handlers only note the signal, so the flag is set for them.
"""

from __future__ import annotations

import posix

from . import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .answered_calls import Answerer, HeldCall
    from .messages import Spec

EAGAIN = 11
SHELLS = (b"dash", b"busybox")
# struct kernel_sigaction: the handler (0 and 1 are no function), then the flags. The C libraries copy it to the stack.
SIGACTION, FLAGS, NO_HANDLER, SA_RESTART = 16, 8, (0, 1), 0x10000000


class TaskCount:
    """Decide about new processes and threads below this process.

    A reaper that `is_one_of_many` of a live sandbox counts below their common parent, without the reapers.
    """

    is_one_of_many = False

    def __init__(self, max_tasks: int):
        self._max_tasks, self._left = max_tasks, 0

    def answer(self, held_call: HeldCall) -> int:
        """Let the call go on; raises OSError (EAGAIN, as the kernel does) where there are as many as there may be."""
        if self._left <= 0:
            root, max_tasks = posix.getpid(), self._max_tasks
            if self.is_one_of_many:
                root = posix.getppid()
                max_tasks += len(procfs.children(root))
            count, is_whole = procfs.count_tasks_below(root, max_tasks)
            self._left = max_tasks - count if is_whole else min(max_tasks - count, 1)
        if self._left <= 0:
            raise OSError(EAGAIN, "as many processes and threads as there may be")
        self._left -= 1
        held_call.let_go_on()
        return 0


def restart_forks(held_call: HeldCall) -> int:
    """Let the call go on, a shell's with SA_RESTART: then no end of a child interrupts a fork that waits for us."""
    try:
        if held_call.arguments[1] and held_call.program().rpartition(b"/")[2] in SHELLS:
            _set_restart(held_call, held_call.arguments[1])
    except OSError:
        pass  # the call itself tells the guest what is wrong with its address
    held_call.let_go_on()
    return 0


def _set_restart(held_call: HeldCall, address: int) -> None:
    action = held_call.copy(address, SIGACTION)
    if int.from_bytes(action[:FLAGS], "little") not in NO_HANDLER:
        flags = int.from_bytes(action[FLAGS:], "little") | SA_RESTART
        held_call.write(address + FLAGS, flags.to_bytes(8, "little"))


def answerers(spec: Spec, names: Mapping[int, str]) -> dict[int, Answerer]:
    """Return the answerers of these calls, by number."""
    count = TaskCount(spec.pids).answer
    return {number: restart_forks if name == "rt_sigaction" else count for number, name in names.items()}
