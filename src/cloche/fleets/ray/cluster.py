"""A cluster of Ray: join it quietly, and await its answers without blocking an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable

T = TypeVar("T")
NAMESPACE = "cloche"
COORDINATOR = "coordinator"
ANSWER_S = 20.0
log = logging.getLogger("cloche.fleet")
_lock = threading.Lock()
# Ray's blocking calls have threads of their own: one that hangs holds up no other work of this process.
_threads = ThreadPoolExecutor(8, "cloche-ray")


def imported() -> Any:  # noqa: ANN401 - a module
    """Return the module of Ray. Raises BackendUnavailable."""
    try:
        import ray
    except ImportError as error:
        raise BackendUnavailable(
            "the package ray is not installed.", remedy='Install the extra that brings it: "pip install cloche[ray]".'
        ) from error
    return ray


def join(address: str = "") -> None:
    """Join the cluster at an address, else at RAY_ADDRESS, else start Ray on this machine; blocks.

    A process that has joined one stays there. Raises BackendUnavailable.
    """
    ray = imported()
    address = address or os.environ.get("RAY_ADDRESS", "")
    with _lock:
        if ray.is_initialized():
            return
        if not address:
            os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
            log.warning("RAY_ADDRESS is not set: a Ray of this machine alone is started, and ends with this process.")
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}
        try:
            ray.init(address or "local", **quiet, **({} if address else {"include_dashboard": False}))
        except Exception as error:
            raise unjoined(address, error) from error
        _silence(ray)


def _silence(ray: Any) -> None:  # noqa: ANN401 - a module
    """Keep Ray's reports of lost nodes off the terminal: it prints them in each driver, and has no setting for it."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def unjoined(address: str, error: Exception) -> BackendUnavailable:
    """Return the error of a cluster that cannot be joined."""
    first = str(error).strip().partition("\n")[0]
    if "Version mismatch" in str(error):
        remedy = "Use the cluster's versions of Python and Ray, or reach its fleet from outside with backend=cloche."
    else:
        remedy = 'Look at "ray status" there, and set RAY_ADDRESS, and RAY_AUTH_TOKEN if the cluster asks for it.'
    return BackendUnavailable(f"Ray at {address or 'this machine'} cannot be joined: {first}", remedy=remedy)


async def in_thread(function: Callable[..., T], *args: Any, **options: Any) -> T:  # noqa: ANN401 - of any call
    """Run a blocking call of Ray's in a thread; a caller that is cancelled does not wait for it."""
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: function(*args, **options))


async def answer(ref: Any, timeout_s: float | None = ANSWER_S) -> Any:  # noqa: ANN401 - what the actor returns
    """Await the answer to a call of an actor. Raises the actor's error, or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(ref.future())


def actor(name: str) -> Any:  # noqa: ANN401 - a handle
    """Return the handle of an actor of this fleet, or None; blocks."""
    try:
        return imported().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def end_actor(name: str) -> None:
    """Kill an actor of this fleet, if there is one; blocks."""
    if handle := actor(name):
        with contextlib.suppress(Exception):  # it has ended meanwhile
            imported().kill(handle, no_restart=True)


def start_in_thread(function: Callable[..., object], *args: Any) -> None:  # noqa: ANN401 - of any call
    """Begin a blocking call of Ray's whose answer nobody needs."""
    _threads.submit(function, *args)
