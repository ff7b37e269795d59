"""Signals between the commands of a live sandbox without a process namespace, where each has a separate domain.

Landlock limits a guest's signals to the descendants of its command, and no process of another command is below the
same reaper. So the filter notifies of `kill`. If the kernel would allow the signal, the call continues: that is decided
by registers. Otherwise init finds the reaper above the target process, and that reaper sends the signal, by its own
right: the kernel limits it to the processes below that reaper, even if the number was reused meanwhile.

Init handles one question at a time. Others wait here; each holds a thread of a guest's.
"""

from __future__ import annotations

import posix

from . import messages
from .seccomp_notify import send_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .answered_calls import HeldCall

EAGAIN = 11
MOST_WAITING = 4096  # those of threads that were killed meanwhile, too


class Kills:
    """Answer `kill` for the guests below one reaper, with init's answers by `link`."""

    def __init__(self, link: int):
        self._link = link
        self._waiting: list[tuple[int, bytes, dict[str, int]]] = []  # the first one is with init

    def answer(self, held_call: HeldCall) -> int:
        """Let the call go on, or have init answer it."""
        pid, number = (
            int.from_bytes(held_call.argument(index).to_bytes(4, "little"), "little", signed=True) for index in (0, 1)
        )
        if self._is_above(pid):
            if len(self._waiting) >= MOST_WAITING:
                raise OSError(EAGAIN, "too many signals at once")
            self._waiting.append((held_call.listener, held_call.question, {"pid": pid, "number": number}))
            held_call.is_answered = True
            if len(self._waiting) == 1:
                self._ask()
        else:
            held_call.let_go_on()
        return 0

    def take(self, refusal: int) -> None:
        """Take the errno for the question that was put first, 0 for none, and put the next one."""
        if self._waiting:
            listener, question, _ = self._waiting.pop(0)
            try:
                send_value(listener, question, 0, refusal)
            except OSError:
                pass  # it was killed meanwhile
        if self._waiting:
            self._ask()

    def _is_above(self, pid: int) -> bool:
        """Tell whether a process, or a group, exists and this process may not signal it."""
        if pid in (0, -1):
            return False  # which mean the reachable processes
        try:
            posix.kill(pid, 0)
        except PermissionError:
            return True
        except OSError:
            pass
        return False

    def _ask(self) -> None:
        messages.send_retrying(self._link, "kill", self._waiting[0][2])
