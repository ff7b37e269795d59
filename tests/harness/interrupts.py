"""Ctrl-C at one chosen instruction of a module, in the thread that asks."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable
from types import FrameType, ModuleType

UNHEARD = {dis.opmap[name] for name in ("RETURN_VALUE", "NOP", "JUMP_FORWARD")}  # before which Python hears no signal


class _InterruptAt:
    """Trace this thread, and send it SIGINT just before the `number`th instruction of a file."""

    def __init__(self, file: str, number: int):
        self._file, self.left = file, number

    def __call__(self, frame: FrameType, event: str, _argument: object) -> _InterruptAt | None:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in UNHEARD:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted(module: ModuleType, number: int, work: Callable[[], object]) -> tuple[bool, bool]:
    """Work, and be interrupted before the `number`th instruction in the module.

    Tells whether there were as many, and whether the interrupt was raised.
    """
    assert module.__file__ is not None
    trace, before, was_raised = _InterruptAt(module.__file__, number), sys.gettrace(), False
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        was_raised = True
    finally:
        sys.settrace(before)
    return trace.left <= 0, was_raised
