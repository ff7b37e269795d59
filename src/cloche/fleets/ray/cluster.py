"""A cluster of Ray: join it quietly, and await its answers without blocking an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cloche.core.errors import BackendUnavailable

T = TypeVar("T")
NAMESPACE = "cloche"
COORDINATOR = "coordinator"
ANSWER_S, REACHED_S = 20.0, 2.0
PREFACE, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"\4"  # RFC 9113, section 3.4
OUTSIDE = 'Write HOST:PORT, on a machine of the cluster; from outside of it, the account of "cloche fleet up".'
UNREACHED = 'Look at "ray status" there; the address is HOST:PORT of its head, such as 10.0.0.1:6379.'
NONE_HERE = "no Ray cluster was found: a run starts Ray on this machine, which ends with its process."
START_ONE = 'Set RAY_ADDRESS or fleet.address, or start one: "ray start --head".'
log = logging.getLogger("cloche.fleet")
_lock = threading.Lock()
_is_own = False
# Ray's blocking calls have threads of their own: one that hangs holds up no other work of this process.
_threads = ThreadPoolExecutor(8, "cloche-ray")


def imported() -> Any:  # noqa: ANN401 - a module
    """Return the module of Ray. Raises BackendUnavailable."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendUnavailable(
            "the package ray is not installed.", remedy='Install the extra that brings it: "pip install cloche[ray]".'
        ) from error
    return ray


def _send_token(address: str) -> None:
    """Have Ray send a token if there is one. Ray reads this mode at its import, and sets it by itself only where it
    finds the address: so the token of its own file goes to no named address.
    """
    is_found = (address or os.environ.get("RAY_ADDRESS", "")) in ("", "auto")
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or (is_found and os.path.exists(os.path.expanduser("~/.ray/auth_token"))):
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def find(address: str = "") -> str:
    """Return the address of the cluster that `join` would join, empty if there is none. Starts nothing.

    Raises BackendUnavailable where the package is missing.
    """
    _send_token(address)
    imported()
    address = address or os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        return address
    from ray._private import services  # pyright: ignore[reportMissingImports]

    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError:
        return ""


def check_answers(address: str) -> None:
    """Raise BackendUnavailable for a port where no cluster answers, which Ray itself would try without an end."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        raise BackendUnavailable(f"{address} is no address of a Ray cluster's head.", remedy=OUTSIDE)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACHED_S) as connection:
            connection.sendall(PREFACE)
            if len(answer := connection.recv(16)) < 9 or answer[3:4] != SETTINGS:
                raise ConnectionError("what answers there is not Ray's head")
    except (OSError, OverflowError) as error:
        raise BackendUnavailable(f"Ray at {address} cannot be reached: {error}.", remedy=UNREACHED) from error


def join(address: str = "", *, starts: bool = True) -> bool:
    """Join the cluster at an address, else the one that Ray finds (RAY_ADDRESS, or one on this machine); blocks.

    Where there is none, `starts` starts Ray on this machine, for this process. Return whether this call did: the
    kernel ends that Ray with the thread of the call. A process that has joined one stays there. Raises
    BackendUnavailable.
    """
    _send_token(address)
    ray = imported()
    with _lock:
        if ray.is_initialized():
            return False
        where = _answering(address)
        if not where and not starts:
            raise BackendUnavailable("no Ray cluster was found.", remedy=START_ONE)
        with _own_handler_of_sigterm():
            _init(ray, where)
        _silence(ray)
        return not where


def _answering(address: str) -> str:
    """Return the address of a cluster that answers, empty if none is named and none is here."""
    where = find(address)
    try:
        if where not in ("", "local"):
            check_answers(where)
    except BackendUnavailable:
        if address or os.environ.get("RAY_ADDRESS"):
            raise
        return ""  # Ray's own note of a cluster that was here
    return where


def _init(ray: Any, where: str) -> None:  # noqa: ANN401 - a module
    global _is_own
    own: dict[str, Any] = {} if where else {"include_dashboard": False}
    if not where:
        log.warning("There is no Ray cluster: Ray is started here, and ends with this process.")
        os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    try:
        ray.init(where or "local", log_to_driver=False, logging_level=logging.ERROR, namespace=NAMESPACE, **own)
    except Exception as error:
        raise unjoined(where, error) from error
    _is_own = not where


@contextlib.contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Put the process's handler of SIGTERM back after the body: Ray's prints a trace of its stack and exits.

    Python's own function for it works in the main thread alone.
    """
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(256)  # more than a struct sigaction has
    libc.sigaction(int(signal.SIGTERM), None, handler)
    try:
        yield
    finally:
        libc.sigaction(int(signal.SIGTERM), handler, None)


def is_own() -> bool:
    """Tell whether this process has started its Ray, which ends with it."""
    return _is_own


def _silence(ray: Any) -> None:  # noqa: ANN401 - a module
    """Keep Ray's reports of lost nodes off the terminal: it prints them in each driver, and has no setting for it."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def unjoined(address: str, error: Exception) -> BackendUnavailable:
    """Return the error of a cluster that cannot be joined."""
    first = (str(error).strip().partition("\n")[0] or type(error).__name__).rstrip(".")
    if not address:
        return BackendUnavailable(f"Ray cannot be started here: {first}.", remedy=START_ONE)
    if "ersion mismatch" in str(error):
        remedy = "Use the cluster's versions of Python and Ray, or reach its fleet from outside with backend=cloche."
    else:
        remedy = (
            'Set RAY_AUTH_TOKEN to the cluster\'s token if it asks for one ("ray get-auth-token" there prints it), and '
            'look at "ray status" there.'
        )
    return BackendUnavailable(f"Ray at {address} cannot be joined: {first}.", remedy=remedy)


async def joined(address: str = "", *, starts: bool = True) -> None:
    """Join a cluster as `join` does, in a thread that does not hold up the end of this process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def work() -> None:
        error: Exception | None = None
        has_started = False
        try:
            has_started = join(address, starts=starts)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)
        if has_started:
            threading.Event().wait()  # until the process ends

    threading.Thread(target=work, name="cloche-ray-join", daemon=True).start()
    await future


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


def actors() -> set[str]:
    """Return the names of the actors of this fleet; blocks."""
    rows = imported().util.list_named_actors(all_namespaces=True)
    return {row["name"] for row in rows if row["namespace"] == NAMESPACE}


def end_actor(name: str) -> None:
    """Kill an actor of this fleet, if there is one; blocks."""
    if handle := actor(name):
        with contextlib.suppress(Exception):  # it has ended meanwhile
            imported().kill(handle, no_restart=True)


def start_in_thread(function: Callable[..., object], *args: Any) -> None:  # noqa: ANN401 - of any call
    """Begin a blocking call of Ray's whose answer nobody needs."""
    _threads.submit(function, *args)
