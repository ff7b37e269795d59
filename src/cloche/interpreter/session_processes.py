"""Functions and classes of cells that are sent to other processes: refused where they could not be loaded.

Theory of operation: `multiprocessing` sends a function by its name. A process that was forked has the cells' names; one
that was started by `spawn` or `forkserver` has an empty `__main__`, fails at the name and ends, and a waiter for its
result, such as `Pool`, waits for ever. So objects are checked as they are pickled for such a process: its start
arguments, and items of queues that it was started with. `concurrent.futures` uses the same queues. The processes that
joblib starts itself (loky) get functions by value, so they are not concerned.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_thread: Any = __import__("_thread")
_sending: Any = _thread._local()  # `writer`: the end of a pipe for which this thread pickles
_FUNCTION = type(lambda: None)


def actions() -> dict[str, Callable[[Any], None]]:
    """Return the actions for modules after their import."""
    return {
        "multiprocessing.reduction": _lead_pickler,
        "multiprocessing.connection": _lead_connection,
        "multiprocessing.queues": _lead_queues,
        "joblib.pool": _lead_joblib,
    }


def _lead_pickler(module: Any) -> None:
    _look_at(module.ForkingPickler)


def _look_at(pickler: Any) -> None:
    begin = _original(pickler, "__init__")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it becomes the class's
        begin(self, *args, **kwargs)
        if _goes_to_new_interpreter():
            self.reducer_override = _refuse

    _put(pickler, "__init__", __init__, begin)


def _lead_connection(module: Any) -> None:
    send = _original(module._ConnectionBase, "send")
    _put(module._ConnectionBase, "send", lambda self, obj: _for(self, send, self, obj), send)


def _for(writer: Any, send: Callable[..., Any], *arguments: Any) -> None:
    """Send an object while the destination pipe is noted for this thread."""
    _sending.writer = writer
    try:
        send(*arguments)
    finally:
        _sending.writer = None


def _lead_queues(module: Any) -> None:
    """Note which queues a new interpreter was started with, and check objects that are pickled for each."""
    for queue in (module.Queue, module.SimpleQueue):
        _lead_state(queue)
    put = _original(module.SimpleQueue, "put")
    _put(module.SimpleQueue, "put", lambda self, obj: _for(self._writer, put, self, obj), put)
    feed = _original(module.Queue, "_feed")

    def feed_for(buffer: Any, notempty: Any, send_bytes: Any, *more: Any) -> None:  # in a thread of its own
        _sending.writer = getattr(send_bytes, "__self__", None)
        feed(buffer, notempty, send_bytes, *more)

    _put(module.Queue, "_feed", staticmethod(feed_for), feed)


def _lead_joblib(module: Any) -> None:
    """Do the same for the queues and the pickler of joblib's backend `multiprocessing`."""
    queue = module.CustomizablePicklingQueue
    _look_at(module.CustomizablePickler)
    _lead_state(queue)
    make = _original(queue, "_make_methods")

    def _make_methods(self: Any) -> None:
        make(self)
        put, send = self.put, self._send
        self.put = lambda obj: _for(self._writer, put, obj)
        self._send = lambda obj: _for(self._writer, send, obj)

    _put(queue, "_make_methods", _make_methods, make)


def _lead_state(queue: Any) -> None:
    state = _original(queue, "__getstate__")

    def __getstate__(self: Any) -> Any:  # noqa: N807 - it becomes the class's
        result = state(self)  # which is for no other purpose
        self._writer.is_read_elsewhere = True
        return result

    _put(queue, "__getstate__", __getstate__, state)


def _original(owner: Any, name: str) -> Any:
    """Return the original function of a class, not a wrapper of another session in this process."""
    function = getattr(owner, name)
    return getattr(function, "__wrapped__", function)


def _put(owner: Any, name: str, ours: Any, original: Any) -> None:
    getattr(ours, "__func__", ours).__wrapped__ = original
    setattr(owner, name, ours)


def _goes_to_new_interpreter() -> bool:
    """Tell whether this thread pickles for a process that was not forked from this one."""
    if getattr(getattr(_sending, "writer", None), "is_read_elsewhere", False):
        return True
    return sys.modules["multiprocessing.context"].get_spawning_popen() is not None


def _refuse(value: Any) -> Any:
    """Pickle every object normally, except functions and classes of a cell."""
    if isinstance(value, (_FUNCTION, type)) and value.__module__ == "__main__" and "<" not in value.__qualname__:
        main = sys.modules["__main__"]
        if getattr(main, "__file__", None) is None and getattr(main, "__spec__", None) is None:
            raise sys.modules["pickle"].PicklingError(
                f"{value.__qualname__} was defined in a cell, and a process that is started by 'spawn' or 'forkserver' "
                "does not have it: it begins without the names of the cells. Use "
                f"multiprocessing.get_context('fork'), or write {value.__qualname__} to a module file and import it"
            )
    return NotImplemented
